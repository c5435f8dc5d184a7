"""One kernel launch as a value, so that launching, compiling ahead and the tests of compiled code use the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
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

    def __post_init__(self) -> None:
        # in the interpreter there is none
        if getattr(self.kernel, "hash", "") is None:
            _hash(self.kernel, set())

    def run(self) -> None:
        """Launch on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.constants, num_warps=self.warps, enable_fp_fusion=self.fused)

    def build(self) -> Any:
        """Compile without launching, into Triton's cache; what Triton makes of it."""
        built = self.kernel.warmup(
            *self.arguments,
            **self.constants,
            num_warps=self.warps,
            enable_fp_fusion=self.fused,
            grid=self.grid,
        )
        # At each launch Triton compares every global name that the kernel reads with its value when it was compiled,
        # 0.6 us each: 80 us of `advance`, which reads 133 in Triton 3.9. They are constants of modules.
        self.kernel.used_global_vals.clear()
        return built

    def compile(self) -> None:
        """:meth:`build`, and load what is compiled into the device. Does nothing in the interpreter.

        A launch loads it otherwise, which no graph can capture.
        """
        if not triton.knobs.runtime.interpret:
            # a launcher for this grid, which is not called: making it loads
            self.build()[self.grid]


def _hash(function: Any, seen: set[int]) -> None:
    """Have Triton hash all that ``function`` calls before itself.

    The hash is part of the key in Triton's cache. Triton 3.6 takes in the constants that a callee reads only if it was
    hashed before, so that the key of a kernel would depend on which kernels were compiled before it in this process.
    """
    names, known = function.fn.__code__.co_names, function.fn.__globals__
    read = [known.get(name) for name in names]
    read += [getattr(one, name, None) for one in read if isinstance(one, ModuleType) for name in names]
    for one in read:
        if isinstance(one, triton.JITFunction) and id(one) not in seen:
            seen.add(id(one))
            _hash(one, seen)
    function.cache_key  # noqa: B018


def present_target() -> Target:
    """The target of this process: the interpreter when ``TRITON_INTERPRET=1`` was set before Triton was imported."""
    if triton.knobs.runtime.interpret:
        return Target(int(INTERPRETER.value), 8)
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return Target(int(HIP.value), target.warp_size, fnuz=str(target.arch).startswith("gfx942"))
    return Target(int(CUDA.value), 32)
