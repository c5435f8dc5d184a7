"""What an implementation of the kernels offers: ``cpu`` (Numba) calls kernels, ``triton`` builds launches of them.

Host code gives both addresses and numbers that are fixed for given shapes, never a counter: message numbers and
parities live in the blocks of :mod:`.blocks.low_latency` and of ``triton/blocks``, so that a captured graph replays
without the host. A kernel on the CPU that waits gets the CLOCK_MONOTONIC instant in ns at which it must return, and
returns a ``STATUS_*`` of ``protocol.context``. A kernel on a device has its time limit in the kernel context,
returns nothing, and reports there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..config import Settings
from ..protocol.layout import LowLatencyPlan, WindowLayout


class LowLatencyKernels(Protocol):
    """Low-latency dispatch and combine: send and recv are separate launches. Arguments are described at
    ``kernels/cpu``."""

    name: str

    def warm(self) -> None:
        """Compile, before the first operation."""

    def first_bad_id(self, topk_idx: int, count: int, experts: int) -> int:
        """Position of the first expert id outside -1 .. experts - 1, or -1."""

    def route(self, context: int, state: int, route_block: int, topk_idx: int) -> None:
        """Fill the lists of a route block from int64[tokens, K] ids."""

    def quantise(
        self,
        target: int,
        stride: int,
        source: int,
        tokens: int,
        hidden: int,
        source_dtype: int,
        target_dtype: int,
        round_scale: int,
        scratch: int,
    ) -> None:
        """Tokens into wire rows of block-scaled FP8."""

    def dispatch_send(
        self,
        context: int,
        state: int,
        route: int,
        progress: int,
        rows: int,
        stride: int,
        payload: int,
        row_bytes: int,
        topk_idx: int,
        weights: int,
        coding: int,
        slice_end_ns: int,
    ) -> int:
        """Pack and publish one message per rank; advances the dispatch number."""

    def dispatch_recv(
        self,
        context: int,
        state: int,
        route: int,
        progress: int,
        coding: int,
        recv_x: int,
        payload: int,
        row_bytes: int,
        scales: int,
        recv_count: int,
        src_info: int,
        layout_range: int,
        stats: int,
        waited: int,
        slice_end_ns: int,
    ) -> int:
        """Wait for every rank's message and unpack it."""

    def combine_send(
        self,
        context: int,
        state: int,
        route: int,
        ticket: int,
        progress: int,
        x: int,
        payload: int,
        row_bytes: int,
        dtype: int,
        slice_end_ns: int,
    ) -> int:
        """Return rows to their sources; advances the combine number."""

    def combine_recv(
        self,
        context: int,
        state: int,
        route: int,
        ticket: int,
        progress: int,
        weights: int,
        out: int,
        payload: int,
        row_bytes: int,
        dtype: int,
        waited: int,
        slice_end_ns: int,
    ) -> int:
        """Wait for every rank's rows and sum them."""


class KernelLaunch(Protocol):
    """A kernel with its arguments."""

    def run(self) -> None:
        """Launch on the current stream."""


class DeviceStateBlock(Protocol):
    """Counters that outlive an operation, in device memory.

    Attributes:
        plan: what they were made for.
        address: what kernels get; valid while this object lives.
    """

    plan: LowLatencyPlan
    address: int

    def new_route(self) -> torch.Tensor:
        """Memory for one dispatch's routing."""


