"""``shm``: writes to a rank on the same host are a memcpy into its mapped window and one word in its mailbox.

The runtime maps the segments (windows and mailboxes) and hands over addresses; this module only moves bytes. A post is
complete when it returns, so SENT waits in a small queue until the next poll. What a mailbox holds is described in
:mod:`uccl_ep_serving.protocol.mailbox`.

No connection exists that could break, so the death of a peer is seen through a pidfd, opened at connect from the
process id, start time and pid namespace that the peer's :meth:`ShmEndpoint.address` names. Where that is not possible
(another pid namespace, a kernel or sandbox without ``pidfd_open``) :meth:`ShmEndpoint.describe` says so, and a silent
peer ends in PeerTimeout instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections.abc import Sequence

import numpy as np

from ...errors import BootstrapError, ConfigError
from ...native.descriptors import open_process
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.mailbox import ring_offset
from ...protocol.talks import NO_DESCRIPTORS
from . import shm_data as data
from .base import Capabilities, DataPath, refused
from .shm_data import FUNCTIONS

_ADDRESS = struct.Struct("<4sIHHQQQ")
_ADDRESS_MAGIC = b"UEPM"


def _start_time(pid: int) -> int:
    """Clock ticks after boot at which the process started: with the pid, a name that is not used twice.

    Raises OSError when there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The command, in parentheses, may hold anything; field 22 is the 20th after it.
        return int(file.read().rpartition(b")")[2].split()[19])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def encode_address(pid: int, ranks: int, proxy: int, window_bytes: int) -> bytes:
    """Address of the endpoint of ``proxy`` in process ``pid``. Raises OSError when there is no such process."""
    return _ADDRESS.pack(_ADDRESS_MAGIC, pid, ranks, proxy, window_bytes, _start_time(pid), _pid_namespace())


