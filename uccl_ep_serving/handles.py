"""What dispatch hands to combine, and the event object that both return."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch

from .errors import ConfigError
from .protocol.streams import NORMAL_CHANNELS

__all__ = [
    "MADE_ON_CPU",
    "MADE_ON_DEVICE",
    "About",
    "EventHandle",
    "EventOverlap",
    "LowLatencyHandle",
    "NodeRoute",
    "NormalGpuHandle",
    "NormalHandle",
    "StreamEvent",
    "TensorHandle",
    "topk_idx_t",
    "wait_for",
]


#: DeepEP's name for the dtype of expert ids.
topk_idx_t = torch.int64


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


class EventHandle:
    """DeepEP's event: what the current stream had been given when this was made; on CPUs nothing, which is over."""

    def __init__(self) -> None:
        self._event: StreamEvent | None = None
        if torch.cuda.is_initialized():
            self._event = event = torch.cuda.Event()
            event.record()

    def wait(self) -> None:
        """Make the current stream wait for it."""
        if self._event is not None:
            self._event.wait()

    current_stream_wait = wait


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


class About(NamedTuple):
    """What a normal-mode handle says of its dispatch: its first tensor, int64 on the CPU.

    Attributes:
        kind: MADE_ON_CPU or MADE_ON_DEVICE.
        rank, ranks: this rank, and those of the group.
        opening: which opening of a group the Buffer was, equal on all ranks.
        epoch, number: of the dispatch, equal on all ranks; on a device the number stands in a tensor of its own.
        tokens: of this rank.
        received: rows received from all ranks; on a device 0.
        capacity: rows of the tensor that dispatch returned (more than received with ``num_worst_tokens``).
        remote_rows: on a device, rows for other ranks, -1 where the host reads nothing back.
        channels: on a device, that the rows are dealt to.
        node_ranks: on a device, ranks of a node where rows passed through forwarders, else 0.
    """

    kind: int
    rank: int
    ranks: int
    opening: int
    epoch: int
    number: int
    tokens: int
    received: int = 0
    capacity: int = 0
    remote_rows: int = -1
    channels: int = 0
    node_ranks: int = 0

    @property
    def origin(self) -> tuple[int, int, int]:
        """(opening, epoch, number): the name of the dispatch."""
        return self.opening, self.epoch, self.number


#: Of :class:`About`: "UCEH" and a number.
MADE_ON_CPU, MADE_ON_DEVICE = 0x5543_4548_01, 0x5543_4548_02


class TensorHandle(tuple[torch.Tensor, ...]):
    """What a normal-mode dispatch hands to combine and to cached dispatches: tensors alone, first an :class:`About`.

    So ``ctx.save_for_backward(*handle)`` keeps one for autograd, and ``ctx.saved_tensors`` is one again, also where the
    tensors were copied or lay elsewhere in between. It is of its rank and group, and of no Buffer.
    """

    about: About
    #: Where its tensors but the first are known to lie. What is built anew by a handle's type alone does not have it.
    device: torch.device | None = None
    _KIND: ClassVar[int]

    @classmethod
    def of(cls, about: About, *tensors: torch.Tensor) -> Self:
        """A handle of these."""
        handle = cls((torch.tensor(about, dtype=torch.int64, device="cpu"), *tensors))
        handle.about, handle.device = about, tensors[0].device
        return handle

    @classmethod
    def again(cls, tensors: Sequence[torch.Tensor], device: torch.device) -> Self | None:
        """The handle on ``device`` that ``tensors`` were taken from, None where they are none of one."""
        handle = cls(tensors)
        if not handle or handle[0].dtype != torch.int64 or handle[0].shape != (len(About._fields),):
            return None
        handle.about = About(*handle[0].tolist())
        if not handle._fits(device):
            return None
        handle.device = device
        return handle

    def _fits(self, device: torch.device) -> bool:
        """Whether its tensors but the first are on ``device`` and have the shapes that they were made with."""
        if self.about.kind != self._KIND or self.about.ranks < 1:
            return False
        forms = self._forms()
        return len(self) == 1 + len(forms) and all(
            one.device == device and one.is_contiguous() and _has_form(one, *form)
            for one, form in zip(self[1:], forms, strict=True)
        )

    def _forms(self) -> list[tuple[torch.dtype, Shape]]:
        """Dtype and shape of all tensors but the first, by what that says."""
        raise NotImplementedError


#: Of a tensor; None: of any length.
Shape = tuple[int | None, ...]