class DeviceLowLatencyKernels(Protocol):
    """Low latency of tensors on a device, for one plan. Each method gives the launches of a step, to be run in order;
    those of send and of receive are apart. Nothing here waits or moves anything. Optional addresses are 0.

    Attributes:
        fp8_dtype: of the values that an FP8 dispatch returns.
    """

    name: str
    fp8_dtype: torch.dtype

    def check(self, settings: Settings) -> None:
        """Raise ConfigError for what these kernels cannot serve."""

    def warm_dispatch(self, source: int, coding: int, round_scale: bool, reduced: bool) -> None:
        """Compile for tokens of DTYPE_* ``source`` sent as ``coding``, and load what is compiled."""

    def warm_combine(self, dtype: int, reduced: bool) -> None:
        """The same for experts' rows of DTYPE_* ``dtype``."""

    def new_state(self, layout: WindowLayout, channels: int, device: torch.device) -> DeviceStateBlock:
        """Counters at zero."""

    def dispatch_send(
        self,
        context: int,
        state: int,
        route_block: int,
        x: int,
        topk_idx: int,
        weights: int,
        tokens: int,
        source: int,
        coding: int,
        round_scale: bool,
        reduced: bool,
    ) -> tuple[KernelLaunch, ...]:
        """Route, pack and publish one message per rank; advances the dispatch number."""

    def dispatch_recv(
        self,
        context: int,
        state: int,
        route_block: int,
        coding: int,
        recv_x: int,
        scales: int,
        recv_count: int,
        src_info: int,
        layout_range: int,
        stats: int,
        waited: int,
    ) -> tuple[KernelLaunch, ...]:
        """Wait for every rank's message and unpack it."""

    def combine_send(
        self, context: int, state: int, route_block: int, ticket: int, x: int, layout_range: int, dtype: int
    ) -> tuple[KernelLaunch, ...]:
        """Return rows to their sources; advances the combine number."""

    def combine_recv(
        self,
        context: int,
        state: int,
        route_block: int,
        ticket: int,
        weights: int,
        out: int,
        tokens: int,
        dtype: int,
        reduced: bool,
        waited: int,
    ) -> tuple[KernelLaunch, ...]:
        """Wait for every rank's rows and sum them."""


class NormalKernels(Protocol):
    """Normal-mode layout, dispatch and combine. Operations are described by the blocks of :mod:`.blocks.normal`."""

    name: str

    def warm(self) -> None:
        """Compile, before the first operation."""

    def layout(
        self,
        topk_idx: int,
        tokens: int,
        topk: int,
        experts: int,
        ranks: int,
        rank_counts: int,
        expert_counts: int,
        in_rank: int,
    ) -> int:
        """Count tokens per rank and expert, mark the ranks of each token; -1, or the first bad id's position."""

    def route_rows(
        self,
        topk_idx: int,
        tokens: int,
        topk: int,
        experts: int,
        ranks: int,
        in_rank: int,
        rank_counts: int,
        expert_counts: int,
        tally: int,
        rows: int,
        lists: int,
    ) -> int:
        """List the tokens of each rank from a layout, and hold it against the ids; ``blocks.normal.LAYOUT_*``."""

    def prepare(self, context: int, operation: int, peers: int, route: int) -> None:
        """Fill the blocks of the peers for a new operation."""

    def open_operation(self, context: int, operation: int, peers: int, progress: int, slice_end: int) -> int:
        """Tell every peer what this rank is about to do, and hear every peer."""

    def place(self, context: int, operation: int, peers: int) -> None:
        """Say where the rows of every peer land."""

    def exchange(self, context: int, counts: int, operation: int, peers: int, progress: int, slice_end: int) -> int:
        """Send, receive and, in a combine, sum the rows of an opened operation."""

    def warm_nodes(self) -> None:
        """Compile what groups of several nodes need besides, before the first operation between nodes."""

    def route_nodes(
        self, in_rank: int, tokens: int, ranks: int, node_ranks: int, me: int, rows: int, lists: int
    ) -> None:
        """List the tokens of each other node."""

    def prepare_nodes(self, context: int, operation: int, peers: int, given: int, taken: int, lists: int) -> None:
        """After :meth:`prepare`: what goes to other nodes through forwarders."""

    def exchange_nodes(
        self, context: int, counts: int, operation: int, peers: int, progress: int, slice_end: int
    ) -> int:
        """:meth:`exchange`, each row once to a node and, summed, once back."""


class NormalFormat(NamedTuple):
    """What all ranks agree on in a normal-mode operation on a device.

    Attributes:
        kind: NormalNotify.OPERATION_*.
        dtype: DTYPE_* of the rows.
        row_bytes, meta_bytes, scale_bytes: of a row.
        topk: ids and weights per row of a dispatch, weights per row of a combine.
        local_experts: experts per rank.
        shape: digest for the handle of a dispatch with number -1.
        shape_step: what it grows by with the number of that dispatch, modulo 2**63.
        node_ranks: ranks of a node when each row crosses once to a node, else 0.
    """

    kind: int
    dtype: int
    row_bytes: int
    meta_bytes: int
    scale_bytes: int
    topk: int
    local_experts: int
    shape: int
    shape_step: int
    node_ranks: int = 0


