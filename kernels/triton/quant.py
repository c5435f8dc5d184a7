"""Conversions between float32 and the narrow formats, and block-scaled FP8, bit-exact with ``cpu/quant.py``.

In Triton's interpreter conversions to FP8 and BF16 are wrong (ties go up, a carry out of the mantissa is lost, BF16 is
cut off), and on ROCm conversion to FP8 depends on the chip: there the bits are rounded here. CUDA has instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import DTYPE_BF16, DTYPE_F16
from .target import CUDA, HIP, INTERPRETER, backend
from .words import aligned

_BF16, _F16 = tl.constexpr(DTYPE_BF16), tl.constexpr(DTYPE_F16)
#: Bits of 1e-4, DeepEP's floor for amax, so that a block of zeros has a finite scale.
_AMAX_FLOOR = tl.constexpr(0x38D1B717)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def round_e4m3(x: tl.tensor) -> tl.tensor:
    """FP8 e4m3fn bits of float32 as uint8: to nearest even, saturating at 448; NaN becomes 0x7F."""
    if backend() == CUDA:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        kept = tl.minimum(size, 0x43E00000)  # 448.0
        # normal numbers: keep 3 of 23 mantissa bits, move the exponent bias from 127 to 7
        normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # below 2**-6: steps of 2**-9, the unit in the last place of 2**14, so the float adder rounds
        shifted = kept.to(tl.float32, bitcast=True) + 16384.0
        code = tl.where(kept < 0x3C800000, shifted.to(tl.int32, bitcast=True) - 0x46800000, normal)
        code = tl.where(size > _INFINITY, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_e4m3fnuz(x: tl.tensor) -> tl.tensor:
    """FP8 e4m3fnuz bits (gfx942): bias 8, saturating at 240, one zero; NaN becomes 0x80."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    kept = tl.minimum(size, 0x43700000)  # 240.0
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - ((127 - 8) << 3)
    # below 2**-7: steps of 2**-10, the unit in the last place of 2**13
    shifted = kept.to(tl.float32, bitcast=True) + 8192.0
    code = tl.where(kept < 0x3C000000, shifted.to(tl.int32, bitcast=True) - 0x46000000, normal)
    code = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
    return tl.where(size > _INFINITY, 0x80, code).to(tl.uint8)


@triton.jit
def round_bf16(x: tl.tensor) -> tl.tensor:
    """BF16 bits of float32 as int16: to nearest even; NaN stays NaN."""
    if backend() == INTERPRETER:
        bits = x.to(tl.int32, bitcast=True)
        high = (bits >> 16) & 0xFFFF
        # adding 0x7FFF plus the lowest kept bit carries into it exactly when rounding to nearest even goes up
        rounded = (bits + 0x7FFF + (high & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) > _INFINITY, high | 0x40, rounded).to(tl.int16)
    else:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def load_floats(
    addresses: tl.tensor, index: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr, NEGATIVE: tl.constexpr = False
) -> tl.tensor:
    """Values [rows, columns] of DTYPE_BF16, DTYPE_F16 or DTYPE_F32 as float32; where not ``mask`` 0, or -0 if
    ``NEGATIVE``, which changes no number that it is added to.

    ``addresses`` [rows] are multiples of 16, ``index`` [1, columns] counts values: only steps of a pointer tell the
    compiler that accesses are contiguous.
    """
    # Where not ``mask``, a number of the rows' own type made of its bits: Triton 3.6 and 3.8 repeat an integer of 16
    # bits in a register without cutting off its sign (0xFFFF8000, a NaN beside -0), and take a -0.0 for 0.
    sign: tl.constexpr = -1 if NEGATIVE else 0
    if DTYPE == _BF16:
        zero = tl.full((), sign * 0x8000, tl.int16).to(tl.bfloat16, bitcast=True)
        values = tl.load(aligned(addresses, tl.bfloat16)[:, None] + index, mask=mask, other=zero)
        # widening is exact, and done on bits it is right everywhere
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == _F16:
        zero = tl.full((), sign * 0x8000, tl.int16).to(tl.float16, bitcast=True)
        return tl.load(aligned(addresses, tl.float16)[:, None] + index, mask=mask, other=zero).to(tl.float32)
    else:
        zero = tl.full((), sign * 0x80000000, tl.int32).to(tl.float32, bitcast=True)
        return tl.load(aligned(addresses, tl.float32)[:, None] + index, mask=mask, other=zero)


