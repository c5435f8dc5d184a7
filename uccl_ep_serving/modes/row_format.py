"""What all ranks must agree on in an operation of normal mode: its name, its digest, and its words for errors."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..protocol.layout import NormalPlan
from ..protocol.message import NormalNotify, round_up
from .node_relay import mark_bytes

__all__ = ["RowFormat", "check_room", "in_words", "operation_name"]

_NAMES = {
    NormalNotify.OPERATION_DISPATCH: "normal dispatch",
    NormalNotify.OPERATION_CACHED_DISPATCH: "normal cached dispatch",
    NormalNotify.OPERATION_COMBINE: "normal combine",
}
_DTYPES = ("bfloat16", "float16", "float32", "float8 with scales", "float8 with packed scales")
_NO_ORIGIN = (-1, -1)
#: Odd, so that for one format every operation number gives another digest; far apart, so that epochs do too.
_NUMBER_STEP, _EPOCH_STEP = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def operation_name(kind: int) -> str:
    """NormalNotify.OPERATION_* in words, whatever a peer told."""
    return _NAMES.get(kind, f"operation {kind}")


def in_words(coding: int, row_bytes: int, meta_bytes: int) -> str:
    """What a rank was given, from what it told: an operation, a dtype and the bytes of a row."""
    dtype = coding & 0xFFFF
    kind = _DTYPES[dtype] if dtype < len(_DTYPES) else f"dtype {dtype}"
    return f"a {operation_name(coding >> 16)} of {kind}, {row_bytes} bytes a row, {meta_bytes} bytes of meta"


class RowFormat(NamedTuple):
    """What all ranks must agree on in one operation.

    Attributes:
        kind: NormalNotify.OPERATION_*.
        dtype: DTYPE_* of the rows.
        hidden: values per row.
        row_bytes: bytes of a row, a multiple of 16.
        topk: expert ids and weights per row of a dispatch, weights per row of a combine; 0 = none travel.
        scale_bytes: bytes of scales per row.
        local_experts: experts per rank, 0 where they do not matter.
        node_ranks: ranks of a node when each row crosses once to a node, else 0.
        origin: (epoch, number) of the dispatch whose handle is used, (-1, -1) when none is.
    """

    kind: int
    dtype: int
    hidden: int
    row_bytes: int
    topk: int = 0
    scale_bytes: int = 0
    local_experts: int = 0
    node_ranks: int = 0
    origin: tuple[int, int] = _NO_ORIGIN

    @property
    def name(self) -> str:
        """The operation in words."""
        return operation_name(self.kind)

    @property
    def coding(self) -> int:
        """Operation and dtype as peers tell them each other: for :func:`in_words`."""
        return self.kind << 16 | self.dtype

    @property
    def words(self) -> str:
        """The operation and what a row is, for an error."""
        return in_words(self.coding, self.row_bytes, self.meta_bytes)

    @property
    def meta_bytes(self) -> int:
        """Bytes of a row's meta: (id and weight) or weight per slot, then scales, then marks, rounded up to 16."""
        if self.kind == NormalNotify.OPERATION_COMBINE:
            return round_up(self.topk * 4, 16)
        return round_up(self.topk * 8 + self.scale_bytes + mark_bytes(self.node_ranks), 16)

    @property
    def digest(self) -> int:
        """Word SHAPE of the notify: 63 bits."""
        epoch, number = self.origin
        mixed = _digest(self[:-1]) + (epoch + 1) * _EPOCH_STEP + (number + 1) * _NUMBER_STEP
        return mixed & ((1 << 63) - 1)


def check_room(form: RowFormat, plan: NormalPlan) -> None:
    """Raise ConfigError for what no window can carry, on every rank alike."""
    row = form.row_bytes + form.meta_bytes
    for name, room, setting in (
        ("a chunk", plan.chunk, "UCCL_EP_CHUNK_BYTES"),
        ("a round slot", plan.round_slot, "UCCL_EP_ROUND_BYTES"),
    ):
        if row > room:
            raise ConfigError(
                f"{form.name}: a row of {form.row_bytes} bytes and {form.meta_bytes} bytes of meta does not fit {name} "
                f"of {room} bytes. Next step: raise {setting} on all ranks"
            )
    if form.local_experts > plan.local_experts:
        raise ConfigError(
            f"{form.name}: {form.local_experts} experts per rank exceed the {plan.local_experts} of the window"
        )


@functools.lru_cache(maxsize=256)
def _digest(fields: tuple[Any, ...]) -> int:
    """63 bits that stand for a format. A hash costs microseconds and engines repeat a few formats for ever."""
    return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little") >> 1
