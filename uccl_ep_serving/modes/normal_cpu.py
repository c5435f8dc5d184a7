"""Normal mode (prefill, training): DeepEP's ``get_dispatch_layout``, ``dispatch`` and ``combine``.

Any token count, any of the dtypes, whatever the size of the window: received rows land in place, in a heap range that
becomes the returned tensor, or in rounds when the heap has no room. A token travels once to each rank that owns one of
its experts. Rows are sorted by source rank, then by token, and nothing that is returned depends on chunk sizes,
channels, rounds or the order of arrival.
"""

from __future__ import annotations

import time

import torch

from ..errors import ConfigError
from ..handles import DispatchOrigin, EventOverlap, NodeRoute, NormalHandle, wait_for
from ..kernels.blocks import normal as block
from ..protocol.message import NormalNotify
from .normal_arguments import (
    bias_pair,
    check_alignment,
    check_experts,
    check_handle,
    check_topk,
    combine_dtype,
    combine_weights,
    rows_and_scales,
)
from .normal_layout import Layout, count_layout, given_layout, refuse_layout
from .row_exchange import ExchangeRuntime, RowExchange
from .row_format import RowFormat

__all__ = ["Normal"]

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_DISPATCH = NormalNotify.OPERATION_DISPATCH
_CACHED = NormalNotify.OPERATION_CACHED_DISPATCH
_COMBINE = NormalNotify.OPERATION_COMBINE


