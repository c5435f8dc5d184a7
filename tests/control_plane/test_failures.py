"""Ranks as threads: whose fault a failure is, told and asked over the control connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.control_threads import ThreadExchange, in_threads, joined
from uccl_ep_serving.control_plane.failure_report import FailureReport
from uccl_ep_serving.control_plane.failures import Liveness, trace_root
from uccl_ep_serving.control_plane.frames import ANSWER, FAILED, send_frame
from uccl_ep_serving.control_plane.mesh import ControlMesh
from uccl_ep_serving.errors import PeerError, PeerLost, PeerTimeout, TransportError


def _timeout(peer: int) -> PeerTimeout:
    return PeerTimeout(f"rank {peer} is silent", peer=peer, phase="dispatch", channel=3, arrived=4, expected=5)


def _lost(peer: int) -> PeerLost:
    return PeerLost(f"rank {peer} is lost", peer=peer, phase="combine")


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
            mesh.close()

    return in_threads(size, run)


def test_a_report_travels_whole() -> None:
    report = FailureReport.of(2, _timeout(1))
    again = FailureReport.decode(2, report.encode(), 3)
    assert again._replace(heard=0.0) == report == FailureReport(2, 1, True, 3, 4, 5, "dispatch")
    lost = FailureReport.of(2, PeerLost("rank 1 is gone", peer=1, phase="combine", cause="mem0: status 12"))
    again = FailureReport.decode(2, lost.encode(), 3)
    assert again._replace(heard=0.0) == lost == FailureReport(2, 1, False, phase="combine", cause="mem0: status 12")
    wordy = FailureReport(0, 1, False, phase="combine", cause="ü" * 5000)
    assert FailureReport.decode(0, wordy.encode(), 2).cause == "ü" * 1024
    long = FailureReport(0, 1, False, phase="a phase in many words " * 100)
    assert long.phase.startswith(FailureReport.decode(0, long.encode(), 2).phase)


@pytest.mark.parametrize(
    "payload", [b"x", FailureReport(0, 3, True).encode(), FailureReport(0, 0, True).encode(), b"\0" * 3000]
)
def test_a_report_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="rank 0 sent a malformed control frame"):
        FailureReport.decode(0, payload, 3)


@pytest.mark.parametrize("end", ["goodbye", "without a goodbye"])
def test_who_left_because_of_another_is_not_named(end: str) -> None:
    """Rank 0 gives up on rank 1 and leaves; a transport tells rank 2 of the leaving before anything else does."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            assert mesh.root_cause.resolve_cause(_timeout(1)).peer == 1
            if end == "goodbye":
                mesh.goodbye()
            mesh.close()
            return None
        if mesh.rank == 1:
            time.sleep(1.0)
            return None
        first = mesh.root_cause.resolve_cause(_lost(0))
        later = mesh.root_cause.resolve_cause(_lost(0))
        return first, later

    first, later = in_meshes(3, body)[2]
    for error in (first, later):
        assert isinstance(error, PeerTimeout)
        assert (error.peer, error.phase, error.channel, error.arrived, error.expected) == (1, "combine", 3, 4, 5)
        assert str(error).startswith("combine, rank 2: rank 1 is silent: rank 0 waits for it or has given up in ")


def test_a_lost_rank_at_the_root_is_named_as_lost() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            mesh.root_cause.resolve_cause(_lost(1))
            mesh.goodbye()
        exchange.all_gather(b"")
        return mesh.root_cause.resolve_cause(_lost(0)) if mesh.rank == 2 else None

    error = in_meshes(3, body)[2]
    assert isinstance(error, PeerLost)
    assert error.peer == 1
    assert "rank 0 lost it in combine" in str(error)


