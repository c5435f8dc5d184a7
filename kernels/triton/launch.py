"""One kernel launch as a value, so that launching, compiling ahead and the tests of compiled code use the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton

from .words import CUDA, HIP, INTERPRETER


@dataclass(frozen=True, slots=True)
class Target:
    """What kernels are compiled for.

    Attributes:
        backend: 0 interpreter, 1 CUDA, 2 ROCm.
        warp: lanes of a warp.
        fnuz: True on gfx942, whose FP8 is e4m3fnuz.
    """

    backend: int
    warp: int
    fnuz: bool = False

    @property
    def interpreted(self) -> bool:
        """True in Triton's interpreter."""
        return self.backend == int(INTERPRETER.value)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its arguments.

    Attributes:
        kernel: what ``triton.jit`` made.
        grid: programs.
        arguments: int64, in the order of the kernel's parameters.
        constants: its ``tl.constexpr`` parameters by name.
        warps: of a program.
        fused: multiplication and addition may become one rounding.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[int, ...]
    constants: Mapping[str, Any]
    warps: int = 1
    fused: bool = True

    def run(self) -> None:
        """Launch on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.constants, num_warps=self.warps, enable_fp_fusion=self.fused)

    def compile(self) -> None:
        """Compile without launching, and load what is compiled into the device. Does nothing in the interpreter.

        A launch loads it otherwise, which no graph can capture.
        """
        if not triton.knobs.runtime.interpret:
            compiled = self.kernel.warmup(
                *self.arguments,
                **self.constants,
                num_warps=self.warps,
                enable_fp_fusion=self.fused,
                grid=self.grid,
            )
            # a launcher for this grid, which is not called: making it loads
            compiled[self.grid]
            # At each launch Triton compares every global name that the kernel reads with its value when it was
            # compiled, 0.6 us each: 80 us of `advance`, which reads 133 in Triton 3.9. They are constants of modules.
            self.kernel.used_global_vals.clear()


def present_target() -> Target:
    """The target of this process: the interpreter when ``TRITON_INTERPRET=1`` was set before Triton was imported."""
    if triton.knobs.runtime.interpret:
        return Target(int(INTERPRETER.value), 8)
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return Target(int(HIP.value), target.warp_size, fnuz=str(target.arch).startswith("gfx942"))
    return Target(int(CUDA.value), 32)
