"""Ranks that are in operations of different modes find out; ranks that are not are left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from uccl_ep_serving.data_plane import calls
from uccl_ep_serving.data_plane.calls import Calls


class Mesh:
    """Delivers to the calls of the other rank."""

    def __init__(self) -> None:
        self.on_doing: Any = None
        self.other: Mesh | None = None
        self.told = 0
        self.liveness = SimpleNamespace(masked=frozenset())

    def tell_doing(self, peer: int, what: bytes) -> None:
        self.told += 1
        assert self.other is not None
        self.other.on_doing(1 - peer, what)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Calls, Calls, list[Mesh], list[float]]:
    """Of ranks 0 and 1, with a clock of their own."""
    clock = [100.0]
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    meshes = [Mesh(), Mesh()]
    meshes[0].other, meshes[1].other = meshes[1], meshes[0]
    return Calls(meshes[0]), Calls(meshes[1]), meshes, clock  # type: ignore[arg-type]


def wait(one: Calls, peer: int, clock: list[float], seconds: float = 2.0) -> None:
    for _ in range(int(seconds * 100)):
        one.remind(peer)
        clock[0] += 0.01


def test_another_mode_is_told_by_who_is_waited_for(pair: Any) -> None:
    zero, one, meshes, clock = pair
    for each in (zero, one):
        each.begin(3, 7, True)
    zero.begin(3, 8, True)
    one.begin(3, 8, False)
    wait(zero, 1, clock)
    assert one.difference == "rank 0 is in a low-latency operation, and this rank in an operation of normal mode"
    assert zero.difference == ""
    wait(one, 0, clock)
    assert zero.difference == "rank 1 is in an operation of normal mode, and this rank in a low-latency operation"
    wait(zero, 1, clock)
    assert meshes[0].told == 1, "a peer that is stopped must not be written to without end"


@pytest.mark.parametrize(("epoch", "begun", "low_latency"), [(3, 8, True), (3, 9, False), (3, 7, False), (4, 8, False)])
def test_ranks_that_make_the_same_calls_at_other_times_are_left_alone(
    pair: Any, epoch: int, begun: int, low_latency: bool
) -> None:
    zero, one, _, clock = pair
    zero.begin(3, 8, True)
    one.begin(epoch, begun, low_latency)
    wait(zero, 1, clock)
    wait(one, 0, clock)
    assert (zero.difference, one.difference) == ("", "")


def test_a_short_wait_says_nothing_and_a_masked_peer_counts_for_nothing(pair: Any) -> None:
    zero, one, meshes, clock = pair
    zero.begin(3, 8, True)
    one.begin(3, 8, False)
    wait(zero, 1, clock, 0.4)
    assert meshes[0].told == 0
    wait(zero, 1, clock)
    meshes[1].liveness.masked = frozenset({0})
    assert one.difference == ""


def test_what_is_no_operation_ends_the_connection(pair: Any) -> None:
    for payload in (b"", b"\x93\x01\x02", b"\xc0" * 40):
        with pytest.raises(ValueError, match="rank 1 sent a malformed control frame"):
            pair[2][0].on_doing(1, payload)
