"""Typed views over addresses, and conversions between float32 and the narrow formats, for vectorised loops.

Atomic accesses cannot be vectorised; payload memory that nobody else touches while a kernel works on it is read and
written through these views instead. The conversions are LLVM instructions on 32-bit lanes: the same arithmetic written
in Numba would widen to 64 bits and halve the vector width.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ...native.jit import intrinsic, view
from ...native.machine import half_instructions

_F32, _F16 = ir.FloatType(), ir.HalfType()
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


#: float32[count] at an address.
float_view = view("float32")
#: uint16[count] at an address: the bits of bfloat16 or float16 values.
short_view = view("uint16")
#: int32[count] at an address: pairs of bfloat16 values.
word_view = view("int32")
#: uint8[count] at an address.
bytes_view = view("uint8")


@intrinsic("float32(int32)")
def bits_to_f32(builder: Any, bits: Any) -> Any:
    """float32 with these 32 bits."""
    return builder.bitcast(bits, _F32)


@intrinsic("int32(float32)")
def absolute_bits(builder: Any, value: Any) -> Any:
    """Bits of ``abs(value)`` as int32: they order like the values, with NaN above infinity."""
    return builder.and_(builder.bitcast(value, _I32), _I32(0x7FFFFFFF))


@intrinsic("float32(uint16)")
def bf16_to_f32(builder: Any, bits: Any) -> Any:
    """Exact."""
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)


@intrinsic("uint16(float32)")
def f32_to_bf16(builder: Any, value: Any) -> Any:
    """Round to nearest even; NaN stays NaN."""
    bits = builder.bitcast(value, _I32)
    high = builder.lshr(bits, _I32(16))
    # adding 0x7FFF plus the lowest kept bit carries into it exactly when rounding to nearest even goes up
    bias = builder.add(builder.and_(high, _I32(1)), _I32(0x7FFF))
    rounded = builder.lshr(builder.add(bits, bias), _I32(16))
    quiet = builder.or_(high, _I32(0x40))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(nan, quiet, rounded), _I16)


@intrinsic("int32(int32, int32)")
def add_bf16_pairs(builder: Any, left: Any, right: Any) -> Any:
    """Two sums of two bfloat16 values each, in float32 rounded to nearest even: as 32-bit words of two values.

    Half the instructions of :func:`bf16_to_f32` and :func:`f32_to_bf16` per value: nothing is widened or packed, and
    NaN needs no care, as the low bits of a sum that is NaN are zero: it is one of the two values, or the CPU's own NaN.
    """
    high = _I32(0xFFFF0000)

    def rounded(left: Any, right: Any) -> Any:
        total = builder.fadd(builder.bitcast(left, _F32), builder.bitcast(right, _F32))
        bits = builder.bitcast(total, _I32)
        odd = builder.icmp_unsigned("!=", builder.and_(bits, _I32(0x10000)), _I32(0))
        # see f32_to_bf16
        return builder.add(bits, builder.select(odd, _I32(0x8000), _I32(0x7FFF)))

    low = rounded(*(builder.shl(word, _I32(16)) for word in (left, right)))
    upper = rounded(*(builder.and_(word, high) for word in (left, right)))
    return builder.or_(builder.and_(upper, high), builder.lshr(low, _I32(16)))


@intrinsic("float32(uint16)")
def f16_to_f32(builder: Any, bits: Any) -> Any:
    """Exact; NaN stays NaN."""
    if half_instructions():
        return builder.fpext(builder.bitcast(bits, _F16), _F32)
    bits = builder.zext(bits, _I32)
    sign = builder.shl(builder.and_(bits, _I32(0x8000)), _I32(16))
    size = builder.and_(bits, _I32(0x7FFF))
    # the mantissa moves up by 13 bits, the exponent bias from 15 to 127; infinity and NaN to exponent 255
    moved = builder.shl(size, _I32(13))
    normal = builder.add(moved, _I32((127 - 15) << 23))
    special = builder.add(moved, _I32((255 - 31) << 23))
    quiet = builder.or_(special, _I32(1 << 22))
    # subnormals: as a mantissa over 2**-14, the least normal number, which is then taken away again
    over = builder.bitcast(builder.add(moved, _I32((127 - 14) << 23)), _F32)
    subnormal = builder.bitcast(builder.fsub(over, _F32(2.0**-14)), _I32)
    value = builder.select(builder.icmp_unsigned("<", size, _I32(0x0400)), subnormal, normal)
    value = builder.select(builder.icmp_unsigned(">=", size, _I32(0x7C00)), special, value)
    value = builder.select(builder.icmp_unsigned(">", size, _I32(0x7C00)), quiet, value)
    return builder.bitcast(builder.or_(value, sign), _F32)


@intrinsic("uint16(float32)")
def f32_to_f16(builder: Any, value: Any) -> Any:
    """Round to nearest even, overflow to infinity; NaN stays NaN."""
    if half_instructions():
        return builder.bitcast(builder.fptrunc(value, _F16), _I16)
    bits = builder.bitcast(value, _I32)
    sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000))
    size = builder.and_(bits, _I32(0x7FFFFFFF))
    # half of the last kept bit, less one when that bit is even, carries into it where rounding goes up
    odd = builder.and_(builder.lshr(size, _I32(13)), _I32(1))
    biased = builder.sub(size, _I32((127 - 15) << 23))
    normal = builder.lshr(builder.add(builder.add(biased, _I32(0xFFF)), odd), _I32(13))
    # below 2**-14: steps of 2**-24, which is the unit in the last place of 0.5, so the float adder rounds for us
    shifted = builder.fadd(builder.bitcast(size, _F32), _F32(0.5))
    subnormal = builder.sub(builder.bitcast(shifted, _I32), _I32(0x3F000000))
    code = builder.select(builder.icmp_unsigned("<", size, _I32(0x38800000)), subnormal, normal)
    code = builder.select(builder.icmp_unsigned(">=", size, _I32(0x47800000)), _I32(0x7C00), code)
    payload = builder.and_(builder.lshr(size, _I32(13)), _I32(0x3FF))
    nan = builder.icmp_unsigned(">", size, _I32(0x7F800000))
    code = builder.select(nan, builder.or_(payload, _I32(0x7E00)), code)
    return builder.trunc(builder.or_(code, sign), _I16)


@intrinsic("uint8(float32)")
def f32_to_e4m3(builder: Any, value: Any) -> Any:
    """FP8 e4m3fn bits: round to nearest even, saturate at 448, NaN becomes 0x7F with the sign."""
    bits = builder.bitcast(value, _I32)
    sign = builder.and_(builder.lshr(bits, _I32(24)), _I32(0x80))
    size = builder.and_(bits, _I32(0x7FFFFFFF))
    limit = _I32(0x43E00000)  # 448.0
    kept = builder.select(builder.icmp_unsigned("<", size, limit), size, limit)
    # normal numbers: keep 3 of 23 mantissa bits, move the exponent bias from 127 to 7
    odd = builder.and_(builder.lshr(kept, _I32(20)), _I32(1))
    rounded = builder.lshr(builder.add(builder.add(kept, _I32(0x7FFFF)), odd), _I32(20))
    normal = builder.sub(rounded, _I32((127 - 7) << 3))
    # below 2**-6: steps of 2**-9, which is the unit in the last place of 2**14, so the float adder rounds for us
    shifted = builder.fadd(builder.bitcast(kept, _F32), _F32(16384.0))
    subnormal = builder.sub(builder.bitcast(shifted, _I32), _I32(0x46800000))
    small = builder.icmp_unsigned("<", kept, _I32(0x3C800000))
    code = builder.select(small, subnormal, normal)
    nan = builder.icmp_unsigned(">", size, _I32(0x7F800000))
    code = builder.select(nan, _I32(0x7F), code)
    return builder.trunc(builder.or_(code, sign), _I8)