@triton.jit
def _waited_for(values: tl.tensor) -> tl.tensor:
    """int64 ``values``, which are there. On AMD a wave's loads return in order: who waits for a late one waits for all
    before it."""
    if backend() == HIP:
        return tl.inline_asm_elementwise("", "=v,0,~{memory}", [values], tl.int64, is_pure=False, pack=1)
    else:
        return values


@triton.jit
def load_together(
    sources: tl.tuple,
    there: tl.tuple,
    index: tl.tensor,
    mask: tl.tensor,
    DTYPE: tl.constexpr,
    TOGETHER: tl.constexpr,
    NEGATIVE: tl.constexpr = False,
) -> tuple[tl.tensor, ...]:
    """:func:`load_floats` of TOGETHER rows, of ``there`` [rows] alone, all loaded before the first is waited for.

    Without the barriers the compiler asks for an address when the row before is there, and adds that before it asks for
    the next.
    """
    parts, known, wanted = (), (), ()
    for step in tl.static_range(TOGETHER):
        known += (_waited_for(sources[step]),)  # type: ignore[assignment]
        wanted += (_waited_for(there[step].to(tl.int64)) != 0,)  # type: ignore[assignment]
    tl.debug_barrier()
    for step in tl.static_range(TOGETHER):
        part = load_floats(known[step], index, wanted[step][:, None] & mask, DTYPE, NEGATIVE)
        parts += (part,)  # type: ignore[assignment]
    tl.debug_barrier()
    return parts


@triton.jit
def store_floats(addresses: tl.tensor, index: tl.tensor, x: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> None:
    """Store float32 ``x`` rounded to nearest even into ``DTYPE``; addresses as for :func:`load_floats`."""
    if DTYPE == _BF16:
        tl.store(aligned(addresses, tl.int16)[:, None] + index, round_bf16(x), mask=mask)
    elif DTYPE == _F16:
        tl.store(aligned(addresses, tl.int16)[:, None] + index, x.to(tl.float16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(aligned(addresses, tl.float32)[:, None] + index, x, mask=mask)


@triton.jit
def quantise_blocks(x: tl.tensor, ROUND: tl.constexpr, FNUZ: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Values along the last of three axes share a scale: (FP8 bits uint8 like ``x``, bits of the float32 scales).

    DeepEP's rule: ``amax = max(|x|, 1e-4)``, value = e4m3(x * (448 / amax)), scale = amax * (1 / 448); with ``ROUND``
    the scale is the next power of two. On gfx942 240 stands for 448. A NaN spoils its block and nothing else.
    """
    # on bits, which order like absolute values, with NaN above infinity
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    amax = tl.maximum(bits, _AMAX_FLOOR).to(tl.float32, bitcast=True)
    if FNUZ:
        largest, inverse = 240.0, 1.0 / 240.0
    else:
        largest, inverse = 448.0, 1.0 / 448.0
    scale = (amax * inverse).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if ROUND:
        up = ((scale & 0x7FFFFF) != 0) & (scale < _INFINITY)
        scale = tl.where(up, ((scale >> 23) + 1) << 23, scale)
        # exact: the reciprocal of a power of two
        factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale.to(tl.float32, bitcast=True))
    else:
        factor = tl.div_rn(tl.full(amax.shape, largest, tl.float32), amax)
    scaled = x * tl.expand_dims(factor, 2)
    if FNUZ:
        codes = round_e4m3fnuz(scaled)
    else:
        codes = round_e4m3(scaled)
    return codes, scale