def test_the_cause_reaches_who_hears_of_a_loss_from_another() -> None:
    """Rank 0 loses rank 1 by a NIC's completion, and rank 2 learns which and why."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            mesh.root_cause.resolve_cause(PeerLost("rank 1 is gone", peer=1, phase="combine", cause="mem0: status 12"))
        _until(lambda: mesh.rank == 0 or mesh.liveness.failed)
        exchange.all_gather(b"")
        error = mesh.root_cause.resolve_cause(_lost(0)) if mesh.rank == 2 else mesh.liveness.how_gone(0)
        exchange.all_gather(b"")
        return error

    _, how, error = in_meshes(3, body)
    assert (type(error), error.peer, error.cause) == (PeerLost, 1, "mem0: status 12")
    assert "rank 0 lost it in combine (mem0: status 12) and has stopped" in str(error)
    assert how == "it has given up, because of this rank (mem0: status 12)"


def test_a_rank_that_fails_by_itself_tells_the_others() -> None:
    """A NIC of rank 0 fails: rank 1, which waits for it, and rank 2, which waits for rank 1, name rank 0 and why."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            mesh.root_cause.report_local_failure(
                TransportError("mem0: its completion queue could not be polled"), "dispatch"
            )
            mesh.root_cause.report_local_failure(TransportError("something else"), "combine")
        exchange.all_gather(b"")
        _until(lambda: mesh.rank == 0 or mesh.liveness.failed)
        assert mesh.liveness.failed == ([0] if mesh.rank else [])
        exchange.all_gather(b"")  # before anybody else gives up
        error = mesh.root_cause.resolve_cause(_lost(2)) if mesh.rank == 0 else None
        if mesh.rank == 1:
            with pytest.raises(PeerLost, match=r"rank 0 is gone \(it failed \(mem0: its completion queue") as caught:
                mesh.liveness.raise_if_absent("dispatch")
            error = mesh.root_cause.resolve_cause(caught.value)
        exchange.all_gather(b"")
        if mesh.rank == 2:
            error = mesh.root_cause.resolve_cause(_lost(1))
        exchange.all_gather(b"")
        return error

    own, *others = in_meshes(3, body)
    assert own.peer == 2, "a rank that failed by itself names nobody as the root, least of all itself"
    for error in others:
        assert (type(error), error.peer) == (PeerLost, 0)
        assert "it failed in dispatch (mem0: its completion queue could not be polled) and has stopped" in str(error)


def test_who_waits_for_another_is_not_named() -> None:
    """Rank 0 waits for rank 1, that for rank 2, that for rank 3, which waits for nobody."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank in (1, 2):
            mesh.root_cause.waits_for = lambda: FailureReport(mesh.rank, mesh.rank + 1, True, phase="dispatch")
        exchange.all_gather(b"")
        started = time.monotonic()
        error = mesh.root_cause.resolve_cause(_timeout(1)) if mesh.rank == 0 else None
        took = time.monotonic() - started
        exchange.all_gather(b"")
        return error, took

    (error, took), *_ = in_meshes(4, body)
    assert (type(error), error.peer) == (PeerTimeout, 3)
    assert "rank 2 waits for it or has given up in dispatch" in str(error)
    assert took < 0.5


def test_who_waits_in_a_step_is_not_named() -> None:
    """Rank 1 is in a step of agreement, which rank 0 does not take; rank 2 waits for rank 1 in an operation."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        error = None
        exchange.all_gather(b"")
        if mesh.rank == 1:
            with pytest.raises(PeerError):  # of rank 0, or of rank 2, which fails first
                mesh.steps.gather("window layout", timeout=1.0)
        elif mesh.rank == 2:
            time.sleep(0.3)
            error = mesh.root_cause.resolve_cause(_timeout(1))
        exchange.all_gather(b"")
        return error

    error = in_meshes(3, body)[2]
    assert (type(error), error.peer) == (PeerTimeout, 0)
    assert "rank 1 waits for it or has given up in window layout" in str(error)


@pytest.mark.parametrize("waits_for", [None, 0], ids=["nobody", "the-asking-rank"])
def test_a_rank_that_is_silent_itself_is_named_with_what_it_says(waits_for: int | None) -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 1 and waits_for is not None:
            mesh.root_cause.waits_for = lambda: FailureReport(1, waits_for, True, phase="dispatch")
        exchange.all_gather(b"")
        error = mesh.root_cause.resolve_cause(_timeout(1)) if mesh.rank == 0 else None
        exchange.all_gather(b"")
        return error

    error = in_meshes(2, body)[0]
    assert (type(error), error.peer) == (PeerTimeout, 1)
    assert ("it waits for nobody" in str(error)) == (waits_for is None)


def test_a_rank_that_answers_nothing_is_named_after_a_moment() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 1:
            mesh.root_cause.take = lambda link, frame: None  # type: ignore[method-assign]
        exchange.all_gather(b"")
        started = time.monotonic()
        error = mesh.root_cause.resolve_cause(_timeout(1)) if mesh.rank == 0 else None
        took = time.monotonic() - started
        exchange.all_gather(b"")
        return error, took

    error, took = in_meshes(2, body)[0]
    assert error.peer == 1
    assert "answers nothing on its control connection" in str(error)
    assert 0.4 < took < 5.0


def test_ranks_that_wait_for_each_other_end_by_name() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        other = (mesh.rank + 1) % 3
        mesh.root_cause.waits_for = lambda: FailureReport(mesh.rank, other, True, phase="dispatch")
        exchange.all_gather(b"")
        error = mesh.root_cause.resolve_cause(_timeout(other))
        exchange.all_gather(b"")
        return error

    for rank, error in enumerate(in_meshes(3, body)):
        assert isinstance(error, PeerTimeout)
        assert error.peer != rank


