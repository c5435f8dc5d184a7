"""What outlives one normal-mode operation on a device: counters, kernels and words of the present window.

Every epoch has its own counters in device memory and its own words in pinned memory. Operations of a Buffer
do not overlap: what the words say belongs to the last one, and is raised by it or by the next call.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..config import Settings
from ..data_plane.kernel_space import SLICE_NS, KernelSpace
from ..errors import ConfigError, TransportError, UcclEpError
from ..gpu.context import GpuContext
from ..gpu.program_budget import LINK_BANDWIDTH, PCIE_BANDWIDTH, PROXY_BANDWIDTH, budget, row_traffic
from ..gpu.spare_turns import SpareTurns
from ..gpu.window import DeviceSpace
from ..handles import EventOverlap
from ..kernels.interface import DeviceNormalKernels, DeviceNormalStateBlock, NormalFormat
from ..kernels.select import device_normal_kernels
from ..protocol.layout import LowLatencyPlan, WindowLayout
from ..protocol.message import NormalNotify
from .normal_gpu_format import difference, wire_format
from .normal_gpu_reply import OpenReply
from .row_format import RowFormat, check_room

__all__ = ["DeviceNormalRuntime", "Generation", "NormalGpuSession"]

_log = logging.getLogger("uccl_ep_serving")

#: Seconds that the device may take beyond the time limit of the kernel that the host waits for.
_GRACE = 30.0
#: More than any device has multiprocessors.
_MOST_PROGRAMS = 1 << 16


class DeviceNormalRuntime(Protocol):
    """What normal mode on a device needs of a Runtime; see there."""

    rank: int
    ranks: int

    @property
    def epoch(self) -> int: ...
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
    def node_ranks(self) -> int: ...
    @property
    def nic_bandwidth(self) -> float: ...
    @property
    def stale(self) -> str: ...
    @property
    def rebuild_requested(self) -> bool: ...
    def before_unmapping(self, release: Callable[[], object]) -> None: ...
    def check(self, phase: str) -> None: ...
    def begin_operation(self) -> None: ...
    def rebuild(self, plan: LowLatencyPlan | None, objection: str = "") -> None: ...


class Generation(NamedTuple):
    """What belongs to one epoch.

    Attributes:
        space: the kernel context, in device memory.
        state: counters, in device memory.
        told: what the opening of an operation tells the host.
    """

    space: DeviceSpace
    state: DeviceNormalStateBlock
    told: OpenReply

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the kernel context and the state block."""
        return self.space.context, self.state.address


