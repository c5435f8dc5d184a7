"""Where everything lies in a window: regions at equal offsets on every rank.

A layout is a pure function of a :class:`LowLatencyPlan` (or none) and a :class:`NormalPlan`; ranks that agree on those
agree on every offset. All regions start on a page. Sizes follow the real dtype. "Peer-written" regions are the only
memory that another rank's write may touch; a proxy refuses offsets outside the window, a kernel checks what it reads.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields

from .command import MAX_RANKS, MAX_WINDOW_BYTES, UNIT
from .message import (
    FORMAT_VERSION,
    GRANT_SLOTS,
    HEADER_BYTES,
    NOTICE_SLOTS,
    meta_bytes,
    notify_bytes,
    round_up,
)
from .relay import BOARD_BYTES, LINE_BYTES
from .streams import STREAMS

__all__ = [
    "MAX_EXPERTS",
    "MAX_LOW_LATENCY_TOKENS",
    "PAGE",
    "PARITIES",
    "LowLatencyPlan",
    "NormalPlan",
    "Region",
    "WindowLayout",
]

PAGE = 4096
PARITIES = 2
MAX_EXPERTS = 4096
MAX_LOW_LATENCY_TOKENS = 8192


def _digest(*values: int | str) -> int:
    """63-bit digest of a tuple of plain values (not cryptographic: it finds mistakes, not attackers)."""
    text = repr((FORMAT_VERSION, *values)).encode()
    return (zlib.crc32(text) << 31 | zlib.crc32(text[::-1])) & ((1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class LowLatencyPlan:
    """What fixes the low-latency regions. Raises ValueError when a value is no integer or outside the formats'
    capacity.

    Attributes:
        ranks: EP ranks R.
        tokens: most tokens a rank dispatches at once, T.
        hidden: values per token, H; H x element_bytes must be a multiple of 16.
        experts: routed experts over all ranks, E, a multiple of R.
        topk: experts per token, K.
        element: bytes per value of the widest dtype that will be sent (2, or 4 for float32).
    """

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    element: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                # NumPy's integers become plain ones: the digest must not tell them apart
                object.__setattr__(self, field.name, operator.index(value))
            except TypeError:
                raise ValueError(f"{field.name} = {value!r} is no integer") from None
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks = {self.ranks} is outside 1..{MAX_RANKS}")
        if not 1 <= self.tokens <= MAX_LOW_LATENCY_TOKENS:
            raise ValueError(f"tokens per rank = {self.tokens} is outside 1..{MAX_LOW_LATENCY_TOKENS}")
        if not 1 <= self.experts <= MAX_EXPERTS or self.experts % self.ranks:
            raise ValueError(
                f"experts = {self.experts} must be in 1..{MAX_EXPERTS} and a multiple of {self.ranks} ranks"
            )
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk = {self.topk} is outside 1..{self.experts} experts")
        if self.element not in (2, 4):
            raise ValueError(f"element = {self.element} bytes: bf16 and fp16 have 2, float32 has 4")
        if self.hidden <= 0 or self.hidden * self.element % UNIT:
            raise ValueError(
                f"hidden = {self.hidden}: a row of {self.element}-byte values must be a multiple of {UNIT} bytes"
            )

    @property
    def local_experts(self) -> int:
        """Experts per rank, L."""
        return self.experts // self.ranks

    @property
    def slots_per_rank(self) -> int:
        """Most experts of one rank that a token can choose."""
        return min(self.topk, self.local_experts)

    @property
    def row(self) -> int:
        """Most bytes of a row. FP8 with scales (H + H/32) never exceeds the unquantized row."""
        return round_up(self.hidden * self.element, UNIT)

    @property
    def meta(self) -> int:
        """Bytes of a token's meta."""
        return meta_bytes(self.topk)

    @property
    def dispatch_slot(self) -> int:
        """Bytes of the receive slot of one source rank."""
        return round_up(HEADER_BYTES + self.tokens * (self.meta + self.row), 128)

    @property
    def dispatch_send(self) -> int:
        """Bytes one parity of packed dispatch messages can need: each token once per destination rank."""
        copies = self.tokens * min(self.topk, self.ranks)
        return self.ranks * 128 + copies * (self.meta + self.row)

    @property
    def combine_recv(self) -> int:
        """Bytes one parity of returned rows can need: at most T x K rows, a header per peer."""
        return self.ranks * 128 + self.tokens * self.topk * self.row

    @property
    def combine_send(self) -> int:
        """Bytes one parity of rows to return can need: each received (token, local expert)."""
        return self.ranks * 128 + self.ranks * self.tokens * self.slots_per_rank * self.row

    @property
    def digest(self) -> int:
        """What every low-latency header carries, so that ranks with different plans refuse each other by name."""
        return _digest(self.ranks, self.tokens, self.hidden, self.experts, self.topk, self.element)


