"""Memory runs out on one rank in the middle of an operation: every rank is told at once, and the group goes on.

Low latency takes its memory before it sends; what it lacks then moves nothing (tests/kernels/test_ll_failures.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import bodies
from tests.support.combinations import diagonal
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.proxy import state

SHORT = 1
Patch = pytest.MonkeyPatch


def no_memory(*_: object, **__: object) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] err == 0. DefaultCPUAllocator: can't allocate memory\n more")


def once(calls: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Around a function: its call after ``calls`` finds no memory."""

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        count = iter(range(1_000_000))
        return lambda *args, **options: (no_memory if next(count) == calls else real)(*args, **options)

    return around


def normal_rows(calls: int) -> Callable[[Patch, Buffer], None]:
    """No room for what a dispatch returns (0), or a combine (1)."""
    return lambda patch, _: patch.setattr(Normal, "_tensor", once(calls)(Normal._tensor))


def low_latency_receipt(calls: int) -> Callable[[Patch, Buffer], None]:
    """A dispatch (0) or a combine (1) has sent, and does not receive."""

    def spoil(patch: Patch, buffer: Buffer) -> None:
        wait, count = buffer.runtime.space.wait, iter(range(1_000_000))

        def short(phase: str, *rest: Any) -> None:
            if phase.endswith("recv") and next(count) == calls:
                no_memory()
            wait(phase, *rest)

        patch.setattr(buffer.runtime.space, "wait", short)

    return spoil


WHERE = {
    "normal dispatch": (bodies.normal_trip, normal_rows(0)),
    "normal combine": (bodies.normal_trip, normal_rows(1)),
    "low-latency dispatch": (bodies.round_trip, low_latency_receipt(0)),
    "low-latency combine": (bodies.round_trip, low_latency_receipt(1)),
}


def run_short(exchange: StoreExchange, overrides: dict[str, Any], where: str) -> tuple[str, float]:
    """What a rank raises, and after how long; afterwards both modes are right."""
    trip, spoil = WHERE[where]
    buffer = bodies.opened(exchange, overrides)
    for seed in range(2):
        bodies.round_trip(buffer, seed)
        bodies.normal_trip(buffer, seed)
    exchange.all_gather(b"")
    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == SHORT:
            spoil(patch, buffer)
        started = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            # a peer that needs nothing more of the operation goes on to the next one, and is told there
            [trip(buffer, seed) for seed in range(3)]
        took = time.monotonic() - started
    for seed in range(3):
        bodies.normal_trip(buffer, seed)
        bodies.round_trip(buffer, seed)
    buffer.destroy()
    return str(caught.value), took


@pytest.mark.parametrize(("where", "path"), diagonal(WHERE, ["direct", "shm", "tcp"]))
def test_every_rank_is_told_and_the_group_goes_on(ranks: Ranks, where: str, path: str) -> None:
    for text, took in ranks.run(3, run_short, PATHS[path], where):
        assert f"rank {SHORT}: {where} ended with RuntimeError: [enforce fail" in text
        assert "can't allocate memory. Next step: leave this process more memory" in text
        assert "The group stays usable: what was sent before is void, go on with a dispatch on every rank" in text
        assert took < 2.0  # the deadline is 20 s


def test_a_rank_alone_goes_on_too(ranks: Ranks) -> None:
    ((text, _),) = ranks.run(1, run_short_alone)
    assert "can't allocate memory" in text


def run_short_alone(exchange: StoreExchange) -> tuple[str, float]:
    buffer = bodies.opened(exchange, {})
    bodies.normal_trip(buffer)
    with pytest.MonkeyPatch.context() as patch:
        normal_rows(0)(patch, buffer)
        with pytest.raises(ConfigError) as caught:
            bodies.normal_trip(buffer)
    bodies.normal_trip(buffer)
    buffer.destroy()
    return str(caught.value), 0.0


def alone(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """There is no memory for the proxies of the first windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "aligned_zeros", lambda nbytes: np.zeros(1 << 60, np.uint8))
        with pytest.raises(TransportError) as caught:
            bodies.opened(exchange, overrides)
    return str(caught.value)


def test_no_memory_for_windows_and_proxies_is_named(ranks: Ranks) -> None:
    (text,) = ranks.run(1, alone, PATHS["shm"])
    assert "rank 0 has no memory for its windows and proxies: " in text
    assert "raise its limit on memory" in text
