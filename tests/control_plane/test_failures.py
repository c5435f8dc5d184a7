"""Ranks as threads: what is seen on one of them is agreed on by all that go on, and named by all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.control_threads import ThreadExchange, in_threads, joined
from uccl_ep_serving.control_plane.frames import NOTE, send_frame
from uccl_ep_serving.control_plane.mesh import ControlMesh
from uccl_ep_serving.control_plane.reports import Note, Promise, Report, Wait
from uccl_ep_serving.errors import Evicted, PeerError, PeerLost, PeerTimeout, TransportError


def _timeout(peer: int) -> PeerTimeout:
    return PeerTimeout(f"rank {peer} is silent", peer=peer, phase="dispatch", channel=3, arrived=4, expected=5)


def _lost(peer: int, cause: str = "") -> PeerLost:
    return PeerLost(f"rank {peer} is lost", peer=peer, phase="combine", cause=cause)


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_meshes(size: int, body: Callable[[ControlMesh, ThreadExchange], Any]) -> list[Any]:
    """Results by rank of ``body`` on connected meshes."""

    def run(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        try:
            mesh.steps.gather("all here")
            exchange.all_gather(b"")  # nobody waits in that step any more
            return body(mesh, exchange)
        finally:
            exchange.all_gather(b"")
            mesh.close()

    return in_threads(size, run)


def _waiting(mesh: ControlMesh, peer: int, stood_still: bool = False) -> None:
    mesh.liveness.waits_for = lambda: (Wait(peer, "dispatch"), stood_still)


def _answer(mesh: ControlMesh) -> Any:
    """What this rank raises once something has failed somewhere."""
    _until(lambda: mesh.liveness.deciding or mesh.liveness.lost or mesh.liveness.stopped)
    return mesh.liveness.answer("combine")


def test_a_note_travels_whole() -> None:
    report = Report(
        3, frozenset({1}), frozenset({2}), frozenset({0}), frozenset({1}), "a NIC", True, Wait(2, "dispatch", 1, 4, 5),
        True, {1: "status 12"},
    )  # fmt: skip
    promise = Promise(2, frozenset({0, 3}), frozenset({3}))
    note = Note(1, frozenset({0, 1, 3}), {3: report}, {0: 1, 3: 3}, frozenset({0, 3}), (promise,))
    assert Note.decode(3, note.encode(), 4) == note
    wordy = Report().grown(failed="x" * 9999, causes={1: "y" * 9999})
    assert (len(wordy.failed), len(wordy.causes[1])) == (2048, 2048)


@pytest.mark.parametrize(
    "payload",
    [
        b"x",
        b"",
        Note(0, frozenset()).encode(),
        Note(0, frozenset({4})).encode(),
        Note(0, frozenset({0}), {9: Report()}).encode(),
        Note(0, frozenset({0}), {1: Report(down=frozenset({-1}))}).encode(),
        Note(0, frozenset({0}), {1: Report(waits=Wait(7))}).encode(),
        Note(0, frozenset({0}), promises=(Promise(1, frozenset({5}), frozenset()),)).encode(),
        b"\x81" * 4000,
    ],
)
def test_a_note_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="rank 0 sent a malformed control frame"):
        Note.decode(0, payload, 3)


def test_the_root_is_named_by_all_with_what_its_waiter_says() -> None:
    """Rank 0 gives up on rank 1, which waits for rank 2, that for rank 3, which waits for nobody."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank in (1, 2):
            _waiting(mesh, mesh.rank + 1)
        exchange.all_gather(b"")
        started = time.monotonic()
        error = mesh.liveness.settle(_timeout(1)) if mesh.rank == 0 else _answer(mesh)
        return error, time.monotonic() - started

    *others, (last, _) = in_meshes(4, body)
    for error, took in others:
        assert (type(error), error.peer, error.peers) == (PeerTimeout, 3, (3,))
        assert "has not begun the operation in which rank 2 waits for it" in str(error).replace("this rank", "rank 2")
        assert took < 0.6
    assert isinstance(last, Evicted)
    assert "ranks [0, 1, 2] have gone on without it" in str(last)
    assert "has not begun the operation in which rank 2 waits for it" in str(last)


def test_of_ranks_that_wait_for_each_other_the_most_awaited_is_named() -> None:
    """Rank 0 waits for rank 1; ranks 1 and 2 wait for each other, as when rank 1 was late and has just begun."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank:
            _waiting(mesh, 3 - mesh.rank)
        exchange.all_gather(b"")
        return mesh.liveness.settle(_timeout(1)) if mesh.rank == 0 else _answer(mesh)

    zero, one, two = in_meshes(3, body)
    assert (type(zero), zero.peer) == (PeerTimeout, 1)
    assert (zero.channel, zero.arrived, zero.expected) == (3, 4, 5)
    assert isinstance(one, Evicted)
    assert "have gone on without it" in str(one)
    assert ". It had waited for rank 2 in " in str(one)
    assert isinstance(two, PeerError)
    assert two.peers == (1,)


def test_a_rank_that_stood_still_is_named_although_it_waits() -> None:
    """Ranks 0 and 1 wait for each other as well as for rank 2, which has slept and waits for rank 1 now."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank:
            _waiting(mesh, 3 - mesh.rank, stood_still=mesh.rank == 2)
        exchange.all_gather(b"")
        return mesh.liveness.settle(_timeout(1)) if mesh.rank == 0 else _answer(mesh)

    zero, one, two = in_meshes(3, body)
    assert zero.peers == one.peers == (2,)
    assert isinstance(two, Evicted)


