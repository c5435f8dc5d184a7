"""What dispatch hands to combine, and the event object that both return."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from .errors import ConfigError

__all__ = [
    "DispatchOrigin",
    "EventOverlap",
    "GpuNodeRoute",
    "LowLatencyHandle",
    "NodeRoute",
    "NormalGpuHandle",
    "NormalHandle",
    "StreamEvent",
    "wait_for",
]


class StreamEvent(Protocol):
    """The part of ``torch.Event`` that is used here."""

    def wait(self) -> Any:
        """Make the current stream wait for the event."""


class EventOverlap:
    """DeepEP's event object: the end of an operation, for streams to wait on.

    Operations on CPU tensors are over when they return; their event is None and waiting for it does nothing.

    Attributes:
        event: the stream event, or None.
        extra_tensors: tensors kept alive until this object is collected.
    """

    def __init__(self, event: StreamEvent | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self.event is not None:
            self.event.wait()

    def __enter__(self) -> EventOverlap:
        """As in DeepEP: what runs inside the ``with`` block overlaps with the operation."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.current_stream_wait()


def wait_for(event: EventOverlap | None) -> None:
    """Make the current stream wait for ``event``, if there is one: what DeepEP calls ``previous_event``.

    Raises ConfigError for what is no such event."""
    if event is None:
        return
    if not hasattr(event, "current_stream_wait"):
        raise ConfigError(f"previous_event must be an EventOverlap (Buffer.capture()) or None, not {event!r}")
    event.current_stream_wait()


class LowLatencyHandle(tuple[Any, ...]):
    """What a low-latency dispatch hands to its combine: opaque for engines, DeepEP's five fields for tools.

    Unpacks as ``(src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts)``:

    - ``src_info`` int32 [L, R * T]: token index, at its source, of each row of ``recv_x``;
    - ``layout_range`` int64 [L, R]: ``begin << 32 | count`` of a source rank's rows among those of a local expert.

    Attributes:
        owner: the ``LowLatency`` that made it.
        epoch: of its runtime at the time.
        plan: sizes of the dispatch, ``protocol.layout.LowLatencyPlan``.
        route: its route block (``kernels.blocks.low_latency.RouteBlock``), which keeps memory that kernels use.
        topk_idx: copy of the ids, int64 [tokens, K].
        topk_weights: copy of the weights given at dispatch, float32 [tokens, K], or None.
        dtype: of the tokens that were dispatched, however they travelled.
        received: True once the rows are unpacked.
    """

    owner: object
    epoch: int
    plan: Any
    route: Any
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    dtype: torch.dtype
    received: bool

    @classmethod
    def build(
        cls,
        fields: tuple[torch.Tensor, torch.Tensor],
        *,
        owner: object,
        epoch: int,
        plan: Any,
        route: object,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> LowLatencyHandle:
        """A handle, not received yet, with DeepEP's ``fields`` and those that are in the plan."""
        handle = cls((*fields, plan.tokens, plan.hidden, plan.experts))
        handle.owner = owner
        handle.epoch = epoch
        handle.plan = plan
        handle.route = route
        handle.topk_idx = topk_idx
        handle.topk_weights = topk_weights
        handle.dtype = dtype
        handle.received = False
        return handle

    @property
    def layout_range(self) -> torch.Tensor:
        """int64 [L, R], see the class."""
        result: torch.Tensor = self[1]
        return result

    @property
    def src_info(self) -> torch.Tensor:
        """int32 [L, R * T], see the class."""
        result: torch.Tensor = self[0]
        return result


class DispatchOrigin(NamedTuple):
    """Which normal-mode dispatch a handle comes from.

    Attributes:
        owner: the ``Normal`` that made it.
        epoch, number: of the dispatch, -1 before it has run; equal on all ranks.
        tokens: tokens of this rank.
    """

    owner: Any
    epoch: int
    number: int
    tokens: int

    @property
    def name(self) -> tuple[int, int]:
        """(epoch, number)"""
        return self.epoch, self.number


class NodeRoute(NamedTuple):
    """What a dispatch of N nodes of M ranks sent over the rails, to the ranks with this one's place in other nodes.

    Attributes:
        node_rows: int64 [N], rows sent to each node, 0 for this rank's own.
        node_tokens: int32 [N, tokens], token indices sent to each node, undefined beyond ``node_rows`` of them.
        relay_rows: int64 [N], rows from each node that were forwarded here; None before the dispatch was opened.
        relay_marks: uint8 [sum of relay_rows, ceil(M / 8)]: for which ranks of this node each was, a bit each; None
            likewise.
    """

    node_rows: torch.Tensor
    node_tokens: torch.Tensor
    relay_rows: torch.Tensor | None = None
    relay_marks: torch.Tensor | None = None


class NormalHandle(NamedTuple):
    """What a normal-mode dispatch hands to combine and to cached dispatches.

    Attributes:
        route: int64, what ``kernels.blocks.normal`` calls the route: R rows sent to each rank, R rows received from
            each, then, as int32, token indices sent to rank 0, to rank 1, and so on; what follows is undefined.
        received: rows received from all ranks.
        capacity: rows of the tensor that dispatch returned (more than received with ``num_worst_tokens``).
        is_token_in_rank: bool [tokens, R].
        origin: the dispatch it comes from.
        nodes: what went over the rails, None when each rank was sent its rows directly.
    """

    route: torch.Tensor
    received: int
    capacity: int
    is_token_in_rank: torch.Tensor
    origin: DispatchOrigin
    nodes: NodeRoute | None = None

    @property
    def rows_returned(self) -> tuple[int, ...]:
        """How many rows a combine may bring back."""
        return self.received, self.capacity


class GpuNodeRoute(NamedTuple):
    """What a dispatch on a device between nodes of M ranks passed through forwarders.

    Attributes:
        node_ranks: M.
        relay_marks: uint8 [rows forwarded here, ceil(M / 8)], on the device: for which ranks of this node each was, a
            bit each; of rows beyond the last, as of those beyond ``num_worst_tokens``, nothing is known.
    """

    node_ranks: int
    relay_marks: torch.Tensor


class NormalGpuHandle(NamedTuple):
    """What a dispatch on a device hands to combine and to cached dispatches. Tensors are on the device.

    Attributes:
        route: int64 [ROUTE_TABLES, R, NORMAL_CHANNELS]: by channel, rows sent to each rank, received from each rank,
            and the same of each node over a rail.
        is_token_in_rank: bool [T, R].
        number: int64 [1], number of the dispatch, equal on all ranks.
        channels: that the rows are dealt to.
        capacity: rows of the tensor that dispatch returned.
        remote_rows: rows for other ranks, -1 where the host reads nothing back.
        origin: the dispatch it comes from; its number stands in ``number``, not there.
        nodes: what passed through forwarders, None when each rank was sent its rows directly.
    """

    route: torch.Tensor
    is_token_in_rank: torch.Tensor
    number: torch.Tensor
    channels: int
    capacity: int
    remote_rows: int
    origin: DispatchOrigin
    nodes: GpuNodeRoute | None = None

    @property
    def rows_returned(self) -> tuple[int, ...]:
        """How many rows a combine may bring back."""
        return (self.capacity,)
