"""``python compiled_sums.py``: as JSON the PTX of a kernel whose warps exchange much through shared memory, and how
much of that it takes. A process of its own because Triton must not be the interpreter here."""

from __future__ import annotations

import json

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

COUNT = 512


@triton.jit
def sums(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of ``x``, int64 [N]: sum and running sums, sums of 16 each, how often x % 64 has each value, and x transposed."""
    i = tl.arange(0, N)
    v = tl.load(x + i)
    m = tl.reshape(v, (N // 16, 16))
    tl.store(y + i, tl.cumsum(v) + tl.sum(v))
    tl.store(y + N + tl.arange(0, N // 16), tl.sum(m, axis=1))
    tl.store(y + N + N // 16 + tl.arange(0, 64), tl.histogram((v % 64).to(tl.int32), 64))
    tl.store(y + 2 * N + i, tl.reshape(tl.trans(m), (N,)))


def main() -> None:
    source = ASTSource(fn=sums, signature={"x": "*i64", "y": "*i64", "N": "constexpr"}, constexprs={"N": COUNT})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(json.dumps({"ptx": built.asm["ptx"], "shared": built.metadata.shared}))


if __name__ == "__main__":
    main()
