"""Normal mode (prefill, training): DeepEP's ``get_dispatch_layout``, ``dispatch`` and ``combine``.

Any token count, any of the dtypes, whatever the size of the window: received rows land in place, in a heap range that
becomes the returned tensor, or in rounds when the heap has no room. A token travels once to each rank that owns one of
its experts. Rows are sorted by source rank, then by token, and nothing that is returned depends on chunk sizes,
channels, rounds or the order of arrival.
"""

from __future__ import annotations

import time

import torch

from ..data_plane.runtime import Runtime
from ..errors import ConfigError
from ..handles import MADE_ON_CPU, About, EventOverlap, NormalHandle, wait_for
from ..kernels.blocks import normal as block
from ..protocol.message import NormalNotify
from .arguments import CPU, naming
from .normal_arguments import DispatchArguments, NormalArguments, check_experts, check_ids
from .row_exchange import RowExchange, count_layout
from .row_format import RowFormat, overflow

__all__ = ["Normal"]

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Normal:
    """Normal-mode operations of one Buffer. Collective: all ranks make the same calls in the same order.

    On CPU tensors an operation is finished when the call returns: ``async_finish`` and ``allocate_on_comm_stream``
    change nothing, the event that is returned is complete, and a ``previous_event`` is waited for first.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._arguments = NormalArguments(runtime.rank, runtime.ranks, CPU, NormalHandle, aligned=False)
        self._exchange = RowExchange(runtime)

    @naming("get_dispatch_layout")
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
            node (where nodes are not equal groups of consecutive ranks, and once a rank is masked, each rank counts
            as one);
            num_tokens_per_expert int32 [E]; is_token_in_rank bool [T, R]; event.

        Raises:
            ConfigError: wrong dtype or shape, an id out of range, or E no integer or not a multiple of R.
        """
        wait_for(previous_event)
        ranks = self._runtime.ranks
        ids = check_ids(topk_idx, CPU)
        layout = count_layout(ids, check_experts(num_experts, ranks), ranks)
        per_node = self._per_node(layout.per_rank, layout.in_rank)
        return layout.per_rank, per_node, layout.per_expert, layout.in_rank, EventOverlap()

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
        consecutive ranks, once to each other node that does, and forwarded there. The arguments are DeepEP's.

        Args:
            x: [T, H] bfloat16, float16 or float32, contiguous, H x itemsize a multiple of 16; or a pair of
                float8_e4m3 [T, H] and its scales: float32 [T, H / 128], or int32 [T, ceil(H / 512)] (packed UE8M0).
            handle: of an earlier dispatch, or its tensors: repeat its routing for another ``x`` ("cached"). Ids and
                weights must then be None, and the layout and ``num_worst_tokens`` count for nothing.
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
                received); on all ranks when memory runs out on one. PeerTimeout, PeerLost: a rank is to be masked, or
                the Buffer closed. ProtocolError, TransportError, ProxyDied: the Buffer must be closed.
        """
        started = time.monotonic_ns()
        wait_for(previous_event)
        runtime, exchange, operation = self._runtime, self._exchange, self._exchange.operation

        # What is given, and what all ranks must agree on: nothing has moved when it is refused.
        counted = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        args = self._arguments.dispatch(x, handle, counted, topk_idx, topk_weights, expert_alignment, num_worst_tokens)
        known, promised = args.handle, 0 if args.handle is not None else num_worst_tokens
        form, tokens = exchange.enter(args.form, known), args.rows.shape[0]
        if promised:
            _try_allocation(promised, form.row_bytes)

        # Who gets which tokens.
        if args.layout is not None:
            route, in_rank = exchange.route(args.layout, args.topk_idx), args.layout.in_rank
            # a cached dispatch reads it again, whatever the caller has done to its own since
            in_rank = in_rank.clone()
            nodes = exchange.relay.route(in_rank, form.node_ranks) if form.node_ranks else None
        else:
            assert known is not None
            route, nodes, in_rank = known.route, known.nodes, known.is_token_in_rank

        with exchange.epoch.operation(form.name) as whole:
            # Open: tell every rank what comes, hear what every rank has.
            self._begin_dispatch(form, args)
            exchange.prepare(route, nodes, in_rank)
            exchange.open(form, whole)
            if known is None and nodes is not None:
                nodes = exchange.relay.keep_marks(operation, exchange.peers, nodes)

            # Place: where the rows of every rank land, in memory that becomes what is returned.
            total = int(operation[block.RECV_TOTAL])
            capacity = max(total, promised) if known is None else known.about.capacity
            landing = exchange.place(form, capacity)
            received = self._allocate(form, landing.rows, capacity, args)

            # Exchange: rows go where the others have placed them, rows of the others come.
            exchange.run(form)

        if landing.meta >= 0:
            runtime.heap.give(landing.meta)
        if known is None:
            who, name = (runtime.rank, runtime.ranks), exchange.origin
            about = About(MADE_ON_CPU, *who, *name, tokens, received=total, capacity=capacity)
            known = NormalHandle.build(about, route, in_rank, nodes)
        remote_rows = int(operation[block.REMOTE_ROWS])
        runtime.record("normal_dispatch", tokens, remote_rows, time.monotonic_ns() - started)
        if promised and total > promised:
            raise overflow(total, f"= {promised} was promised")
        per_local: list[int] = []
        if args.layout is not None and not promised:
            counts = exchange.expert_counts[: form.local_experts]
            if expert_alignment != 1:
                counts = -(-counts // expert_alignment) * expert_alignment
            per_local = counts.tolist()
        return *received, per_local, known, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: object = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back to the ranks of their tokens and sum them there, unweighted.

        Args:
            x: [N, H] bfloat16, float16 or float32, contiguous, in the order of the dispatch that returned ``handle``.
            topk_weights: float32 [N, K], summed per token like the rows.
            bias: [T, H] of x's dtype, or two of them, each of which may be None; added in float32 before rounding.
            config: accepted; chunk sizes follow ``UCCL_EP_CHUNK_BYTES``.

        Returns:
            combined_x [T, H]: the sum over ranks in ascending order, in float32, rounded once; 0 for a token that went
            nowhere. Rows that come from another node by way of a forwarder are summed there first, in the same manner.
            combined_topk_weights float32 [T, K] or None. event.

        Raises:
            ConfigError: bad input, before anything is sent. PeerTimeout, PeerLost: a rank is to be masked, or the
                Buffer closed. ProtocolError, TransportError, ProxyDied: the Buffer must be closed.
        """
        started = time.monotonic_ns()
        wait_for(previous_event)
        runtime, exchange, operation = self._runtime, self._exchange, self._exchange.operation

        # What is given, and what all ranks must agree on: nothing has moved when it is refused.
        args = self._arguments.combine(x, handle, topk_weights, bias)
        known = args.handle
        form, tokens = exchange.enter(args.form, known), known.about.tokens
        weights = None if args.topk_weights is None else torch.empty(tokens, form.topk, dtype=torch.float32, device=CPU)

        with exchange.epoch.operation(form.name) as whole:
            # Open: tell every rank what goes back, hear what every rank has.
            exchange.begin(form, tokens)
            operation[block.X] = x.data_ptr()
            if args.topk_weights is not None and weights is not None:
                operation[block.WEIGHTS] = args.topk_weights.data_ptr()
                operation[block.OUT_WEIGHTS] = weights.data_ptr()
            for word, bias_rows in zip((block.BIAS_0, block.BIAS_1), args.biases, strict=False):
                operation[word] = bias_rows.data_ptr()
            exchange.prepare(known.route, known.nodes, known.is_token_in_rank)
            exchange.open(form, whole)

            # Place: where the rows of every rank land, and where their sums go.
            landing = exchange.place(form, int(operation[block.RECV_REMOTE]))
            heap = runtime.heap
            room = heap.take(tokens * form.row_bytes) if tokens else None
            combined = self._tensor(-1 if room is None else room, tokens, x)
            operation[block.OUT] = combined.data_ptr()

            # Exchange: rows go back to the ranks of their tokens, which sum them in rank order.
            exchange.run(form)

        for offset in landing:
            if offset >= 0:
                heap.give(offset)
        remote_rows = int(operation[block.REMOTE_ROWS])
        runtime.record("normal_combine", tokens, remote_rows, time.monotonic_ns() - started)
        return combined, weights, EventOverlap()

    # -- inside -------------------------------------------------------------------------------------------------

    def _begin_dispatch(self, form: RowFormat, args: DispatchArguments[NormalHandle]) -> None:
        """Take the next number for a dispatch and say where its arguments are; they must live until it has run."""
        exchange = self._exchange
        exchange.begin(form, args.rows.shape[0])
        operation = exchange.operation
        operation[block.X] = args.rows.data_ptr()
        if args.scales is not None:
            operation[block.SCALES] = args.scales.data_ptr()
        if args.layout is not None:
            operation[block.EXPERT_COUNTS_SENT] = args.layout.per_expert.data_ptr()
        if args.topk_idx is not None and args.topk_weights is not None:
            operation[block.TOPK_IDX] = args.topk_idx.data_ptr()
            operation[block.WEIGHTS] = args.topk_weights.data_ptr()

    def _allocate(
        self, form: RowFormat, offset: int, capacity: int, args: DispatchArguments[NormalHandle]
    ) -> tuple[Received, torch.Tensor | None, torch.Tensor | None]:
        """What an opened dispatch returns, ``capacity`` rows of each; those of x at ``offset`` of the window when it is
        not -1. Only what no row fills has content: ids -1, weights 0."""
        operation = self._exchange.operation
        rows = self._tensor(offset, capacity, args.rows)
        scales = idx = weights = None
        operation[block.OUT] = rows.data_ptr()
        operation[block.IN_PLACE] = offset >= 0
        if args.scales is not None:
            scales = torch.empty(capacity, args.scales.shape[1], dtype=args.scales.dtype, device=CPU)
            operation[block.OUT_SCALES] = scales.data_ptr()
        if form.topk:
            idx = torch.empty(capacity, form.topk, dtype=torch.int64, device=CPU)
            weights = torch.empty(capacity, form.topk, dtype=torch.float32, device=CPU)
            if capacity > (total := int(operation[block.RECV_TOTAL])):
                idx[total:] = -1
                weights[total:] = 0
            operation[block.OUT_IDX] = idx.data_ptr()
            operation[block.OUT_WEIGHTS] = weights.data_ptr()
        if form.kind == NormalNotify.OPERATION_CACHED_DISPATCH and operation[block.MASKED]:
            rows.view(torch.uint8).zero_()
        return rows if scales is None else (rows, scales), idx, weights

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
            return torch.empty(rows, hidden, dtype=like.dtype, device=CPU)
        return self._runtime.heap.tensor(offset, rows, hidden, like.dtype)


def _try_allocation(rows: int, row_bytes: int) -> None:
    """Raise ConfigError where so much memory is not to be had: once the others are told what comes, they wait for it.
    No page of it is touched."""
    try:
        torch.empty(rows, row_bytes, dtype=torch.uint8, device=CPU)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"normal-mode dispatch: num_worst_tokens = {rows} rows of {row_bytes} bytes cannot be allocated "
            f"({str(error).splitlines()[0]}). Next step: the most tokens of a rank times the ranks is enough"
        ) from None
