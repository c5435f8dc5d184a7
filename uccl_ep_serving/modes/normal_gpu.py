"""Normal-mode dispatch and combine of tensors on a device: the host launches kernels and, at most once, reads back.

The same operations, arguments and wire as :mod:`.normal_cpu`. A first dispatch must know how many rows to return, so
the host waits until the opening has told it; with ``num_worst_tokens``, from a handle, and in a combine it reads
nothing back: numbers, routing and counts stay in device memory, and a captured graph replays. Returned tensors are the
caller's allocator's; peers write to the window, from where kernels copy.

What a kernel reports (a silent peer, a refused claim) is raised by the next call; until then ids are -1 and sums zero.
An expert id out of range counts as -1; it is raised by the call whose host reads back, else by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..data_plane.runtime import Runtime
from ..errors import ConfigError
from ..gpu.context import GpuContext
from ..handles import DispatchOrigin, EventOverlap, NormalGpuHandle
from ..kernels.blocks import normal_device as block
from ..kernels.blocks.normal_device import NodeTensors, NormalFormat, NormalTensors
from ..protocol.message import META_LINE, NormalNotify
from .epoch import Operation
from .normal_arguments import DispatchArguments, NormalArguments, check_experts, check_ids
from .normal_gpu_route import Marks, Route, all_of, new_marks, node_tensors, run_all, without_nodes
from .normal_gpu_session import NormalGpuSession, Present
from .row_format import RowFormat

__all__ = ["NormalGpu"]

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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
        self._arguments = NormalArguments(runtime.ranks, self._device, NormalGpuHandle, aligned=True)

    # -- layout -------------------------------------------------------------------------------------------------

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
            steps, used = all_of(marks.launches(self._kernels, 0, 0)), [*marks.tensors, *_copied(topk_idx)]
            if nodes is not None and nodes is not marks.per_rank:
                steps, used = (*steps, marks.node_counting(nodes)), [*used, nodes]
            event = self._gpu.order.run(lambda: run_all(steps), used, own_stream=True, finish=not async_finish)
            return marks.per_rank, nodes, marks.per_expert, marks.in_rank, event

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
        device.

        Args:
            config: its ``num_sms`` is the most programs that move rows; see ``program_budget``.

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
                self, x, handle, layout, topk_idx, topk_weights, expert_alignment, num_worst_tokens
            )
            args, before = self._crossing(args)
            form, tokens = args.form, args.rows.shape[0]
            reads_back = args.handle is None and not num_worst_tokens
            if reads_back and order.capturing:
                raise ConfigError(
                    f"{form.name}: how many rows come is read back, which no graph can capture: give num_worst_tokens"
                )
            present, wire = session.enter(form, 0)

            opening = self._prepare(args, before, present, wire, num_worst_tokens)
            work, handle, used = opening
            per_local: list[int] = []
            with session.operation(form) as operation:
                if reads_back:
                    handle, counted = self._open(operation, opening, form, present)
                    per_local = (-(-counted // expert_alignment) * expert_alignment).tolist()
                    work = ()
                outputs = _Outputs(args, handle.capacity, self._device)
                if form.kind == NormalNotify.OPERATION_CACHED_DISPATCH and self._runtime.mask.any():
                    outputs.rows.view(torch.uint8).zero_()
                work += self._exchange(args, outputs, handle, present, wire, config)
                used = [*used, *outputs.tensors, *_copied(x, topk_idx, topk_weights, *layout)]
                event = session.launch(operation, lambda: run_all(work), used, finish=not async_finish)
            session.end(form, tokens, handle.remote_rows, started, reads_back)
            return outputs.x, outputs.topk_idx, outputs.topk_weights, per_local, handle, event

    def _crossing(
        self, args: DispatchArguments[NormalGpuHandle]
    ) -> tuple[DispatchArguments[NormalGpuHandle], tuple[Callable[[], None], ...]]:
        """With how rows cross to other nodes, and what must be launched first where a handle knows another way."""
        crossed = self._session.node_ranks(args.form.name)
        handle, steps = self._on_its_way(args.handle, crossed)
        crossed = crossed if handle is None or handle.nodes is not None else 0
        return args._replace(form=args.form._replace(node_ranks=crossed), handle=handle), steps

    def _on_its_way(
        self, handle: NormalGpuHandle | None, crossed: int
    ) -> tuple[NormalGpuHandle | None, tuple[Callable[[], None], ...]]:
        """A handle goes the way of its dispatch, unless a rank has been masked since."""
        if handle is None or handle.nodes is None or handle.nodes.node_ranks == crossed:
            return handle, ()
        return without_nodes(handle, self._kernels)

    def _prepare(
        self,
        args: DispatchArguments[NormalGpuHandle],
        before: tuple[Callable[[], None], ...],
        present: Present,
        wire: NormalFormat,
        num_worst_tokens: int,
    ) -> _Opening:
        """The route, where no handle has it, and the opening. Nothing is launched yet."""
        used, handle = args.tensors, args.handle
        cached = handle is not None
        if handle is None:
            assert args.layout is not None
            runtime = self._runtime
            route = Route(args.layout, args.topk_idx, runtime.ranks, runtime.rank, wire.node_ranks)
            used += route.tensors
            before = route.steps(self._kernels, present.addresses)
            origin = DispatchOrigin(self, self._runtime.epoch, -1, args.rows.shape[0])
            handle = route.new_handle(origin, args.copies, num_worst_tokens)
            counts = route.per_expert
        else:
            counts = handle.recv_rows
        used += [handle.send_rows, handle.recv_rows, handle.send_tokens, handle.number, counts]
        used += node_tensors(handle)
        launches = self._kernels.open(
            *present.addresses,
            wire,
            handle.send_rows.data_ptr(),
            handle.recv_rows.data_ptr() if cached else 0,
            counts.data_ptr(),
            handle.number.data_ptr() if cached else 0,
            handle.number.data_ptr(),
            handle.recv_rows.data_ptr(),
            present.reply.address,
            self._session.new_ticket(),
            num_worst_tokens,
            0 if handle.nodes is None else handle.nodes.passing.data_ptr(),
        )
        return _Opening((*before, *all_of(launches)), handle, used)

    def _open(
        self, operation: Operation, opening: _Opening, form: RowFormat, present: Present
    ) -> tuple[NormalGpuHandle, npt.NDArray[np.int64]]:
        """Open and read back: the handle with what comes in it, and the rows of each local expert."""
        reply = present.reply
        self._session.launch(operation, lambda: run_all(opening.work), opening.used, finish=False)
        self._session.wait_reply(operation, form, present)
        handle = opening.handle._replace(
            capacity=reply[block.INFO_TOTAL], remote_rows=reply[block.INFO_REMOTE_ROWS], most=reply[block.INFO_MOST]
        )
        if handle.nodes is not None:
            marks = new_marks(reply[block.INFO_RELAYED], handle.nodes.node_ranks, handle.send_rows)
            handle = handle._replace(nodes=handle.nodes._replace(relay_marks=marks))
        return handle, reply.counts(form.local_experts)

    def _exchange(
        self,
        args: DispatchArguments[NormalGpuHandle],
        outputs: _Outputs,
        handle: NormalGpuHandle,
        present: Present,
        wire: NormalFormat,
        config: Any,
    ) -> tuple[Callable[[], None], ...]:
        """What moves the rows of an opened dispatch."""
        tokens = args.rows.shape[0]
        tensors = NormalTensors(
            args.rows.data_ptr(),
            handle.send_tokens.data_ptr(),
            tokens,
            _address(args.topk_idx),
            _address(args.topk_weights),
            _address(args.scales),
            outputs.rows.data_ptr(),
            _address(outputs.topk_idx),
            _address(outputs.topk_weights),
            _address(outputs.scales),
            handle.capacity,
        )
        nodes = None
        if handle.nodes is not None:
            room = 2 * self._kernels.slot_rows(self._runtime.layout, wire)
            passes = torch.empty(self._runtime.ranks, room, dtype=torch.int32, device=self._device)
            outputs.scratch = [passes, *node_tensors(handle)]
            marks, kept = handle.nodes.relay_marks, wire.kind == NormalNotify.OPERATION_DISPATCH
            nodes = NodeTensors(
                handle.is_token_in_rank.data_ptr(),
                passes.data_ptr(),
                room,
                marks.data_ptr() if kept else 0,
                len(marks),
                0,
            )
        steps = self._steps(wire, present, handle, tokens)
        programs = self._session.programs(args.form, present, tokens, handle.copies, steps, config)
        return all_of(self._kernels.exchange(*present.addresses, wire, tensors, nodes, steps, programs))

    # -- combine ------------------------------------------------------------------------------------------------

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """See :meth:`Normal.combine`; ``config`` and errors as for :meth:`dispatch`."""
        started = time.monotonic_ns()
        with self._gpu.order.operation(previous_event, own_stream=allocate_on_comm_stream):
            args = self._arguments.combine(self, x, handle, topk_weights, bias)
            form, rows, weights, biases, handle = args
            crossed = self._session.node_ranks(form.name)
            handle, before = self._on_its_way(handle, crossed)
            form = form._replace(node_ranks=0 if handle.nodes is None else crossed)
            tokens, hidden, topk = handle.origin.tokens, form.hidden, form.topk
            present, wire = self._session.enter(form, len(biases))
            out = torch.empty(tokens, hidden, dtype=rows.dtype, device=self._device)
            out_weights = None
            if topk:
                out_weights = torch.empty(tokens, topk, dtype=torch.float32, device=self._device)
            back = self._rows_to_gather(form, handle)
            gathered = torch.empty(back, hidden, dtype=rows.dtype, device=self._device)
            gathered_weights = torch.empty(back, topk, dtype=torch.float32, device=self._device)
            launches = self._kernels.open(
                *present.addresses,
                wire,
                handle.send_rows.data_ptr(),
                handle.recv_rows.data_ptr(),
                0,
                handle.number.data_ptr(),
                0,
                0,
                present.reply.address,
                self._session.new_ticket(),
                0,
                0 if handle.nodes is None else handle.nodes.passing.data_ptr(),
            )
            nodes, scratch = None, node_tensors(handle)
            if handle.nodes is not None:
                marks, size = handle.nodes.relay_marks, handle.nodes.node_ranks
                counts = torch.empty(
                    len(marks) + self._runtime.ranks // size, size, dtype=torch.int32, device=self._device
                )
                scratch.append(counts)
                nodes = NodeTensors(0, 0, 0, marks.data_ptr(), len(marks), counts.data_ptr())
            tensors = NormalTensors(
                rows.data_ptr(),
                0,
                rows.shape[0],
                0,
                _address(weights),
                0,
                gathered.data_ptr(),
                0,
                gathered_weights.data_ptr(),
                0,
                back,
            )
            steps = self._steps(wire, present, handle, tokens)
            programs = self._session.programs(form, present, tokens, handle.copies, steps, config)
            launches += self._kernels.exchange(*present.addresses, wire, tensors, nodes, steps, programs)
            launches += self._kernels.reduce(
                *present.addresses,
                wire,
                rows.data_ptr(),
                rows.shape[0],
                _address(weights),
                handle.places.data_ptr(),
                tokens,
                gathered.data_ptr(),
                gathered_weights.data_ptr(),
                tuple(one.data_ptr() for one in biases),
                out.data_ptr(),
                _address(out_weights),
                programs,
            )
            used = [rows, out, gathered, gathered_weights, *biases, *handle[:6], *scratch, *_copied(topk_weights, bias)]
            used += [one for one in (weights, out_weights) if one is not None]
            work = before + all_of(launches)
            with self._session.operation(form) as operation:
                event = self._session.launch(operation, lambda: run_all(work), used, finish=not async_finish)
            self._session.end(form, tokens, handle.remote_rows, started, reads_back=False)
            return out, out_weights, event

    def _rows_to_gather(self, form: RowFormat, handle: NormalGpuHandle) -> int:
        """How many rows a combine gathers before it sums them: 0 where they fit the heap, from where kernels sum."""
        back = handle.remote_rows if handle.remote_rows >= 0 else handle.origin.tokens * handle.copies
        room = back * (form.row_bytes + form.meta_bytes) + META_LINE * (self._runtime.ranks + 1)
        return 0 if room <= self._runtime.layout.normal.heap else back

    # -- inside -------------------------------------------------------------------------------------------------

    def _steps(self, wire: NormalFormat, present: Present, handle: NormalGpuHandle, tokens: int) -> int:
        runtime = self._runtime
        ranks, layout = runtime.ranks, runtime.layout
        # where the host reads nothing back: what the advice for num_worst_tokens comes to
        most = handle.most if handle.most >= 0 else max(tokens, -(-handle.capacity // ranks))
        room = ranks * max(most, tokens) * (wire.row_bytes + wire.meta_bytes) + META_LINE * (ranks + 1)
        fits = room <= layout.normal.heap
        steps = self._kernels.steps(layout, runtime.channels, wire, most, not present.space.all_mapped, fits)
        # a rank alone still copies its own rows
        return self._session.with_spare(steps or 1, wire.kind, present)


class _Opening(NamedTuple):
    """A dispatch that is ready to be opened.

    Attributes:
        work: what is launched, up to and with the opening.
        handle: what that fills.
        used: tensors that it uses.
    """

    work: tuple[Callable[[], None], ...]
    handle: NormalGpuHandle
    used: list[torch.Tensor]


class _Outputs:
    """What dispatch returns, on the device. Only ids and weights have content before the kernels have run: -1 and 0."""

    def __init__(self, args: DispatchArguments[NormalGpuHandle], capacity: int, device: torch.device) -> None:
        rows, scales, topk = args.rows, args.scales, args.form.topk
        self.rows = torch.empty(capacity, rows.shape[1], dtype=rows.dtype, device=device)
        self.scales = self.topk_idx = self.topk_weights = None
        self.scratch: list[torch.Tensor] = []
        if scales is not None:
            self.scales = torch.empty(capacity, scales.shape[1], dtype=scales.dtype, device=device)
        if topk:
            self.topk_idx = torch.full((capacity, topk), -1, dtype=torch.int64, device=device)
            self.topk_weights = torch.zeros(capacity, topk, dtype=torch.float32, device=device)

    @property
    def x(self) -> Received:
        """As dispatch's caller gets it."""
        return self.rows if self.scales is None else (self.rows, self.scales)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        given = [one for one in (self.scales, self.topk_idx, self.topk_weights) if one is not None]
        return [self.rows, *given, *self.scratch]


def _copied(*given: object) -> list[torch.Tensor]:
    """Of what a caller passes: the tensors that were copied here, on the stream of the operation, to be contiguous."""
    tensors = chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in given)
    return [one for one in tensors if isinstance(one, torch.Tensor) and not one.is_contiguous()]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
