"""``python compiled_conversions.py``: by name, as one JSON object, PTX of the kernels around our conversions, and how
much shared memory each takes. A process of its own because Triton must not be the interpreter here."""

from __future__ import annotations

import itertools
import json

from tests.kernels.conversion_kernels import quantise, to_e4m3, to_e4m3fnuz
from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for

#: Blocks of 128 values of a program of ``quantise``.
GROUPS = 4


def main() -> None:
    at = 1 << 40
    options = {"grid": (1,), "num_warps": 4}
    with compiling_for(GPUS["sm_90"]):
        built = {kernel.__name__: kernel.warmup(at, at, BLOCK=1024, **options) for kernel in (to_e4m3, to_e4m3fnuz)}
        for rounded, fnuz in itertools.product((False, True), repeat=2):
            built[f"quantise {rounded} {fnuz}"] = quantise.warmup(
                at, at, at, GROUPS=GROUPS, ROUND=rounded, FNUZ=fnuz, **options
            )
    print(json.dumps({name: {"ptx": one.asm["ptx"], "shared": one.metadata.shared} for name, one in built.items()}))


if __name__ == "__main__":
    main()
