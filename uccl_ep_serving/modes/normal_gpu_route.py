"""Who gets which tokens, worked out on the device: the tensors of a layout and of a dispatch, and what fills them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..handles import DispatchOrigin, GpuNodeRoute, NormalGpuHandle
from .normal_arguments import Layout
from .row_format import mark_bytes

if TYPE_CHECKING:
    from ..kernels.triton.launch import Launch
    from ..kernels.triton.normal import TritonNormalKernels

__all__ = ["Marks", "Route", "all_of", "new_marks", "node_tensors", "run_all", "without_nodes"]

#: Of an int64: larger than every position.
_NO_POSITION = (1 << 63) - 1


def all_of(launches: tuple[Launch, ...]) -> tuple[Callable[[], None], ...]:
    """Launches as steps."""
    return tuple(launch.run for launch in launches)


def run_all(steps: tuple[Callable[[], None], ...]) -> None:
    """Run steps in order."""
    for step in steps:
        step()


def new_marks(rows: int, node_ranks: int, like: torch.Tensor) -> torch.Tensor:
    """Room for the marks of rows that are forwarded, on the device of ``like``."""
    return torch.empty(rows, mark_bytes(node_ranks), dtype=torch.uint8, device=like.device)


def node_tensors(handle: NormalGpuHandle) -> list[torch.Tensor]:
    """What of a handle kernels use only between nodes."""
    if handle.nodes is None:
        return []
    return [handle.is_token_in_rank, handle.nodes.passing, handle.nodes.relay_marks]


def without_nodes(
    handle: NormalGpuHandle, kernels: TritonNormalKernels
) -> tuple[NormalGpuHandle, tuple[Callable[[], None], ...]]:
    """A handle for rows that go to each rank, of one made when they crossed once to a node, and what fills it."""
    assert handle.nodes is not None
    tokens, ranks = handle.is_token_in_rank.shape
    device = handle.send_rows.device
    rows = torch.empty(ranks, dtype=torch.int64, device=device)
    lists = torch.empty(ranks, tokens, dtype=torch.int32, device=device)
    places = torch.empty(tokens, ranks, dtype=torch.int32, device=device)
    launches = kernels.list(
        handle.is_token_in_rank.data_ptr(), tokens, 0, 0, rows.data_ptr(), 0, lists.data_ptr(), places.data_ptr()
    )
    plain = handle._replace(
        send_rows=rows,
        recv_rows=handle.nodes.passing[1],
        send_tokens=lists,
        places=places,
        remote_rows=-1,
        most=-1,
        nodes=None,
    )
    return plain, all_of(launches)


class Marks:
    """Counts and marks of a layout, to be filled by kernels."""

    def __init__(self, topk_idx: torch.Tensor, experts: int, ranks: int) -> None:
        device = topk_idx.device
        self._ids, self._experts = topk_idx, experts
        self.per_rank = torch.zeros(ranks, dtype=torch.int32, device=device)
        self.per_expert = torch.zeros(experts, dtype=torch.int32, device=device)
        self.in_rank = torch.empty(topk_idx.shape[0], ranks, dtype=torch.bool, device=device)
        self._bad = torch.full((1,), _NO_POSITION, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that kernels use."""
        return [self._ids, self.per_rank, self.per_expert, self.in_rank, self._bad]

    def node_counting(self, counts: torch.Tensor) -> Callable[[], None]:
        """What fills ``counts``, int32 [nodes], with the tokens that have an expert on each node."""

        def count() -> None:
            in_node = self.in_rank.unflatten(1, (len(counts), -1)).any(dim=2)
            torch.sum(in_node, dim=0, dtype=torch.int32, out=counts)

        return count

    def launches(self, kernels: TritonNormalKernels, context: int, state: int) -> tuple[Launch, ...]:
        """``context`` not 0: the host is told of an id out of range."""
        tokens, topk = self._ids.shape
        return kernels.mark(
            context,
            state,
            self._ids.data_ptr(),
            tokens,
            topk,
            self._experts,
            self.per_rank.data_ptr(),
            self.per_expert.data_ptr(),
            self.in_rank.data_ptr(),
            self._bad.data_ptr(),
        )


class Route:
    """Who gets which tokens, to be filled by kernels: from the ids where there are any, else from the marks."""

    def __init__(
        self,
        layout: Layout,
        topk_idx: torch.Tensor | None,
        ranks: int,
        rank: int,
        node_ranks: int,
    ) -> None:
        _, in_rank, per_expert = layout
        device, tokens = in_rank.device, in_rank.shape[0]
        self._rank, self._node_ranks = rank, node_ranks
        self._marks = None if topk_idx is None else Marks(topk_idx, per_expert.shape[0], ranks)
        self._given = per_expert
        self.in_rank = in_rank if self._marks is None else self._marks.in_rank
        self.per_expert = per_expert.clone() if self._marks is None else self._marks.per_expert
        self.rows = torch.empty(ranks, dtype=torch.int64, device=device)
        self.lists = torch.empty(ranks, tokens, dtype=torch.int32, device=device)
        self.places = torch.empty(tokens, ranks, dtype=torch.int32, device=device)
        self.passing = torch.empty(2 if node_ranks else 0, ranks, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that kernels use."""
        marks = [] if self._marks is None else self._marks.tensors
        own = [self.in_rank, self.per_expert, self._given, self.rows, self.lists, self.places, self.passing]
        return own + marks

    def steps(self, kernels: TritonNormalKernels, addresses: tuple[int, int]) -> tuple[Callable[[], None], ...]:
        """In the order of the stream."""
        ranks, tokens = self.lists.shape
        marking = () if self._marks is None else self._marks.launches(kernels, *addresses)
        listing = kernels.list(
            self.in_rank.data_ptr(),
            tokens,
            self._rank,
            self._node_ranks,
            self.rows.data_ptr(),
            self.passing.data_ptr(),
            self.lists.data_ptr(),
            self.places.data_ptr(),
        )
        if self._marks is not None:
            return all_of(marking + listing)

        def bound() -> None:
            # the peers refuse more rows for an expert than there are rows
            rows = self.passing[0] if self._node_ranks else self.rows
            most = rows.to(torch.int32).view(ranks, 1)
            self.per_expert.copy_(torch.minimum(self._given.view(ranks, -1), most).clamp_(min=0).view(-1))

        return (*all_of(listing), bound)

    def new_handle(self, origin: DispatchOrigin, copies: int, capacity: int) -> NormalGpuHandle:
        """Of a dispatch that takes this route and has not run: what it receives is not known.

        Args:
            copies: most ranks that a token goes to.
            capacity: rows that dispatch is going to return, 0 where the host reads back how many.
        """
        nodes = None
        if self._node_ranks:
            # each row that is forwarded goes to a rank of this node, and none of these gets more than ``capacity``
            nodes = GpuNodeRoute(
                self._node_ranks, self.passing, new_marks(capacity * self._node_ranks, self._node_ranks, self.rows)
            )
        return NormalGpuHandle(
            self.rows,
            torch.zeros_like(self.rows),
            self.lists,
            self.places,
            self.in_rank,
            torch.empty(1, dtype=torch.int64, device=self.rows.device),
            capacity,
            -1,
            -1,
            copies,
            origin,
            nodes,
        )