@dataclass(frozen=True, slots=True)
class NormalPlan:
    """What fixes the normal-mode regions.

    Attributes:
        ranks: EP ranks R.
        local_experts: most experts per rank that a notify can count.
        heap: bytes of the heap from which received rows are placed (leased to the returned tensors).
        rounds: bytes of the staging for rounds, used when the heap has no room: two slots per source rank.
        chunk: bytes of a chunk in the send staging (rows and meta).
        depth: chunks in flight per destination.
    """

    ranks: int
    local_experts: int = MAX_EXPERTS
    heap: int = 512 << 20
    rounds: int = 64 << 20
    chunk: int = 1 << 20
    depth: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks = {self.ranks} is outside 1..{MAX_RANKS}")
        for name in ("heap", "rounds", "chunk"):
            value = getattr(self, name)
            if value < 0 or value % PAGE:
                raise ValueError(f"{name} = {value} must be a multiple of {PAGE} bytes")
        if self.depth < 1 or self.chunk < PAGE:
            raise ValueError(f"depth = {self.depth} and chunk = {self.chunk} must be at least 1 and {PAGE}")

    @property
    def round_slot(self) -> int:
        """Bytes of one of the two round slots of a source rank."""
        return self.rounds // (2 * self.ranks) // 128 * 128

    @property
    def notify(self) -> int:
        """Bytes reserved for one notify."""
        return round_up(notify_bytes(self.local_experts), 128)


@dataclass(frozen=True, slots=True)
class Region:
    """A named byte range of the window."""

    name: str
    offset: int
    nbytes: int
    meaning: str


class WindowLayout:
    """Offsets of all regions for ``ranks`` ranks.

    Attributes named after a region hold its byte offset. Raises ValueError when the window would exceed 1 TiB.
    """

    direct_flags: int
    notice_recv: int
    notice_send: int
    notify_recv: int
    notify_send: int
    grant_recv: int
    grant_send: int
    relay_boards: int
    relay_lines: int
    ll_dispatch_recv: int
    ll_dispatch_send: int
    ll_combine_recv: int
    ll_combine_send: int
    normal_send: int
    normal_rounds: int
    normal_heap: int

    def __init__(self, ranks: int, low_latency: LowLatencyPlan | None, normal: NormalPlan) -> None:
        if normal.ranks != ranks or (low_latency is not None and low_latency.ranks != ranks):
            raise ValueError(f"plans of {normal.ranks} ranks in a window of {ranks}")
        self.ranks = ranks
        self.low_latency = low_latency
        self.normal = normal
        self._regions: dict[str, Region] = {}
        self.nbytes = 0
        add = self._add
        add(
            "direct_flags",
            ranks * STREAMS * 8,
            "int64 [source rank, stream]: messages stored by kernels that map this window",
        )
        add("notice_recv", ranks * NOTICE_SLOTS * HEADER_BYTES, "[source rank, slot]: notices received")
        add("notice_send", ranks * NOTICE_SLOTS * HEADER_BYTES, "[destination rank, slot]: notices to send")
        add(
            "notify_recv",
            PARITIES * ranks * normal.notify,
            "[parity, source rank]: normal-mode notifies received",
        )
        add(
            "notify_send",
            PARITIES * ranks * normal.notify,
            "[parity, destination rank]: normal-mode notifies to send",
        )
        add("grant_recv", ranks * GRANT_SLOTS * HEADER_BYTES, "[source rank, slot]: grants received")
        add("grant_send", ranks * GRANT_SLOTS * HEADER_BYTES, "[destination rank, slot]: grants to send")
        add("relay_boards", ranks * BOARD_BYTES, "[node]: what has arrived from a node for this one")
        add("relay_lines", ranks * LINE_BYTES, "[node, rank of this node]: rows forwarded inside this node")
        plan = low_latency
        add(
            "ll_dispatch_recv",
            PARITIES * ranks * plan.dispatch_slot if plan else 0,
            "[parity, source rank]: dispatch messages received",
        )
        add(
            "ll_dispatch_send",
            PARITIES * round_up(plan.dispatch_send, 128) if plan else 0,
            "[parity]: dispatch messages packed by destination",
        )
        add(
            "ll_combine_recv",
            PARITIES * round_up(plan.combine_recv, 128) if plan else 0,
            "[parity]: combine messages received, where the dispatch header said",
        )
        add(
            "ll_combine_send",
            PARITIES * round_up(plan.combine_send, 128) if plan else 0,
            "[parity]: combine messages packed by source",
        )
        add(
            "normal_send",
            ranks * normal.depth * normal.chunk,
            "[destination rank, depth]: chunks packed for sending",
        )
        add("normal_rounds", ranks * 2 * normal.round_slot, "[source rank, 2]: rows received in rounds")
        add("normal_heap", normal.heap, "rows received in place, leased to the returned tensors")
        if self.nbytes > MAX_WINDOW_BYTES:
            raise ValueError(f"a window of {self.nbytes} bytes exceeds {MAX_WINDOW_BYTES}")

    def _add(self, name: str, nbytes: int, meaning: str) -> None:
        self._regions[name] = Region(name, self.nbytes, nbytes, meaning)
        setattr(self, name, self.nbytes)
        self.nbytes += round_up(nbytes, PAGE)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def __getitem__(self, name: str) -> Region:
        return self._regions[name]

    @property
    def digest(self) -> int:
        """Equal on two ranks exactly when all their regions are equal."""
        return _digest(self.ranks, *(f"{r.name}:{r.offset}:{r.nbytes}" for r in self))
