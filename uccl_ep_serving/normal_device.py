"""Normal-mode dispatch and combine of tensors on a device: the host launches kernels and, at most once, looks.

The same operations, arguments and wire as :mod:`.normal`. A first dispatch must know how many rows to return, so the
host waits until the opening has told it; with ``num_worst_tokens``, from a handle, and in a combine it reads nothing
back: numbers, routing and counts stay in device memory, and a captured graph replays. Returned tensors are the
caller's allocator's; peers write to the window, from where kernels copy.

What a kernel reports (a silent peer, a refused claim, an expert id out of range) is raised by the next call; until then
ids are -1 and sums zero.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .config import Settings
from .device_ground import DeviceGround
from .device_space import DeviceSpace
from .errors import ConfigError, TransportError, UcclEpError
from .handles import DispatchOrigin, EventOverlap
from .kernel_space import SLICE_NS, KernelSpace
from .kernels.interface import DeviceNormalKernels, DeviceNormalStateBlock, KernelLaunch, NormalFormat, NormalTensors
from .kernels.select import device_normal_kernels
from .normal_device_format import check_room, difference, wire_format
from .normal_device_route import Marks, Route, all_of, run_all
from .normal_device_told import Told
from .normal_inputs import (
    bias_pair,
    check_alignment,
    check_device,
    check_layout,
    check_topk,
    combine_weights,
    plain_dtype,
    rows_and_scales,
)
from .protocol.layout import LowLatencyPlan, WindowLayout
from .protocol.message import NormalNotify
from .row_format import RowFormat

__all__ = ["DeviceNormal", "DeviceNormalHandle", "DeviceNormalRuntime"]

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_DISPATCH = NormalNotify.OPERATION_DISPATCH
_CACHED = NormalNotify.OPERATION_CACHED_DISPATCH
_COMBINE = NormalNotify.OPERATION_COMBINE
#: Bytes of rows that are worth a program: it moves as much in about the time that a turn takes.
_PROGRAM_BYTES = 64 << 10
#: Seconds that the device may take beyond the time limit of the kernel that the host waits for.
_GRACE = 30.0


class DeviceNormalRuntime(Protocol):
    """What normal mode on a device needs of a Runtime; see there."""

    rank: int
    ranks: int
    generation: int

    @property
    def settings(self) -> Settings: ...
    @property
    def space(self) -> KernelSpace: ...
    @property
    def layout(self) -> WindowLayout: ...
    @property
    def mask(self) -> npt.NDArray[np.int32]: ...
    @property
    def record(self) -> Callable[..., None]: ...
    @property
    def all_direct(self) -> bool: ...
    @property
    def stale(self) -> str: ...
    def before_unmapping(self, release: Callable[[], None]) -> None: ...
    def check(self, phase: str) -> None: ...
    def begin_operation(self) -> None: ...
    def grow(self, plan: LowLatencyPlan | None, objection: str = "") -> None: ...


class DeviceNormalHandle(NamedTuple):
    """What a dispatch on a device hands to combine and to cached dispatches. Tensors are on the device.

    Attributes:
        send_rows: int64 [R], rows sent to each rank.
        recv_rows: int64 [R], rows received from each rank.
        send_tokens: int32 [R, T], token indices sent to each rank; what follows is undefined.
        places: int32 [T, R], the token's place in the list of the rank, or -1.
        is_token_in_rank: bool [T, R].
        number: int64 [1], number of the dispatch, equal on all ranks.
        capacity: rows of the tensor that dispatch returned.
        sent_away: rows for other ranks; most: rows to or from one other rank. -1 where the host has not looked.
        copies: most ranks that a token goes to.
        origin: the dispatch it comes from; its number stands in ``number``.
    """

    send_rows: torch.Tensor
    recv_rows: torch.Tensor
    send_tokens: torch.Tensor
    places: torch.Tensor
    is_token_in_rank: torch.Tensor
    number: torch.Tensor
    capacity: int
    sent_away: int
    most: int
    copies: int
    origin: DispatchOrigin


class _Generation(NamedTuple):
    """What belongs to one window generation."""

    space: DeviceSpace
    state: DeviceNormalStateBlock
    told: Told

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the kernel context and the state block."""
        return self.space.context, self.state.address


