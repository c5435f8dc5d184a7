"""Handles of a dispatch between nodes, where a later operation goes another way."""

from __future__ import annotations

from typing import Any

import torch

from uccl_ep_serving.handles import GpuNodeRoute, NormalGpuHandle
from uccl_ep_serving.modes.normal_gpu_route import without_nodes


class Kernels:
    """Notes what is launched."""

    def list(self, *arguments: int) -> tuple[Any, ...]:
        self.listed = arguments
        return ()


def test_without_forwarders_each_rank_sends_what_was_forwarded_for_it() -> None:
    """Rows over the rails were those of a node; what came from each rank is known from the dispatch."""
    ranks, tokens = 4, 3
    passing = torch.tensor([[1, 2, 0, 1], [3, 0, 2, 2]])
    origin: Any = "normal dispatch 5"
    handle = NormalGpuHandle(
        send_rows=torch.tensor([1, 2, 1, 0]),
        recv_rows=torch.tensor([3, 0, 4, 0]),
        send_tokens=torch.zeros(ranks, tokens, dtype=torch.int32),
        places=torch.zeros(tokens, ranks, dtype=torch.int32),
        is_token_in_rank=torch.ones(tokens, ranks, dtype=torch.bool),
        number=torch.tensor([5]),
        capacity=7,
        remote_rows=6,
        most=4,
        copies=2,
        origin=origin,
        nodes=GpuNodeRoute(2, passing, torch.zeros(4, 1, dtype=torch.uint8)),
    )
    kernels: Any = Kernels()
    plain, _ = without_nodes(handle, kernels)
    assert plain.recv_rows.tolist() == [3, 0, 2, 2]
    assert plain.nodes is None
    # nothing that the host has read of the other way holds of this one
    assert (plain.remote_rows, plain.most) == (-1, -1)
    assert (plain.capacity, plain.copies, plain.origin) == (7, 2, origin)
    marked, count, *_ = kernels.listed
    assert (marked, count) == (handle.is_token_in_rank.data_ptr(), tokens)
    filled = {plain.send_rows.data_ptr(), plain.send_tokens.data_ptr(), plain.places.data_ptr()}
    assert filled <= set(kernels.listed)
    assert (plain.send_tokens.shape, plain.places.shape) == ((ranks, tokens), (tokens, ranks))
