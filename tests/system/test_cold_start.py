"""One rank's cache is cold: it compiles while the others wait, and no deadline of theirs runs meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support import bodies
from tests.support.combinations import first_of
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.data_plane import build
from uccl_ep_serving.errors import PeerTimeout
from uccl_ep_serving.modes import low_latency_cpu, row_exchange

#: Seconds that a wait for a peer may last, and that the cold rank compiles whatever it has not compiled yet.
TIMEOUT, COMPILING = 0.4, 0.6


def cold_rank(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[float, int]:
    """Both modes with a deadline that is shorter than each compilation: seconds of all of it, and compilations."""
    slow: list[float] = []

    def slowly(module: Any) -> Any:
        load = module.load

        def compile_slowly(*groups: Any) -> None:
            slow.append(COMPILING)
            time.sleep(COMPILING)
            load(*groups)

        module.load = compile_slowly
        return load

    places = (build, low_latency_cpu, row_exchange)
    kept = [slowly(module) for module in places] if exchange.rank == 1 else []
    started = time.monotonic()
    try:
        buffer = bodies.opened(exchange, {**overrides, "timeout": TIMEOUT, "connect_timeout": TIMEOUT})
        bodies.round_trip(buffer)
        bodies.normal_trip(buffer)
        bodies.round_trip(buffer, hidden=256)
        buffer.destroy()
    finally:
        for module, load in zip(places, kept, strict=False):
            module.load = load  # type: ignore[attr-defined]
    return time.monotonic() - started, len(slow)


@pytest.mark.parametrize("path", first_of("tcp", "direct"))
def test_a_cold_rank_uses_up_nobodys_deadline(ranks: Ranks, path: str) -> None:
    (seconds, warm), (_, compiled) = ranks.run(2, cold_rank, PATHS[path])
    assert warm == 0
    # the transports once for each window, low latency once for each plan, normal mode once
    assert compiled == 6
    assert seconds > compiled * COMPILING


def late_rank(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 is late for the first operation of each mode and for a meeting, then for one of which it is not known."""
    buffer = bodies.opened(exchange, {**overrides, "timeout": TIMEOUT})
    for call in (bodies.round_trip, bodies.normal_trip, lambda buffer: buffer.runtime.meet()):
        time.sleep(2 * TIMEOUT * exchange.rank)
        call(buffer)
    text = ""
    if exchange.rank == 0:
        try:
            buffer.runtime.meet()
        except PeerTimeout as error:
            text = str(error)
    exchange.all_gather(b"")
    buffer.destroy()
    return text


def test_ranks_wait_longer_for_each_other_before_the_first_operations(ranks: Ranks) -> None:
    """An engine compiles its model just before, on one node longer than on another."""
    text, _ = ranks.run(2, late_rank, PATHS["tcp"])
    assert text.startswith(f"meeting before an operation, rank 0: no answer from ranks [1] within {6 * TIMEOUT:g} s")


def broken_compiler(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """A rank that cannot compile: what each rank is told, then the same calls again."""
    buffer = bodies.opened(exchange, overrides)
    texts = []
    for module, call in ((low_latency_cpu, bodies.round_trip), (row_exchange, bodies.normal_trip)):
        load: Any = module.load

        def fail(*_: Any) -> None:
            raise OSError("no compiler here")

        if exchange.rank == 1:
            module.load = fail
        try:
            with pytest.raises(Exception, match="could not compile") as caught:
                call(buffer)
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
        finally:
            module.load = load
        call(buffer)
    buffer.destroy()
    return texts


def test_a_rank_that_cannot_compile_is_named_on_every_rank_and_the_group_stays_usable(ranks: Ranks) -> None:
    first, second = ranks.run(2, broken_compiler, {"direct": False, "transport": "shm"})
    assert first == second
    for text in first:
        words = "rank 1 could not compile or load its kernels: OSError: no compiler here"
        assert text.startswith(f"ConfigError: window layout: {words}")
        assert "The group stays usable" in text
