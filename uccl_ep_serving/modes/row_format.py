"""What all ranks must agree on in an operation of normal mode: its name, its digest, and the words when they do not."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError
from ..protocol.layout import NormalPlan
from ..protocol.message import NormalNotify, round_up

if TYPE_CHECKING:
    from ..kernels.blocks.normal_device import NormalFormat

__all__ = [
    "RowFormat",
    "check_experts",
    "check_room",
    "largest_row",
    "mark_bytes",
    "overflow",
    "shape_mismatch",
    "wire_format",
]

_NAMES = {
    NormalNotify.OPERATION_DISPATCH: "normal dispatch",
    NormalNotify.OPERATION_CACHED_DISPATCH: "normal cached dispatch",
    NormalNotify.OPERATION_COMBINE: "normal combine",
}
_DTYPES = ("bfloat16", "float16", "float32", "float8 with scales", "float8 with packed scales")
_NO_ORIGIN = (-1, -1, -1)
#: Of 63 bits.
_MOST = (1 << 63) - 1
#: Odd, so that for one format every operation number gives another digest; far apart, so that epochs and openings do
#: too.
_NUMBER_STEP, _EPOCH_STEP, _OPENING_STEP = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


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
        channels: that the rows are dealt to on a GPU; 0 on CPUs, whose kernels speak otherwise.
        origin: (opening, epoch, number) of the dispatch whose handle is used, -1 each when none is.
    """

    kind: int
    dtype: int
    hidden: int
    row_bytes: int
    topk: int = 0
    scale_bytes: int = 0
    local_experts: int = 0
    node_ranks: int = 0
    channels: int = 0
    origin: tuple[int, int, int] = _NO_ORIGIN

    @property
    def name(self) -> str:
        """The operation in words."""
        return _NAMES[self.kind]

    @property
    def coding(self) -> int:
        """Operation and dtype as peers tell them each other."""
        return self.kind << 16 | self.dtype

    @property
    def meta_bytes(self) -> int:
        """Bytes of a row's meta: (id and weight) or weight per slot, then scales, then marks, rounded up to 16."""
        if self.kind == NormalNotify.OPERATION_COMBINE:
            return round_up(self.topk * 4, 16)
        return round_up(self.topk * 8 + self.scale_bytes + mark_bytes(self.node_ranks), 16)

    @property
    def digest(self) -> int:
        """Word SHAPE of the notify: 63 bits."""
        steps = zip(self.origin, (_OPENING_STEP, _EPOCH_STEP, _NUMBER_STEP), strict=True)
        return (_digest(self[:-1]) + sum((one + 1) * step for one, step in steps)) & _MOST


def largest_row(form: RowFormat) -> int:
    """Bytes of a row of the dispatch ``form``, or of its combine, of values of up to 4 bytes, with the meta."""
    return max(form.row_bytes, 4 * form.hidden) + form.meta_bytes


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
    check_experts(form, plan)


def check_experts(form: RowFormat, plan: NormalPlan) -> None:
    """Raise ConfigError for more experts than the window has counts for."""
    if form.local_experts > plan.local_experts:
        raise ConfigError(
            f"{form.name}: {form.local_experts} experts per rank exceed the {plan.local_experts} of the window"
        )


@functools.lru_cache(maxsize=256)
def _digest(fields: tuple[Any, ...]) -> int:
    """63 bits that stand for a format. A hash costs microseconds and engines repeat a few formats for ever."""
    return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little") >> 1


def mark_bytes(node_ranks: int) -> int:
    """Bytes with a bit for each of ``node_ranks`` ranks."""
    return -(-node_ranks // 8)


@functools.lru_cache(maxsize=256)
def wire_format(form: RowFormat) -> NormalFormat:
    """``form`` for kernels of a device: the number of the dispatch of a handle is known to the device only."""
    # it imports torch, which ``uccl-ep plan`` does without
    from ..kernels.blocks.normal_device import NormalFormat

    opening, epoch, number = form.origin
    step = form._replace(origin=(opening, epoch, number + 1)).digest - form.digest
    return NormalFormat(
        form.kind,
        form.dtype,
        form.row_bytes,
        form.meta_bytes,
        form.scale_bytes,
        form.topk,
        form.local_experts,
        form.digest,
        step & _MOST,
        form.node_ranks,
        form.channels,
    )


def _handle(form: RowFormat) -> str:
    """Of which dispatch the handle is, in words."""
    opening, epoch, number = form.origin
    if opening < 0:
        return "no handle"
    which = f"dispatch {number}" if number >= 0 else "a dispatch"
    return f"the handle of {which} in epoch {epoch} of Buffer {opening:08x}"


def shape_mismatch(form: RowFormat, rank: int, others: Iterable[tuple[int, int, int, int]]) -> ConfigError:
    """What to raise when peers were given another operation than ``form``.

    Args:
        rank: of this process.
        others: (rank, coding, bytes of a row, bytes of meta) that these peers told.
    """
    told = "; ".join(f"rank {peer} {_words(*shape)}" for peer, *shape in others)
    return ConfigError(
        f"{form.name}: the ranks were given different operations, nothing was sent: rank {rank} "
        f"{_words(form.coding, form.row_bytes, form.meta_bytes)} (hidden {form.hidden}, top-k {form.topk}, "
        f"{form.local_experts} local experts, {_channels(form)}, {_handle(form)}); {told}. Where these agree, "
        "hidden, top-k, the experts, the channels or the handle differ. Next step: make the same call on every rank, "
        "with the same num_sms, on CPUs or on GPUs alike; the group goes on"
    )


def _channels(form: RowFormat) -> str:
    return f"{form.channels} channels" if form.channels else "CPU kernels"


def overflow(rows: int, promised: str) -> ConfigError:
    """What to raise when more rows arrived than ``num_worst_tokens`` promised."""
    return ConfigError(
        f"{rows} rows arrived where num_worst_tokens {promised}; all ranks received, the group goes on. Next step: "
        "num_worst_tokens = ranks x the most tokens of a rank"
    )


def _words(coding: int, row_bytes: int, meta_bytes: int) -> str:
    """What a rank was given: an operation, a dtype and the bytes of a row."""
    kind, dtype = coding >> 16, coding & 0xFFFF
    of = _DTYPES[dtype] if dtype < len(_DTYPES) else f"dtype {dtype}"
    return f"a {_NAMES.get(kind, f'operation {kind}')} of {of}, {row_bytes} bytes a row, {meta_bytes} bytes of meta"
