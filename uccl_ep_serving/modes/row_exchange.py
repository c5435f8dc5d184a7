"""One exchange of rows between all ranks: what a dispatch and a combine of normal mode have in common.

:class:`RowExchange` owns the blocks of ``kernels.blocks.normal`` and the numbers that all ranks count alike. An
operation is opened (every rank tells every rank its shape and its rows), placed (where do the rows of each peer land?)
and run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..config import Settings
from ..data_plane.nodes import crossed_once
from ..data_plane.segments import HeapAllocator
from ..errors import ConfigError, UcclEpError
from ..handles import NodeRoute, NormalHandle
from ..kernels.blocks import normal as block
from ..kernels.select import normal_kernels
from ..native.copy import last_cache_bytes
from ..protocol.layout import LowLatencyPlan, WindowLayout
from ..protocol.message import LEAST_CHUNK_BYTES, NormalNotify
from ..protocol.streams import NORMAL_COMBINE, NORMAL_DISPATCH
from .node_relay import NodeRelay
from .row_format import RowFormat, check_room, in_words, operation_name

__all__ = ["ExchangeRuntime", "Placement", "RowExchange"]

Int64s = npt.NDArray[np.int64]


class ExchangeRuntime(Protocol):
    """What normal mode needs of a ``runtime.Runtime``; see there for the meaning."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def layout(self) -> WindowLayout: ...
    @property
    def window(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def mask(self) -> npt.NDArray[np.int32]: ...
    @property
    def heap(self) -> HeapAllocator: ...
    @property
    def record(self) -> Callable[[str, int, int, int], None]: ...
    def check(self, phase: str = ...) -> None: ...
    def begin_operation(self) -> None: ...
    @property
    def all_direct(self) -> bool: ...
    @property
    def node_ranks(self) -> int: ...
    @property
    def stale(self) -> str: ...
    def rebuild(self, plan: LowLatencyPlan | None, objection: str = ...) -> None: ...
    def wait(self, phase: str, step: Callable[[int], int], moved: Callable[[], int] | None = ...) -> None: ...


class Placement(NamedTuple):
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
        relay: what an operation between nodes adds.
        operation: int64[OPERATION_WORDS], see ``kernels.blocks.normal``.
        peers: int64[ranks, PEER_WORDS].
        expert_counts: int64[local experts]: rows that a dispatch received for each.
    """

    def __init__(self, runtime: ExchangeRuntime) -> None:
        ranks = runtime.ranks
        self.kernels = normal_kernels("cpu")
        self.relay = NodeRelay(self.kernels, runtime.rank, ranks)
        self._runtime = runtime
        self._epoch = -1
        self._number = 0
        self._notices = 0
        self._broken = ""
        self._counts: Int64s = np.zeros((ranks, block.COUNT_WORDS), dtype=np.int64)
        self._templates: dict[tuple[Any, ...], Int64s] = {}
        self._scratch: Int64s = np.zeros(block.SCRATCH_BYTES // 8 + ranks + 2, dtype=np.int64)
        self._tally: Int64s = np.zeros(0, dtype=np.int64)
        self.expert_counts: Int64s = np.zeros(0, dtype=np.int64)
        self.operation: Int64s = np.zeros(block.OPERATION_WORDS, dtype=np.int64)
        self.peers: Int64s = np.zeros((ranks, block.PEER_WORDS), dtype=np.int64)
        if self._node_ranks:
            self.relay.warm()
        self._addresses = (self._counts.ctypes.data, self.operation.ctypes.data, self.peers.ctypes.data)

    @property
    def origin(self) -> tuple[int, int]:
        """(epoch, number) of the operation that was begun last: its name, equal on all ranks."""
        return self._epoch, self._number - 1

    def node_ranks(self, operation: int, handle: NormalHandle | None) -> int:
        """Before the format of an operation can be said: ranks of a node when its rows cross once to a node, else 0.

        The same on every rank. An operation with a handle goes the way of the dispatch that the handle comes from,
        unless a rank has been masked since.

        Raises:
            UcclEpError: an earlier operation ended half-way. What ``Runtime.check`` and ``Runtime.rebuild`` raise.
        """
        self._catch_up(operation_name(operation))
        return 0 if handle is not None and handle.nodes is None else self._node_ranks

    @property
    def _node_ranks(self) -> int:
        runtime = self._runtime
        return crossed_once(runtime.node_ranks, runtime.ranks, runtime.settings.hierarchy, bool(runtime.mask.any()))

    def _catch_up(self, name: str) -> None:
        """Begin anew where the windows did."""
        runtime = self._runtime
        runtime.check(name)
        if runtime.stale:
            runtime.rebuild(None)
        if self._epoch != runtime.epoch:
            # new windows with new connections: every count restarts, on every rank
            self._epoch, self._number, self._notices, self._broken = runtime.epoch, 0, 0, ""
            self._counts.fill(0)
            self._templates.clear()
        if self._broken:
            raise UcclEpError(
                f"{name}: an earlier operation of this Buffer ended half-way ({self._broken}), so the ranks no "
                "longer agree on message numbers. Close this Buffer on all ranks and build a new one"
            )

    def check(self, form: RowFormat) -> None:
        """Refuse what no window can carry, with the same answer on every rank; :meth:`node_ranks` comes before it.

        Raises:
            ConfigError: a row does not fit a chunk or a round slot.
        """
        runtime = self._runtime
        if runtime.ranks == 1 or form[:-1] in self._templates:
            return
        check_room(form, runtime.layout.normal)

    def route(
        self,
        topk_idx: torch.Tensor | None,
        in_rank: torch.Tensor,
        rank_counts: torch.Tensor,
        expert_counts: torch.Tensor,
    ) -> tuple[int, torch.Tensor]:
        """``blocks.normal.LAYOUT_*`` of a layout, and the route that follows from it (see ``handles.NormalHandle``)."""
        tokens, ranks = in_rank.shape
        (experts,) = expert_counts.shape
        if len(self._tally) < 2 * ranks + experts:
            self._tally = np.zeros(2 * ranks + experts, dtype=np.int64)
            self._tally_address = self._tally.ctypes.data
        topk = 0 if topk_idx is None else topk_idx.shape[1]
        most = tokens * (min(topk, ranks) if topk else ranks)
        route = torch.empty(2 * ranks + (most + 1) // 2, dtype=torch.int64)
        address = route.data_ptr()
        verdict = self.kernels.route_rows(
            0 if topk_idx is None else topk_idx.data_ptr(),
            tokens,
            topk,
            experts,
            ranks,
            in_rank.data_ptr(),
            rank_counts.data_ptr(),
            expert_counts.data_ptr(),
            self._tally_address,
            address,
            address + 16 * ranks,
        )
        return verdict, route

    def begin(self, form: RowFormat, tokens: int) -> None:
        """Fill the words that the format and the window fix; the caller adds its addresses, then :meth:`prepare`."""
        runtime, operation = self._runtime, self.operation
        template = self._templates.get(form[:-1])
        if template is None:
            template = self._templates[form[:-1]] = self._template(form)
        operation[:] = template
        number = self._number
        if number & 1:
            parity = runtime.ranks * int(template[block.NOTIFY_STRIDE])
            operation[block.NOTIFY_SEND] += parity
            operation[block.NOTIFY_RECV] += parity
        operation[block.NUMBER] = number
        operation[block.NOTICES] = self._notices
        operation[block.SHAPE] = form.digest
        operation[block.TOKENS] = tokens
        runtime.begin_operation()
        self._number += 1
        self._notices += 1 if form.kind == NormalNotify.OPERATION_COMBINE else 2

    def _template(self, form: RowFormat) -> Int64s:
        """The operation block of a format as far as it is the same in every operation of this window, parity 0."""
        window, ranks = self._runtime.layout, self._runtime.ranks
        meta = form.meta_bytes
        if meta > block.SCRATCH_BYTES and 8 * len(self._scratch) < meta + 8 * (ranks + 2):
            self._scratch = np.zeros(meta // 8 + ranks + 2, dtype=np.int64)
            # templates hold its address
            self._templates.clear()
        if len(self.expert_counts) < form.local_experts:
            self.expert_counts = np.zeros(form.local_experts, dtype=np.int64)
            self._templates.clear()
        template = np.zeros(block.OPERATION_WORDS, dtype=np.int64)
        for word, value in (
            (block.KIND, form.kind),
            (block.PHASE, NORMAL_COMBINE if form.kind == NormalNotify.OPERATION_COMBINE else NORMAL_DISPATCH),
            (block.CODING, form.coding),
            (block.HIDDEN, form.hidden),
            (block.ELEMENT, form.dtype),
            (block.TOPK, form.topk),
            (block.ROW_BYTES, form.row_bytes),
            (block.META_BYTES, meta),
            (block.SCALE_BYTES, form.scale_bytes),
            (block.LOCAL_EXPERTS, form.local_experts),
            (block.EXPERT_COUNTS, self.expert_counts.ctypes.data),
            (block.SCRATCH, self._scratch.ctypes.data),
            (block.NOTIFY_SEND, window.notify_send),
            (block.NOTIFY_RECV, window.notify_recv),
            (block.NOTIFY_STRIDE, window.normal.notify),
            (block.GRANT_SEND, window.grant_send),
            (block.GRANT_RECV, window.grant_recv),
            (block.STAGING, window.normal_send),
            (block.CHUNK_BYTES, window.normal.chunk),
            (block.DEPTH, window.normal.depth),
            (block.LANDING, window.normal_rounds),
            (block.LANDING_END, window.normal_heap + window.normal.heap),
            (block.LEAST_CHUNK_BYTES, LEAST_CHUNK_BYTES),
            (block.ROUND_SLOT, window.normal.round_slot),
            (block.ROW_RANGE, -1),
            (block.META_RANGE, -1),
            (block.STREAM_FROM, last_cache_bytes()),
        ):
            template[word] = value
        if form.node_ranks:
            self.relay.fill_template(template, window, form.node_ranks)
        return template

    def prepare(self, route: torch.Tensor, nodes: NodeRoute | None, in_rank: torch.Tensor) -> None:
        """Fill the peers' blocks. The arguments are those of a handle, or what a first dispatch will make one of."""
        _, operation, peers = self._addresses
        context = self._runtime.context
        self.kernels.prepare(context, operation, peers, route.data_ptr())
        if nodes is not None and self.operation[block.NODE_RANKS]:
            self.relay.prepare(context, self.operation, peers, nodes, in_rank)

    def open(self, form: RowFormat) -> None:
        """Tell every peer and hear every peer; afterwards RECV_ROWS and RECV_TOTAL hold what this rank will receive.

        Raises:
            ConfigError: the ranks were given different operations or shapes; every rank raises, nothing has moved and
                the group goes on as it was.
            PeerError, ProtocolError, TransportError, ProxyDied: see ``Runtime.wait``.
        """
        runtime, (_, operation, peers) = self._runtime, self._addresses
        context, progress, kernel = runtime.context, runtime.progress, self.kernels.open_operation
        self._wait(f"{form.name}, opening", lambda end: kernel(context, operation, peers, progress, end))
        if self.operation[block.DIFFERENT]:
            told = self.peers[:, block.TOLD] != 0
            differ = told & (self.peers[:, block.TOLD_SHAPE] != self.operation[block.SHAPE])
            # nobody gets as far as saying that writes are over
            self._notices -= 0 if form.kind == NormalNotify.OPERATION_COMBINE else 1
            raise ConfigError(self._difference(form, np.flatnonzero(differ)))
        # the peers count on the rows now: whatever keeps this rank from run() leaves the group apart
        self._broken = f"{form.name}: opened and not run"

    def _difference(self, form: RowFormat, ranks: npt.NDArray[np.intp]) -> str:
        words = []
        for rank in ranks[:8]:
            _, coding, row_bytes, meta_bytes = (
                int(word) for word in self.peers[rank, block.TOLD_SHAPE : block.TOLD_META_BYTES + 1]
            )
            words.append(f"rank {rank} {in_words(coding, row_bytes, meta_bytes)}")
        return (
            f"the ranks were given different operations, nothing was sent: rank {self._runtime.rank} {form.words} "
            f"(hidden {form.hidden}, top-k {form.topk}, {form.local_experts} local experts, handle {form.origin}); "
            f"{'; '.join(words)}. Where these agree, hidden, top-k, the experts or the handle differ"
        )

    def place(self, form: RowFormat, capacity: int) -> Placement:
        """Decide where the rows of every peer land and tell the kernels.

        Args:
            capacity: rows for which there must be room in a heap range (all ranks' rows lie in it in order).
        """
        runtime, operation = self._runtime, self.operation
        placement = Placement(-1, -1)
        if operation[block.RECV_REMOTE]:
            placement = self._take(runtime.heap, capacity * form.row_bytes, int(operation[block.META_ROOM]))
            operation[block.ROW_RANGE], operation[block.META_RANGE] = placement
        _, address, peers = self._addresses
        self.kernels.place(runtime.context, address, peers)
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
        context, progress = runtime.context, runtime.progress
        kernel = self.kernels.exchange_nodes if form.node_ranks else self.kernels.exchange
        self._wait(form.name, lambda end: kernel(context, counts, operation, peers, progress, end))
        self._broken = ""

    def _wait(self, phase: str, step: Callable[[int], int]) -> None:
        """Wait for a kernel. Whatever ends it early leaves the group apart."""
        try:
            self._runtime.wait(phase, step, self._steps)
        except BaseException as failure:
            self._broken = f"{phase}: {type(failure).__name__}"
            raise

    def _steps(self) -> int:
        return int(self.operation[block.STEPS])
