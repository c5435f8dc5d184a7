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
import errno
import functools
import os
import select
import struct
from collections.abc import Sequence

import numpy as np
from numba import types

from ...errors import BootstrapError, ConfigError, TransportError
from ...native.atomics import copy, load64, peek, peek32, poke, store64
from ...native.calls import monotonic_ns
from ...native.jit import c_function, compile_lock, compiled
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.imm import IMM
from ...protocol.mailbox import SLOTS, SLOTS_OFFSET, TAIL, WORD, mailbox_bytes, ring_offset
from .base import (
    ACCEPTED,
    ARRIVED,
    BUSY,
    DOWN,
    EVENT_BYTES,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_WRONG_SOURCE,
    SENT,
    Capabilities,
    DataPath,
)

__all__ = ["ShmEndpoint", "encode_address", "mailbox_bytes", "warm"]

# The context: int64 words, written by the constructor and then by the proxy thread alone.
_RANKS = 0
_WINDOW_BYTES = 1  # length of every window
_PEERS = 2  # address of the peer records
_DONE = 3  # address of the queue of SENT events, two words each: wr_id, peer
_DONE_HEAD = 4  # SENT events queued
_DONE_TAIL = 5  # SENT events delivered
_CURSOR = 6  # peer whose ring the next poll reads first, so that none is starved by a small limit
_WATCH = 7  # epoll descriptor over the peers' pidfds, -1 = nobody is watched
_WATCH_POLLS = 8  # polls since the clock was last read
_WATCH_TIME = 9  # CLOCK_MONOTONIC ns of the next look at the pidfds
_ENDED = 10  # address of room for _ENDED_MAX epoll events
_CONTEXT_WORDS = 16

# A peer record: one pair of cache lines.
_STATE = 0
_WINDOW = 1  # address of the peer's mapped window
_OUT = 2  # address of our ring in the peer's mailbox
_OUT_HEAD = 3  # immediates put into it
_OUT_TAIL = 4  # immediates of them known to be taken
_IN = 5  # address of the peer's ring in our mailbox
_IN_TAIL = 6  # immediates taken from it
_PROBLEM = 7  # FAULT_* code to report at the next poll, 0 = none
_PIDFD = 8  # descriptor of the peer's process, -1 = not watched
_PEER_WORDS = 16

_ABSENT, _UP, _ENDING, _CLOSED = 0, 1, 2, 3  # ENDING: the process is gone, its last immediates are still delivered

_DONE_SLOTS = 4096
_ENDED_MAX = 16
_EPOLL_EVENT_BYTES = 12 if os.uname().machine == "x86_64" else 16
_EPOLL_DATA = _EPOLL_EVENT_BYTES - 8
# A look at the pidfds costs a system call (0.3 us), reading the clock 30 ns: neither belongs in every poll. A dead peer
# is noticed within 50 ms plus 32 polls.
_WATCH_EVERY_POLLS = 32
_WATCH_EVERY_NS = 50_000_000

_IMM_BITS = WORD["imm"].width
_IMM_MASK = WORD["imm"].mask
_SOURCE_SHIFT = IMM["source"].shift
_ENOTCONN = errno.ENOTCONN
_EINVAL = errno.EINVAL
_ESRCH = errno.ESRCH

_epoll_wait = types.ExternalFunction("epoll_wait", types.int32(types.int32, types.int64, types.int32, types.int32))


