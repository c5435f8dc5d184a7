"""Buffers that serve several low-latency shapes: rebuilt once for each that does not fit, never for one that does."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.support import bodies
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

#: Keywords of a round trip: long slots, much combine space, longer slots. None fits windows made for those before it.
SHAPES: list[dict[str, int]] = [
    {"tokens": 64, "hidden": 1024, "experts": 6, "topk": 1},
    {"tokens": 8, "hidden": 1024, "experts": 24, "topk": 12},
    {"tokens": 96, "hidden": 1024, "experts": 6, "topk": 1},
]


def alternate(exchange: StoreExchange, overrides: dict[str, Any], reserved: bool) -> list[int]:
    """A hundred layers of alternating shapes, normal mode between; the number of the epoch after each."""
    buffer = bodies.opened(exchange, overrides)
    if reserved:
        for one in SHAPES:
            buffer.reserve_low_latency(one["tokens"], one["hidden"], one["experts"], one["topk"], use_fp8=False)
    epochs = []
    for layer in range(100):
        bodies.round_trip(buffer, layer, **SHAPES[layer % 3])
        if layer % 10 == 9:
            bodies.normal_trip(buffer, layer)
        epochs.append(buffer.runtime.epoch)
    buffer.destroy()
    return epochs


@pytest.mark.parametrize(
    ("path", "reserved"),
    [
        ("direct", False),
        ("shm", True),
        ("tcp", True),
        *(
            pytest.param(path, reserved, marks=pytest.mark.combinations)
            for path, reserved in (("direct", True), ("shm", False), ("tcp", False))
        ),
    ],
)
def test_alternating_layers(ranks: Ranks, path: str, reserved: bool) -> None:
    want = [3] * 100 if reserved else [1, 2, *[3] * 98]
    assert ranks.run(3, alternate, PATHS[path], reserved) == [want] * 3


def grow_with_one_in_flight(exchange: StoreExchange, overrides: dict[str, Any]) -> list[int]:
    """What lies inside the windows that are there goes on beside an operation in flight; what does not is refused."""
    buffer = bodies.opened(exchange, overrides)
    long, wide, _ = SHAPES
    bodies.round_trip(buffer, **wide)
    x, topk_idx, weights = bodies.tokens_of(buffer.rank, 4, 128, 6, 2)
    options: Any = {"use_fp8": False, "topk_weights": weights, "return_recv_hook": True}
    rows, _, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, 4, 6, **options)
    bodies.round_trip(buffer, **wide)
    epochs = [buffer.runtime.epoch]
    with pytest.raises(bodies.UcclEpError, match=r"no room for .*tokens=64.* and an operation is in flight\. Next"):
        bodies.round_trip(buffer, **long)
    assert hook is not None
    hook()
    out, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
    assert torch.allclose(out.float(), x.float() * weights.sum(dim=1, keepdim=True), rtol=0.02)
    # a rebuild makes the handle void, by name
    bodies.round_trip(buffer, **long)
    with pytest.raises(bodies.UcclEpError, match="for a low-latency shape that they had no room"):
        buffer.low_latency_combine(rows, topk_idx, weights, handle)
    epochs.append(buffer.runtime.epoch)
    for one in (wide, long):
        bodies.round_trip(buffer, **one)
    epochs.append(buffer.runtime.epoch)
    buffer.destroy()
    return epochs


@pytest.mark.parametrize("path", ["direct", "tcp"])
def test_what_does_not_fit_waits_for_what_is_in_flight(ranks: Ranks, path: str) -> None:
    assert ranks.run(2, grow_with_one_in_flight, PATHS[path]) == [[1, 2, 2]] * 2


def reserve_apart(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Ranks that reserve different shapes are told at once, and go on; a masked rank takes no room with it."""
    buffer = bodies.opened(exchange, overrides)
    with pytest.raises(bodies.UcclEpError) as caught:
        buffer.reserve_low_latency(8, 256 if buffer.rank else 128, 6, 2)
    buffer.reserve_low_latency(8, 256, 6, 2)
    bodies.round_trip(buffer, hidden=256, experts=6)
    before = buffer.runtime.layout.low_latency
    last = exchange.size - 1
    exchange.all_gather(b"")
    if buffer.rank == last:
        buffer.runtime.close(0.1)
        return str(caught.value)
    buffer.low_latency_update_mask_buffer(last, True)
    buffer.reserve_low_latency(8, 128, 6, 2)
    assert buffer.runtime.layout.low_latency == before
    buffer.destroy()
    return str(caught.value)


def reserve_apart_in_time(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    """Rank 1 asks for room for the second shape while the others still reserve the first, which all have room for."""
    buffer = bodies.opened(exchange, overrides)
    buffer.reserve_low_latency(8, 128, 6, 2)
    if buffer.rank != 1:
        deadline = time.monotonic() + 20.0
        while not buffer.runtime.rebuild_requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert buffer.runtime.rebuild_requested
        for _ in range(2):
            buffer.reserve_low_latency(8, 128, 6, 2)
    buffer.reserve_low_latency(8, 256, 6, 2)
    bodies.round_trip(buffer, hidden=256, experts=6)
    epoch = buffer.runtime.epoch
    buffer.destroy()
    return epoch


def test_a_rank_that_is_ahead_waits_for_the_others(ranks: Ranks) -> None:
    assert ranks.run(3, reserve_apart_in_time, PATHS["shm"]) == [2, 2, 2]


def test_ranks_that_reserve_different_shapes(ranks: Ranks) -> None:
    for text in ranks.run(3, reserve_apart, PATHS["shm"]):
        assert "the ranks disagree: rank 0 began low latency" in text
        assert "hidden=128" in text
        assert "ranks 1, 2 began low latency" in text
        assert "hidden=256" in text
        assert "The group stays usable" in text