class DeviceNormal:
    """Normal mode of one Buffer for tensors on a device. Collective, and not thread-safe: one host thread calls it.

    Args:
        runtime: of the Buffer.
        ground: what it shares with low-latency mode.
    """

    def __init__(self, runtime: DeviceNormalRuntime, ground: DeviceGround) -> None:
        self._runtime = runtime
        self._ground = ground
        self._device = ground.memory.device
        self._kernels: DeviceNormalKernels = device_normal_kernels(runtime.ranks, ground.interpreted)
        self._present: _Generation | None = None
        self._generation = -1
        self._ticket = 0
        self._broken = ""
        self._last: RowFormat | None = None
        self._warm: set[tuple[RowFormat, int]] = set()

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
        _wait_for(previous_event)
        ranks = self._runtime.ranks
        check_topk(topk_idx, None, None, self._device)
        if num_experts < 1 or num_experts % ranks:
            raise ConfigError(f"num_experts = {num_experts} must be a positive multiple of the {ranks} ranks")
        ids = topk_idx.contiguous()
        with self._allocating(allocate_on_comm_stream):
            marks = Marks(ids, num_experts, ranks)
        launches = marks.launches(self._kernels, 0, 0)
        event = self._run(launches, marks.tensors, finish=not async_finish)
        nodes = None if self._runtime.all_direct else marks.per_rank
        return marks.per_rank, nodes, marks.per_expert, marks.in_rank, event

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
        """See :meth:`Normal.dispatch`. Where ids are given they decide: the layout is counted again on the device.

        Args:
            config: its ``num_sms`` is the number of programs that move rows.

        Raises:
            ConfigError: wrong arguments; ranks that were given different operations (at once, or with
                ``num_worst_tokens`` and from a handle by the next call), after which the group goes on; a dispatch of
                unknown size while a graph is captured.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: of this or an earlier operation.
        """
        started = time.monotonic_ns()
        phase = "normal dispatch" if handle is None else "normal cached dispatch"
        _wait_for(previous_event)
        rows, scales, dtype = rows_and_scales(x, self._device)
        self._check_start("x", rows)
        tokens, hidden = rows.shape
        runtime, ranks = self._runtime, self._runtime.ranks
        given = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        in_rank = per_expert = None
        local_experts = topk = 0
        origin = (-1, -1)
        if handle is not None:
            self._check_handle(handle, tokens)
            if any(one is not None for one in given) or num_worst_tokens:
                raise ConfigError("a cached dispatch takes x and handle only: the layout comes from the handle")
            origin = (handle.origin.generation, -1)
        else:
            check_alignment(expert_alignment, num_worst_tokens)
            _, in_rank, per_expert = check_layout(
                num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, tokens, ranks, self._device
            )
            local_experts = len(per_expert) // ranks
            if topk_idx is not None or topk_weights is not None:
                topk_idx, topk_weights = check_topk(topk_idx, topk_weights, tokens, self._device)
                topk = topk_idx.shape[1]
            if not num_worst_tokens and self._ground.lane.capturing:
                raise ConfigError(
                    f"{phase}: how many rows come is read back, which no graph can capture: give num_worst_tokens"
                )
        scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
        kind = _DISPATCH if handle is None else _CACHED
        row_bytes = hidden * rows.element_size()
        form = RowFormat(kind, dtype, hidden, row_bytes, topk, scale_bytes, local_experts, origin=origin)
        here, wire = self._adopt(phase, form, 0)
        programs = self._programs(config, tokens * form.row_bytes * min(topk or ranks, ranks))

        used: list[torch.Tensor] = [rows]
        used += [one for one in (scales, topk_idx, topk_weights) if one is not None]
        before: tuple[Callable[[], None], ...] = ()
        if handle is None:
            assert in_rank is not None
            assert per_expert is not None
            route = Route(in_rank, per_expert, topk_idx, ranks)
            used += route.tensors
            before = route.steps(self._kernels, here.addresses)
            handle = DeviceNormalHandle(
                route.rows,
                torch.zeros_like(route.rows),
                route.lists,
                route.places,
                route.in_rank,
                torch.empty(1, dtype=torch.int64, device=self._device),
                0,
                -1,
                -1,
                min(topk or ranks, ranks),
                DispatchOrigin(self, runtime.generation, -1, tokens),
            )
            counts = route.per_expert
        else:
            counts = handle.recv_rows
        used += [handle.send_rows, handle.recv_rows, handle.send_tokens, handle.number, counts]
        self._ticket += 1
        opening = self._kernels.open(
            *here.addresses,
            wire,
            handle.send_rows.data_ptr(),
            0 if kind == _DISPATCH else handle.recv_rows.data_ptr(),
            counts.data_ptr(),
            0 if kind == _DISPATCH else handle.number.data_ptr(),
            handle.number.data_ptr(),
            handle.recv_rows.data_ptr(),
            here.told.address,
            self._ticket,
            num_worst_tokens,
        )
        steps = (*before, *all_of(opening))
        per_local: list[int] = []
        runtime.begin_operation()
        self._last = form
        if kind == _DISPATCH and not num_worst_tokens:
            # the peers count on the rows from here on: what keeps this rank from sending them leaves the group apart
            self._broken = f"{phase}: opened and not run"
            self._ground.lane.run(lambda: run_all(steps), used, own_stream=True, finish=False)
            steps = ()
            self._wait_told(phase, form, here)
            capacity = here.told[self._kernels.total]
            counted = here.told.counts(local_experts)
            per_local = (-(-counted // expert_alignment) * expert_alignment).tolist()
            handle = handle._replace(
                capacity=capacity, sent_away=here.told[self._kernels.away], most=here.told[self._kernels.most]
            )
        elif kind == _DISPATCH:
            capacity = num_worst_tokens
            handle = handle._replace(capacity=capacity)
        else:
            capacity = handle.capacity

        with self._allocating(allocate_on_comm_stream):
            recv_x = torch.empty(capacity, hidden, dtype=rows.dtype, device=self._device)
            recv_scales = recv_idx = recv_weights = None
            if scales is not None:
                recv_scales = torch.empty(capacity, scales.shape[1], dtype=scales.dtype, device=self._device)
            if topk:
                recv_idx = torch.full((capacity, topk), -1, dtype=torch.int64, device=self._device)
                recv_weights = torch.zeros(capacity, topk, dtype=torch.float32, device=self._device)
        if kind == _CACHED and runtime.mask.any():
            recv_x.view(torch.uint8).zero_()
        used += [one for one in (recv_x, recv_scales, recv_idx, recv_weights) if one is not None]
        tensors = NormalTensors(
            rows.data_ptr(),
            handle.send_tokens.data_ptr(),
            tokens,
            _address(topk_idx),
            _address(topk_weights),
            _address(scales),
            recv_x.data_ptr(),
            _address(recv_idx),
            _address(recv_weights),
            _address(recv_scales),
            capacity,
        )
        turns = self._turns(wire, here, handle, tokens)
        steps += all_of(self._kernels.exchange(*here.addresses, wire, tensors, turns, programs))
        event = self._ground.lane.run(lambda: run_all(steps), used, own_stream=True, finish=not async_finish)
        self._broken = ""
        runtime.record("normal_dispatch", tokens, max(handle.sent_away, 0), time.monotonic_ns() - started)
        if self._ground.interpreted:
            self._check(phase)
        received = recv_x if recv_scales is None else (recv_x, recv_scales)
        return received, recv_idx, recv_weights, per_local, handle, event

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
        phase = "normal combine"
        _wait_for(previous_event)
        self._check_handle(handle, None)
        rows, dtype = plain_dtype(x, self._device)
        self._check_start("x", rows)
        if len(rows) != handle.capacity:
            raise ConfigError(f"x has {len(rows)} rows, and the dispatch of this handle returned {handle.capacity}")
        tokens, hidden = handle.origin.tokens, rows.shape[1]
        biases = bias_pair(bias, tokens, rows)
        for one in biases:
            self._check_start("bias", one)
        topk = 0
        if topk_weights is not None:
            topk_weights = combine_weights(topk_weights, len(rows), self._device)
            topk = topk_weights.shape[1]
        origin = (handle.origin.generation, -1)
        form = RowFormat(_COMBINE, dtype, hidden, hidden * rows.element_size(), topk, origin=origin)
        here, wire = self._adopt(phase, form, len(biases))
        programs = self._programs(config, tokens * form.row_bytes * handle.copies)
        with self._allocating(allocate_on_comm_stream):
            out = torch.empty(tokens, hidden, dtype=rows.dtype, device=self._device)
            weights = None
            if topk:
                weights = torch.empty(tokens, topk, dtype=torch.float32, device=self._device)
        # rows that need not fit the heap are gathered here before they are summed
        back = handle.sent_away if handle.sent_away >= 0 else tokens * handle.copies
        room = back * (form.row_bytes + form.meta_bytes) + 128 * (self._runtime.ranks + 1)
        if room <= self._runtime.layout.normal.heap:
            back = 0
        gathered = torch.empty(back, hidden, dtype=rows.dtype, device=self._device)
        gathered_weights = torch.empty(back, topk, dtype=torch.float32, device=self._device)
        self._ticket += 1
        addresses = here.addresses
        launches = self._kernels.open(
            *addresses,
            wire,
            handle.send_rows.data_ptr(),
            handle.recv_rows.data_ptr(),
            0,
            handle.number.data_ptr(),
            0,
            0,
            here.told.address,
            self._ticket,
            0,
        )
        tensors = NormalTensors(
            rows.data_ptr(),
            0,
            tokens,
            0,
            _address(topk_weights),
            0,
            gathered.data_ptr(),
            0,
            gathered_weights.data_ptr(),
            0,
            back,
        )
        turns = self._turns(wire, here, handle, tokens)
        launches += self._kernels.exchange(*addresses, wire, tensors, turns, programs)
        launches += self._kernels.reduce(
            *addresses,
            wire,
            rows.data_ptr(),
            _address(topk_weights),
            handle.places.data_ptr(),
            tokens,
            gathered.data_ptr(),
            gathered_weights.data_ptr(),
            tuple(one.data_ptr() for one in biases),
            out.data_ptr(),
            _address(weights),
            programs,
        )
        used = [rows, out, gathered, gathered_weights, *biases, *handle[:6]]
        used += [one for one in (topk_weights, weights) if one is not None]
        self._runtime.begin_operation()
        self._last = form
        event = self._run(launches, used, finish=not async_finish)
        self._runtime.record("normal_combine", tokens, max(handle.sent_away, 0), time.monotonic_ns() - started)
        if self._ground.interpreted:
            self._check(phase)
        return out, weights, event

    # -- inside -------------------------------------------------------------------------------------------------

    def _adopt(self, phase: str, form: RowFormat, biases: int) -> tuple[_Generation, NormalFormat]:
        """Refuse what is known to be wrong, and give what belongs to the present windows, with kernels compiled.

        Raises:
            ConfigError: a row does not fit a chunk or a round slot; or what an earlier operation has found by now.
        """
        runtime = self._runtime
        self._check(phase)
        if self._broken:
            raise UcclEpError(
                f"{phase}: an earlier operation of this Buffer ended half-way ({self._broken}), so the ranks no longer "
                "agree on message numbers. Close this Buffer on all ranks and build a new one"
            )
        if runtime.stale:
            runtime.grow(None)
        if runtime.ranks > 1:
            check_room(form, runtime.layout.normal)
        self._kernels.check(runtime.settings, form.topk)
        if self._present is None or self._generation != runtime.generation:
            if self._ground.lane.capturing:
                raise ConfigError(f"{phase}: dispatch and combine once before a graph is captured")
            space = self._ground.space()
            told = Told(
                self._ground.memory,
                self._kernels.info_bytes(runtime.layout.normal.local_experts),
                self._kernels.told,
                self._kernels.told_words * runtime.ranks,
            )
            runtime.before_unmapping(told.close)
            state = self._kernels.new_state(runtime.layout, self._device)
            self._present, self._generation = _Generation(space, state, told), runtime.generation
        wire = wire_format(form)
        kind = (form._replace(origin=(-1, -1)), biases)
        if kind not in self._warm:
            # before this rank tells the others of the operation: compiling would eat into their deadline
            self._kernels.warm(wire, form.local_experts * runtime.ranks, biases)
            self._warm.add(kind)
        return self._present, wire

    def _check(self, phase: str) -> None:
        """Raise what is known to be wrong: of this Buffer, or of an operation whose end nobody waited for."""
        self._ground.take_report()
        self._runtime.check(phase)
        if self._present is None or self._generation != self._runtime.generation:
            return
        told = self._present.told
        if told[self._kernels.parted]:
            told.clear(self._kernels.parted)
            assert self._last is not None
            raise ConfigError(difference(self._runtime.rank, self._last, told))
        beyond = told[self._kernels.beyond]
        if beyond:
            told.clear(self._kernels.beyond)
            raise ConfigError(
                f"{beyond} rows arrived where num_worst_tokens promised fewer; all ranks received, the group goes on. "
                "Next step: num_worst_tokens = ranks x the most tokens of a rank"
            )

    def _wait_told(self, phase: str, form: RowFormat, here: _Generation) -> None:
        """Wait until the opening of this call has told the host what it knows. Raises what it found to be wrong."""
        runtime, kernels = self._runtime, self._kernels
        begun = look = time.monotonic()
        while here.told[kernels.ticket] != self._ticket:
            now = time.monotonic()
            if now - look > SLICE_NS * 1e-9:
                look = now
                runtime.space.watch()
            if now - begun > runtime.settings.timeout + _GRACE:
                raise TransportError(
                    f"{phase}: {self._device} has not run the opening within {now - begun:.0f} s. Likely cause: other "
                    "work on the device does not end. Next step: look at what runs there"
                )
            if now - begun > 1e-3:
                time.sleep(20e-6)
        different = here.told[kernels.different]
        if different:
            if different > 0:
                self._broken = ""
            self._check(phase)
            raise UcclEpError(f"{phase}: a kernel failed and has not said why")

    def _check_handle(self, handle: object, tokens: int | None) -> None:
        if not isinstance(handle, DeviceNormalHandle):
            raise ConfigError(f"handle must come from a normal-mode dispatch on a device, not {type(handle).__name__}")
        if handle.origin.owner is not self:
            raise ConfigError("handle comes from another Buffer")
        if tokens is not None and handle.origin.tokens != tokens:
            raise ConfigError(f"handle belongs to a dispatch of {handle.origin.tokens} tokens, x has {tokens}")

    def _check_start(self, name: str, tensor: torch.Tensor) -> None:
        check_device(self._device, **{name: tensor})
        if tensor.numel() and tensor.data_ptr() % 16:
            raise ConfigError(f"{name} must start on a multiple of 16 bytes")

    def _programs(self, config: Any, nbytes: int) -> int:
        """Programs that move ``nbytes`` bytes: no more than ``config`` allows, nor than are worth it."""
        allowed = getattr(config, "num_sms", 20) or 1
        return int(max(min(allowed, -(-nbytes // _PROGRAM_BYTES)), 1))

    def _turns(self, wire: NormalFormat, here: _Generation, handle: DeviceNormalHandle, tokens: int) -> int:
        runtime = self._runtime
        ranks, layout = runtime.ranks, runtime.layout
        # where the host has not looked: what the advice for num_worst_tokens comes to
        most = handle.most if handle.most >= 0 else max(tokens, -(-handle.capacity // ranks))
        room = ranks * max(most, tokens) * (wire.row_bytes + wire.meta_bytes) + 128 * (ranks + 1)
        fits = room <= layout.normal.heap
        turns = self._kernels.turns(layout, runtime.settings.channels, wire, most, not here.space.all_mapped, fits)
        # a rank alone still copies its own rows
        return turns or 1

    def _allocating(self, on_comm_stream: bool) -> contextlib.AbstractContextManager[Any]:
        stream = self._ground.comm_stream
        return torch.cuda.stream(stream) if on_comm_stream and stream is not None else contextlib.nullcontext()

    def _run(self, launches: tuple[KernelLaunch, ...], used: list[torch.Tensor], finish: bool) -> EventOverlap:
        return self._ground.lane.run(lambda: run_all(all_of(launches)), used, own_stream=True, finish=finish)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _wait_for(event: EventOverlap | None) -> None:
    if event is not None:
        event.current_stream_wait()
