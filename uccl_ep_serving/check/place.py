"""Where a rank of a check works: its GPU and the memory of it, with every call of the driver and every kernel noted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..gpu.memory import DeviceMemory, memory_of
from ..kernels.triton.launch import Launch
from ..kernels.triton.target import Target, present_target
from .workers import note

__all__ = ["Place", "driver_call", "each_kernel_noted", "interpreting", "noting", "present_place"]


@dataclass(frozen=True)
class Place:
    """What the parts of a check work on.

    Attributes:
        memory: of the device.
        target: what kernels are compiled for.
    """

    memory: DeviceMemory
    target: Target

    @property
    def device(self) -> torch.device:
        """Of tensors."""
        return self.memory.device


def present_place(index: int) -> Place:
    """GPU ``index`` of those that this process sees, or Triton's interpreter where TRITON_INTERPRET=1 says so."""
    note("torch.cuda.set_device")
    if not interpreting():
        torch.cuda.set_device(index)
    device = torch.device("cpu" if interpreting() else "cuda")
    return Place(noting(memory_of(device, interpreting())), present_target())


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which the driver is not asked about."""
    return bool(triton.knobs.runtime.interpret)


def driver_call(name: str) -> str:
    """The function of CUDA's or ROCm's runtime with this name."""
    return f"{'hip' if torch.version.hip else 'cuda'}{name}"


def noting(memory: DeviceMemory) -> DeviceMemory:
    """``memory``, which from now on notes each call of the driver under its name there."""
    call: Callable[..., Any] | None = getattr(memory, "_call", None)
    if call is not None:

        def noted(name: str, *arguments: Any) -> Any:
            note(driver_call(name))
            return call(name, *arguments)

        memory._call = noted  # type: ignore[attr-defined]
    return memory


@contextlib.contextmanager
def each_kernel_noted(memory: DeviceMemory) -> Iterator[None]:
    """Inside, each kernel is noted, launched and waited for, so that a failure is the one of the kernel that is noted.

    No kernel waits for one that its rank launches later, so that waiting for each keeps nobody from going on.
    """
    run = Launch.run

    def run_noted(launch: Launch) -> None:
        note(f"kernel {launch.kernel.__name__}")
        run(launch)
        memory.synchronize()

    Launch.run = run_noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Launch.run = run  # type: ignore[method-assign]
