"""Everything the kernels of one rank can touch, and the bounded wait around them.

:class:`KernelSpace` owns the context block (``protocol.context``) with its address tables, the sticky error, the mask
and the progress block. It does not know how peers are reached: the runtime tells it, per peer, either the address of
the peer's mapped window or the proxy's count addresses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ..control_plane.reports import Wait
from ..errors import PeerError, ProtocolError, ProxyDied, TransportError, UcclEpError
from ..native.failure import failure_code, set_failure
from ..native.pages import own_pages
from ..protocol import context as ctx
from ..protocol.layout import WindowLayout
from ..protocol.streams import CREDIT, STREAMS, channel_of
from .segments import HeapAllocator, Segment
from .sticky_error import StickyError

__all__ = ["KernelSpace"]

#: Length of one slice of a wait. Between slices Python handles signals (Ctrl-C) and the host looks at its watchers.
SLICE_NS = 20_000_000
#: Seconds given to a thread that claimed the error word to say what happened: four stores, unless it is preempted.
CLAIM_TIMEOUT = 1.0

#: A rank that does not come back from a slice for this much longer did not run: other ranks cannot help that.
_STILL_NS = 100_000_000

_I64 = npt.NDArray[np.int64]


def _raise(error: PeerError | ProtocolError | TransportError | ProxyDied, phase: str) -> NoReturn:
    try:
        raise error
    finally:
        del error  # this frame is in the traceback: a cycle would keep windows mapped


class KernelSpace:
    """Context block, window, heap, sticky error and mask of one rank.

    Args:
        rank, ranks, channels: of the group.
        segment: the window.
        layout: what lies where in it.
        timeout: seconds a wait may last.
        mask: int32[ranks] to share with other epochs, a fresh one by default.

    Attributes:
        context: address of the context block.
        window: address of the window.
        progress: address of int64[8]: peer, stream, arrived, expected of whatever a pending kernel waits for.
            Writer: kernels that return PENDING. Reader: the host, after they did.
        mask: int32[ranks], 1 = peer masked. Writer: host. Readers: kernels.
        phase: words for the operation that waits, or is about to begin. Writer: the host; reader: ``watch``.
        watch: called between slices of a wait; raises when the host knows more (a lost peer, a dead proxy).
        raise_named: called with what has ended a wait, and its phase; raises that, or what names the peer at the root.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        channels: int,
        segment: Segment,
        layout: WindowLayout,
        timeout: float,
        mask: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.layout = layout
        self.timeout = timeout
        self.window = segment.address
        self.heap = HeapAllocator(segment.bytes, layout.normal_heap, layout.normal.heap)
        self.mask: npt.NDArray[np.int32] = np.zeros(ranks, dtype=np.int32) if mask is None else mask
        self.watch: Callable[[], None] = lambda: None
        self.raise_named: Callable[[PeerError | ProtocolError | TransportError | ProxyDied, str], NoReturn] = _raise
        #: Of the last long wait: when it ended, and for whom it was.
        self._long_wait: tuple[int, Wait] | None = None
        self.phase = ""
        self._segment = segment
        #: Threads in :meth:`wait`, and whether more may enter. Who enters says so and then looks whether it may, who
        #: closes says so and then looks who is inside: each step is atomic, so one of the two sees the other.
        self._inside: set[int] = set()
        self._left = False
        #: For who closes: somebody came out.
        self._gate = threading.Condition()
        # kernels of a device reach it
        self._error: _I64 = own_pages(8 * ctx.ERROR_WORDS).view(np.int64)
        self._progress: _I64 = np.zeros(8, dtype=np.int64)
        self._progress[0] = -1
        #: The same words, for what the host reads before every operation: they take a third of the time here.
        self._error_glance, self._progress_glance = self._error.data, self._progress.data
        self._arrived: _I64 = np.zeros((ranks, STREAMS), dtype=np.int64)
        self._completed: _I64 = np.zeros((ranks, STREAMS), dtype=np.int64)
        self._flag: _I64 = np.zeros((ranks, STREAMS), dtype=np.int64)
        self._peer_window: _I64 = np.zeros(ranks, dtype=np.int64)
        self._ring: _I64 = np.zeros(STREAMS, dtype=np.int64)
        self._context: _I64 = np.zeros(ctx.CONTEXT_WORDS, dtype=np.int64)
        for word, value in {
            ctx.RANK: rank,
            ctx.RANKS: ranks,
            ctx.CHANNELS: channels,
            ctx.WINDOW: segment.address,
            ctx.WINDOW_BYTES: layout.nbytes,
            ctx.ARRIVED: self._arrived.ctypes.data,
            ctx.COMPLETED: self._completed.ctypes.data,
            ctx.PEER_WINDOW: self._peer_window.ctypes.data,
            ctx.FLAG: self._flag.ctypes.data,
            ctx.RING: self._ring.ctypes.data,
            ctx.MASK: self.mask.ctypes.data,
            ctx.ERROR: self._error.ctypes.data,
        }.items():
            self._context[word] = value
        self.context: int = self._context.ctypes.data
        self.progress: int = self._progress.ctypes.data
        self.error: int = self._error.ctypes.data
        self.connect_direct(rank, segment.address)

    def connect_direct(self, peer: int, window: int) -> None:
        """``peer``'s window is mapped at ``window``: kernels write it and store its flags themselves."""
        streams = np.arange(STREAMS, dtype=np.int64)
        flags = self.layout.direct_flags
        self._peer_window[peer] = window
        self._arrived[peer] = self.window + flags + (peer * STREAMS + streams) * 8
        self._flag[peer] = window + flags + (self.rank * STREAMS + streams) * 8
        self._completed[peer] = 0

    def connect_proxied(
        self, peer: int, arrived: Callable[[int, int], int], completed: Callable[[int, int], int]
    ) -> None:
        """``peer`` is reached through proxies, which publish counts at the addresses the two functions give."""
        for stream in range(CREDIT):
            self._arrived[peer, stream] = arrived(peer, stream)
            self._completed[peer, stream] = completed(peer, stream)

    @property
    def window_bytes(self) -> npt.NDArray[np.uint8]:
        """uint8 view of the window."""
        return self._segment.bytes

    def set_ring(self, stream: int, address: int) -> None:
        """Commands of ``stream`` go into the ring at ``address``."""
        self._ring[stream] = address

    def is_direct(self, peer: int) -> bool:
        """True when kernels write ``peer``'s window themselves."""
        return bool(self._peer_window[peer])

    @property
    def all_direct(self) -> bool:
        """True when no peer is reached through a proxy."""
        return bool(self._peer_window.all())

    def fail(self, code: int, peer: int = -1, stream: int = -1, arrived: int = -1, expected: int = -1) -> bool:
        """Set the sticky error unless it is set; True when this call was the first."""
        return bool(set_failure(self.error, code, peer, stream, arrived, expected))

    @property
    def failed(self) -> bool:
        """True once the sticky error is set. It is never lifted: a new epoch has an error word of its own."""
        return self._error_glance[ctx.ERROR_CODE] != ctx.FAILURE_NONE

    @property
    def failed_with(self) -> tuple[int, int]:
        """(FAILURE_* code, peer) of the sticky error."""
        return failure_code(self.error), self._error_glance[ctx.ERROR_PEER]

    def failure(self, phase: str) -> UcclEpError:
        """The sticky error as an exception."""
        # whoever claimed the error word may be preempted before it has said what happened
        end = time.monotonic() + CLAIM_TIMEOUT
        while (code := int(failure_code(self.error))) == ctx.FAILURE_CLAIMED and time.monotonic() < end:
            time.sleep(1e-4)
        return self._sticky(code).exception(phase, f"{phase}, rank {self.rank} of {self.ranks}", self.timeout)

    @property
    def mismatch(self) -> str:
        """What is wrong, in words, when low-latency operations of different shapes have met; else empty."""
        return self._sticky(int(failure_code(self.error))).mismatch

    def _sticky(self, code: int) -> StickyError:
        # after the acquire load of the code; nobody writes the rest a second time
        return StickyError(code, *(int(word) for word in self._error[ctx.ERROR_PEER : ctx.ERROR_EXPECTED + 1]))

    @property
    def awaited(self) -> int:
        """Peer that the pending kernel waits for, -1 when none is pending."""
        return self._progress_glance[0]

    @property
    def pending(self) -> tuple[int, int, int, int]:
        """What the pending kernel waits for: peer (-1 when none is pending), stream, messages arrived and expected."""
        peer, stream, arrived, expected = (int(word) for word in self._progress[:4])
        return peer, stream, arrived, expected

    def _wait(self, phase: str) -> Wait:
        peer, stream, arrived, expected = self.pending
        return Wait(peer, phase, channel_of(stream) if stream >= 0 else -1, arrived, expected)

    @property
    def pending_wait(self) -> Wait | None:
        """For whom the pending kernel waits."""
        return self._wait(self.phase) if self.awaited not in (-1, self.rank) else None

    @property
    def waits_for(self) -> Wait | None:
        """For whom the pending kernel waits, or a kernel has waited for half a deadline not long ago."""
        if (pending := self.pending_wait) is not None:
            return pending
        if self._long_wait is None or time.monotonic_ns() - self._long_wait[0] > self.timeout * 1e9:
            return None
        return self._long_wait[1]

    def busy_elsewhere(self) -> bool:
        """True while another thread is in :meth:`wait`."""
        return bool(self._inside - {threading.get_ident()})

    def leave(self, deadline: float) -> bool:
        """Release whoever waits, and let nobody in any more.

        Args:
            deadline: ``time.monotonic()`` instant.

        Returns:
            False when a kernel of another thread still runs at the deadline: what it touches must stay mapped.
        """
        self.fail(ctx.FAILURE_CLOSED)
        with self._gate:
            self._left = True
            # A thread that got here from inside wait() (a signal handler, say) runs no kernel now, and none later.
            return self._gate.wait_for(
                lambda: not self._inside - {threading.get_ident()}, max(deadline - time.monotonic(), 0.0)
            )

    def wait(self, phase: str, step: Callable[[int], int], moved: Callable[[], int] | None = None) -> None:
        """Run ``step`` until it is done. One thread at a time, as with a Buffer.

        Args:
            phase: words for messages, for example ``"low-latency dispatch recv"``.
            step: called with the CLOCK_MONOTONIC instant in ns at which it must return; returns a STATUS_* of
                ``protocol.context``. On PENDING it has stored what it waits for in the progress block.
            moved: a number that grows as long as ``step`` makes progress, and each time the deadline starts again: it
                bounds silence, not work.

        Raises:
            PeerTimeout: the deadline passed; the sticky error is set.
            PeerLost, ProxyDied, TransportError, ProtocolError: as the sticky error says. Of the errors that blame a
                peer, only those that name the one at the root are raised.
        """
        try:
            self._run(phase, step, moved)
        except (PeerError, ProtocolError, TransportError, ProxyDied) as error:
            # outside: this rank waits for nobody any more, and says so to the others
            self.raise_named(error, phase)

    def _run(self, phase: str, step: Callable[[int], int], moved: Callable[[], int] | None) -> None:
        """The slices of a wait."""
        self.phase, me = phase, threading.get_ident()
        limit = int(self.timeout * 1e9)
        started = now = time.monotonic_ns()
        end, seen = started + limit, moved() if moved else 0
        try:
            self._inside.add(me)
            # _left may also have been set in this very thread, between two slices
            while not self._left:
                status = step(now + SLICE_NS)
                if status == ctx.STATUS_OK:
                    return
                self.watch()
                if status != ctx.STATUS_PENDING:
                    break
                before, now = now, time.monotonic_ns()
                if (still := now - before - SLICE_NS) > _STILL_NS:
                    # a deadline is for others: time in which this rank stood still is not theirs
                    end += still
                if now - started >= limit // 2:
                    self._long_wait = now, self._wait(phase)
                if moved and (so_far := moved()) != seen:
                    end, seen = now + limit, so_far
                if now >= end:
                    self.fail(ctx.FAILURE_PEER_TIMEOUT, *self.pending)
                    break
            raise self.failure(phase)
        finally:
            self._progress[0] = -1
            self._inside.discard(me)
            if self._left:
                with self._gate:
                    self._gate.notify_all()
