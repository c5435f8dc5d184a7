"""``tcp`` and ``shm`` in a process that has no descriptor left: a TransportError that says so, at each step."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import select
import subprocess
import time
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from tests.support.tcp_peers import WINDOW, connect_all, make
from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.protocol import frame
from uccl_ep_serving.protocol.mailbox import mailbox_bytes
from uccl_ep_serving.proxy.transport import tcp
from uccl_ep_serving.proxy.transport.shm import ShmEndpoint, encode_address


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """Exactly ``left`` descriptors can be opened in here."""
    free = [os.dup(0) for _ in range(left + 1)]  # the lowest ones, ascending
    for descriptor in free:
        os.close(descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def sleeper() -> Iterator[int]:
    """A process that another rank could run in."""
    process = subprocess.Popen(["sleep", "300"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def no_epoll(sizehint: int = -1, flags: int = 0) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


class FullEpoll:
    """An epoll descriptor of a user who watches as many files as he may."""

    def fileno(self) -> int:
        return -1

    def register(self, descriptor: int, events: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        pass


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class TestTcp:
    def test_listening(self) -> None:
        make(0, 2, np.zeros(WINDOW, np.uint8)).close()
        before = open_descriptors()
        with descriptors(0), pytest.raises(TransportError, match=r"rank 1: cannot listen .*ulimit -n") as caught:
            make(1, 2, np.zeros(WINDOW, np.uint8))
        assert caught.value.errno == errno.EMFILE
        assert open_descriptors() == before

    @pytest.mark.parametrize(("left", "words"), [(0, "cannot watch its connections"), (1, "socket for rank 0")])
    def test_connecting(self, left: int, words: str) -> None:
        endpoint = make(1, 2, np.zeros(WINDOW, np.uint8))
        before = open_descriptors()
        with descriptors(left), pytest.raises(TransportError, match=rf"rank 1: {words}.*ulimit -n.*TCP_CONN") as caught:
            endpoint.connect([frame.encode_address("127.0.0.1", 1), None], time.monotonic() + 10)
        assert caught.value.errno == errno.EMFILE
        assert open_descriptors() == before - 1  # the listener is closed

    @pytest.mark.parametrize(
        ("module", "name", "refusal", "step"),
        [
            (select, "epoll", no_epoll, "ulimit -n"),  # selectors keep the real one
            (tcp, "take_over", lambda *arguments: -errno.ENOSPC, "max_user_watches"),
        ],
    )
    def test_the_connections_that_were_made(
        self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, refusal: object, step: str
    ) -> None:
        """Each of them is proven; it is this host that cannot watch them, not a connection that failed."""
        before = open_descriptors()
        endpoints = [make(rank, 2, np.zeros(WINDOW, np.uint8)) for rank in range(2)]
        monkeypatch.setattr(module, name, refusal)
        raised = connect_all(endpoints)
        for rank, error in enumerate(raised):
            assert isinstance(error, TransportError)
            assert re.search(rf"rank {rank}: cannot watch its tcp connections: .*{step}", str(error))
        assert open_descriptors() == before

    def test_a_watch_that_is_refused_while_connecting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from uccl_ep_serving.proxy.transport import tcp_talks

        class Full(tcp_talks.selectors.EpollSelector):
            def register(self, *arguments: object) -> None:  # type: ignore[override]
                raise OSError(errno.ENOSPC, "No space left on device")

        before = open_descriptors()
        endpoint = make(1, 2, np.zeros(WINDOW, np.uint8))
        monkeypatch.setattr(tcp_talks.selectors, "DefaultSelector", Full)
        with pytest.raises(TransportError, match=r"rank 1: cannot watch a connection .*max_user_watches"):
            endpoint.connect([frame.encode_address("127.0.0.1", 1), None], time.monotonic() + 10)
        assert open_descriptors() == before


class TestShm:
    @pytest.fixture
    def endpoint(self) -> Iterator[ShmEndpoint]:
        boxes = [np.zeros(mailbox_bytes(2, 1), np.uint8) for _ in range(2)]
        window = np.zeros(64, np.uint8)
        made = ShmEndpoint(
            0,
            2,
            0,
            mailbox=boxes[0].ctypes.data,
            peer_mailboxes=[0, boxes[1].ctypes.data],
            peer_windows=[0, window.ctypes.data],
            window_bytes=64,
        )
        with contextlib.closing(made):
            yield made

    def test_its_address(self, endpoint: ShmEndpoint) -> None:
        with descriptors(0), pytest.raises(TransportError, match=r"rank 0: .*start time.*ulimit -n") as caught:
            endpoint.address()
        assert caught.value.errno == errno.EMFILE

    @pytest.mark.parametrize(("left", "words"), [(0, "pidfd_open"), (1, "start time of its process")])
    def test_connecting(self, endpoint: ShmEndpoint, left: int, words: str) -> None:
        """Nobody says of a process that it has ended, or that it cannot be watched at all."""
        with sleeper() as pid:
            address = encode_address(pid, 2, 0, 64)
            with descriptors(left), pytest.raises(TransportError, match=rf"rank 1 .*{words}.*ulimit -n") as caught:
                endpoint.connect([None, address], 0.0)
        assert caught.value.errno == errno.EMFILE

    @pytest.mark.parametrize(("epoll", "step"), [(no_epoll, "ulimit -n"), (lambda: FullEpoll(), "max_user_watches")])
    def test_an_epoll_that_is_refused(
        self, endpoint: ShmEndpoint, monkeypatch: pytest.MonkeyPatch, epoll: object, step: str
    ) -> None:
        monkeypatch.setattr(select, "epoll", epoll)
        with sleeper() as pid, pytest.raises(TransportError, match=rf"rank 1 .*process {pid}.*{step}"):
            endpoint.connect([None, encode_address(pid, 2, 0, 64)], 0.0)