class ShmEndpoint:
    """Endpoint of one proxy thread over mapped segments.

    Args:
        rank, ranks, proxy: who this is.
        mailbox: address of this rank's mailbox segment (:func:`mailbox_bytes` bytes, zero when it was created).
        peer_mailboxes: by rank, address of the peer's mailbox segment; 0 = not mapped, not reached by shm.
        peer_windows: by rank, address of the peer's window; 0 = not mapped.
        window_bytes: length of every window.

    Raises:
        ConfigError: a table has the wrong length, or an address is missing or not aligned to 8 bytes.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        proxy: int,
        *,
        mailbox: int,
        peer_mailboxes: Sequence[int],
        peer_windows: Sequence[int],
        window_bytes: int,
    ) -> None:
        if len(peer_mailboxes) != ranks or len(peer_windows) != ranks:
            raise ConfigError(
                f"shm of rank {rank}: {len(peer_mailboxes)} mailboxes and {len(peer_windows)} windows for {ranks} ranks"
            )
        if mailbox == 0 or mailbox % 8 or any(address % 8 for address in peer_mailboxes):
            raise ConfigError(f"shm of rank {rank}: mailboxes must be mapped at addresses that are multiples of 8")
        self._rank, self._ranks, self._proxy = rank, ranks, proxy
        self._window_bytes = window_bytes
        self._how = ["not connected"] * ranks
        self._watch: select.epoll | None = None
        self._pidfds: list[int] = []

        self._context = np.zeros(data.CONTEXT_WORDS, np.int64)
        self._peers = np.zeros((ranks, data.PEER_WORDS), np.int64)
        self._done = np.zeros(data.DONE_SLOTS * 2, np.int64)
        self._ended = np.zeros(data.ENDED_MAX * 2, np.int64)
        self._context[data.RANKS] = ranks
        self._context[data.WINDOW_BYTES] = window_bytes
        self._context[data.PEERS] = self._peers.ctypes.data
        self._context[data.DONE] = self._done.ctypes.data
        self._context[data.ENDED] = self._ended.ctypes.data
        self._context[data.WATCH] = -1
        self._peers[:, data.PIDFD] = -1
        for peer, (their_mailbox, window) in enumerate(zip(peer_mailboxes, peer_windows, strict=True)):
            if their_mailbox and window:
                self._peers[peer, data.WINDOW] = window
                self._peers[peer, data.OUT] = their_mailbox + ring_offset(ranks, proxy, rank)
                self._peers[peer, data.IN] = mailbox + ring_offset(ranks, proxy, peer)
        self._data_path = DataPath(self._context.ctypes.data, *FUNCTIONS.addresses)

    @property
    def capabilities(self) -> Capabilities:
        """In order, any mapped memory; the ring an immediate lies in names its source."""
        return Capabilities(
            name="shm",
            proves_source=True,
            max_write=MAX_WRITE_BYTES,
            in_sequence=True,
            tells_drop=True,
        )

    def address(self) -> bytes:
        """Shape of the group as this rank sees it, and which process to watch.

        Raises:
            TransportError: no descriptor is left to read the process's start time.
        """
        try:
            return encode_address(os.getpid(), self._ranks, self._proxy, self._window_bytes)
        except OSError as error:
            raise refused(f"rank {self._rank}: start time of its own process", error, "shm") from None

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Check each peer's address against the mapped segments and start to watch its process; never waits.

        Raises:
            BootstrapError: a peer's address is malformed, its segments are not mapped, it sees another group, or its
                process has ended already.
            TransportError: no descriptor is left to watch a process.
        """
        for peer, address in enumerate(addresses):
            if address is not None:
                self._how[peer] = self._connect(peer, address)
                self._peers[peer, data.STATE] = data.UP
        if self._watch is not None:
            self._context[data.WATCH] = self._watch.fileno()

    def _connect(self, peer: int, address: bytes) -> str:
        who = f"rank {self._rank} connects to rank {peer} over shm (proxy {self._proxy})"
        if not self._peers[peer, data.OUT]:
            raise BootstrapError(
                f"{who}: its window or mailbox is not mapped here. Ranks on different hosts, or whose processes may "
                "not map each other's memory, need UCCL_EP_TRANSPORT=tcp or auto"
            )
        if len(address) != _ADDRESS.size or not address.startswith(_ADDRESS_MAGIC):
            raise BootstrapError(f"{who}: {address[:16]!r} is not the address of a shm endpoint")
        _, pid, *theirs, start, namespace = _ADDRESS.unpack(address)
        ours = [self._ranks, self._proxy, self._window_bytes]
        if theirs != ours:
            raise BootstrapError(
                f"{who}: it has [ranks, proxy, window bytes] = {theirs}, this rank has {ours}. "
                "Start all ranks with the same settings"
            )
        if pid == os.getpid() and namespace == _pid_namespace():
            return "shm, in this process"
        if namespace != _pid_namespace():
            return "shm, process not watched (another pid namespace)"
        try:
            pidfd = open_process(pid)
        except ProcessLookupError:
            raise BootstrapError(f"{who}: its process {pid} has ended") from None
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise refused(f"{who}: pidfd_open", error, "shm") from None
            return f"shm, process not watched (pidfd_open: {error.strerror})"
        self._pidfds.append(pidfd)
        # Checked after the descriptor is open: from here on the pid cannot pass to another process unnoticed.
        try:
            alive = _start_time(pid) == start
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise refused(f"{who}: start time of its process {pid}", error, "shm") from None
            alive = False
        if not alive:
            raise BootstrapError(f"{who}: its process {pid} has ended")
        try:
            if self._watch is None:
                self._watch = select.epoll()
            self._watch.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)
        except OSError as error:
            raise refused(f"{who}: cannot watch its process {pid}", error, "shm") from None
        self._peers[peer, data.PIDFD] = pidfd
        return f"shm, process {pid}"

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""
        return self._data_path

    def describe(self, peer: int) -> str:
        """How ``peer`` is reached, and whether its death would be noticed."""
        return self._how[peer]

    def close(self) -> None:
        """Stop watching processes and refuse further posts. The segments belong to the runtime."""
        self._context[data.WATCH] = -1
        self._peers[:, data.STATE] = data.CLOSED
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for pidfd in self._pidfds:
            with contextlib.suppress(OSError):
                os.close(pidfd)
        self._pidfds = []
