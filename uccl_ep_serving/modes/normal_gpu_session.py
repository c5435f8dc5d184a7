"""What outlives one normal-mode operation on a device: counters, kernels and words of the present epoch.

Every epoch has its own counters in device memory and its own words in pinned memory. Operations of a Buffer do not
overlap: what the words say belongs to the last one, and is raised by it or by the next call.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..data_plane.kernel_space import SLICE_NS
from ..data_plane.runtime import Runtime
from ..errors import REBUILD_GROUP, ConfigError, TransportError, UcclEpError
from ..gpu.context import GpuContext
from ..gpu.program_budget import DEFAULT_SMS
from ..gpu.window import DeviceSpace
from ..handles import EventOverlap
from ..kernels.blocks import normal_device as block
from ..kernels.blocks.normal_device import DeviceNormalState, NormalFormat
from ..kernels.select import copy_normal_kernels, device_normal_kernels
from ..protocol.message import NormalNotify
from ..protocol.pipe import channel_count, ring_rows
from .epoch import Epoch, Operation
from .open_reply import OpenReply
from .row_format import RowFormat, check_experts, largest_row, overflow, shape_mismatch, wire_format

if TYPE_CHECKING:
    from ..kernels.triton.normal import TritonNormalKernels

__all__ = ["NormalGpuSession", "Present"]

_log = logging.getLogger("uccl_ep_serving")

#: Seconds that the device may take beyond the time limit of the kernel that the host waits for.
_GRACE = 30.0
#: Seconds for which the host spins until the reply is there, and for which it lets other threads run in between. It
#: sleeps only then: the shortest sleep takes 70 us and more (a timer of Linux has 50 us of slack).
_SPINS, _YIELDS = 1e-3, 20e-3
#: A ticket is the number of an operation times this, and the place of its format among all.
_FORMATS = 1 << 16
#: More than any device has multiprocessors.
_MOST_PROGRAMS = 1 << 16


class Present(NamedTuple):
    """What belongs to the present epoch.

    Attributes:
        space: the kernel context, in device memory.
        state: counters, in device memory.
        reply: what the opening of an operation tells the host.
        kernels: that serve it.
    """

    space: DeviceSpace
    state: DeviceNormalState
    reply: OpenReply
    kernels: TritonNormalKernels

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the kernel context and the state block."""
        return self.space.context, self.state.address


