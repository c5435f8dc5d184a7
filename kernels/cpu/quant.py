"""Block-scaled FP8 rows, and sums of rows in float32.

FP8 follows DeepEP: blocks of 128 values; ``amax = max(|x|, 1e-4)``; value = e4m3(x * (448 / amax)), stored scale =
amax * (1 / 448). With ``round_scale`` the stored scale is the next power of two, and UE8M0 stores only its exponent
byte. A NaN or infinity spoils the block it is in and nothing else.
"""

from __future__ import annotations

import numpy as np

from ...native.atomics import poke8, poke32
from ...native.jit import compiled
from ...protocol.message import (
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_FP8,
    DTYPE_FP8_UE8M0,
    SCALE_BLOCK,
)
from .elements import (
    absolute_bits,
    add_bf16_pairs,
    bf16_to_f32,
    bits_to_f32,
    bytes_view,
    f16_to_f32,
    f32_to_bf16,
    f32_to_e4m3,
    f32_to_f16,
    float_view,
    short_view,
    word_view,
)

#: DeepEP's floor for amax, so that a block of zeros has a finite scale.
_AMAX_FLOOR = np.float32(1e-4)
#: Largest finite e4m3 value, and DeepEP's reciprocal of it in float32.
_E4M3_MAX = np.float32(448.0)
_E4M3_MAX_INVERSE = np.float32(1.0) / np.float32(448.0)


@compiled
def widen(target: int, source: int, count: int, dtype: int) -> None:
    """``count`` values at ``source`` of DTYPE_BF16, DTYPE_F16 or DTYPE_F32 as float32 at ``target``."""
    wide = float_view(target, count)
    if dtype == DTYPE_BF16:
        half = short_view(source, count)
        for i in range(count):
            wide[i] = bf16_to_f32(half[i])
    elif dtype == DTYPE_F16:
        half = short_view(source, count)
        for i in range(count):
            wide[i] = f16_to_f32(half[i])
    else:
        same = float_view(source, count)
        for i in range(count):
            wide[i] = same[i]


@compiled
def narrow(target: int, source: int, count: int, dtype: int) -> None:
    """``count`` float32 values at ``source`` rounded to nearest even into ``dtype`` at ``target``."""
    wide = float_view(source, count)
    if dtype == DTYPE_BF16:
        half = short_view(target, count)
        for i in range(count):
            half[i] = f32_to_bf16(wide[i])
    elif dtype == DTYPE_F16:
        half = short_view(target, count)
        for i in range(count):
            half[i] = f32_to_f16(wide[i])
    else:
        same = float_view(target, count)
        for i in range(count):
            same[i] = wide[i]


@compiled
def accumulate(total: int, source: int, count: int, dtype: int, weight: np.float32) -> None:
    """float32 ``total[i] += weight * source[i]``, product and sum rounded separately."""
    wide = float_view(total, count)
    if dtype == DTYPE_BF16:
        half = short_view(source, count)
        for i in range(count):
            wide[i] += weight * bf16_to_f32(half[i])
    elif dtype == DTYPE_F16:
        half = short_view(source, count)
        for i in range(count):
            wide[i] += weight * f16_to_f32(half[i])
    else:
        same = float_view(source, count)
        for i in range(count):
            wide[i] += weight * same[i]


@compiled
def add_two(total: int, left: int, right: int, count: int, dtype: int) -> None:
    """float32 ``total[i] = left[i] + right[i]``."""
    wide = float_view(total, count)
    if dtype == DTYPE_BF16:
        one, two = short_view(left, count), short_view(right, count)
        for i in range(count):
            wide[i] = bf16_to_f32(one[i]) + bf16_to_f32(two[i])
    elif dtype == DTYPE_F16:
        one, two = short_view(left, count), short_view(right, count)
        for i in range(count):
            wide[i] = f16_to_f32(one[i]) + f16_to_f32(two[i])
    else:
        same, other = float_view(left, count), float_view(right, count)
        for i in range(count):
            wide[i] = same[i] + other[i]