class Normal:
    """Normal-mode operations of one Buffer. Collective: all ranks make the same calls in the same order.

    On CPU tensors an operation is finished when the call returns: ``async_finish`` and ``allocate_on_comm_stream``
    change nothing, the event that is returned is complete, and a ``previous_event`` is waited for first.
    """

    def __init__(self, runtime: ExchangeRuntime) -> None:
        self._runtime = runtime
        self._exchange = RowExchange(runtime)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where tokens go; local, sends nothing.

        Args:
            topk_idx: int64 [T, K], global expert ids, -1 = none. Expert e lives on rank ``e // (E / R)``.
            num_experts: E, a multiple of the ranks.

        Returns:
            num_tokens_per_rank int32 [R]; num_tokens_per_rdma_rank int32 [nodes], or None when all ranks share one
            node (where nodes are not equal groups of consecutive ranks, each rank counts as one);
            num_tokens_per_expert int32 [E]; is_token_in_rank bool [T, R]; event.

        Raises:
            ConfigError: wrong dtype or shape, an id out of range, or E no integer or not a multiple of R.
        """
        wait_for(previous_event)
        ranks = self._runtime.ranks
        check_topk(topk_idx, None, None)
        experts = check_experts(num_experts, ranks)
        topk_idx = topk_idx.contiguous()
        per_rank, per_expert, in_rank = count_layout(self._exchange.kernels, topk_idx, experts, ranks)
        return per_rank, self._per_node(per_rank, in_rank), per_expert, in_rank, EventOverlap()

    def dispatch(
        self,
        x: Received,
        *,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: object = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Received, torch.Tensor | None, torch.Tensor | None, list[int], NormalHandle, EventOverlap]:
        """Send every token once to each rank that owns one of its experts; where nodes are equal groups of
        consecutive ranks, once to each other node that does, and on from there.

        Args:
            x: [T, H] bfloat16, float16 or float32, contiguous, H x itemsize a multiple of 16; or a pair of
                float8_e4m3 [T, H] and its scales: float32 [T, H / 128], or int32 [T, ceil(H / 512)] (packed UE8M0).
            handle: of an earlier dispatch of this Buffer: repeat its routing for another ``x`` ("cached"); layout,
                ids and weights must then be None.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from :meth:`get_dispatch_layout`.
            num_tokens_per_rdma_rank: accepted and not needed.
            topk_idx, topk_weights: int64 and float32 [T, K], both or none.
            expert_alignment: each entry of the returned list is rounded up to a multiple of it.
            num_worst_tokens: W > 0: the returned tensors have W rows, those that no token fills have ids -1 and
                undefined data, and the list is empty.
            config: accepted; chunk sizes follow ``UCCL_EP_CHUNK_BYTES``.

        Returns:
            recv_x [N, H] (or the pair with recv_x_scales); recv_topk_idx int64 [N, K], local expert or -1;
            recv_topk_weights float32 [N, K], 0 where the id is -1; rows per local expert; handle; event. Ids and
            weights are None when none were given. The tensors stay valid as long as they are kept.

        Raises:
            ConfigError: bad input, before anything is sent (more rows than ``num_worst_tokens``: after everything was
                received). PeerTimeout, PeerLost, ProtocolError, TransportError, ProxyDied: the Buffer must be closed.
        """
        started = time.monotonic_ns()
        wait_for(previous_event)
        rows, scales, dtype = rows_and_scales(x)
        layout, tokens = None, rows.shape[0]
        given = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        if handle is not None:
            check_handle(handle, self, tokens)
            if any(one is not None for one in given) or num_worst_tokens:
                raise ConfigError("a cached dispatch takes x and handle only: the layout comes from the handle")
            form = self._dispatch_form(rows, scales, dtype, None, handle)
            route, nodes, in_rank = handle.route, handle.nodes, handle.is_token_in_rank
        else:
            check_alignment(expert_alignment, num_worst_tokens)
            layout = given_layout(*given, tokens, self._runtime.ranks)
            form = self._dispatch_form(rows, scales, dtype, layout, None)
            route, nodes = self._route(layout, form.node_ranks)
            in_rank = layout.in_rank

        exchange = self._exchange
        self._begin_dispatch(form, rows, scales, layout)
        exchange.prepare(route, nodes, in_rank)
        exchange.open(form)
        if layout is not None and nodes is not None:
            nodes = exchange.relay.keep_marks(exchange.operation, exchange.peers, nodes)
        total = int(exchange.operation[block.RECV_TOTAL])
        capacity = max(total, num_worst_tokens) if handle is None else handle.capacity
        received, recv_idx, recv_weights = self._run_dispatch(form, total, capacity, rows, scales)
        if handle is None:
            origin = DispatchOrigin(self, *exchange.origin, tokens)
            handle = NormalHandle(route, total, capacity, in_rank, origin, nodes)
        sent_away = int(exchange.operation[block.SENT_AWAY])
        self._runtime.record("normal_dispatch", tokens, sent_away, time.monotonic_ns() - started)
        if num_worst_tokens and total > num_worst_tokens:
            raise ConfigError(
                f"{total} rows arrived where num_worst_tokens = {num_worst_tokens} was promised; all ranks received, "
                "the group goes on. Next step: num_worst_tokens = ranks x the most tokens of a rank"
            )
        per_local: list[int] = []
        if layout is not None and not num_worst_tokens:
            counts = exchange.expert_counts[: form.local_experts]
            per_local = (
                counts if expert_alignment == 1 else -(-counts // expert_alignment) * expert_alignment
            ).tolist()
        return received, recv_idx, recv_weights, per_local, handle, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: object = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back to the ranks of their tokens and sum them there, unweighted.

        Args:
            x: [N, H] bfloat16, float16 or float32, contiguous, in the order of the dispatch that returned ``handle``.
            topk_weights: float32 [N, K], summed per token like the rows.
            bias: [T, H] of x's dtype, or two of them, added in float32 before rounding.
            config: accepted; chunk sizes follow ``UCCL_EP_CHUNK_BYTES``.

        Returns:
            combined_x [T, H]: the sum over ranks in ascending order, in float32, rounded once; 0 for a token that went
            nowhere. Rows that come from another node by way of a forwarder are summed there first, in the same manner.
            combined_topk_weights float32 [T, K] or None. event.

        Raises:
            ConfigError: bad input, before anything is sent. PeerTimeout, PeerLost, ProtocolError, TransportError,
                ProxyDied: the Buffer must be closed.
        """
        started = time.monotonic_ns()
        wait_for(previous_event)
        check_handle(handle, self, None)
        dtype = combine_dtype(x, handle)
        tokens, hidden = handle.origin.tokens, x.shape[1]
        biases = bias_pair(bias, tokens, x)
        topk = 0
        if topk_weights is not None:
            topk_weights = combine_weights(topk_weights, x.shape[0])
            topk = topk_weights.shape[1]
        runtime, exchange = self._runtime, self._exchange
        form = RowFormat(
            _COMBINE,
            dtype,
            hidden,
            hidden * x.element_size(),
            topk,
            node_ranks=exchange.node_ranks(_COMBINE, handle),
            origin=handle.origin[1:3],
        )
        exchange.check(form)

        exchange.begin(form, tokens)
        operation = exchange.operation
        weights = None
        operation[block.X] = x.data_ptr()
        if topk_weights is not None:
            weights = torch.empty(tokens, topk, dtype=torch.float32)
            operation[block.WEIGHTS] = topk_weights.data_ptr()
            operation[block.OUT_WEIGHTS] = weights.data_ptr()
        for word, one in zip((block.BIAS_0, block.BIAS_1), biases, strict=False):
            operation[word] = one.data_ptr()
        exchange.prepare(handle.route, handle.nodes, handle.is_token_in_rank)
        exchange.open(form)
        placement = exchange.place(form, int(operation[block.RECV_REMOTE]))
        room = runtime.heap.take(tokens * form.row_bytes) if tokens else None
        combined = self._tensor(-1 if room is None else room, tokens, x)
        operation[block.OUT] = combined.data_ptr()
        exchange.run(form)
        for offset in placement:
            if offset >= 0:
                runtime.heap.give(offset)
        runtime.record("normal_combine", tokens, int(operation[block.SENT_AWAY]), time.monotonic_ns() - started)
        return combined, weights, EventOverlap()

    def _dispatch_form(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: int,
        layout: Layout | None,
        handle: NormalHandle | None,
    ) -> RowFormat:
        """What ranks must agree on in a dispatch of ``layout``, or of ``handle``. Raises ConfigError when no window can
        carry it."""
        kind, hidden = _CACHED if layout is None else _DISPATCH, rows.shape[1]
        form = RowFormat(
            kind,
            dtype,
            hidden,
            hidden * rows.element_size(),
            0 if layout is None else layout.topk,
            0 if scales is None else scales.shape[1] * scales.element_size(),
            0 if layout is None else layout.per_expert.shape[0] // self._runtime.ranks,
            self._exchange.node_ranks(kind, handle),
            (-1, -1) if handle is None else handle.origin[1:3],
        )
        self._exchange.check(form)
        return form

    def _route(self, layout: Layout, node_ranks: int) -> tuple[torch.Tensor, NodeRoute | None]:
        """Who gets which tokens: the first parts of a handle. Raises ConfigError when the layout contradicts itself or
        the ids."""
        exchange = self._exchange
        verdict, route = exchange.route(layout.topk_idx, layout.in_rank, layout.per_rank, layout.per_expert)
        if verdict != block.LAYOUT_RIGHT:
            refuse_layout(exchange.kernels, layout)
        return route, exchange.relay.route(layout.in_rank, node_ranks) if node_ranks else None

    def _begin_dispatch(
        self, form: RowFormat, rows: torch.Tensor, scales: torch.Tensor | None, layout: Layout | None
    ) -> None:
        """Take the next number for a dispatch and say where its arguments are; they must live until it has run."""
        exchange = self._exchange
        exchange.begin(form, rows.shape[0])
        operation = exchange.operation
        operation[block.X] = rows.data_ptr()
        if scales is not None:
            operation[block.SCALES] = scales.data_ptr()
        if layout is not None:
            operation[block.EXPERT_COUNTS_SENT] = layout.per_expert.data_ptr()
            if layout.topk_idx is not None and layout.topk_weights is not None:
                operation[block.TOPK_IDX] = layout.topk_idx.data_ptr()
                operation[block.WEIGHTS] = layout.topk_weights.data_ptr()

    def _run_dispatch(
        self, form: RowFormat, total: int, capacity: int, x: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[Received, torch.Tensor | None, torch.Tensor | None]:
        """Exchange the rows of an opened dispatch: the ``total`` rows that arrive, their ids and their weights, in
        tensors of ``capacity`` rows like ``x`` and ``scales``."""
        exchange, operation = self._exchange, self._exchange.operation
        placement = exchange.place(form, capacity)
        recv_x = self._tensor(placement.rows, capacity, x)
        recv_scales = recv_idx = recv_weights = None
        operation[block.OUT] = recv_x.data_ptr()
        operation[block.IN_PLACE] = placement.rows >= 0
        if scales is not None:
            recv_scales = torch.empty(capacity, scales.shape[1], dtype=scales.dtype)
            operation[block.OUT_SCALES] = recv_scales.data_ptr()
        if form.topk:
            recv_idx = torch.empty(capacity, form.topk, dtype=torch.int64)
            recv_weights = torch.empty(capacity, form.topk, dtype=torch.float32)
            if capacity > total:
                recv_idx[total:] = -1
                recv_weights[total:] = 0
            operation[block.OUT_IDX] = recv_idx.data_ptr()
            operation[block.OUT_WEIGHTS] = recv_weights.data_ptr()
        if form.kind == _CACHED and operation[block.MASKED]:
            recv_x.view(torch.uint8).zero_()
        exchange.run(form)
        if placement.meta >= 0:
            self._runtime.heap.give(placement.meta)
        return recv_x if recv_scales is None else (recv_x, recv_scales), recv_idx, recv_weights

    def _per_node(self, per_rank: torch.Tensor, in_rank: torch.Tensor) -> torch.Tensor | None:
        """Tokens with an expert on each node, None when there is one node."""
        size = self._runtime.node_ranks
        if self._runtime.all_direct:
            return None
        if size == 1:
            return per_rank.clone()
        return in_rank.view(len(in_rank), self._runtime.ranks // size, size).any(dim=2).sum(dim=0, dtype=torch.int32)

    def _tensor(self, offset: int, rows: int, like: torch.Tensor) -> torch.Tensor:
        """[rows, H] over the heap range at ``offset``, or of its own when that is -1.

        Results live in the heap wherever there is room, also those that no peer writes: its pages are there already,
        while the first touch of as much fresh memory costs more than the whole operation.
        """
        hidden = like.shape[1]
        if offset < 0:
            return torch.empty(rows, hidden, dtype=like.dtype)
        return self._runtime.heap.tensor(offset, rows, hidden, like.dtype)