def test_of_ranks_that_wait_for_each_other_the_first_one_is_named() -> None:
    """Rank 0 waits for rank 1; ranks 1 and 2 wait for each other, as when rank 1 was late and has just begun."""

    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank:
            mesh.root_cause.waits_for = lambda: FailureReport(mesh.rank, 3 - mesh.rank, True, phase="dispatch")
        exchange.all_gather(b"")
        error = mesh.root_cause.resolve_cause(_timeout(1)) if mesh.rank == 0 else None
        exchange.all_gather(b"")
        return error

    error = in_meshes(3, body)[0]
    assert (type(error), error.peer) == (PeerTimeout, 1)


def test_a_rank_that_takes_part_in_a_step_again_has_not_given_up() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            mesh.root_cause.resolve_cause(_timeout(1))
        else:
            _until(lambda: mesh.liveness.failed)
            with pytest.raises(PeerLost, match="it has given up, because of "):
                mesh.liveness.raise_if_absent("dispatch")
        exchange.all_gather(b"")
        if mesh.rank != 1:
            mesh.mask_out(1)
            mesh.steps.gather("anew")
            found = (
                mesh.liveness.failed,
                mesh.liveness.report_of(mesh.rank),
                mesh.root_cause.resolve_cause(_lost(1)).peer,
            )
        exchange.all_gather(b"")
        return found if mesh.rank != 1 else None

    zero, _, two = in_meshes(3, body)
    assert zero == two == ([], None, 1)


def test_a_report_ends_when_its_rank_takes_part_in_a_step() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            mesh.root_cause.resolve_cause(_lost(1))
        else:
            _until(lambda: mesh.liveness.failed == [0])
        exchange.all_gather(b"")
        if mesh.rank:
            _until(lambda: mesh.liveness.failed == [])
        mesh.steps.gather("anew")
        report = mesh.liveness.report_of(0)
        exchange.all_gather(b"")
        return report

    assert in_meshes(3, body)[1:] == [None, None]


def test_a_malformed_report_ends_the_connection_of_its_sender() -> None:
    def body(mesh: ControlMesh, exchange: ThreadExchange) -> Any:
        if mesh.rank == 0:
            send_frame(mesh.root_cause.links[1], FAILED, body=b"x")
            send_frame(mesh.root_cause.links[2], ANSWER, 7, body=FailureReport(0, 9, True).encode())
        else:
            _until(lambda: mesh.liveness.lost)
        lost = list(mesh.liveness.lost)
        exchange.all_gather(b"")
        return lost

    _, one, two = in_meshes(3, body)
    assert one == two == [0]


@pytest.mark.parametrize(
    ("lost", "accused", "given_up", "departed", "named"),
    [
        ([3], {2: [1]}, {1: 2}, [0], 3),
        ([], {2: [1]}, {1: 2}, [0], 2),
        ([], {4: [1]}, {}, [0], 1),
        ([], {}, {1: 2}, [0], 1),
        ([], {}, {}, [0], 0),
        ([], {5: [2]}, {}, [0], 0),  # what a masked rank says does not count
        ([], {}, {1: 5}, [0], 0),  # nor who gave up because of a masked one
    ],
)
def test_the_likeliest_culprit_comes_first(
    lost: list[int], accused: dict[int, list[int]], given_up: dict[int, int], departed: list[int], named: int
) -> None:
    """Rank 4 of 6; 2 is masked where it masks rank 5, and 5 where somebody gave up because of it."""
    liveness = Liveness(4, 6)
    liveness.lost, liveness.masked_by, liveness.departed = lost, accused, dict.fromkeys(departed, 0.0)
    liveness.reports = {by: FailureReport(by, peer, True) for by, peer in given_up.items()}
    if accused == {5: [2]}:
        liveness.mask_out(2)
    elif given_up == {1: 5}:
        liveness.mask_out(5)
    assert liveness.culprit(frozenset(range(6)) - liveness.masked) == named
    with pytest.raises(PeerError) as caught:
        liveness.raise_if_absent("dispatch")
    assert caught.value.peer == named


@pytest.mark.parametrize(
    ("waits_for", "named"),
    [
        ({}, 1),
        ({1: 2}, 2),
        ({1: 2, 2: 3}, 3),
        ({1: 2, 2: 2}, 2),  # it has said itself what failed
        ({1: 0}, 1),  # this rank and the first one wait for each other
        ({1: 2, 2: 0}, 1),  # likewise over a third one
        ({1: 2, 2: 1}, 1),
        ({1: 2, 2: 3, 3: 2}, 2),  # of those that wait for each other the first on the way
    ],
)
def test_reports_are_followed_to_the_root(waits_for: dict[int, int], named: int) -> None:
    """An error of rank 0 names rank 1."""
    reports = {by: FailureReport(by, peer, by != peer) for by, peer in waits_for.items()}
    root = trace_root(0, 1, reports.get(1), lambda report: reports.get(report.peer))
    assert (1 if root is None else root.peer) == named