class NormalTensors(NamedTuple):
    """Addresses of what an exchange moves, 0 for what there is not; see ``triton/normal_rows.move_rows``."""

    x: int
    lists: int
    tokens: int
    topk_idx: int
    weights: int
    scales: int
    out: int
    out_idx: int
    out_weights: int
    out_scales: int
    capacity: int


class NodeTensors(NamedTuple):
    """Addresses and sizes of what an exchange between nodes needs besides, 0 for what there is not.

    Attributes:
        in_rank: uint8[tokens, ranks], which ranks a dispatched token goes to.
        passes, pass_rows: int32[ranks, pass_rows], scratch of a dispatch: rows of two landing slots for each rank.
        marks, room: uint8[room, mark bytes], for which ranks of its node each row was that this rank forwards.
        counts: int32[room + nodes, ranks of a node], scratch of a combine.
    """

    in_rank: int
    passes: int
    pass_rows: int
    marks: int
    room: int
    counts: int


class DeviceNormalStateBlock(Protocol):
    """Counters and tables of a window generation, in device memory.

    Attributes:
        address: what kernels get; valid while this object lives.
    """

    address: int


class DeviceNormalKernels(Protocol):
    """Normal mode of tensors on a device: launches of each step, to be run in order. Nothing here waits or moves.

    Attributes:
        ticket, different, total, most, away, in_heap, beyond, parted: words in which :meth:`open` tells the host the
            caller's ticket (stored last), how many peers were given another shape (-1: failed), rows of the received
            tensor, the most to or from one other rank, those for other ranks, whether all stay where they land; and
            until the host clears them, how many came where fewer were promised, and ``different`` where it was not 0.
        relayed: word in which it tells how many rows of a dispatch this rank forwards.
        late: words in which it tells how many steps were not launched, of all dispatches and of all combines.
        told, told_words: where, by rank, stands what a peer of another shape told; after it the rows per local expert.
    """

    name: str
    ticket: int
    different: int
    total: int
    most: int
    away: int
    in_heap: int
    beyond: int
    parted: int
    relayed: int
    late: tuple[int, int]
    told: int
    told_words: int

    def check(self, settings: Settings, topk: int) -> None:
        """Raise ConfigError for what these kernels cannot serve."""

    def new_state(self, layout: WindowLayout, device: torch.device) -> DeviceNormalStateBlock:
        """Counters at zero."""

    def warm(self, form: NormalFormat, experts: int, biases: int) -> None:
        """Compile what an operation of this format launches."""

    def info_bytes(self, local_experts: int) -> int:
        """Bytes of what :meth:`open` tells the host."""

    def mark(
        self,
        context: int,
        state: int,
        topk_idx: int,
        tokens: int,
        topk: int,
        experts: int,
        rank_counts: int,
        expert_counts: int,
        in_rank: int,
        bad: int,
    ) -> tuple[KernelLaunch, ...]:
        """Counts and marks from ids."""

    def list(
        self, in_rank: int, tokens: int, rank: int, node_ranks: int, rows: int, passing: int, lists: int, places: int
    ) -> tuple[KernelLaunch, ...]:
        """Lists of the tokens of each rank from marks; with ``node_ranks`` those of other nodes over the rails."""

    def open(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        given: int,
        taken: int,
        expert_counts: int,
        origin: int,
        number_out: int,
        rows_out: int,
        info: int,
        ticket: int,
        capacity: int,
        passing: int,
    ) -> tuple[KernelLaunch, ...]:
        """Tell every peer what this rank is about to do, and hear every peer."""

    def exchange(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        tensors: NormalTensors,
        nodes: NodeTensors | None,
        turns: int,
        programs: int,
    ) -> tuple[KernelLaunch, ...]:
        """Move the rows of an opened operation."""

    def reduce(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        x: int,
        received: int,
        weights: int,
        places: int,
        tokens: int,
        gathered: int,
        gathered_weights: int,
        biases: tuple[int, ...],
        out: int,
        out_weights: int,
        programs: int,
    ) -> tuple[KernelLaunch, ...]:
        """Sum the rows of a combine that has been exchanged; ``received`` of them are this rank's experts'."""

    def turns(
        self, layout: WindowLayout, channels: int, form: NormalFormat, rows: int, proxied: bool, fits: bool
    ) -> int:
        """Turns after which an exchange of ``rows`` rows between each two ranks is over."""

    def slot_rows(self, layout: WindowLayout, form: NormalFormat) -> int:
        """Rows of one of the two slots in which rows to be forwarded land."""