def _has_form(one: torch.Tensor, dtype: torch.dtype, shape: Shape) -> bool:
    return (
        one.dtype == dtype
        and one.dim() == len(shape)
        and all(wanted in (None, length) for wanted, length in zip(shape, one.shape, strict=True))
    )


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

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that are there."""
        return tuple(one for one in self if one is not None)


class NormalHandle(TensorHandle):
    """Of a dispatch on CPUs."""

    _KIND = MADE_ON_CPU

    @classmethod
    def build(
        cls, about: About, route: torch.Tensor, is_token_in_rank: torch.Tensor, nodes: NodeRoute | None = None
    ) -> Self:
        """A handle of a dispatch that has run; ``nodes`` has all its tensors."""
        return cls.of(about, route, is_token_in_rank, *(nodes.tensors if nodes is not None else ()))

    @property
    def route(self) -> torch.Tensor:
        """int64, what ``kernels.blocks.normal`` calls the route: R rows sent to each rank, R rows received from each,
        and, as int32, token indices sent to rank 0, to rank 1, and so on; what follows is undefined."""
        return self[1]

    @property
    def is_token_in_rank(self) -> torch.Tensor:
        """bool [tokens, R]"""
        return self[2]

    @property
    def nodes(self) -> NodeRoute | None:
        """What went over the rails, None when each rank was sent its rows directly."""
        return NodeRoute(*self[3:]) if len(self) > 3 else None

    @property
    def rows_returned(self) -> tuple[int, ...]:
        """How many rows a combine may bring back."""
        return self.about.received, self.about.capacity

    def _fits(self, device: torch.device) -> bool:
        """As of every handle; and there is room for as many rows as the route tells of."""
        if not super()._fits(device):
            return False
        route, nodes, ranks = self.route, self.nodes, self.about.ranks
        rows = int(route[:ranks].sum()) if len(route) >= 2 * ranks else 0
        return len(route) >= 2 * ranks + (rows + 1) // 2 and (
            nodes is None
            or nodes.relay_rows is None
            or nodes.relay_marks is None
            or int(nodes.relay_rows.sum()) == len(nodes.relay_marks)
        )

    def _forms(self) -> list[tuple[torch.dtype, Shape]]:
        tokens, ranks = self.about.tokens, self.about.ranks
        forms: list[tuple[torch.dtype, Shape]] = [(torch.int64, (None,)), (torch.bool, (tokens, ranks))]
        if len(self) > 3:
            nodes = self[3].numel()
            marks = (None, -(-(ranks // nodes) // 8)) if nodes else (0, 0)
            forms += [
                (torch.int64, (nodes,)),
                (torch.int32, (nodes, tokens)),
                (torch.int64, (nodes,)),
                (torch.uint8, marks),
            ]
        return forms


class NormalGpuHandle(TensorHandle):
    """Of a dispatch on a device, where all its tensors but the first are."""

    _KIND = MADE_ON_DEVICE

    @classmethod
    def build(
        cls,
        about: About,
        route: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        number: torch.Tensor,
        relay_marks: torch.Tensor | None = None,
    ) -> Self:
        """A handle of a dispatch."""
        return cls.of(about, route, is_token_in_rank, number, *(() if relay_marks is None else (relay_marks,)))

    @property
    def route(self) -> torch.Tensor:
        """int64 [ROUTE_TABLES, R, NORMAL_CHANNELS]: by channel, rows sent to each rank, received from each rank, and
        the same of each node over a rail."""
        return self[1]

    @property
    def is_token_in_rank(self) -> torch.Tensor:
        """bool [T, R]"""
        return self[2]

    @property
    def number(self) -> torch.Tensor:
        """int64 [1], number of the dispatch, equal on all ranks."""
        return self[3]

    @property
    def relay_marks(self) -> torch.Tensor | None:
        """uint8 [rows forwarded here, ceil(M / 8)]: for which ranks of this node each was, a bit each; of rows beyond
        the last, as of those beyond ``num_worst_tokens``, nothing is known. None when each rank was sent its rows
        directly."""
        return self[4] if len(self) > 4 else None

    @property
    def rows_returned(self) -> tuple[int, ...]:
        """How many rows a combine may bring back."""
        return (self.about.capacity,)

    def _forms(self) -> list[tuple[torch.dtype, Shape]]:
        about = self.about
        route: Shape = (None, about.ranks, NORMAL_CHANNELS)
        forms: list[tuple[torch.dtype, Shape]] = [
            (torch.int64, route),
            (torch.bool, (about.tokens, about.ranks)),
            (torch.int64, (1,)),
        ]
        return [*forms, (torch.uint8, (None, -(-about.node_ranks // 8)))] if about.node_ranks else forms
