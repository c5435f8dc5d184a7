"""Closing under an operation of another thread: it ends by name, and what its kernel touches stays mapped till then."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable

import pytest

from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane import plane as data_plane
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.plane import DataPlane
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.errors import TransportError, UcclEpError
from uccl_ep_serving.native.failure import STICKY_ERROR
from uccl_ep_serving.native.groups import load
from uccl_ep_serving.protocol.context import STATUS_PENDING
from uccl_ep_serving.protocol.layout import NormalPlan, WindowLayout


def _plane() -> DataPlane:
    """Of rank 0 of 2, with the peer's window mapped."""
    layout = WindowLayout(2, None, NormalPlan(2, heap=4096, rounds=65536, chunk=4096, depth=1))
    plane = DataPlane(layout)
    window = Segment.create("window", layout.nbytes)
    plane.segments += [window, Segment.create("peer", layout.nbytes)]
    plane.space = KernelSpace(0, 2, 1, window, layout, timeout=20.0)
    load(STICKY_ERROR)
    plane.space.connect_direct(1, plane.segments[1].address)
    return plane


def _waiting(space: KernelSpace, step: Callable[[int], int]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            space.wait("dispatch", step)
        except UcclEpError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, raised


def test_memory_stays_mapped_until_the_kernel_of_another_thread_has_left() -> None:
    plane = _plane()
    assert plane.space is not None
    peer, nbytes = plane.segments[1].address, plane.layout.nbytes
    inside = threading.Event()
    wrote = []

    def step(slice_end_ns: int) -> int:
        inside.set()
        time.sleep(0.5)  # a kernel that copies does not look at the clock
        ctypes.memset(peer, 1, nbytes)
        wrote.append(nbytes)
        return STATUS_PENDING

    thread, raised = _waiting(plane.space, step)
    assert inside.wait(5)
    plane.close(time.monotonic() + 5)
    written = len(wrote)
    assert written
    thread.join(5)
    assert "closed" in str(raised[0])
    with pytest.raises(UcclEpError, match="closed"):
        plane.space.wait("dispatch", step)
    assert len(wrote) == written


def test_memory_of_a_kernel_that_does_not_return_is_never_unmapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_plane, "_STOP_SECONDS", 0.2)
    plane = _plane()
    assert plane.space is not None
    window = plane.segments[1]
    inside, release = threading.Event(), threading.Event()

    def step(slice_end_ns: int) -> int:
        inside.set()
        release.wait(10)
        window.bytes[:] = 1
        return STATUS_PENDING

    thread, _ = _waiting(plane.space, step)
    try:
        assert inside.wait(5)
        with caplog.at_level(logging.ERROR):
            plane.close(time.monotonic())
        assert "did not return in time" in caplog.text
        assert window.bytes.nbytes == window.nbytes
    finally:
        release.set()
        thread.join(5)
        data_plane._abandoned.remove(plane)


def test_a_handler_that_closes_in_the_waiting_thread_does_not_wait_for_itself() -> None:
    plane = _plane()
    assert plane.space is not None
    space = plane.space
    steps = []

    def step(slice_end_ns: int) -> int:
        steps.append(slice_end_ns)
        return STATUS_PENDING

    space.watch = lambda: plane.close(time.monotonic() + 5)
    started = time.monotonic()
    with pytest.raises(UcclEpError, match="closed"):
        space.wait("dispatch", step)
    assert time.monotonic() - started < 2
    assert len(steps) == 1


