"""Typed views over addresses, and conversions between float32 and the narrow formats, for vectorised loops.

Atomic accesses cannot be vectorised; payload memory that nobody else touches while a kernel works on it is read and
written through these views instead. The conversions are LLVM instructions on 32-bit lanes: the same arithmetic written
in Numba would widen to 64 bits and halve the vector width.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
from llvmlite import ir
from numba import carray, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from ...native.jit import compiled

_F32, _F16 = ir.FloatType(), ir.HalfType()
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


def half_instructions() -> bool:
    """Whether the CPU that Numba compiles for converts float16: x86 with F16C (since 2012), and AArch64.

    Elsewhere LLVM calls ``__extendhfsf2`` of the compiler's run-time library. The just-in-time compiler has none, and
    LLVM then aborts the process, so the conversions below use integers there.
    """
    features = numba.config.CPU_FEATURES
    if features is None:
        features = get_host_cpu_features()
    return platform.machine() in ("aarch64", "arm64") or "+f16c" in features.split(",")


def _pointer_to(element: Any, llvm: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], llvm.as_pointer())

    return types.CPointer(element)(types.int64), codegen


@intrinsic
def _float_pointer(typingctx, address):  # type: ignore[no-untyped-def]
    return _pointer_to(types.float32, _F32)


@intrinsic
def _short_pointer(typingctx, address):  # type: ignore[no-untyped-def]
    return _pointer_to(types.uint16, _I16)


@intrinsic
def _word_pointer(typingctx, address):  # type: ignore[no-untyped-def]
    return _pointer_to(types.int32, _I32)


@intrinsic
def _byte_pointer(typingctx, address):  # type: ignore[no-untyped-def]
    return _pointer_to(types.uint8, _I8)


@compiled
def float_view(address: int, count: int) -> Any:
    """float32[count] at ``address``."""
    return carray(_float_pointer(address), (count,))


@compiled
def short_view(address: int, count: int) -> Any:
    """uint16[count] at ``address``: the bits of bfloat16 or float16 values."""
    return carray(_short_pointer(address), (count,))


@compiled
def word_view(address: int, count: int) -> Any:
    """int32[count] at ``address``: pairs of bfloat16 values."""
    return carray(_word_pointer(address), (count,))


@compiled
def bytes_view(address: int, count: int) -> Any:
    """uint8[count] at ``address``."""
    return carray(_byte_pointer(address), (count,))


@intrinsic
def bits_to_f32(typingctx, bits):  # type: ignore[no-untyped-def]
    """float32 with these 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


@intrinsic
def absolute_bits(typingctx, value):  # type: ignore[no-untyped-def]
    """Bits of ``abs(value)`` as int32: they order like the values, with NaN above infinity."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(builder.bitcast(args[0], _I32), _I32(0x7FFFFFFF))

    return types.int32(types.float32), codegen


@intrinsic
def bf16_to_f32(typingctx, bits):  # type: ignore[no-untyped-def]
    """Exact."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(types.uint16), codegen


@intrinsic
def f32_to_bf16(typingctx, value):  # type: ignore[no-untyped-def]
    """Round to nearest even; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        high = builder.lshr(bits, _I32(16))
        # adding 0x7FFF plus the lowest kept bit carries into it exactly when rounding to nearest even goes up
        bias = builder.add(builder.and_(high, _I32(1)), _I32(0x7FFF))
        rounded = builder.lshr(builder.add(bits, bias), _I32(16))
        quiet = builder.or_(high, _I32(0x40))
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(nan, quiet, rounded), _I16)

    return types.uint16(types.float32), codegen


@intrinsic
def add_bf16_pairs(typingctx, left, right):  # type: ignore[no-untyped-def]
    """Two sums of two bfloat16 values each, in float32 rounded to nearest even: as 32-bit words of two values.

    Half the instructions of :func:`bf16_to_f32` and :func:`f32_to_bf16` per value: nothing is widened or packed, and
    NaN needs no care, as the low bits of a sum that is NaN are zero: it is one of the two values, or the CPU's own NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        high = _I32(0xFFFF0000)

        def rounded(left: Any, right: Any) -> Any:
            total = builder.fadd(builder.bitcast(left, _F32), builder.bitcast(right, _F32))
            bits = builder.bitcast(total, _I32)
            odd = builder.icmp_unsigned("!=", builder.and_(bits, _I32(0x10000)), _I32(0))
            # see f32_to_bf16
            return builder.add(bits, builder.select(odd, _I32(0x8000), _I32(0x7FFF)))

        low = rounded(*(builder.shl(word, _I32(16)) for word in args))
        upper = rounded(*(builder.and_(word, high) for word in args))
        return builder.or_(builder.and_(upper, high), builder.lshr(low, _I32(16)))

    return types.int32(types.int32, types.int32), codegen


@intrinsic
def f16_to_f32(typingctx, bits):  # type: ignore[no-untyped-def]
    """Exact; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if half_instructions():
            return builder.fpext(builder.bitcast(args[0], _F16), _F32)
        bits = builder.zext(args[0], _I32)
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

    return types.float32(types.uint16), codegen


@intrinsic
def f32_to_f16(typingctx, value):  # type: ignore[no-untyped-def]
    """Round to nearest even, overflow to infinity; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if half_instructions():
            return builder.bitcast(builder.fptrunc(args[0], _F16), _I16)
        bits = builder.bitcast(args[0], _I32)
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

    return types.uint16(types.float32), codegen


@intrinsic
def f32_to_e4m3(typingctx, value):  # type: ignore[no-untyped-def]
    """FP8 e4m3fn bits: round to nearest even, saturate at 448, NaN becomes 0x7F with the sign."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
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

    return types.uint8(types.float32), codegen