@compiled
def narrow_sum(target: int, total: int, source: int, count: int, dtype: int) -> None:
    """``target[i] = total[i] + source[i]``, a float32 sum rounded to nearest even into ``dtype``, like ``source``."""
    wide = float_view(total, count)
    if dtype == DTYPE_BF16:
        half, into = short_view(source, count), short_view(target, count)
        for i in range(count):
            into[i] = f32_to_bf16(wide[i] + bf16_to_f32(half[i]))
    elif dtype == DTYPE_F16:
        half, into = short_view(source, count), short_view(target, count)
        for i in range(count):
            into[i] = f32_to_f16(wide[i] + f16_to_f32(half[i]))
    else:
        same, out = float_view(source, count), float_view(target, count)
        for i in range(count):
            out[i] = wide[i] + same[i]


@compiled
def narrow_sum_of_two(target: int, left: int, right: int, count: int, dtype: int) -> None:
    """``target[i] = left[i] + right[i]``, all in ``dtype``, the sum in float32 rounded to nearest even.

    ``count`` is even: rows are multiples of 16 bytes.
    """
    if dtype == DTYPE_BF16:
        pairs = count // 2
        lefts, rights, sums = word_view(left, pairs), word_view(right, pairs), word_view(target, pairs)
        for i in range(pairs):
            sums[i] = add_bf16_pairs(lefts[i], rights[i])
    elif dtype == DTYPE_F16:
        one, two, into = short_view(left, count), short_view(right, count), short_view(target, count)
        for i in range(count):
            into[i] = f32_to_f16(f16_to_f32(one[i]) + f16_to_f32(two[i]))
    else:
        same, other, out = float_view(left, count), float_view(right, count), float_view(target, count)
        for i in range(count):
            out[i] = same[i] + other[i]


@compiled
def _amax_bits(values: int) -> int:
    """Bits of ``max(|x|, 1e-4)`` over the 128 float32 values at ``values``; a NaN is the largest of all."""
    block = float_view(values, SCALE_BLOCK)
    largest = np.int32(0)
    for i in range(SCALE_BLOCK):
        # on bits: an integer maximum vectorises, a float one does not because of NaN
        largest = max(largest, absolute_bits(block[i]))
    return max(largest, absolute_bits(_AMAX_FLOOR))


@compiled
def quantise(
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
    """Rows of ``hidden`` values (a multiple of 128) into wire rows ``e4m3 data | scales``.

    Args:
        target: first wire row; the next one starts ``stride`` bytes further.
        source: [tokens, hidden] of ``source_dtype``, contiguous.
        target_dtype: DTYPE_FP8 (float32 scales) or DTYPE_FP8_UE8M0 (exponent bytes, implies ``round_scale``).
        scratch: 512 bytes.
    """
    blocks = hidden // SCALE_BLOCK
    width = 4 if source_dtype != DTYPE_BF16 and source_dtype != DTYPE_F16 else 2
    power_of_two = round_scale or target_dtype == DTYPE_FP8_UE8M0
    values = float_view(scratch, SCALE_BLOCK)
    for token in range(tokens):
        row = target + token * stride
        scales = row + hidden
        for block in range(blocks):
            first = (token * blocks + block) * SCALE_BLOCK
            widen(scratch, source + first * width, SCALE_BLOCK, source_dtype)
            amax = bits_to_f32(np.int32(_amax_bits(scratch)))
            scale = np.int64(absolute_bits(amax * _E4M3_MAX_INVERSE))
            if power_of_two:
                if scale & 0x7FFFFF and scale < 0x7F800000:
                    scale = ((scale >> 23) + 1) << 23
                # exact: the reciprocal of a power of two
                factor = np.float32(1.0) / bits_to_f32(np.int32(scale))
            else:
                factor = _E4M3_MAX / amax
            codes = bytes_view(row + block * SCALE_BLOCK, SCALE_BLOCK)
            for i in range(SCALE_BLOCK):
                codes[i] = f32_to_e4m3(values[i] * factor)
            if target_dtype == DTYPE_FP8:
                poke32(scales + 4 * block, scale)
            else:
                poke8(scales + block, scale >> 23)
