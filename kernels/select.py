"""Which implementation of the kernels serves a device."""

from __future__ import annotations

import functools

from ..errors import ConfigError
from ..protocol.layout import LowLatencyPlan
from .interface import DeviceLowLatencyKernels, DeviceNormalKernels, LowLatencyKernels, NormalKernels

#: What GPU kernels need, as in the extra `cuda` of pyproject.toml.
_TRITON = "triton>=3.4"


@functools.cache
def low_latency_kernels(device_type: str) -> LowLatencyKernels:
    """The kernels of a Buffer that serves CPU tensors, compiled and ready.

    Args:
        device_type: of the tensors that they are for (``torch.device.type``).

    Raises:
        ConfigError: that is not "cpu".
    """
    if device_type != "cpu":
        raise _served_elsewhere("low-latency mode", device_type)
    # imported late: Numba and its compiled code are not needed by a process that never dispatches
    from .cpu.low_latency import CpuLowLatencyKernels

    kernels = CpuLowLatencyKernels()
    kernels.warm()
    return kernels


def device_low_latency_kernels(plan: LowLatencyPlan, interpreted: bool) -> DeviceLowLatencyKernels:
    """Kernels for tensors on a device.

    Args:
        interpreted: in Triton's interpreter, on CPU tensors.

    Raises:
        ConfigError: Triton is missing, or was imported without (or with) TRITON_INTERPRET=1.
    """
    try:
        from .triton.low_latency import TritonLowLatencyKernels
    except ImportError as error:
        raise _without_triton("low-latency mode", error) from error
    kernels = TritonLowLatencyKernels(plan)
    _check_interpreter(kernels.target.interpreted, interpreted)
    return kernels


def device_normal_kernels(ranks: int, interpreted: bool) -> DeviceNormalKernels:
    """The same for normal mode."""
    try:
        from .triton.normal import TritonNormalKernels
    except ImportError as error:
        raise _without_triton("normal mode", error) from error
    kernels = TritonNormalKernels(ranks)
    _check_interpreter(kernels.target.interpreted, interpreted)
    return kernels


def _without_triton(mode: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{mode} on a device needs Triton: {error}. Next step: pip install '{_TRITON}'")


def _served_elsewhere(mode: str, device_type: str) -> ConfigError:
    return ConfigError(
        f"{mode}: a tensor is on {device_type}, and this Buffer serves tensors on cpu: UCCL_EP_DEVICE=cpu is set, or "
        "its first tensor was on cpu. Next step: pass tensors on cpu, or build another Buffer with UCCL_EP_DEVICE=cuda"
    )


def _check_interpreter(present: bool, wanted: bool) -> None:
    """Raise ConfigError when Triton was imported for something else than these kernels were asked for."""
    if present != wanted:
        raise ConfigError(
            "UCCL_EP_DEVICE=interpreter needs TRITON_INTERPRET=1 in the environment before Triton is imported"
            if wanted
            else "TRITON_INTERPRET=1 is set: kernels would run in Python on the host. Unset it"
        )


@functools.cache
def normal_kernels(device_type: str) -> NormalKernels:
    """The same for normal mode."""
    if device_type != "cpu":
        raise _served_elsewhere("normal mode", device_type)
    from .cpu.normal import CpuNormalKernels

    kernels = CpuNormalKernels()
    kernels.warm()
    return kernels
