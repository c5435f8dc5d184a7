"""A rank dies while the group connects, rebuilds its windows or closes, or never gets that far: the others are
told within a second or two, by name, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import bodies
from tests.support.combinations import diagonal, first_of
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.control_plane.steps import Steps
from uccl_ep_serving.errors import ConfigError, PeerLost, UcclEpError
from uccl_ep_serving.proxy.transport.shm import ShmEndpoint
from uccl_ep_serving.proxy.transport.tcp import TcpEndpoint

LOST = 1


def _die(*_: object, **__: object) -> None:
    time.sleep(0.5)  # the others are waiting by then
    os.kill(os.getpid(), signal.SIGKILL)


#: The step in which this process dies.
_doomed: list[str] = []


def _may_die_in_gather() -> None:
    """In a step of :data:`_doomed`, once the parts of all others are there: they wait for this rank's. Called before a
    Buffer is opened, which keeps the method."""
    gather = Steps.gather

    def or_die(self: Steps, step: str, *arguments: Any, **options: Any) -> Any:
        if step in _doomed:
            deadline = time.monotonic() + 20
            while self.links.keys() - self._inbox.get(self._next, {}).keys() and time.monotonic() < deadline:
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, step, *arguments, **options)

    Steps.gather = or_die  # type: ignore[method-assign]


def _die_in_connect() -> None:
    TcpEndpoint.connect = ShmEndpoint.connect = _die  # type: ignore[method-assign]


def _again(exchange: StoreExchange, name: str, without: int) -> StoreExchange:
    """The ranks that are left, on the same store."""
    rank = exchange.rank - (exchange.rank > without)
    return StoreExchange(exchange._store, rank, exchange.size - 1, name)


def _timed(action: Callable[[], object]) -> tuple[str, float]:
    started = time.monotonic()
    try:
        action()
    except UcclEpError as error:
        return f"{type(error).__name__} {getattr(error, 'peer', '')}: {error}", time.monotonic() - started
    return "", time.monotonic() - started


def die_while(exchange: StoreExchange, overrides: dict[str, Any], stage: str) -> tuple[str, float, tuple[int, int]]:
    """Rank 1 is killed in ``stage``; returns what the others were told, after how long, and what they have left."""
    bodies.both_modes(StoreExchange(exchange._store, exchange.rank, exchange.size, "warm"), overrides, 1)
    before = bodies.settled()
    if exchange.rank == LOST and stage == "connect":
        _die_in_connect()
    if stage == "connect":
        text, took = _timed(lambda: bodies.opened(exchange, {**overrides, "timeout": 60.0, "connect_timeout": 60.0}))
    else:
        if exchange.rank == LOST:
            _may_die_in_gather()
        buffer = bodies.opened(exchange, {**overrides, "timeout": 60.0, "connect_timeout": 60.0})
        bodies.round_trip(buffer)
        if exchange.rank == LOST:
            if stage == "connect anew":
                _die_in_connect()
            else:
                _doomed.append(stage)
        last = buffer.destroy if stage == "close" else lambda: bodies.round_trip(buffer, hidden=256)
        text, took = _timed(last)
        buffer.destroy()
    left = bodies.left_over(before)
    # those that are left build a group of their own, in the same processes
    again = bodies.opened(_again(exchange, "left", LOST), overrides)
    bodies.round_trip(again)
    bodies.normal_trip(again)
    again.destroy()
    return text, took, left


STAGES = ["connect", "window layout", "leaving the old window", "sharing windows", "connect anew", "starting", "close"]


@pytest.mark.parametrize(("path", "stage"), diagonal(["shm", "tcp"], STAGES))
def test_a_death_is_noticed_in_every_stage(mortal_ranks: Ranks, path: str, stage: str) -> None:
    mortal_ranks.start(3, die_while, PATHS[path], stage)
    for succeeded, found in mortal_ranks.finish([0, 2], timeout=180).values():
        assert succeeded, found
        text, took, left = found
        # whoever closes has nothing to lose any more
        assert text.startswith(f"PeerLost {LOST}: ") if stage != "close" else text == "", text
        assert took < 0.5 + 1.5
        assert left == (0, 0)
    assert not [name for name in os.listdir("/dev/shm") if "uccl" in name]


def lose_in_normal_mode(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """What is said after a loss in the middle of a normal-mode operation, and that a new group goes on."""
    buffer = bodies.opened(exchange, overrides)
    bodies.normal_trip(buffer)
    if exchange.rank == LOST:
        _die()
    texts = [_timed(lambda: bodies.normal_trip(buffer))[0] for _ in range(2)]
    buffer.destroy()
    again = bodies.opened(_again(exchange, "left", LOST), overrides)
    for seed in range(3):
        bodies.normal_trip(again, seed)
        bodies.round_trip(again, seed)
    again.destroy()
    return texts


@pytest.mark.parametrize("path", ["direct", "tcp"])
def test_survivors_of_a_normal_mode_operation_build_a_new_group(mortal_ranks: Ranks, path: str) -> None:
    mortal_ranks.start(3, lose_in_normal_mode, PATHS[path])
    for succeeded, texts in mortal_ranks.finish([0, 2], timeout=180).values():
        assert succeeded, texts
        for text in texts:
            assert text.startswith(f"PeerLost {LOST}")
            assert "close this Buffer on all of them and build the group again" in text


def leave_while_awaited(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, float]:
    """Rank 1 closes in good order where the others still expect an operation of it."""
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    if exchange.rank == LOST:
        buffer.runtime.close(0.1)
        return "", 0.0
    found = _timed(lambda: bodies.round_trip(buffer))
    buffer.destroy()
    return found


@pytest.mark.parametrize("path", first_of("tcp", "shm", "direct"))
def test_a_rank_that_leaves_while_others_wait_for_it_is_named_before_the_deadline(ranks: Ranks, path: str) -> None:
    zero, _, two = ranks.run(3, leave_while_awaited, PATHS[path])
    for text, took in (zero, two):
        assert text.startswith("PeerLost ")
        assert took < 8.0  # the deadline is 20 s
    assert f"PeerLost {LOST}" in zero[0] + two[0]


def start_badly(exchange: StoreExchange, how: str, monkeypatch_environment: dict[str, str]) -> str:
    """Rank 1 fails before the ranks have met."""
    options: dict[str, Any] = {}
    if exchange.rank == LOST:
        os.environ.update(monkeypatch_environment)
        options = {"num_nvl_bytes": -1} if how == "argument" else {}
    try:
        buffer = Buffer(exchange, **options)
    except UcclEpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for name in monkeypatch_environment:
            os.environ.pop(name, None)
    buffer.destroy()
    return ""


@pytest.mark.parametrize(
    ("how", "environment", "words"),
    [
        ("setting", {"UCCL_EP_TIMEOUT": "soon"}, "UCCL_EP_TIMEOUT='soon'"),
        ("interface", {"UCCL_EP_SOCKET_IFNAME": "none9"}, "UCCL_EP_SOCKET_IFNAME='none9'"),
        ("argument", {}, "num_nvl_bytes = -1 must be at least 0"),
    ],
)
def test_what_is_wrong_on_one_rank_raises_on_all(
    ranks: Ranks, how: str, environment: dict[str, str], words: str
) -> None:
    started = time.monotonic()
    texts = ranks.run(3, start_badly, how, environment)
    assert time.monotonic() - started < 20
    assert all(text.startswith(ConfigError.__name__) and words in text for text in texts), texts
    assert all("rank 1 on" in texts[rank] for rank in (0, 2))
    assert PeerLost.__name__ not in "".join(texts)
