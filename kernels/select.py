"""Which implementation of the kernels serves a device."""

from __future__ import annotations

import functools

from ..errors import ConfigError
from .interface import LowLatencyKernels, NormalKernels

__all__ = ["low_latency_kernels", "normal_kernels"]


@functools.cache
def low_latency_kernels(device_type: str) -> LowLatencyKernels:
    """Kernels for tensors on devices of type ``device_type`` (``torch.device.type``), compiled and ready.

    Raises ConfigError for a device that no implementation serves.
    """
    if device_type != "cpu":
        raise ConfigError(
            f"low-latency mode has no kernels for {device_type} tensors in this version: only cpu tensors are served"
        )
    # imported late: Numba and its compiled code are not needed by a process that never dispatches
    from .cpu.low_latency import CpuLowLatencyKernels

    kernels = CpuLowLatencyKernels()
    kernels.warm()
    return kernels


@functools.cache
def normal_kernels(device_type: str) -> NormalKernels:
    """The same for normal mode."""
    if device_type != "cpu":
        raise ConfigError(
            f"normal mode has no kernels for {device_type} tensors in this version: only cpu tensors are served"
        )
    from .cpu.normal import CpuNormalKernels

    kernels = CpuNormalKernels()
    kernels.warm()
    return kernels
