"""What kernels are compiled for, as the host knows it and as they ask for it while they are compiled.

Triton compiles for the device of its active driver, also ahead (:mod:`.ahead`), and its cache tells devices apart. So
kernels need no argument for this.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

INTERPRETER, CUDA, HIP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class Target:
    """What kernels are compiled for.

    Attributes:
        backend: 0 interpreter, 1 CUDA, 2 ROCm.
        warp: lanes of a warp.
        fnuz: True on gfx942, whose FP8 is e4m3fnuz.
        in_order: programs start in the order of their numbers. On CUDA they do (CUB's scans rely on it, too), and in
            the interpreter, which runs one after the other; on ROCm dies of one device take them in turn.
    """

    backend: int
    warp: int
    fnuz: bool = False
    in_order: bool = True

    @property
    def interpreted(self) -> bool:
        """True in Triton's interpreter."""
        return self.backend == int(INTERPRETER.value)


def present_target() -> Target:
    """The target of this process: the interpreter when ``TRITON_INTERPRET=1`` was set before Triton was imported."""
    if triton.knobs.runtime.interpret:
        return Target(int(INTERPRETER.value), 8)
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return Target(int(HIP.value), target.warp_size, str(target.arch).startswith("gfx942"), in_order=False)
    return Target(int(CUDA.value), 32)


# for Triton a function of its own, whose source is no part of a kernel's key in the cache: the device is
present_target.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.constexpr_function
def backend() -> int:
    """INTERPRETER, CUDA or HIP."""
    return present_target().backend


@triton.constexpr_function
def lanes() -> int:
    """Of a warp."""
    return present_target().warp
