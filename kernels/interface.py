"""What an implementation of the kernels offers: ``cpu`` (Numba) calls kernels, ``triton`` builds launches of them.

Host code gives both addresses and numbers that are fixed for given shapes, never a counter: message numbers and
parities live in the blocks of :mod:`.low_latency_state` and of ``triton/blocks``, so that a captured graph replays
without the host. A kernel on the CPU that waits gets the CLOCK_MONOTONIC instant in ns at which it must return, and
returns a ``STATUS_*`` of ``protocol.context``. A kernel on a device has its time limit in the kernel context,
returns nothing, and reports there.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..config import Settings
from ..protocol.layout import LowLatencyPlan, WindowLayout

__all__ = ["DeviceLowLatencyKernels", "DeviceStateBlock", "KernelLaunch", "LowLatencyKernels", "NormalKernels"]


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

    def warm(self, source: int, coding: int, round_scale: bool, reduced: bool) -> None:
        """Compile for tokens of DTYPE_* ``source`` sent as ``coding``."""

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
    """Normal-mode layout, dispatch and combine. Operations are described by the blocks of :mod:`.normal_block`."""

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
        """List the tokens of each rank from a layout, and hold it against the ids; ``normal_block.LAYOUT_*``."""

    def prepare(self, context: int, operation: int, peers: int, given: int, taken: int, lists: int) -> None:
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