def test_a_rank_that_answers_nothing_is_found_out() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 1:
            mesh.liveness.hear = lambda by, payload: None  # type: ignore[method-assign]
        exchange.all_gather(b"")
        started = time.monotonic()
        error = mesh.liveness.settle(_timeout(1)) if mesh.rank == 0 else None
        return error, time.monotonic() - started

    error, took = in_meshes(3, body)[0]
    assert (type(error), error.peers) == (PeerTimeout, (1,))
    assert "nothing is answered there: one of the two is stopped, its host is gone, or no packet gets through" in str(
        error
    )
    assert 0.3 < took < 5.0


def test_the_cause_reaches_all() -> None:
    """Rank 0 loses rank 2 by a NIC's completion, and rank 1 learns which and why; rank 2 has lost nobody."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        return mesh.liveness.settle(_lost(2, "mem0: status 12")) if mesh.rank == 0 else _answer(mesh)

    zero, one, two = in_meshes(3, body)
    for error in (zero, one):
        assert (type(error), error.peers, error.cause) == (PeerLost, (2,), "mem0: status 12")
    assert "rank 0 has no connection to it: mem0: status 12" in str(one)
    assert isinstance(two, Evicted)


def test_the_cause_reaches_all_where_only_the_lost_rank_has_seen_it() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        return mesh.liveness.settle(_lost(0, "mem2: status 12")) if mesh.rank == 2 else _answer(mesh)

    *others, two = in_meshes(3, body)
    for error, named in zip(others, ("this rank", "rank 0"), strict=True):
        assert (type(error), error.peers, error.cause) == (PeerLost, (2,), "mem2: status 12")
        assert f"it has no connection to {named}: mem2: status 12" in str(error)
    assert isinstance(two, Evicted)


def test_a_rank_that_fails_by_itself_tells_the_others() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            mesh.liveness.fail(str(TransportError("mem0: its completion queue could not be polled")))
            mesh.liveness.fail("something else")
        return _answer(mesh)

    zero, *others = in_meshes(3, body)
    assert isinstance(zero, Evicted)
    for error in others:
        assert (type(error), error.peers) == (PeerLost, (0,))
        assert "it failed (mem0: its completion queue could not be polled)" in str(error)


@pytest.mark.parametrize("accusing", [0, 2])
def test_who_broke_the_formats_is_lost_and_what_it_says_does_not_count(accusing: int) -> None:
    """It has noticed first that its connection to the accuser is down."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        accused = 2 - accusing
        if mesh.rank == accusing:
            return mesh.liveness.accuse(accused, "a frame", "combine")
        return mesh.liveness.settle(_lost(accusing)) if mesh.rank == accused else _answer(mesh)

    errors = in_meshes(3, body)
    for rank in (1, accusing):
        assert errors[rank].peers == (2 - accusing,)
    assert isinstance(errors[2 - accusing], Evicted)


def test_a_second_loss_is_named_with_the_first() -> None:
    """What is not masked yet is named again, together with what was lost since."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 3:
            mesh.liveness.fail("a NIC")
        first = _answer(mesh)
        exchange.all_gather(b"")
        if mesh.rank == 2:
            mesh.liveness.fail("another")
        if mesh.rank < 2:
            _until(lambda: len(mesh.liveness.lost) == 2)
        return first, mesh.liveness.answer("combine")

    for first, second in in_meshes(5, body)[:2]:
        assert (first.peers, second.peer, second.peers) == ((3,), 3, (2, 3))
        assert "and rank 2" in str(second)


def test_a_malformed_note_ends_the_connection_of_its_sender() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 2:
            send_frame(mesh.steps.links[0], NOTE, body=b"x")
        return _answer(mesh)

    zero, one, two = in_meshes(3, body)
    assert zero.peers == one.peers == (2,)
    assert "malformed control frame" in str(zero)
    assert isinstance(two, Evicted)


def test_a_departed_rank_that_is_needed_is_named() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 1:
            mesh.goodbye()
            return None
        _until(lambda: mesh.liveness.departed)
        if mesh.rank == 0:
            with pytest.raises(PeerLost, match="it closed its Buffer") as caught:
                mesh.steps.gather("next", timeout=10.0)
            return mesh.liveness.settle(caught.value)
        return _answer(mesh)

    zero, _, two = in_meshes(3, body)
    assert zero.peers == two.peers == (1,)


def test_who_closes_waits_for_no_agreement() -> None:
    """Another thread of the rank waits for one that will never be reached."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            return None
        mesh.liveness.advance = list  # type: ignore[method-assign, assignment]
        mesh.liveness.fail("a NIC")
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(mesh.liveness.answer("combine")))
        waiting.start()
        mesh.close()
        waiting.join(5.0)
        return found

    _, (error,) = in_meshes(2, body)
    assert isinstance(error, Evicted)
    assert "closed meanwhile" in str(error)
