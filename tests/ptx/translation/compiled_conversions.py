"""``python compiled_conversions.py``: PTX of the kernels around our conversions, by name, as one JSON object. A process
of its own because Triton must not be the interpreter here."""

from __future__ import annotations

import json

from tests.kernels.conversion_kernels import to_e4m3, to_e4m3fnuz
from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for
from uccl_ep_serving.kernels.triton.words import CUDA


def main() -> None:
    with compiling_for(GPUS["sm_90"]):
        kernels = {kernel.__name__: kernel for kernel in (to_e4m3, to_e4m3fnuz)}
        built = {
            name: kernel.warmup(1 << 40, 1 << 40, BLOCK=1024, BACKEND=CUDA.value, grid=(1,), num_warps=4)
            for name, kernel in kernels.items()
        }
    print(json.dumps({name: one.asm["ptx"] for name, one in built.items()}))


if __name__ == "__main__":
    main()