def test_what_cannot_be_let_go_keeps_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has failed refuses to unmap, an endpoint to close: the memory goes all the same."""
    let_go: list[str] = []

    class Endpoint:
        def __init__(self, name: str, works: bool) -> None:
            self.name, self.works = name, works

        def close(self) -> None:
            let_go.append(self.name)
            if not self.works:
                raise TransportError(f"{self.name} cannot be closed")

    plane = _plane()
    own, peer = plane.segments
    plane.endpoints = [[Endpoint("roce", False)], [Endpoint("tcp", True)]]  # type: ignore[list-item]
    plane.releases += [Endpoint("graph", True).close, Endpoint("device", False).close]
    with pytest.raises(TransportError, match="roce cannot be closed"):
        plane.close(time.monotonic() + 5)
    assert let_go == ["device", "graph", "tcp", "roce"]
    assert own.fd == peer.fd == -1
    plane.close(time.monotonic() + 5)
    assert len(let_go) == 4


class _Alone:
    rank, size = 0, 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


def test_destroy_from_another_thread_ends_a_wait() -> None:
    buffer = Buffer(_Alone(), settings=Settings.from_environment({}, heap_bytes=1 << 20, timeout=20.0))
    thread, raised = _waiting(buffer.runtime.space, lambda end: time.sleep(0.02) or STATUS_PENDING)
    time.sleep(0.2)
    started = time.monotonic()
    buffer.destroy()
    assert time.monotonic() - started < 3
    thread.join(5)
    assert "closed" in str(raised[0])


def _device_that_waits(space: KernelSpace, waited: list[float]) -> Callable[[float], bool]:
    """What a device is while a kernel waits for a peer: it finishes with the sticky error, which kernels look at, or at
    their own limit. ``waited`` is told how long that took."""

    def finish(deadline: float) -> bool:
        started = time.monotonic()
        while not space.failed and time.monotonic() < min(started + space.timeout, deadline):
            time.sleep(0.001)
        waited.append(time.monotonic() - started)
        return space.failed

    return finish


def test_a_kernel_that_waits_for_a_peer_does_not_hold_a_close(caplog: pytest.LogCaptureFixture) -> None:
    buffer = Buffer(_Alone(), settings=Settings.from_environment({}, heap_bytes=1 << 20, timeout=60.0))
    waited: list[float] = []
    buffer.runtime.before_draining(_device_that_waits(buffer.runtime.space, waited))
    # what a Buffer does that is collected
    buffer.runtime.close(1.0)
    assert 0.9 < waited[0] < 20.0
    assert "its kernels still wait: they end here" in caplog.text


def test_a_kernel_that_waits_for_a_peer_does_not_hold_windows_that_are_laid_out_anew() -> None:
    environment = {"heap_bytes": 1 << 20, "timeout": 60.0, "connect_timeout": 1.0}
    buffer = Buffer(_Alone(), settings=Settings.from_environment({}, **environment))
    waited: list[float] = []
    buffer.runtime.before_draining(_device_that_waits(buffer.runtime.space, waited))
    buffer.runtime.rebuild(None)
    assert 0.9 < waited[0] < 20.0
    buffer.runtime.check()
    buffer.destroy()
    # before the drain, and before the memory went
    assert len(waited) == 2
    assert waited[1] < 0.5


def test_a_device_that_hangs_under_something_else_holds_neither_a_close_nor_a_rebuild(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that look at the sticky error stand behind one that does not: memory stays, and time is limited."""

    def finish(deadline: float) -> bool:
        time.sleep(max(deadline - time.monotonic(), 0.0))
        return False

    monkeypatch.setattr(data_plane, "_DEVICE_SECONDS", 0.5)
    environment = {"heap_bytes": 1 << 20, "timeout": 60.0, "connect_timeout": 1.0}
    buffer = Buffer(_Alone(), settings=Settings.from_environment({}, **environment))
    kept, released = [], []
    for leave in (lambda: buffer.runtime.rebuild(None), lambda: buffer.runtime.close(1.0)):
        kept.append(buffer.runtime.space.window)
        buffer.runtime.before_draining(finish)
        buffer.runtime.before_unmapping(lambda: released.append("unmapped"))
        started = time.monotonic()
        leave()
        assert time.monotonic() - started < 10.0
        assert caplog.text.count("the GPU has not finished what it was given") == len(kept)
    assert not released
    for window in kept:
        assert ctypes.c_uint8.from_address(window).value == 0
    del data_plane._abandoned[:]


def test_windows_stay_where_the_wait_for_a_device_is_interrupted() -> None:
    plane, released = _plane(), []

    def finish(deadline: float) -> bool:
        raise KeyboardInterrupt

    plane.finishes.append(finish)
    plane.releases.append(lambda: released.append("unmapped"))
    with pytest.raises(KeyboardInterrupt):
        plane.close(time.monotonic())
    assert (data_plane._abandoned, released) == ([plane], [])
    del data_plane._abandoned[:]


def test_a_device_that_finishes_in_time_is_released_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    buffer = Buffer(_Alone(), settings=Settings.from_environment({}, heap_bytes=1 << 20))
    space, failed = buffer.runtime.space, []
    buffer.runtime.before_draining(lambda deadline: failed.append(space.failed) or True)
    buffer.destroy()
    assert failed == [False, True]
    assert "still wait" not in caplog.text
