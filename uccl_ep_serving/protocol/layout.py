"""Where everything lies in a window: regions at equal offsets on every rank.

A layout is a pure function of a :class:`LowLatencyRoom` (or none) and a :class:`NormalPlan`; ranks that agree on those
agree on every offset. All regions start on a page. Sizes follow the real dtype. "Peer-written" regions are the only
memory that another rank's write may touch; a proxy refuses offsets outside the window, a kernel checks what it reads.

Low-latency operations of any :class:`LowLatencyPlan` that a room holds use the same regions: what a plan decides lies
inside a slot, a parity of a region or the combine staging, never where those begin.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields

from .bitfield import Word
from .command import MAX_RANKS, MAX_WINDOW_BYTES, UNIT
from .message import (
    CHANNEL_ROWS_BYTES,
    FORMAT_VERSION,
    GRANT_SLOTS,
    HEADER_BYTES,
    NOTICE_SLOTS,
    counts_bytes,
    meta_bytes,
    notify_bytes,
    round_up,
)
from .pipe import words_bytes
from .relay import BOARD_BYTES, LINE_BYTES
from .streams import STREAMS

__all__ = [
    "MAX_EXPERTS",
    "MAX_LOW_LATENCY_TOKENS",
    "PAGE",
    "PARITIES",
    "PLAN",
    "LowLatencyPlan",
    "LowLatencyRoom",
    "NormalPlan",
    "Region",
    "WindowLayout",
    "is_plan",
    "plan_in_words",
]

PAGE = 4096
PARITIES = 2
#: Peer-written slots and parities of a region begin on multiples of so many bytes: no two share a cache line.
_SLOT = 128
MAX_EXPERTS = 4096
MAX_LOW_LATENCY_TOKENS = 8192

#: The sizes of a low-latency operation in one word of every header of it. Ranks agree on how many they are.
PLAN = Word(
    "low-latency plan",
    63,
    ("tokens", 14, "most tokens a rank dispatches, T"),
    ("quads", 21, "hidden size / 4"),
    ("experts", 13, "routed experts, E"),
    ("topk", 13, "experts per token, K"),
    ("wide", 1, "1 = values of 4 bytes, 0 = of 2"),
    ("marked", 1, "1: no other word of a header is that large"),
)
_MAX_HIDDEN = 4 * PLAN["quads"].limit


def _digest(*values: int | str) -> int:
    """63-bit digest of a tuple of plain values (not cryptographic: it finds mistakes, not attackers)."""
    text = repr((FORMAT_VERSION, *values)).encode()
    return (zlib.crc32(text) << 31 | zlib.crc32(text[::-1])) & ((1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class LowLatencyRoom:
    """Bytes of the low-latency regions: enough for every plan that they hold.

    Attributes:
        ranks: EP ranks.
        dispatch_slot: of the receive slot of one source rank.
        dispatch_send: of one parity of packed dispatch messages.
        combine_recv: of one parity of returned rows.
        combine_send: of rows to return.
    """

    ranks: int
    dispatch_slot: int
    dispatch_send: int
    combine_recv: int
    combine_send: int

    def __post_init__(self) -> None:
        for name, nbytes in self._regions():
            if nbytes < 0 or nbytes % _SLOT:
                raise ValueError(f"{name} = {nbytes} must be a multiple of {_SLOT} bytes")

    def _regions(self) -> Iterator[tuple[str, int]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self)[1:])

    def holds(self, plan: LowLatencyPlan) -> bool:
        """True when operations of ``plan`` fit."""
        return self.with_room_for(plan.room) == self

    def with_room_for(self, other: LowLatencyRoom) -> LowLatencyRoom:
        """The smallest room that holds what either holds. Raises ValueError for other ranks."""
        if other.ranks != self.ranks:
            raise ValueError(f"room for {other.ranks} ranks in a window of {self.ranks}")
        return LowLatencyRoom(self.ranks, *(max(nbytes, getattr(other, name)) for name, nbytes in self._regions()))

    @property
    def longest_message(self) -> int:
        """Bytes that one message may have."""
        return max(self.dispatch_slot, self.combine_recv)

    @property
    def nbytes(self) -> int:
        """Bytes of all low-latency regions, without the round-up to pages."""
        twice = self.ranks * self.dispatch_slot + self.dispatch_send + self.combine_recv
        return PARITIES * twice + self.combine_send


@dataclass(frozen=True, slots=True)
class LowLatencyPlan:
    """Sizes of a low-latency operation, equal on all ranks. Raises ValueError when a value is no integer or outside the
    formats' capacity.

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
        if not 0 < self.hidden <= _MAX_HIDDEN or self.hidden * self.element % UNIT:
            raise ValueError(
                f"hidden = {self.hidden}: a row of {self.element}-byte values must be a multiple of {UNIT} bytes, with "
                f"at most {_MAX_HIDDEN} values"
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
    def first_row(self) -> int:
        """Bytes of a dispatch message before its first meta."""
        return HEADER_BYTES + counts_bytes(self.local_experts)

    @property
    def room(self) -> LowLatencyRoom:
        """What its messages need.

        A dispatch packs each token once per destination rank. At most T x K rows return. A combine packs each received
        (token, local expert). Headers and the round-up of a message lie in ``_SLOT`` bytes for each rank.
        """
        token = self.meta + self.row
        ahead = self.ranks * (_SLOT + counts_bytes(self.local_experts))
        return LowLatencyRoom(
            self.ranks,
            dispatch_slot=round_up(self.first_row + self.tokens * token, _SLOT),
            dispatch_send=round_up(ahead + self.tokens * min(self.topk, self.ranks) * token, _SLOT),
            combine_recv=round_up(self.ranks * _SLOT + self.tokens * self.topk * self.row, _SLOT),
            combine_send=round_up(
                self.ranks * _SLOT + self.ranks * self.tokens * self.slots_per_rank * self.row, _SLOT
            ),
        )

    @property
    def word(self) -> int:
        """What every header of its operations carries, so that ranks with different plans refuse each other by name:
        see :data:`PLAN`."""
        return PLAN.pack(
            tokens=self.tokens,
            quads=self.hidden // 4,
            experts=self.experts,
            topk=self.topk,
            wide=int(self.element == 4),
            marked=1,
        )


def is_plan(word: int) -> bool:
    """True for a :data:`PLAN` word, False for any other that a header rightly has."""
    return word >> PLAN["marked"].shift == 1


def plan_in_words(word: int) -> str:
    """What a :data:`PLAN` word says, for messages; one that is none in digits."""
    if not is_plan(word):
        return f"{word:#x}"
    sizes = PLAN.unpack(word)
    return (
        f"T = {sizes['tokens']}, hidden {4 * sizes['quads']}, {sizes['experts']} experts, top-{sizes['topk']}, "
        f"values of {4 if sizes['wide'] else 2} bytes"
    )


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
        return round_up(notify_bytes(self.local_experts) + CHANNEL_ROWS_BYTES, 128)


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

    Args:
        low_latency: room for all plans that it holds, or one plan, or None.

    Attributes:
        low_latency: that room.
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
    pipe_words: int
    ll_dispatch_recv: int
    ll_dispatch_send: int
    ll_combine_recv: int
    ll_combine_send: int
    normal_send: int
    normal_rounds: int
    normal_heap: int

    def __init__(self, ranks: int, low_latency: LowLatencyRoom | LowLatencyPlan | None, normal: NormalPlan) -> None:
        if normal.ranks != ranks or (low_latency is not None and low_latency.ranks != ranks):
            raise ValueError(f"plans of {normal.ranks} ranks in a window of {ranks}")
        self.ranks = ranks
        self.low_latency = room = low_latency.room if isinstance(low_latency, LowLatencyPlan) else low_latency
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
        add("pipe_words", words_bytes(ranks), "[word, channel, pipe]: how far mapped peers are with their pipes")
        add(
            "ll_dispatch_recv",
            PARITIES * ranks * room.dispatch_slot if room else 0,
            "[parity, source rank]: dispatch messages received",
        )
        add(
            "ll_dispatch_send",
            PARITIES * room.dispatch_send if room else 0,
            "[parity]: dispatch messages packed by destination",
        )
        add(
            "ll_combine_recv",
            PARITIES * room.combine_recv if room else 0,
            "[parity]: combine messages received, where the dispatch header said",
        )
        add(
            "ll_combine_send",
            room.combine_send if room else 0,
            "combine messages packed by source",
        )
        add(
            "normal_send",
            ranks * normal.depth * normal.chunk,
            "[destination rank, depth]: chunks packed for sending; on GPUs rings for sending",
        )
        add(
            "normal_rounds",
            ranks * 2 * normal.round_slot,
            "[source rank, 2]: rows received in rounds; on GPUs, with normal_heap, rings that rows land in",
        )
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