@compiled
def _event(events: int, index: int, kind: int, value: int, peer: int, status: int) -> None:
    address = events + index * EVENT_BYTES
    poke(address, kind)
    poke(address + 8, value)
    poke(address + 16, peer)
    poke(address + 24, status)


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    record = peek(context + 8 * _PEERS) + peer * 8 * _PEER_WORDS
    state = peek(record + 8 * _STATE)
    if state not in (_UP, _ENDING):
        return -_ENOTCONN
    if nbytes < 0 or target < 0 or target > peek(context + 8 * _WINDOW_BYTES) - nbytes:
        return -_EINVAL
    queued = peek(context + 8 * _DONE_HEAD)
    if queued - peek(context + 8 * _DONE_TAIL) >= _DONE_SLOTS:
        return BUSY
    head = peek(record + 8 * _OUT_HEAD)
    ring = peek(record + 8 * _OUT)
    if head - peek(record + 8 * _OUT_TAIL) >= SLOTS:
        tail = load64(ring + TAIL)
        if tail > head or tail < peek(record + 8 * _OUT_TAIL):
            poke(record + 8 * _PROBLEM, FAULT_BAD_FRAME)
            return BUSY
        poke(record + 8 * _OUT_TAIL, tail)
        if head - tail >= SLOTS:
            return BUSY
    if nbytes > 0:
        copy(peek(record + 8 * _WINDOW) + target, local, nbytes)
    lap = ((head // SLOTS) + 1) & 1
    # Release: the payload is in place before the receiver can see the immediate.
    store64(ring + SLOTS_OFFSET + (head % SLOTS) * 8, (imm & _IMM_MASK) | (lap << _IMM_BITS))
    poke(record + 8 * _OUT_HEAD, head + 1)
    done = peek(context + 8 * _DONE) + (queued % _DONE_SLOTS) * 16
    poke(done, wr_id)
    poke(done + 8, peer)
    poke(context + 8 * _DONE_HEAD, queued + 1)
    return ACCEPTED


def _flush(context: int) -> int:
    return 0


@compiled
def _deliver_sent(context: int, events: int, limit: int) -> int:
    """SENT events of peers that were not dropped; returns how many."""
    peers, queue = peek(context + 8 * _PEERS), peek(context + 8 * _DONE)
    head, tail = peek(context + 8 * _DONE_HEAD), peek(context + 8 * _DONE_TAIL)
    count = 0
    while tail < head and count < limit:
        done = queue + (tail % _DONE_SLOTS) * 16
        peer = peek(done + 8)
        tail += 1
        if peek(peers + peer * 8 * _PEER_WORDS + 8 * _STATE) != _CLOSED:
            _event(events, count, SENT, peek(done), peer, 0)
            count += 1
    poke(context + 8 * _DONE_TAIL, tail)
    return count


@compiled
def _watch(context: int) -> None:
    """Mark peers whose process has ended."""
    watch = peek(context + 8 * _WATCH)
    polls = peek(context + 8 * _WATCH_POLLS) + 1
    if watch < 0 or polls < _WATCH_EVERY_POLLS:
        poke(context + 8 * _WATCH_POLLS, polls)
        return
    poke(context + 8 * _WATCH_POLLS, 0)
    now = monotonic_ns()
    if now < peek(context + 8 * _WATCH_TIME):
        return
    poke(context + 8 * _WATCH_TIME, now + _WATCH_EVERY_NS)
    ended = peek(context + 8 * _ENDED)
    count = _epoll_wait(watch, ended, _ENDED_MAX, 0)
    for index in range(count):
        # Registered one-shot: each process is told once.
        pidfd = peek32(ended + index * _EPOLL_EVENT_BYTES + _EPOLL_DATA)
        for peer in range(peek(context + 8 * _RANKS)):
            record = peek(context + 8 * _PEERS) + peer * 8 * _PEER_WORDS
            if peek(record + 8 * _PIDFD) == pidfd and peek(record + 8 * _STATE) == _UP:
                poke(record + 8 * _STATE, _ENDING)


@compiled
def _receive(record: int, peer: int, events: int, count: int, limit: int) -> int:
    """Take immediates of one peer until its ring is empty or ``limit`` events are stored; returns the new count."""
    problem = peek(record + 8 * _PROBLEM)
    if problem != 0 and count < limit:
        poke(record + 8 * _STATE, _CLOSED)
        _event(events, count, FAULT, 0, peer, problem)
        return count + 1
    ending = peek(record + 8 * _STATE) == _ENDING
    ring = peek(record + 8 * _IN)
    before = peek(record + 8 * _IN_TAIL)
    taken = before
    while count < limit:
        # Read once: the peer could change the word between a check and its use.
        word = load64(ring + SLOTS_OFFSET + (taken % SLOTS) * 8)
        lap = ((taken // SLOTS) + 1) & 1
        if (word >> _IMM_BITS) & 1 != lap:
            if ending:
                poke(record + 8 * _STATE, _CLOSED)
                _event(events, count, DOWN, 0, peer, _ESRCH)
                count += 1
            break
        imm = word & _IMM_MASK
        status = 0
        if word >> (_IMM_BITS + 1) != 0:
            status = FAULT_BAD_FRAME
        elif imm >> _SOURCE_SHIFT != peer:
            status = FAULT_WRONG_SOURCE
        if status != 0:
            poke(record + 8 * _STATE, _CLOSED)
            _event(events, count, FAULT, word, peer, status)
            count += 1
            break
        _event(events, count, ARRIVED, imm, peer, 0)
        count += 1
        taken += 1
    if taken != before:
        poke(record + 8 * _IN_TAIL, taken)
        store64(ring + TAIL, taken)
    return count


def _poll(context: int, events: int, limit: int) -> int:
    _watch(context)
    # Half of the room at most, so that a burst of own posts does not hold back what arrives.
    count = _deliver_sent(context, events, (limit + 1) // 2)
    ranks, peers = peek(context + 8 * _RANKS), peek(context + 8 * _PEERS)
    cursor = peek(context + 8 * _CURSOR)
    for step in range(ranks):
        if count >= limit:
            break
        peer = cursor + step
        if peer >= ranks:
            peer -= ranks
        record = peers + peer * 8 * _PEER_WORDS
        state = peek(record + 8 * _STATE)
        if state in (_UP, _ENDING):
            count = _receive(record, peer, events, count, limit)
            if count >= limit:
                poke(context + 8 * _CURSOR, (peer + 1) % ranks)
    return count


def _drop(context: int, peer: int, reason: int) -> int:
    poke(peek(context + 8 * _PEERS) + peer * 8 * _PEER_WORDS + 8 * _STATE, _CLOSED)
    return 0


@functools.cache
def warm() -> tuple[int, int, int, int]:
    """Compile (or load) the data path; addresses of post, flush, poll and drop."""
    with compile_lock():
        functions = (
            c_function("int64(int64, int64, int64, int64, int64, int64, int64, int64)")(_post),
            c_function("int64(int64)")(_flush),
            c_function("int64(int64, int64, int64)")(_poll),
            c_function("int64(int64, int64, int64)")(_drop),
        )
    post, flush, poll, drop = (int(function.address) for function in functions)
    return post, flush, poll, drop


# --- control path -----------------------------------------------------------------------------------------------------

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

        self._context = np.zeros(_CONTEXT_WORDS, np.int64)
        self._peers = np.zeros((ranks, _PEER_WORDS), np.int64)
        self._done = np.zeros(_DONE_SLOTS * 2, np.int64)
        self._ended = np.zeros(_ENDED_MAX * 2, np.int64)
        self._context[_RANKS] = ranks
        self._context[_WINDOW_BYTES] = window_bytes
        self._context[_PEERS] = self._peers.ctypes.data
        self._context[_DONE] = self._done.ctypes.data
        self._context[_ENDED] = self._ended.ctypes.data
        self._context[_WATCH] = -1
        self._peers[:, _PIDFD] = -1
        for peer, (their_mailbox, window) in enumerate(zip(peer_mailboxes, peer_windows, strict=True)):
            if their_mailbox and window:
                self._peers[peer, _WINDOW] = window
                self._peers[peer, _OUT] = their_mailbox + ring_offset(ranks, proxy, rank)
                self._peers[peer, _IN] = mailbox + ring_offset(ranks, proxy, peer)
        self._data_path = DataPath(self._context.ctypes.data, *warm())

    @property
    def capabilities(self) -> Capabilities:
        """In order, any mapped memory; the ring an immediate lies in names its source."""
        return Capabilities(
            name="shm",
            ordered=True,
            proves_source=True,
            memory_kinds=("shared", "host"),
            immediate_bits=_IMM_BITS,
            max_write=MAX_WRITE_BYTES,
        )

    def address(self) -> bytes:
        """Shape of the group as this rank sees it, and which process to watch."""
        return encode_address(os.getpid(), self._ranks, self._proxy, self._window_bytes)

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Check each peer's address against the mapped segments and start to watch its process; never waits.

        Raises:
            BootstrapError: a peer's address is malformed, its segments are not mapped, it sees another group, or its
                process has ended already.
        """
        for peer, address in enumerate(addresses):
            if address is not None:
                self._how[peer] = self._connect(peer, address)
                self._peers[peer, _STATE] = _UP
        if self._watch is not None:
            self._context[_WATCH] = self._watch.fileno()

    def _connect(self, peer: int, address: bytes) -> str:
        who = f"rank {self._rank} connects to rank {peer} over shm (proxy {self._proxy})"
        if not self._peers[peer, _OUT]:
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
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise BootstrapError(f"{who}: its process {pid} has ended") from None
        except OSError as error:
            return f"shm, process not watched (pidfd_open: {error.strerror})"
        self._pidfds.append(pidfd)
        # Checked after the descriptor is open: from here on the pid cannot pass to another process unnoticed.
        try:
            alive = _start_time(pid) == start
        except OSError:
            alive = False
        if not alive:
            raise BootstrapError(f"{who}: its process {pid} has ended")
        if self._watch is None:
            try:
                self._watch = select.epoll()
            except OSError as error:
                raise TransportError(f"{who}: epoll_create: {error.strerror}", errno=error.errno or 0) from None
        self._watch.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)
        self._peers[peer, _PIDFD] = pidfd
        return f"shm, process {pid}"

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""
        return self._data_path

    def describe(self, peer: int) -> str:
        """How ``peer`` is reached, and whether its death would be noticed."""
        return self._how[peer]

    def close(self) -> None:
        """Stop watching processes and refuse further posts. The segments belong to the runtime."""
        self._context[_WATCH] = -1
        self._peers[:, _STATE] = _CLOSED
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for pidfd in self._pidfds:
            with contextlib.suppress(OSError):
                os.close(pidfd)
        self._pidfds = []
