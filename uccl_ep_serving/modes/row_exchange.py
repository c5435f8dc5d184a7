"""One exchange of rows between all ranks: what a dispatch and a combine of normal mode have in common.

:class:`RowExchange` owns the blocks of ``kernels.blocks.normal`` and the numbers that all ranks count alike. An
operation is opened (every rank tells every rank its shape and its rows), placed (where do the rows of each peer land?)
and run.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from ..data_plane.nodes import crossed_once
from ..data_plane.runtime import Runtime
from ..data_plane.segments import HeapAllocator
from ..errors import ConfigError
from ..handles import NodeRoute, NormalHandle
from ..kernels.blocks import normal as block
from ..kernels.cpu import normal as cpu_kernels
from ..native.copy import last_cache_bytes
from ..native.groups import load
from ..protocol.layout import MAX_EXPERTS
from ..protocol.message import LEAST_CHUNK_BYTES, NormalNotify
from ..protocol.streams import NORMAL_COMBINE, NORMAL_DISPATCH
from .arguments import CPU, naming
from .epoch import Epoch, Operation
from .node_relay import NodeRelay
from .normal_arguments import Layout
from .row_format import RowFormat, check_room, shape_mismatch

__all__ = ["Placement", "RowExchange", "count_layout"]

Int64s = npt.NDArray[np.int64]


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
        kernels: ``kernels.cpu.normal``.
        epoch: that the counters belong to.
        relay: what an operation between nodes adds.
        operation: int64[OPERATION_WORDS], see ``kernels.blocks.normal``.
        peers: int64[ranks, PEER_WORDS].
        expert_counts: int64[local experts]: rows that a dispatch received for each.
    """

    def __init__(self, runtime: Runtime) -> None:
        ranks = runtime.ranks
        self.kernels = cpu_kernels
        self.epoch = Epoch(runtime)
        self.relay = NodeRelay(runtime.rank, ranks)
        self._runtime = runtime
        self._number = 0
        self._notices = 0
        self._counts: Int64s = np.zeros((ranks, block.COUNT_WORDS), dtype=np.int64)
        self._templates: dict[tuple[Any, ...], Int64s] = {}
        self._scratch: Int64s = np.zeros(block.SCRATCH_BYTES // 8 + ranks + 2, dtype=np.int64)
        self._tally: Int64s = np.zeros(0, dtype=np.int64)
        self.expert_counts: Int64s = np.zeros(0, dtype=np.int64)
        self.operation: Int64s = np.zeros(block.OPERATION_WORDS, dtype=np.int64)
        self.peers: Int64s = np.zeros((ranks, block.PEER_WORDS), dtype=np.int64)
        self._addresses = (self._counts.ctypes.data, self.operation.ctypes.data, self.peers.ctypes.data)

    @property
    def origin(self) -> tuple[int, int, int]:
        """(opening, epoch, number) of the operation that was begun last: its name, equal on all ranks."""
        return self._runtime.opening, self.epoch.number, self._number - 1

    def enter(self, form: RowFormat, handle: NormalHandle | None) -> RowFormat:
        """``form`` as its rows go in the windows that are there, which are rebuilt first where they are stale.

        It is the same on every rank. An operation with a handle goes the way of the dispatch that the handle comes
        from, unless a rank has been masked since.

        Raises:
            ConfigError: a row does not fit a chunk or a round slot. What ``Epoch.check`` and ``Runtime.rebuild`` raise.
        """
        runtime = self._runtime
        self.epoch.check(form.name, begins=True)
        if runtime.stale:
            runtime.rebuild(None)
        if self.epoch.enter():
            self._number = self._notices = 0
            self._counts.fill(0)
            self._templates.clear()
        node_ranks = self._node_ranks
        if not self.epoch.has_compiled:
            groups = [self.kernels.NORMAL, self.kernels.NORMAL_NODES][: 2 if node_ranks else 1]
            self.epoch.compile_together(lambda: load(*groups))
        if node_ranks and (handle is None or _went_between_nodes_of(node_ranks, handle)):
            form = form._replace(node_ranks=node_ranks)
        if runtime.ranks > 1 and form[:-1] not in self._templates:
            check_room(form, runtime.layout.normal)
        return form

    @property
    def _node_ranks(self) -> int:
        """Ranks of a node when its rows cross once to a node, else 0."""
        runtime = self._runtime
        return crossed_once(runtime.node_ranks, runtime.ranks, runtime.settings.hierarchy, bool(runtime.mask.any()))

    @naming("normal dispatch")
    def route(self, layout: Layout, topk_idx: torch.Tensor | None) -> torch.Tensor:
        """Who gets which tokens: ``NormalHandle.route``. Raises ConfigError when the layout contradicts itself or the
        ids."""
        tokens, ranks = layout.in_rank.shape
        (experts,) = layout.per_expert.shape
        if len(self._tally) < 2 * ranks + experts:
            self._tally = np.zeros(2 * ranks + experts, dtype=np.int64)
            self._tally_address = self._tally.ctypes.data
        topk = 0 if topk_idx is None else topk_idx.shape[1]
        most = tokens * (min(topk, ranks) if topk else ranks)
        route = torch.empty(2 * ranks + (most + 1) // 2, dtype=torch.int64, device=CPU)
        address = route.data_ptr()
        verdict = self.kernels.route_rows(
            0 if topk_idx is None else topk_idx.data_ptr(),
            tokens,
            topk,
            experts,
            ranks,
            layout.in_rank.data_ptr(),
            layout.per_rank.data_ptr(),
            layout.per_expert.data_ptr(),
            self._tally_address,
            address,
            address + 16 * ranks,
        )
        if verdict != block.LAYOUT_RIGHT:
            _refuse_layout(layout, topk_idx)
        return route

    def begin(self, form: RowFormat, tokens: int) -> None:
        """Take the next number and fill the words that the format and the window fix; the caller adds its addresses,
        which must live until the operation has run, then :meth:`prepare`."""
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

    def open(self, form: RowFormat, operation: Operation) -> None:
        """Tell every peer and hear every peer; afterwards RECV_ROWS and RECV_TOTAL hold what this rank will receive.

        Raises:
            ConfigError: the ranks were given different operations or shapes; every rank raises, nothing has moved and
                the group goes on as it was.
            PeerError, ProtocolError, TransportError, ProxyDied: see ``KernelSpace.wait``.
        """
        space, (_, block_address, peers) = self._runtime.space, self._addresses
        step = partial(self.kernels.open_operation, space.context, block_address, peers, space.progress)
        space.wait(f"{form.name}, opening", step, self._steps)
        if self.operation[block.DIFFERENT]:
            # nobody gets as far as saying that writes are over
            self._notices -= 0 if form.kind == NormalNotify.OPERATION_COMBINE else 1
            operation.void = True
            told = self.peers[:, block.PEER_NOTIFIED] != 0
            ranks = np.flatnonzero(told & (self.peers[:, block.PEER_SHAPE] != self.operation[block.SHAPE]))
            words = self.peers[ranks, block.PEER_CODING : block.PEER_META_BYTES + 1].tolist()
            others = [(int(rank), *shape) for rank, shape in zip(ranks[:8], words[:8], strict=True)]
            raise shape_mismatch(form, self._runtime.rank, others)

    def place(self, form: RowFormat, capacity: int) -> Placement:
        """Decide where the rows of every peer land and tell the kernels.

        Args:
            capacity: rows for which there must be room in a heap range (all ranks' rows lie in it in order).
        """
        space, operation = self._runtime.space, self.operation
        placement = Placement(-1, -1)
        if operation[block.RECV_REMOTE]:
            placement = self._take(space.heap, capacity * form.row_bytes, int(operation[block.META_ROOM]))
            operation[block.ROW_RANGE], operation[block.META_RANGE] = placement
        _, address, peers = self._addresses
        self.kernels.place(space.context, address, peers)
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
        kernel = self.kernels.exchange_nodes if form.node_ranks else self.kernels.exchange
        space = self._runtime.space
        space.wait(form.name, partial(kernel, space.context, *self._addresses, space.progress), self._steps)

    def _steps(self) -> int:
        return int(self.operation[block.STEPS])


def count_layout(topk_idx: torch.Tensor, experts: int, ranks: int) -> Layout:
    """Who gets which tokens. Raises ConfigError for an id out of range.

    Args:
        topk_idx: int64 [T, K], contiguous.
        experts: E, a multiple of R.
    """
    tokens, topk = topk_idx.shape
    per_rank = torch.empty(ranks, dtype=torch.int32, device=CPU)
    per_expert = torch.empty(experts, dtype=torch.int32, device=CPU)
    in_rank = torch.empty(tokens, ranks, dtype=torch.bool, device=CPU)
    addresses = per_rank.data_ptr(), per_expert.data_ptr(), in_rank.data_ptr()
    bad = cpu_kernels.layout(topk_idx.data_ptr(), tokens, topk, experts, ranks, *addresses)
    if bad >= 0:
        raise ConfigError(
            f"topk_idx[{bad // topk}, {bad % topk}] = {int(topk_idx.flatten()[bad])} is not an expert: ids are "
            f"-1 .. {experts - 1}"
        )
    return Layout(per_rank, in_rank, per_expert)


def _went_between_nodes_of(node_ranks: int, handle: NormalHandle) -> bool:
    """Whether the dispatch of ``handle`` did, so that what follows it can."""
    nodes = handle.nodes
    return nodes is not None and len(nodes.node_rows) * node_ranks == handle.about.ranks


def _refuse_layout(layout: Layout, topk_idx: torch.Tensor | None) -> NoReturn:
    """Say what is wrong with a layout that contradicts itself or its ids. Raises ConfigError."""
    per_rank, in_rank, per_expert = layout
    if topk_idx is not None:
        counted = count_layout(topk_idx, len(per_expert), in_rank.shape[1])
        if not torch.equal(counted.per_expert, per_expert):
            raise ConfigError("num_tokens_per_expert does not count the experts of topk_idx")
        if not torch.equal(counted.in_rank, in_rank):
            raise ConfigError("is_token_in_rank does not mark the ranks of topk_idx")
    elif torch.equal(in_rank.sum(dim=0), per_rank):
        raise ConfigError(
            f"num_tokens_per_expert {per_expert.tolist()} cannot be of num_tokens_per_rank {per_rank.tolist()}: a "
            f"count is negative, or of a rank that gets no token, or above {MAX_EXPERTS} for each of its tokens"
        )
    raise ConfigError(
        f"num_tokens_per_rank {per_rank.tolist()} contradicts is_token_in_rank, which marks "
        f"{in_rank.sum(dim=0).tolist()}"
    )
