"""Kernels around the conversions, so that they can be tested alone. Imported only where Triton is the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from uccl_ep_serving.kernels.triton.quant import (
    load_floats,
    quantise_blocks,
    round_e4m3,
    round_e4m3fnuz,
    store_floats,
)
from uccl_ep_serving.kernels.triton.words import floats, int32s, uint8s


@triton.jit
def to_e4m3(source: tl.int64, target: tl.int64, BLOCK: tl.constexpr) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(floats(source + 4 * index))
    tl.store(uint8s(target + index), round_e4m3(x))


@triton.jit
def to_e4m3fnuz(source: tl.int64, target: tl.int64, BLOCK: tl.constexpr) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(floats(source + 4 * index))
    tl.store(uint8s(target + index), round_e4m3fnuz(x))


@triton.jit
def there_and_back(
    source: tl.int64,
    narrow: tl.int64,
    target: tl.int64,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.arange(0, BLOCK)[None, :]
    everything = index >= 0
    row = narrow + tl.zeros([1], tl.int64)
    store_floats(row, index, tl.load(floats(source + 4 * index)), everything, DTYPE)
    tl.debug_barrier()
    tl.store(floats(target + 4 * index), load_floats(row, index, everything, DTYPE))


@triton.jit
def quantise(
    source: tl.int64,
    codes: tl.int64,
    scales: tl.int64,
    GROUPS: tl.constexpr,
    ROUND: tl.constexpr,
    FNUZ: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, GROUPS)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    x = tl.load(floats(source + 4 * (row * GROUPS * 128 + value)))
    got, scale = quantise_blocks(x, ROUND, FNUZ)
    tl.store(uint8s(codes + row * GROUPS * 128 + value), got)
    tl.store(int32s(scales + 4 * (row * GROUPS + tl.arange(0, GROUPS)[None, :])), scale)
