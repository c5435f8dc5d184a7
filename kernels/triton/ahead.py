"""Compiling for a GPU that need not be there, into the cache where a launch on such a GPU finds it.

Triton's cache knows a kernel by its source, what it is specialized for, the GPU's architecture, and the versions of
Triton and its tools; by nothing of one device. So a kernel goes the way of a launch here, up to the point where one
would be needed, with a driver that knows the architecture only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from ...errors import ConfigError
from .launch import Launch

__all__ = ["GPUS", "compiling_for", "keep", "present_gpu"]

#: Those that the kernels are checked for, by name.
GPUS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class _Described:
    """A driver of Triton that can only say what it drives."""

    def __init__(self, gpu: GPUTarget) -> None:
        self._gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return self._gpu

    def get_current_device(self) -> str:
        # in a process Triton keeps what it has compiled by device
        return str(self._gpu)

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(gpu: GPUTarget) -> Iterator[None]:
    """Inside, kernels are built for ``gpu``. Nothing can be launched or loaded.

    Raises:
        ConfigError: Triton is the interpreter in this process.
    """
    if triton.knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET=1 is set: kernels run in Python on the host. Unset it to compile them")
    triton.runtime.driver.set_active(_Described(gpu))
    try:
        yield
    finally:
        # None: that of this machine, when it is asked for
        triton.runtime.driver.set_active(None)


def present_gpu() -> tuple[str, GPUTarget]:
    """Name and architecture of this machine's GPU. Raises RuntimeError where Triton finds none."""
    gpu = triton.runtime.driver.active.get_current_target()
    return next((name for name, one in GPUS.items() if one == gpu), str(gpu.arch)), gpu


def keep(launch: Launch) -> tuple[Path, bool]:
    """Have the code of ``launch`` in Triton's cache; its directory there, and whether it was there before."""
    heard: list[tuple[Path, bool]] = []

    def listener(*, metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
        heard.append((Path(next(iter(metadata_group.values()))).parent, cache_hit))

    # of what a process has in memory Triton says nothing: another launch may have compiled to the same code
    launch.kernel.device_caches.clear()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listener
        launch.build()
    (found,) = heard
    return found
