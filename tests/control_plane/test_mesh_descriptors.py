"""Descriptors that travel over the control connections: they arrive, and none stays open where a step fails."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
import time
from typing import Any

import pytest

from tests.support.control_threads import ThreadExchange, in_threads, joined
from uccl_ep_serving.control_plane import frames
from uccl_ep_serving.control_plane.frames import GATHER, NOTE, read_frames, send_frame, send_now
from uccl_ep_serving.control_plane.links import Link
from uccl_ep_serving.errors import PeerTimeout, TransportError


def test_descriptors_reach_peers_on_this_host() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mine = os.memfd_create("test")
        os.write(mine, b"rank %d" % exchange.rank)
        got = mesh.steps.gather("share", descriptors=[mine])
        texts = [os.pread(taken[0], 100, 0) if taken else b"" for _, taken in got]
        for _, taken in got:
            for descriptor in taken:
                os.close(descriptor)
        mesh.steps.gather("end")
        os.close(mine)
        mesh.goodbye()
        mesh.close()
        return texts

    for rank, texts in enumerate(in_threads(3, body)):
        assert texts == [b"" if peer == rank else b"rank %d" % peer for peer in range(3)]


@pytest.mark.parametrize("in_time", [True, False])
def test_descriptors_wait_until_others_have_taken_theirs(in_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one user the system lets no more be under way than a process may have open."""
    send_fds, refused = socket.send_fds, list[int]()

    def full(*given: Any) -> int:
        if not in_time or len(refused) < 3:
            refused.append(1)
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send_fds(*given)

    monkeypatch.setattr(frames.socket, "send_fds", full)
    monkeypatch.setattr(frames, "_ROOM_SECONDS", 10.0 if in_time else 0.05)
    near, far = socket.socketpair()
    descriptor = os.memfd_create("test")
    try:
        if in_time:
            send_frame(Link(1, near, True), GATHER, 0, b"part", [descriptor])
            (frame,) = itertools.islice(read_frames(Link(0, far, True)), 1)
            assert (frame.payload, len(frame.descriptors), len(refused)) == (b"part", 1, 3)
            os.close(frame.descriptors[0])
        else:
            with pytest.raises(TransportError, match=r"no descriptors can be handed .*ulimit -n"):
                send_frame(Link(1, near, True), GATHER, 0, b"part", [descriptor])
    finally:
        for one in (near, far):
            one.close()
        os.close(descriptor)


def test_what_waits_for_descriptors_to_be_taken_holds_no_other_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads would take the connection for one that takes nothing more, and blame its peer."""
    send_fds, refused, room = socket.send_fds, threading.Event(), threading.Event()

    def full(*given: Any) -> int:
        if room.is_set():
            return send_fds(*given)
        refused.set()
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    monkeypatch.setattr(frames.socket, "send_fds", full)
    near, far = socket.socketpair()
    descriptor, link = os.memfd_create("test"), Link(1, near, True)
    thread = threading.Thread(target=send_frame, args=(link, GATHER, 0, b"part", [descriptor]))
    thread.start()
    try:
        assert refused.wait(5)
        assert all(send_now(link, NOTE, b"note") for _ in range(20))
    finally:
        room.set()
        thread.join(5)
    found = list(itertools.islice(read_frames(Link(0, far, True)), 21))
    assert [(frame.kind, len(frame.descriptors)) for frame in found] == [(NOTE, 0)] * 20 + [(GATHER, 1)]
    near.close()
    far.close()
    for one in (descriptor, *found[-1].descriptors):
        os.close(one)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_an_answer_to_a_step_that_was_given_up_leaves_no_descriptor() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mine = os.memfd_create("test")
        try:
            if exchange.rank == 0:
                mesh.steps.gather("all here")
                before = open_descriptors()
                with pytest.raises(PeerTimeout, match=r"ranks \[1\]"):
                    mesh.steps.gather("share", timeout=0.2)
                exchange.all_gather(b"")
                mesh.steps.gather("further")  # rank 1's part of it comes behind its answer
                return open_descriptors() - before, dict(mesh.steps._inbox)
            mesh.steps.gather("all here")
            exchange.all_gather(b"")
            for _, taken in mesh.steps.gather("share", descriptors=[mine]):
                assert not taken
            mesh.steps.gather("further")
            return None
        finally:
            exchange.all_gather(b"")
            os.close(mine)
            mesh.close()

    assert in_threads(2, body) == [(set(), {}), None]


@pytest.mark.parametrize("how", ["malformed", "twice", "no frame"])
def test_descriptors_of_what_cannot_be_handled_are_closed(how: str) -> None:
    """Rank 1 gets the reading end of a pipe with it; once nobody has that end open, writing fails."""

    def body(exchange: ThreadExchange) -> bool:
        mesh = joined(exchange)
        closed = False
        if mesh.rank == 0:
            reading, writing = os.pipe()
            link = mesh.steps.links[1]
            if how == "malformed":
                send_frame(link, NOTE, body=b"x", descriptors=[reading])
            elif how == "twice":
                send_frame(link, GATHER, 7, b"\1\0x")
                send_frame(link, GATHER, 7, b"\1\0x", [reading])
            else:
                socket.send_fds(link.socket, [b"no frame" * 10], [reading])
            os.close(reading)
            deadline = time.monotonic() + 5
            while not closed and time.monotonic() < deadline:
                time.sleep(0.01)
                try:
                    os.write(writing, b"x")
                except BrokenPipeError:
                    closed = True
            os.close(writing)
        exchange.all_gather(b"")
        mesh.close()
        return closed

    assert in_threads(2, body)[0] is True


def test_a_step_that_fails_gives_back_the_descriptors_it_got() -> None:
    """Ranks 0 and 1 hand theirs over; rank 2 never takes the step, so it fails on both and waits unread on rank 2."""

    def body(exchange: ThreadExchange) -> None:
        mesh = joined(exchange)
        mine = os.memfd_create("test")
        try:
            mesh.steps.gather("all here")
            if exchange.rank != 2:
                with pytest.raises(PeerTimeout, match=r"ranks \[(0, |1, )?2\]"):
                    mesh.steps.gather("share", descriptors=[mine], timeout=0.3)
            exchange.all_gather(b"")
        finally:
            os.close(mine)
            mesh.close()

    before = open_descriptors()
    assert in_threads(3, body) == [None, None, None]
    assert open_descriptors() - before == set()


def test_what_came_of_descriptors_that_did_not_all_fit_is_closed() -> None:
    """Linux hands over as many as there is room for, and drops the rest: a frame without all of them is of no use."""
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    reading, writing = os.pipe()
    with mine, theirs:
        link = Link(1, mine, local=True)
        # more than a frame may carry
        socket.send_fds(theirs, [b"x"], [reading] * 200)
        os.close(reading)
        with pytest.raises(OSError, match="ulimit -n") as caught:
            list(read_frames(link))
        assert caught.value.errno == errno.EMFILE
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"x")
        os.close(writing)
