"""What an implementation of the kernels offers. Two are planned: ``cpu`` (Numba, here) and ``triton``.

Host code calls these with addresses and with numbers that are fixed for given shapes, never with a counter: message
numbers and parities live in the blocks of :mod:`.low_latency_state`, so that a captured graph replays without the
host. A kernel that waits gets the CLOCK_MONOTONIC instant in nanoseconds at which it must return (an implementation on
a device has a time limit of its own and may ignore it), and returns a ``STATUS_*`` of ``protocol.context``.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["LowLatencyKernels", "NormalKernels"]


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