class NormalGpuSession:
    """Normal-mode state of one Buffer on one rank.

    An operation enters the present epoch, takes a ticket for its opening, is launched in one or two parts, between
    which the host perhaps waits for the reply to the opening, and ends.

    Args:
        runtime: of the Buffer.
        gpu: memory, streams and space, shared with low-latency mode.

    Attributes:
        kernels: of normal mode, Triton's.
        epoch: that the counters belong to.
    """

    def __init__(self, runtime: Runtime, gpu: GpuContext) -> None:
        with gpu.on_its_device():
            self.kernels: TritonNormalKernels = device_normal_kernels(runtime.ranks, gpu.interpreted)
            #: Those that serve where all windows are mapped.
            self._direct = self.kernels
            if runtime.settings.copy == "tma":
                self._direct = copy_normal_kernels(runtime.ranks)
        self.epoch = Epoch(runtime, gpu=gpu)
        self._runtime = runtime
        self._gpu = gpu
        self._present: Present | None = None
        self._ticket = 0
        #: Of all operations: the place of each in the order of their first.
        self._forms: dict[RowFormat, int] = {}
        self._warm: set[tuple[RowFormat, int, str]] = set()

    def check(self, phase: str) -> None:
        """Raise what is known to be wrong: of this Buffer, or of an operation whose end nobody waited for."""
        self.epoch.check(phase, begins=True)
        if self._present is None or self.epoch.number != self._runtime.epoch:
            return
        reply = self._present.reply
        if ticket := reply[block.INFO_SHAPE_MISMATCH]:
            reply.clear(block.INFO_SHAPE_MISMATCH)
            raise shape_mismatch(list(self._forms)[ticket % _FORMATS], self._runtime.rank, reply.take_shapes())
        if overflow_rows := reply[block.INFO_OVERFLOW_ROWS]:
            reply.clear(block.INFO_OVERFLOW_ROWS)
            raise overflow(overflow_rows, "promised fewer")

    def node_ranks(self, phase: str) -> int:
        """In the windows that are there, which are rebuilt first where they are stale: ranks of a node when each row
        crosses once to a node, else 0; equal on all ranks. Raises ConfigError for what an earlier operation found."""
        self.check(phase)
        if self._runtime.stale:
            self._runtime.rebuild(None)
        return self._gpu.crossed

    def enter(self, form: RowFormat, biases: int) -> tuple[Present, NormalFormat]:
        """After :meth:`node_ranks`: what belongs to the present epoch, with kernels compiled.

        Raises:
            ConfigError: a row does not fit a ring; or a graph is captured before the first operation.
        """
        runtime, capturing = self._runtime, self._gpu.order.capturing
        check_experts(form, runtime.layout.normal)
        row = form.row_bytes + form.meta_bytes
        if not ring_rows(runtime.layout, row, form.node_ranks, form.channels):
            raise ConfigError(
                f"{form.name}: a row of {form.row_bytes} bytes and {form.meta_bytes} bytes of meta does not fit a ring "
                f"of the window, of which {runtime.ranks} ranks and {form.channels} channels have one each. Next step: "
                "raise UCCL_EP_HEAP_BYTES, and UCCL_EP_CHUNK_BYTES, on all ranks"
            )
        self.kernels.check(runtime.settings, form.topk)
        new = self._present is None or not self.epoch.present
        if capturing and (new or not self.epoch.has_compiled or self._kind(form, biases) not in self._warm):
            raise ConfigError(
                f"{form.name}: its kernels and counters are not there yet, which no graph can capture. Next step: "
                "dispatch and combine once in the same formats before the capture"
            )
        if self._present is None or new:
            self._present = self._build()
            self.epoch.enter()
        present, wire = self._present, wire_format(form)
        kind = self._kind(form, biases)
        if kind not in self._warm or not self.epoch.has_compiled:

            def compile() -> None:
                with self._gpu.on_its_device():
                    present.kernels.warm(wire, form.local_experts * runtime.ranks, biases)

            # All ranks are in their first operation together, those with CPU kernels as well; formats may differ.
            if self.epoch.has_compiled:
                compile()
            else:
                self.epoch.compile_together(compile)
            self._warm.add(kind)
        return present, wire

    def _kind(self, form: RowFormat, biases: int) -> tuple[RowFormat, int, str]:
        """What kernels of the present epoch are compiled for."""
        assert self._present is not None
        return form._replace(origin=(-1, -1, -1)), biases, self._present.kernels.name

    def _build(self) -> Present:
        """Counters at zero and words for the runtime's epoch."""
        runtime, kernels, memory = self._runtime, self.kernels, self._gpu.memory
        space = self._gpu.space()
        nbytes = kernels.info_bytes(runtime.layout.normal.local_experts)
        ranks_at, rank_words = block.INFO_WORDS, block.PEER_INFO_WORDS * runtime.ranks
        reply = self._gpu.prepare(lambda: OpenReply(memory, nbytes, ranks_at, rank_words), OpenReply.close)
        states: list[object] = []

        def release() -> None:
            # an opening in a captured graph tells the host whatever it finds
            if not self._gpu.keep(reply, *states):
                reply.close()

        runtime.before_unmapping(release)
        state = self._gpu.prepare(lambda: kernels.new_state(runtime.layout, memory.device))
        states.append(state)
        return Present(space, state, reply, self._direct if space.all_mapped else self.kernels)

    # -- one operation ------------------------------------------------------------------------------------------

    def new_ticket(self, form: RowFormat) -> int:
        """What the opening of the next operation stores last, once it has told the host everything. It names the
        format, also where a graph repeats it."""
        place = self._forms.setdefault(form, len(self._forms))
        self._ticket = (self._ticket // _FORMATS + 1) * _FORMATS + place
        return self._ticket

    def operation(self, form: RowFormat) -> Operation:
        """What goes around launching an operation. Until something is launched, whatever ends it ends nothing else."""
        operation = self.epoch.operation(form.name)
        operation.void = True
        if self._runtime.rebuild_requested:
            # for other windows, since this call began
            self.check(form.name)
        return operation

    def launch(
        self, operation: Operation, work: Callable[[], None], used: Sequence[torch.Tensor], finish: bool
    ) -> EventOverlap:
        """Launch ``work``, all of an operation or a part of it, in the order of the streams; see ``StreamOrder.run``.

        The peers count on the rows once it is opened: what keeps this rank from launching all of it after that leaves
        the ranks apart.
        """
        operation.void = False
        return self._gpu.order.run(work, used, own_stream=True, finish=finish)

    def wait_reply(self, operation: Operation, form: RowFormat, present: Present) -> None:
        """Wait until the opening of this operation has told the host what it knows. Raises what it found to be wrong.

        Raises:
            ConfigError: the ranks were given different operations; nothing was sent and the group goes on.
            TransportError: the device has failed, or has not run the opening in time.
            UcclEpError: what a kernel has reported.
        """
        runtime, device = self._runtime, self._gpu.memory.device
        begun = watched = time.monotonic()
        while present.reply[block.INFO_TICKET] != self._ticket:
            now = time.monotonic()
            if now - watched > SLICE_NS * 1e-9:
                watched = now
                runtime.space.watch()
                self._look(form.name)
            if now - begun > runtime.settings.timeout + _GRACE:
                raise TransportError(
                    f"{form.name}: {device} has not run the opening within {now - begun:.0f} s. Likely cause: other "
                    "work on the device does not end. Next step: look at what runs there"
                )
            if now - begun > _YIELDS:
                time.sleep(20e-6)
            elif now - begun > _SPINS:
                os.sched_yield()
        different = present.reply[block.INFO_DIFFERENT]
        if different:
            operation.void = different > 0
            self.check(form.name)
            raise UcclEpError(
                f"{form.name}: the opening on {device} gave up, because an earlier kernel of this Buffer had failed, "
                "of which no report has reached the host. Likely cause: that kernel was stopped, or the memory of its "
                f"report was overwritten; the log of the device has its first error. {REBUILD_GROUP}"
            )

    def _look(self, phase: str) -> None:
        """Raise what the driver says of a kernel that failed: no report of it would reach the host."""
        try:
            self._gpu.order.look()
        except RuntimeError as error:
            raise TransportError(
                f"{phase}: a kernel has failed on {self._gpu.memory.device}: {error}. Likely cause: an address that is "
                "not mapped, in this kernel or in one that ran before on this device. Next step: find the first that "
                "failed (compute-sanitizer, CUDA_LAUNCH_BLOCKING=1)"
            ) from error

    def end(self, form: RowFormat, tokens: int, remote_rows: int, started: int, reads_back: bool) -> None:
        """Count an operation that is launched, and raise what its opening has told where the host has waited for it; in
        the interpreter it is over, and all that it reports is raised.

        Args:
            tokens: of this rank.
            remote_rows: rows for other ranks, -1 where the host reads nothing back.
            started: ``time.monotonic_ns()`` when the caller came.
        """
        name = "normal_combine" if form.kind == NormalNotify.OPERATION_COMBINE else "normal_dispatch"
        self._runtime.record(name, tokens, max(remote_rows, 0), time.monotonic_ns() - started)
        if reads_back or self._gpu.interpreted:
            self.check(form.name)

    # -- how much to launch -------------------------------------------------------------------------------------

    def channels(self, form: RowFormat, config: Any) -> int:
        """Channels of a first dispatch, each of which a program serves; equal on all ranks that are set alike.

        Args:
            config: its ``num_sms`` is the most that the caller allows.
        """
        most = max(min(getattr(config, "num_sms", DEFAULT_SMS), self._multiprocessors), 1)
        most = min(self._runtime.settings.programs or most, most, self.kernels.most_channels)
        return channel_count(self._runtime.layout, largest_row(form), form.node_ranks, most)

    @functools.cached_property
    def _multiprocessors(self) -> int:
        """Of the device; in the interpreter programs take turns, however many there are."""
        if self._gpu.interpreted:
            return _MOST_PROGRAMS
        return int(torch.cuda.get_device_properties(self._gpu.memory.device).multi_processor_count)
