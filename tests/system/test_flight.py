"""What ranks leave behind when they cannot go on, and what that says together: who hung, and where."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import bodies
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.cli.flight import Flight, findings, read
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import ConfigError, Evicted, PeerError

SILENT = 2
_DEADLINE = 2.0


def linger_elsewhere(seconds: float) -> None:
    """Where the silent rank stands."""
    time.sleep(seconds)


def _one_hangs(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Two operations of all, and a third that rank 2 does not begin. Returns what was raised."""
    buffer = bodies.opened(exchange, {**overrides, "timeout": _DEADLINE})
    for _ in range(2):
        bodies.round_trip(buffer)
    if exchange.rank == SILENT:
        linger_elsewhere(_DEADLINE + 2.0)
    try:
        bodies.round_trip(buffer)
    except (PeerError, Evicted) as error:
        return type(error).__name__
    finally:
        buffer.destroy()
    return ""


def _wait_for(place: Path, ranks: int) -> Flight:
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        flights = read(place)
        if flights and len(flights[0].records) == ranks:
            break
        time.sleep(0.05)
    (flight,) = flights
    return flight


@pytest.mark.parametrize("path", ["tcp", "direct"])
def test_the_rank_that_hung_is_named_with_where_it_stood(ranks: Ranks, path: str, tmp_path: Path) -> None:
    raised = ranks.run(3, _one_hangs, {**PATHS[path], "flight_recorder": str(tmp_path)})
    assert raised[SILENT] == "Evicted"
    flight = _wait_for(tmp_path, 3)
    assert not flight.unreadable
    silent = flight.records[SILENT]
    assert any("linger_elsewhere" in frame for frame in silent.threads["MainThread"])
    assert silent.stats.running is None
    assert silent.stats.state == "evicted"
    for rank, name in enumerate(raised):
        record = flight.records[rank]
        assert record.stats.world == 3
        assert len(record.calls) == 4
        if rank != SILENT:
            assert record.error.startswith(name)
            assert record.stats.begun == silent.stats.begun + 1
            assert record.stats.running is not None
    first, *others = findings(flight.records)
    assert first.startswith("ranks 0, 1 waited for rank 2, which waited for nobody: in no call of ours, at ")
    assert "linger_elsewhere" in first
    assert any(words.startswith("operations begun differ: 4 in epoch 1 on rank 2; 5 in epoch 1") for words in others)


def _one_dies_first(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Before the first operation, which agrees on windows; and who is left ends at once."""
    buffer = bodies.opened(exchange, overrides)
    exchange.all_gather(b"")
    if exchange.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError):
        bodies.round_trip(buffer)
    os._exit(0)


def test_a_failure_before_the_first_operation_leaves_a_record_at_once(mortal_ranks: Ranks, tmp_path: Path) -> None:
    mortal_ranks.start(2, _one_dies_first, {**PATHS["tcp"], "flight_recorder": str(tmp_path)})
    mortal_ranks.finish([0])
    (flight,) = read(tmp_path)
    assert flight.records[0].error.startswith("PeerLost: ")


def _part_and_go_on(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    if exchange.rank == SILENT:
        time.sleep(1.5)
    with pytest.raises(ConfigError):
        bodies.round_trip(buffer, hidden=128 if exchange.rank else 256)
    bodies.round_trip(buffer)
    buffer.destroy()


def test_ranks_that_settle_what_has_failed_leave_no_record(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, _part_and_go_on, {**PATHS["tcp"], "flight_recorder": str(tmp_path)})
    assert not list(tmp_path.iterdir())


def _one_dies(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    exchange.all_gather(b"")
    if exchange.rank == SILENT:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError):
        bodies.round_trip(buffer)
    buffer.destroy()


def test_a_rank_that_was_killed_is_the_one_without_a_record(mortal_ranks: Ranks, tmp_path: Path) -> None:
    mortal_ranks.start(3, _one_dies, {**PATHS["tcp"], "flight_recorder": str(tmp_path)})
    for succeeded, words in mortal_ranks.finish([0, 1]).values():
        assert succeeded, words
    flight = _wait_for(tmp_path, 2)
    assert any(words.startswith("rank 2 left no record: its process was killed") for words in findings(flight.records))


def _works(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    buffer = bodies.opened(exchange, overrides)
    for tokens in (8, 64):
        bodies.round_trip(buffer, tokens=tokens)
    time.sleep(0.7)  # the control connections look at how the rank stands twice a second
    buffer.destroy()


def test_a_group_that_works_and_ends_leaves_no_record(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _works, {**PATHS["tcp"], "flight_recorder": str(tmp_path)})
    assert not list(tmp_path.iterdir())
