"""One exchange of rows between all ranks: what a dispatch and a combine of normal mode have in common.

:class:`RowExchange` owns the blocks of ``kernels.normal_block`` and the numbers that all ranks count alike. An
operation is opened (every rank tells every rank its shape and its rows), placed (where do the rows of each peer land?)
and run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .config import Settings
from .errors import ConfigError, UcclEpError
from .kernel_space import KernelSpace
from .kernels import normal_block as block
from .kernels.select import normal_kernels
from .memory import HeapAllocator
from .protocol.context import STATUS_OK, STATUS_PENDING
from .protocol.layout import LowLatencyPlan, WindowLayout
from .protocol.message import NormalNotify, round_up
from .protocol.streams import NORMAL_COMBINE, NORMAL_DISPATCH

__all__ = ["ExchangeRuntime", "Placement", "RowExchange", "RowFormat"]

Int64s = npt.NDArray[np.int64]

_NAMES = {
    NormalNotify.OPERATION_DISPATCH: "normal dispatch",
    NormalNotify.OPERATION_CACHED_DISPATCH: "normal cached dispatch",
    NormalNotify.OPERATION_COMBINE: "normal combine",
}
_DTYPES = ("bfloat16", "float16", "float32", "float8 with scales", "float8 with packed scales")
#: A message below this size costs more in latency than it gains by being striped over channels.
_LEAST_CHUNK_BYTES = 64 << 10


class ExchangeRuntime(Protocol):
    """What normal mode needs of a ``runtime.Runtime``; see there for the meaning."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def space(self) -> KernelSpace: ...
    @property
    def layout(self) -> WindowLayout: ...
    @property
    def window(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def mask(self) -> npt.NDArray[np.int32]: ...
    @property
    def heap(self) -> HeapAllocator: ...
    @property
    def record(self) -> Callable[[str, int, int, int], None]: ...
    def check(self, phase: str = ...) -> None: ...
    def begin_operation(self) -> None: ...
    @property
    def stale(self) -> str: ...
    def grow(self, plan: LowLatencyPlan | None, objection: str = ...) -> None: ...
    def wait(self, phase: str, step: Callable[[int], int]) -> None: ...


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What all ranks must agree on in one operation.

    Attributes:
        kind: NormalNotify.OPERATION_*.
        dtype: DTYPE_* of the rows.
        hidden: values per row.
        row_bytes: bytes of a row, a multiple of 16.
        topk: expert ids and weights per row of a dispatch, weights per row of a combine; 0 = none travel.
        scale_bytes: bytes of scales per row.
        local_experts: experts per rank, 0 where they do not matter.
        origin: (generation, number) of the dispatch whose handle is used, (-1, -1) when none is.
    """

    kind: int
    dtype: int
    hidden: int
    row_bytes: int
    topk: int = 0
    scale_bytes: int = 0
    local_experts: int = 0
    origin: tuple[int, int] = (-1, -1)

    @property
    def name(self) -> str:
        """The operation in words."""
        return _NAMES[self.kind]

    @property
    def meta_bytes(self) -> int:
        """Bytes of a row's meta: (id and weight) or weight per slot, then scales, rounded up to 16."""
        slot = 4 if self.kind == NormalNotify.OPERATION_COMBINE else 8
        return round_up(self.topk * slot + self.scale_bytes, 16)

    @property
    def digest(self) -> int:
        """Word SHAPE of the notify: 63 bits."""
        fields = (self.kind, self.dtype, self.hidden, self.row_bytes, self.topk, self.scale_bytes, self.local_experts)
        text = repr((*fields, self.origin)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of an operation land.

    Attributes:
        rows: window offset of a heap range with room for all rows, -1 = rounds, or there was no remote row.
        meta: window offset of the heap range of their meta, -1 = none.
    """

    rows: int
    meta: int


class RowExchange:
    """The blocks and counters of one Buffer's normal mode. Not thread-safe, like the Buffer.

    Attributes:
        kernels: the implementation for CPU tensors.
        operation: int64[OPERATION_WORDS], see ``kernels.normal_block``.
        peers: int64[ranks, PEER_WORDS].
    """

    def __init__(self, runtime: ExchangeRuntime) -> None:
        ranks = runtime.ranks
        self.kernels = normal_kernels("cpu")
        self._runtime = runtime
        self._generation = -1
        self._number = 0
        self._notices = 0
        self._broken = ""
        self._counts: Int64s = np.zeros((ranks, block.COUNT_WORDS), dtype=np.int64)
        self._scratch: Int64s = np.zeros(block.SCRATCH_BYTES // 8 + ranks, dtype=np.int64)
        self.operation: Int64s = np.zeros(block.OPERATION_WORDS, dtype=np.int64)
        self.peers: Int64s = np.zeros((ranks, block.PEER_WORDS), dtype=np.int64)
        self._addresses = (self._counts.ctypes.data, self.operation.ctypes.data, self.peers.ctypes.data)

    @property
    def origin(self) -> tuple[int, int]:
        """(generation, number) of the operation that was begun last: its name, equal on all ranks."""
        return self._generation, self._number - 1

    def present(self) -> npt.NDArray[np.bool_]:
        """bool[ranks]: ranks that are not masked."""
        return np.asarray(self._runtime.mask == 0)

    def check(self, form: RowFormat) -> None:
        """Refuse what no window can carry, with the same answer on every rank.

        Raises:
            ConfigError: a row does not fit a chunk or a round slot.
            UcclEpError: an earlier operation ended half-way.
        """
        runtime = self._runtime
        runtime.check(form.name)
        if runtime.stale:
            runtime.grow(None)
        if self._generation != runtime.generation:
            # new windows with new connections: every count restarts, on every rank
            self._generation, self._number, self._notices, self._broken = runtime.generation, 0, 0, ""
            self._counts.fill(0)
        if self._broken:
            raise UcclEpError(
                f"{form.name}: an earlier operation of this Buffer ended half-way ({self._broken}), so the ranks no "
                "longer agree on message numbers. Close this Buffer on all ranks and build a new one"
            )
        if runtime.ranks == 1:
            return
        plan, row = runtime.layout.normal, form.row_bytes + form.meta_bytes
        for name, room, setting in (
            ("a chunk", plan.chunk, "UCCL_EP_CHUNK_BYTES"),
            ("a round slot", plan.round_slot, "UCCL_EP_ROUND_BYTES"),
        ):
            if row > room:
                raise ConfigError(
                    f"{form.name}: a row of {form.row_bytes} bytes and {form.meta_bytes} bytes of meta does not fit "
                    f"{name} of {room} bytes. Next step: raise {setting} on all ranks"
                )
        if form.local_experts > plan.local_experts:
            raise ConfigError(
                f"{form.name}: {form.local_experts} experts per rank exceed the {plan.local_experts} of the window"
            )

    def begin(self, form: RowFormat, tokens: int) -> None:
        """Fill the blocks with what the format and the window fix; the caller adds its addresses and rows."""
        runtime, operation, peers = self._runtime, self.operation, self.peers
        window, number, ranks = runtime.layout, self._number, runtime.ranks
        combine = form.kind == NormalNotify.OPERATION_COMBINE
        if form.meta_bytes > block.SCRATCH_BYTES:
            self._scratch = np.zeros(form.meta_bytes // 8 + ranks, dtype=np.int64)
        stride = window.normal.notify
        parity = (number & 1) * ranks * stride
        operation.fill(0)
        for word, value in (
            (block.KIND, form.kind),
            (block.NUMBER, number),
            (block.NOTICES, self._notices),
            (block.PHASE, NORMAL_COMBINE if combine else NORMAL_DISPATCH),
            (block.SHAPE, form.digest),
            (block.CODING, form.kind << 16 | form.dtype),
            (block.TOKENS, tokens),
            (block.HIDDEN, form.hidden),
            (block.ELEMENT, form.dtype),
            (block.TOPK, form.topk),
            (block.ROW_BYTES, form.row_bytes),
            (block.META_BYTES, form.meta_bytes),
            (block.SCALE_BYTES, form.scale_bytes),
            (block.LOCAL_EXPERTS, form.local_experts),
            (block.SCRATCH, self._scratch.ctypes.data),
            (block.NOTIFY_SEND, window.notify_send + parity),
            (block.NOTIFY_RECV, window.notify_recv + parity),
            (block.NOTIFY_STRIDE, stride),
            (block.GRANT_SEND, window.grant_send),
            (block.GRANT_RECV, window.grant_recv),
            (block.STAGING, window.normal_send),
            (block.CHUNK_BYTES, window.normal.chunk),
            (block.DEPTH, window.normal.depth),
            (block.LANDING, window.normal_rounds),
            (block.LANDING_END, window.normal_heap + window.normal.heap),
        ):
            operation[word] = value
        peers.fill(0)
        peers[:, block.ABSENT] = runtime.mask != 0
        runtime.begin_operation()
        self._number += 1
        self._notices += 1 if combine else 2

    def open(self, form: RowFormat) -> Int64s:
        """Tell every peer and hear every peer.

        Returns:
            int64[ranks]: rows that each rank has for this one (this rank's own entry as the caller set it).

        Raises:
            ConfigError: the ranks were given different operations or shapes; every rank raises, nothing has moved and
                the group goes on as it was.
            PeerError, ProtocolError, TransportError, ProxyDied: see ``Runtime.wait``.
        """
        runtime, (_, operation, peers) = self._runtime, self._addresses
        context, progress, kernel = runtime.context, runtime.progress, self.kernels.open_operation
        self._wait(f"{form.name}, opening", lambda end: kernel(context, operation, peers, progress, end))
        told = self.peers[:, block.TOLD] != 0
        differ = told & (self.peers[:, block.TOLD_SHAPE] != self.operation[block.SHAPE])
        if differ.any():
            # nobody gets as far as saying that writes are over
            self._notices -= 0 if form.kind == NormalNotify.OPERATION_COMBINE else 1
            raise ConfigError(self._difference(form, np.flatnonzero(differ)))
        # the peers count on the rows now: whatever keeps this rank from run() leaves the group apart
        self._broken = f"{form.name}: opened and not run"
        return self.peers[:, block.RECV_ROWS]

    def _difference(self, form: RowFormat, ranks: npt.NDArray[np.intp]) -> str:
        words = []
        for rank in ranks[:8]:
            _, coding, row_bytes, meta_bytes = (
                int(word) for word in self.peers[rank, block.TOLD_SHAPE : block.TOLD_META_BYTES + 1]
            )
            name = _NAMES.get(coding >> 16, f"operation {coding >> 16}")
            kind = _DTYPES[coding & 0xFFFF] if coding & 0xFFFF < len(_DTYPES) else f"dtype {coding & 0xFFFF}"
            words.append(f"rank {rank} a {name} of {kind}, {row_bytes} bytes a row, {meta_bytes} bytes of meta")
        return (
            f"the ranks were given different operations, nothing was sent: rank {self._runtime.rank} a {form.name} of "
            f"{_DTYPES[form.dtype]}, {form.row_bytes} bytes a row, {form.meta_bytes} bytes of meta "
            f"(hidden {form.hidden}, top-k {form.topk}, {form.local_experts} local experts, handle {form.origin}); "
            f"{'; '.join(words)}. Where these agree, hidden, top-k, the experts or the handle differ"
        )

    def place(self, form: RowFormat, first: Int64s, rows: Int64s, capacity: int) -> Placement:
        """Decide where the rows of every peer land and tell the kernels.

        Args:
            first: int64[ranks], place of each rank's first row among all rows.
            rows: int64[ranks], rows of each rank, 0 for this one.
            capacity: rows for which there must be room in a heap range (all ranks' rows lie in it in order).
        """
        runtime, peers = self._runtime, self.peers
        window, heap = runtime.layout, runtime.heap
        row, meta = form.row_bytes, form.meta_bytes
        plan = window.normal
        most = plan.chunk // (row + meta)
        channels = runtime.settings.channels
        placement = Placement(-1, -1)
        peers[:, block.SLOT_ROWS] = np.maximum(rows, 1)
        if rows.any():
            chunk = np.minimum(np.maximum(-(-rows // channels), max(_LEAST_CHUNK_BYTES // row, 1)), most)
            starts = np.zeros(len(rows) + 1, dtype=np.int64)
            # the meta of every rank starts on a line of its own
            np.cumsum(-(-rows * meta // 128) * 128, out=starts[1:])
            placement = self._take(heap, capacity * row, int(starts[-1]))
            if placement.rows >= 0:
                peers[:, block.ROW_LANDING] = placement.rows + first * row
                peers[:, block.META_LANDING] = placement.meta + starts[:-1]
            else:
                slot = plan.round_slot
                chunk = np.minimum(chunk, slot // (row + meta))
                slot_rows = slot // (row + meta) // chunk * chunk
                landing = window.normal_rounds + np.arange(len(rows), dtype=np.int64) * 2 * slot
                peers[:, block.SLOT_ROWS] = slot_rows
                peers[:, block.SLOT_STRIDE] = slot
                peers[:, block.ROW_LANDING] = landing
                peers[:, block.META_LANDING] = landing + slot_rows * row
            peers[:, block.CHUNK_ROWS] = chunk
        return placement

    @staticmethod
    def _take(heap: HeapAllocator, rows: int, meta: int) -> Placement:
        at = heap.take(rows)
        if at is None:
            return Placement(-1, -1)
        if meta == 0:
            return Placement(at, -1)
        beside = heap.take(meta)
        if beside is None:
            heap.give(at)
            return Placement(-1, -1)
        return Placement(at, beside)

    def run(self, form: RowFormat) -> None:
        """Exchange the rows. Raises as :meth:`open`, ConfigError excepted; the operation cannot be taken up again."""
        runtime, (counts, operation, peers) = self._runtime, self._addresses
        context, progress, kernel = runtime.context, runtime.progress, self.kernels.exchange
        self._wait(form.name, lambda end: kernel(context, counts, operation, peers, progress, end))
        self._broken = ""

    def _wait(self, phase: str, step: Callable[[int], int]) -> None:
        """Wait for a kernel; as long as rows move, the deadline starts anew: it bounds silence, not work."""
        runtime, operation = self._runtime, self.operation
        over = False

        def turn(slice_end: int) -> int:
            nonlocal over
            steps = operation[block.STEPS]
            status = step(slice_end)
            over = status == STATUS_OK
            return STATUS_OK if status == STATUS_PENDING and operation[block.STEPS] != steps else status

        try:
            while not over:
                runtime.wait(phase, turn)
                if not over:
                    runtime.check(phase)
        except BaseException as failure:
            self._broken = f"{phase}: {type(failure).__name__}"
            raise