class NormalGpuSession:
    """Normal-mode state of one Buffer on one rank.

    An operation adopts the present windows, takes a ticket for its opening, begins, perhaps waits for what the opening
    tells, and ends.

    Args:
        runtime: of the Buffer.
        gpu: memory, order and space, shared with low-latency mode.

    Attributes:
        kernels: of normal mode.
    """

    def __init__(self, runtime: DeviceNormalRuntime, gpu: GpuContext) -> None:
        with gpu.on_its_device():
            self.kernels: DeviceNormalKernels = device_normal_kernels(runtime.ranks, gpu.interpreted)
        self._runtime = runtime
        self._gpu = gpu
        self._present: Generation | None = None
        self._epoch = -1
        self._ticket = 0
        self._broken = ""
        self._looks = False
        self._last: RowFormat | None = None
        self._warm: set[tuple[RowFormat, int]] = set()
        self._told_reasons: set[tuple[str, str]] = set()
        #: Of dispatches and of combines, in the present windows.
        self._spare = (SpareTurns(), SpareTurns())

    def node_ranks(self, phase: str) -> int:
        """In the present windows: ranks of a node when each row crosses once to a node, else 0; equal on all ranks.

        Raises:
            ConfigError: what an earlier operation has found by now. UcclEpError: it ended half-way.
        """
        runtime = self._runtime
        self.check(phase)
        if runtime.stale or self._epoch != runtime.epoch:
            # message numbers begin anew, whatever became of the last operation
            self._broken = ""
        if self._broken:
            raise UcclEpError(
                f"{phase}: an earlier operation of this Buffer ended half-way ({self._broken}), so the ranks no "
                "longer agree on message numbers. Close this Buffer on all ranks and build a new one"
            )
        if runtime.stale:
            runtime.rebuild(None)
        return self._gpu.crossed

    def adopt(self, form: RowFormat, biases: int) -> tuple[Generation, NormalFormat]:
        """After :meth:`node_ranks`: what belongs to the present windows, with kernels compiled.

        Raises:
            ConfigError: a row does not fit a chunk or a round slot.
        """
        runtime = self._runtime
        if runtime.ranks > 1:
            check_room(form, runtime.layout.normal)
        self.kernels.check(runtime.settings, form.topk)
        if self._present is None or self._epoch != runtime.epoch:
            self._present, self._epoch = self._build(form.name), runtime.epoch
            self._spare = (SpareTurns(), SpareTurns())
        wire = wire_format(form)
        kind = (form._replace(origin=(-1, -1)), biases)
        if kind not in self._warm:
            if self._gpu.order.capturing:
                raise ConfigError(
                    f"{form.name}: dispatch and combine once in the same formats before a graph is captured"
                )
            # before this rank tells the others of the operation: compiling would eat into their deadline
            with self._gpu.on_its_device():
                self.kernels.warm(wire, form.local_experts * runtime.ranks, biases)
            self._warm.add(kind)
        return self._present, wire

    def with_spare(self, turns: int, kind: int, here: Generation) -> int:
        """``turns`` of an operation, and as many more as those before it have missed."""
        which = int(kind == NormalNotify.OPERATION_COMBINE)
        return turns + self._spare[which].of(turns, here.told[self.kernels.late[which]])

    def programs(self, form: RowFormat, here: Generation, tokens: int, copies: int, turns: int, config: Any) -> int:
        """Programs that move the rows of an operation; each new reason for their number is logged once.

        Args:
            copies: most ranks that a token goes to.
            turns: of the operation.
            config: its ``num_sms`` is the most that the caller allows.
        """
        settings, ranks, space = self._runtime.settings, self._runtime.ranks, here.space
        most = max(min(getattr(config, "num_sms", 20), self._multiprocessors), 1)
        if settings.programs:
            programs, reason = min(settings.programs, most), f"UCCL_EP_PROGRAMS={settings.programs}"
        else:
            traffic = row_traffic(
                tokens, form.row_bytes, copies, ranks, space.mapped, form.node_ranks, space.on_device or ranks == 1
            )
            link = settings.link_bandwidth * 1e9 or (LINK_BANDWIDTH if space.on_device else PCIE_BANDWIDTH)
            far = settings.nic_bandwidth * 1e9 or self._runtime.nic_bandwidth or PROXY_BANDWIDTH
            programs, reason = budget(traffic, turns, link, far, most)
        if (form.name, reason) not in self._told_reasons:
            self._told_reasons.add((form.name, reason))
            _log.info(
                "uccl_ep rank %d: %s of %d tokens, %.1f MB of rows to a rank: %d programs of %d allowed: %s",
                self._runtime.rank,
                form.name,
                tokens,
                tokens * form.row_bytes / 1e6,
                programs,
                most,
                reason,
            )
        return programs

    @functools.cached_property
    def _multiprocessors(self) -> int:
        """Of the device; in the interpreter programs take turns, however many there are."""
        device = self._gpu.memory.device
        if self._gpu.interpreted:
            return _MOST_PROGRAMS
        return int(torch.cuda.get_device_properties(device).multi_processor_count)

    def _build(self, phase: str) -> Generation:
        """Counters at zero and words for the runtime's epoch. Raises ConfigError while a graph is captured."""
        runtime, kernels, memory = self._runtime, self.kernels, self._gpu.memory
        if self._gpu.order.capturing:
            raise ConfigError(f"{phase}: dispatch and combine once before a graph is captured")
        space = self._gpu.space()
        told = self._gpu.prepare(
            lambda: OpenReply(
                memory,
                kernels.info_bytes(runtime.layout.normal.local_experts),
                kernels.told,
                kernels.told_words * runtime.ranks,
            )
        )
        states: list[object] = []

        def release() -> None:
            # an opening in a captured graph tells the host whatever it finds
            if not self._gpu.keep(told, *states):
                told.close()

        runtime.before_unmapping(release)
        state = self._gpu.prepare(lambda: kernels.new_state(runtime.layout, memory.device))
        states.append(state)
        return Generation(space, state, told)

    def new_ticket(self) -> int:
        """What the opening of the next operation stores last, once it has told the host everything."""
        self._ticket += 1
        return self._ticket

    def begin(self, form: RowFormat, looks: bool) -> None:
        """Note that an operation is launched from here on.

        Args:
            looks: the host waits between its opening and its exchange.
        """
        self._runtime.begin_operation()
        self._last, self._looks = form, looks
        if self._runtime.rebuild_requested:
            # for other windows, since this call began
            self.check(form.name)

    def launch(
        self, form: RowFormat, work: Callable[[], None], used: Sequence[torch.Tensor], finish: bool
    ) -> EventOverlap:
        """Launch ``work``, all of an operation or a part of it, in the order of the order; see :meth:`StreamOrder.run`.

        The peers count on the rows once it is opened: what keeps this rank from reaching :meth:`end` after that leaves
        the group apart, and later operations are refused. Of what is captured, nothing has run.
        """
        order = self._gpu.order
        if not order.capturing:
            self._broken = f"{form.name}: opened and not run"
        return order.run(work, used, own_stream=True, finish=finish)

    def wait_told(self, form: RowFormat, here: Generation) -> None:
        """Wait until the opening of this operation has told the host what it knows. Raises what it found to be wrong.

        Raises:
            ConfigError: the ranks were given different operations; nothing was sent and the group goes on.
            TransportError: the device has not run the opening in time.
            UcclEpError: what a kernel has reported.
        """
        phase = form.name
        runtime, kernels = self._runtime, self.kernels
        begun = look = time.monotonic()
        while here.told[kernels.ticket] != self._ticket:
            now = time.monotonic()
            if now - look > SLICE_NS * 1e-9:
                look = now
                runtime.space.watch()
            if now - begun > runtime.settings.timeout + _GRACE:
                raise TransportError(
                    f"{phase}: {self._gpu.memory.device} has not run the opening within {now - begun:.0f} s. Likely "
                    "cause: other work on the device does not end. Next step: look at what runs there"
                )
            if now - begun > 1e-3:
                time.sleep(20e-6)
        different = here.told[kernels.different]
        if different:
            if different > 0:
                self._broken = ""
            self.check(phase)
            raise UcclEpError(f"{phase}: a kernel failed and has not said why")

    def end(self, form: RowFormat, tokens: int, sent_away: int, started: int) -> None:
        """Note that all of an operation is launched, and raise what its opening has told where the host has waited for
        it; in the interpreter it is over, and all that it reports is raised.

        Args:
            tokens: of this rank.
            sent_away: rows for other ranks, -1 where the host has not looked.
            started: ``time.monotonic_ns()`` when the caller came.
        """
        self._broken = ""
        name = "normal_combine" if form.kind == NormalNotify.OPERATION_COMBINE else "normal_dispatch"
        self._runtime.record(name, tokens, max(sent_away, 0), time.monotonic_ns() - started)
        if self._looks or self._gpu.interpreted:
            self.check(form.name)

    def check(self, phase: str) -> None:
        """Raise what is known to be wrong: of this Buffer, or of an operation whose end nobody waited for."""
        self._gpu.take_report()
        self._runtime.check(phase)
        self._gpu.check_ids(phase)
        if self._present is None or self._epoch != self._runtime.epoch:
            return
        told, kernels = self._present.told, self.kernels
        if told[kernels.parted]:
            told.clear(kernels.parted)
            assert self._last is not None
            raise ConfigError(difference(self._runtime.rank, self._last, told))
        beyond = told[kernels.beyond]
        if beyond:
            told.clear(kernels.beyond)
            raise ConfigError(
                f"{beyond} rows arrived where num_worst_tokens promised fewer; all ranks received, the group goes on. "
                "Next step: num_worst_tokens = ranks x the most tokens of a rank"
            )
