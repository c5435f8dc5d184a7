"""Normal-mode dispatch and combine of tensors on a device: the host launches kernels and, at most once, reads back.

The same operations and arguments as :mod:`.normal_cpu`, over pipes (``protocol.pipe``). A first dispatch must know how
many rows to return, so the host waits until the opening has told it; with ``num_worst_tokens``, from a handle, and in a
combine it reads nothing back: numbers, routing and counts stay in device memory, and a captured graph replays. Returned
tensors are the caller's allocator's; peers write to the window, from where kernels copy.

What a kernel reports (a silent peer, a refused claim) is raised by the next call. Until then rows that came have their
ids and the others -1; sums are right or zero.
An expert id out of range counts as -1; it is raised by the call whose host reads back, else by the next.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import torch

from ..data_plane.runtime import Runtime
from ..errors import ConfigError
from ..gpu.context import GpuContext
from ..handles import MADE_ON_DEVICE, About, EventOverlap, NormalGpuHandle
from ..kernels.blocks import normal_device as block
from ..kernels.blocks.normal_device import NormalOpening, NormalTensors
from ..protocol.message import NormalNotify
from .arguments import naming
from .normal_arguments import NormalArguments, check_experts, check_ids
from .normal_gpu_outputs import Outputs, Received, address_of
from .normal_gpu_route import Marks, Route, Steps, all_of, new_marks, run_all
from .normal_gpu_session import NormalGpuSession, Present
from .row_format import RowFormat

__all__ = ["NormalGpu"]


class NormalGpu:
    """Normal mode of one Buffer for tensors on a device. Collective, and not thread-safe: one host thread calls it.

    Args:
        runtime: of the Buffer.
        gpu: what it shares with low-latency mode.
    """

    def __init__(self, runtime: Runtime, gpu: GpuContext) -> None:
        self._runtime = runtime
        self._gpu = gpu
        self._device = gpu.memory.device
        self._session = NormalGpuSession(runtime, gpu)
        self._kernels = self._session.kernels
        self._arguments = NormalArguments(runtime.rank, runtime.ranks, self._device, NormalGpuHandle, aligned=True)
        #: Of the last layout, until a dispatch. None in a capture: whatever ids a replay has, it counts them.
        self._marked: Marks | None = None

    # -- layout -------------------------------------------------------------------------------------------------

    @naming("get_dispatch_layout")
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """See :meth:`Normal.get_dispatch_layout`. Ids out of range count nowhere here; dispatch refuses them."""
        with self._gpu.order.operation(previous_event, own_stream=allocate_on_comm_stream):
            ranks = self._runtime.ranks
            ids = check_ids(topk_idx, self._device)
            marks = Marks(ids, check_experts(num_experts, ranks), ranks)
            nodes = self._new_node_counts(marks)
            # a dispatch of the same ids goes by the counts, whatever is done to what returns
            in_rank, per_expert = torch.empty_like(marks.in_rank), torch.empty_like(marks.per_expert)
            steps: Steps = all_of(marks.counting(self._kernels))
            steps += lambda: in_rank.copy_(marks.in_rank), lambda: per_expert.copy_(marks.per_expert)
            used = [*marks.tensors, in_rank, per_expert, *_copied(topk_idx)]
            if nodes is not None and nodes is not marks.per_rank:
                steps, used = (*steps, marks.node_counting(nodes)), [*used, nodes]
            event = self._gpu.order.run(lambda: run_all(steps), used, own_stream=True, finish=not async_finish)
            self._marked = None if self._gpu.order.capturing else marks
            return marks.per_rank, nodes, per_expert, in_rank, event

    def _new_node_counts(self, marks: Marks) -> torch.Tensor | None:
        """Tokens with an expert on each node, to be filled: None when all ranks share one node; where nodes are not
        equal groups of consecutive ranks, each rank counts as one."""
        size = self._runtime.node_ranks
        if self._runtime.all_direct:
            return None
        if size == 1:
            return marks.per_rank
        return torch.empty(self._runtime.ranks // size, dtype=torch.int32, device=self._device)

    # -- dispatch -----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Received,
        *,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Received, torch.Tensor | None, torch.Tensor | None, list[int], Any, EventOverlap]:
        """The arguments of :meth:`Normal.dispatch`. Where ids are given they decide: the layout is counted again on the
        device, unless :meth:`get_dispatch_layout` has just counted this very tensor of ids. Between the two nothing may
        write to it: torch tells of its own writes, but not of those to tensors made in inference mode, and nobody of
        those of other kernels.

        Args:
            config: its ``num_sms`` is the most programs that move rows; see :meth:`NormalGpuSession.channels`.

        Raises:
            ConfigError: wrong arguments; ranks that were given different operations (at once, or with
                ``num_worst_tokens`` and from a handle by the next call), after which the group goes on; a dispatch of
                unknown size while a graph is captured.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: of this or an earlier operation.
        """
        started = time.monotonic_ns()
        with self._gpu.order.operation(previous_event, own_stream=allocate_on_comm_stream):
            session, order = self._session, self._gpu.order
            layout = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
            args = self._arguments.dispatch(
                x, handle, layout, topk_idx, topk_weights, expert_alignment, num_worst_tokens
            )
            crossed = session.node_ranks(args.form.name)
            known = args.handle
            crossed = crossed if known is None else _on_its_way(known, crossed)
            form, tokens = args.form._replace(node_ranks=crossed), args.rows.shape[0]
            channels = session.channels(form, config) if known is None else known.about.channels
            form = form._replace(channels=channels)
            reads_back = known is None and not num_worst_tokens
            if reads_back and order.capturing:
                raise ConfigError(
                    f"{form.name}: how many rows come is read back, which no graph can capture: give num_worst_tokens"
                )
            present, wire = session.enter(form, 0)

            before: Steps = ()
            route, used = None, args.tensors
            if known is None:
                assert args.layout is not None
                marked, self._marked = None if order.capturing else self._marked, None
                route = Route(args.layout, args.topk_idx, self._runtime.ranks, marked)
                runtime = self._runtime
                about = About(
                    *(MADE_ON_DEVICE, runtime.rank, runtime.ranks, runtime.opening, runtime.epoch, -1, tokens),
                    capacity=num_worst_tokens,
                    channels=channels,
                    node_ranks=crossed,
                )
                known = route.new_handle(about)
                before = route.steps
                used += route.tensors
            opening = self._opening(form, known, present, tokens)
            if route is not None:
                opening = route.add_to(opening)
            outputs = Outputs(args, tokens * args.copies if reads_back else known.about.capacity, self._device)
            used += [known.route, known.number, known.is_token_in_rank]
            used += _copied(x, topk_idx, topk_weights, *layout)
            if not reads_back:
                # memory may run out, which must not count as an operation
                before += outputs.filling + outputs.allocate(known.about.capacity)
            with session.operation(form) as operation:
                if reads_back:
                    steps = (*before, *all_of(present.kernels.open(*present.addresses, wire, opening, 0)))
                    steps += outputs.filling
                    session.launch(operation, lambda: run_all(steps), [*used, *outputs.slots], finish=False)
                    session.wait_reply(operation, form, present)
                    # until the rows are moved the device waits for what stands here
                    known = self._after_opening(known, present)
                    before = outputs.allocate(known.about.capacity)
                if form.kind == NormalNotify.OPERATION_CACHED_DISPATCH and self._runtime.mask.any():
                    outputs.rows.view(torch.uint8).zero_()
                marks, kept = _marks_of(known, crossed)
                moved = present.kernels.dispatch(
                    *present.addresses,
                    wire,
                    opening,
                    outputs.addresses,
                    known.about.capacity,
                    marks if form.kind == NormalNotify.OPERATION_DISPATCH else 0,
                    kept,
                    reads_back,
                )
                steps = (*before, *all_of(moved))
                used += outputs.tensors + ([] if known.relay_marks is None else [known.relay_marks])
                event = session.launch(operation, lambda: run_all(steps), used, finish=not async_finish)
            per_local: list[int] = []
            if reads_back:
                counted = present.reply.counts(form.local_experts)
                per_local = (-(-counted // expert_alignment) * expert_alignment).tolist()
            session.end(form, tokens, known.about.remote_rows, started, reads_back)
            return outputs.x, outputs.topk_idx, outputs.topk_weights, per_local, known, event

    def _opening(self, form: RowFormat, handle: NormalGpuHandle, present: Present, tokens: int) -> NormalOpening:
        """What an operation of ``handle`` is opened with."""
        return NormalOpening(
            handle.is_token_in_rank.data_ptr(),
            tokens,
            handle.route.data_ptr(),
            0,
            handle.number.data_ptr(),
            present.reply.address,
            self._session.new_ticket(form),
        )

    def _after_opening(self, handle: NormalGpuHandle, present: Present) -> NormalGpuHandle:
        """The handle with what comes."""
        reply, about, marks = present.reply, handle.about, handle.relay_marks
        about = about._replace(capacity=reply[block.INFO_TOTAL], remote_rows=reply[block.INFO_REMOTE_ROWS])
        if marks is not None:
            marks = new_marks(reply[block.INFO_RELAYED], about.node_ranks, handle.route)
        return NormalGpuHandle.build(about, handle.route, handle.is_token_in_rank, handle.number, marks)

    # -- combine ------------------------------------------------------------------------------------------------

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """See :meth:`Normal.combine`; ``config`` and errors as for :meth:`dispatch`."""
        started = time.monotonic_ns()
        with self._gpu.order.operation(previous_event, own_stream=allocate_on_comm_stream):
            args = self._arguments.combine(x, handle, topk_weights, bias)
            form, rows, weights, biases, handle = args
            crossed = _on_its_way(handle, self._session.node_ranks(form.name))
            form = form._replace(node_ranks=crossed, channels=handle.about.channels)
            tokens, hidden, topk = handle.about.tokens, form.hidden, form.topk
            present, wire = self._session.enter(form, len(biases))
            out = torch.empty(tokens, hidden, dtype=rows.dtype, device=self._device)
            out_weights = None
            if topk:
                out_weights = torch.empty(tokens, topk, dtype=torch.float32, device=self._device)
            opening = self._opening(form, handle, present, tokens)
            tensors = NormalTensors(
                rows.data_ptr(), 0, address_of(weights), 0, out.data_ptr(), 0, address_of(out_weights), 0
            )
            given = tuple(one.data_ptr() for one in biases)
            launches = present.kernels.combine(
                *present.addresses, wire, opening, tensors, rows.shape[0], *_marks_of(handle, crossed), given
            )
            used = [rows, out, *biases, handle.route, handle.number, handle.is_token_in_rank]
            used += _copied(topk_weights, bias) + [one for one in (weights, out_weights) if one is not None]
            used += [] if handle.relay_marks is None else [handle.relay_marks]
            with self._session.operation(form) as operation:
                work = all_of(launches)
                event = self._session.launch(operation, lambda: run_all(work), used, finish=not async_finish)
            self._session.end(form, tokens, handle.about.remote_rows, started, reads_back=False)
            return out, out_weights, event


def _on_its_way(handle: NormalGpuHandle, crossed: int) -> int:
    """Ranks of a node, ``crossed`` or 0. A handle goes the way of its dispatch, unless a rank has been masked since, or
    this Buffer has other nodes: then rows go to each rank."""
    return crossed if handle.about.node_ranks == crossed else 0


def _marks_of(handle: NormalGpuHandle, crossed: int) -> tuple[int, int]:
    """(Address of the marks of rows that are forwarded, for how many there is room.)"""
    marks = handle.relay_marks
    return (marks.data_ptr(), len(marks)) if crossed and marks is not None else (0, 0)


def _copied(*given: object) -> list[torch.Tensor]:
    """Of what a caller passes: the tensors that were copied here, on the stream of the operation, to be contiguous."""
    tensors = chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in given)
    return [one for one in tensors if isinstance(one, torch.Tensor) and not one.is_contiguous()]
