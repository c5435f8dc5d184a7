"""What a fault does: to the connections of a rank, from inside its process; to listeners; to what a rank starts with.

Connections are found by what the kernel says of descriptors, not by the package's own objects: however it keeps or
renews them, these are the ones to a peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from uccl_ep_serving.control_plane.links import MAGIC
from uccl_ep_serving.native import cache
from uccl_ep_serving.native.failure import STICKY_ERROR
from uccl_ep_serving.protocol.frame import FRAME_MAGIC

__all__ = ["Strangers", "cut", "cut_again", "garble", "limit", "spoil_cache"]

_CREDENTIALS = struct.Struct("3i")
#: A control listener in /proc/net/unix: connections that it has accepted have its name, too, and other flags.
_LISTENING = re.compile(r" 00010000 .*@(uccl_ep_control\.(\d+)\.\w+)")
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


def _sockets() -> Iterator[socket.socket]:
    """A copy of each stream socket of this process."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(path.name)))
            with one:
                if one.type == socket.SOCK_STREAM:
                    yield one


def _connections(pid: int, data: bool) -> list[socket.socket]:
    """Copies of the control (Unix) or data (TCP) connections of this process to process ``pid`` on this host."""
    theirs = {one.laddr for one in psutil.Process(pid).net_connections("tcp") if one.raddr} if data else set()
    found = []
    for one in _sockets():
        with contextlib.suppress(OSError):
            if data and one.family != socket.AF_UNIX:
                fits = one.getpeername()[:2] in theirs
            else:
                fits = one.family == socket.AF_UNIX and not data and _peer_of(one) == pid
            if fits:
                found.append(one.dup())
    return found


def _peer_of(one: socket.socket) -> int:
    """Process at the other end of a Unix socket."""
    return int(_CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0])


def _chosen(pid: int, data: bool, share: float) -> socket.socket:
    found = _connections(pid, data)
    if not found:
        raise LookupError(f"no {'data' if data else 'control'} connection to process {pid}")
    for index, one in enumerate(found):
        if index != int(share * len(found)):
            one.close()
    return found[int(share * len(found))]


def cut(pid: int, data: bool, form: str, share: float) -> None:
    """Shut down a connection to process ``pid``: ``both`` ways, or what this end may ``write``."""
    with _chosen(pid, data, share) as one:
        one.shutdown(socket.SHUT_RDWR if form == "both" else socket.SHUT_WR)


def cut_again(pid: int, form: str, pause: float) -> None:
    """Shut down all data connections to process ``pid``, and those that take their place after ``pause`` seconds."""
    for seconds in (0.0, pause):
        time.sleep(seconds)
        for one in _connections(pid, data=True):
            with one, contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR if form == "both" else socket.SHUT_WR)


def garble(pid: int, data: bool, form: str, share: float, seed: int) -> None:
    """Put bytes of nobody into a connection to process ``pid``, between whatever this process writes to it."""
    rng = random.Random(seed)
    magic = FRAME_MAGIC if data else MAGIC
    content = {
        "noise": rng.randbytes(64),
        "header": struct.pack("<I", magic) + rng.randbytes(60),
        "few": rng.randbytes(7),
        "zeros": bytes(64),
    }[form]
    with _chosen(pid, data, share) as one:
        one.send(content, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Strangers:
    """Whoever connects to the listeners of some processes without belonging to them.

    Half of them say nothing, the others noise. The oldest leave again.
    """

    MOST, AT_ONCE = 200, 4

    def __init__(self, pids: list[int], seed: int) -> None:
        self._pids = pids
        self._rng = random.Random(seed)
        self._open: list[socket.socket] = []
        self.count = 0

    def come(self) -> None:
        """Some to each listener that there is now."""
        for address in self._listeners() * self.AT_ONCE:
            one = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
            one.setblocking(False)
            self._open.append(one)
            if one.connect_ex(address) not in (0, errno.EINPROGRESS):
                continue  # gone again, or its queue is full
            self.count += 1
            with contextlib.suppress(OSError):
                if self._rng.random() < 0.5:
                    one.send(self._rng.randbytes(self._rng.choice((1, 8, 64, 1000))), socket.MSG_NOSIGNAL)
        while len(self._open) > self.MOST:
            self._open.pop(0).close()

    def _listeners(self) -> list[str | tuple[str, int]]:
        found: list[str | tuple[str, int]] = []
        for name, pid in _LISTENING.findall(Path("/proc/net/unix").read_text()):
            if int(pid) in self._pids:
                found.append(f"\0{name}")
        for pid in self._pids:
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(pid).net_connections("tcp4")
                found += [tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN]
        return found

    def leave(self) -> None:
        """All of them."""
        while self._open:
            self._open.pop().close()


def limit(form: str, share: float) -> None:
    """Leave this process few descriptors, or little memory."""
    if form == "descriptors":
        have = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (have + int(share * 30), have + 30))
        return
    have = psutil.Process().memory_info().vms
    most = have + int(share * (64 << 20))
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def spoil_cache(form: str, directory: Path, seed: int) -> None:
    """Have this process find its cache below ``directory`` in a bad state, and nothing of one group compiled yet.

    ``empty``, ``cut``, ``noise``: a file that is damaged. ``shared``: others may write the directory, and have put code
    there that ends whoever runs it. ``full``: no room, where this process may mount a file system; else no directory.
    """
    os.environ["UCCL_EP_CACHE_DIR"] = str(directory)
    kept = STICKY_ERROR.found
    code = kept.read_bytes() if kept is not None else b""
    if form == "full":
        if not _mount_full(directory):
            directory.rmdir()
            directory.touch()
    elif form == "shared":
        directory.chmod(0o777)
    for cached in (cache.cache_directory, cache.read_directories):
        cached.cache_clear()
    STICKY_ERROR.loaded = False
    if form == "shared":
        place = cache.places(cache._source_digest())[0] / STICKY_ERROR._file_name
        place.parent.mkdir(mode=0o777, parents=True, exist_ok=True)
        # it has the right checksum: only its place says that it is not ours
        cache.write_object(place, random.Random(seed).randbytes(4096))
    elif form != "full":
        content = {"empty": b"", "cut": code[: len(code) // 2], "noise": random.Random(seed).randbytes(5000)}[form]
        STICKY_ERROR.path.write_bytes(content)


def _mount_full(directory: Path) -> bool:
    """Mount a file system of one page over ``directory``, for this process alone, and fill it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    if libc.mount(b"none", os.fsencode(directory), b"tmpfs", 0, b"size=4k"):
        return False
    with contextlib.suppress(OSError):
        (directory / "rest").write_bytes(bytes(1 << 14))
    return True
