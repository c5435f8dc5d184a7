"""Which implementation of the kernels a Buffer gets, imported and compiled before it is needed.

A Buffer of CPU tensors calls the functions of ``cpu.low_latency`` and ``cpu.normal``, one of a device builds launches
of ``triton.low_latency`` and ``triton.normal``. Both keep message numbers and parities in memory of their own, so that
a captured graph replays without the host. A kernel on the CPU that waits gets the CLOCK_MONOTONIC instant in ns at
which it must return, and returns a ``STATUS_*`` of ``protocol.context``. A kernel on a device has its time limit in the
kernel context, returns nothing, and reports there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..native.groups import Group
from ..protocol.layout import LowLatencyPlan

if TYPE_CHECKING:
    from .cuda.normal import CopyNormalKernels
    from .triton.low_latency import TritonLowLatencyKernels
    from .triton.normal import TritonNormalKernels

#: What GPU kernels need, as in the extra `cuda` of pyproject.toml.
_TRITON = "triton>=3.6"


def cpu_groups(low_latency: bool = True, normal: bool = True) -> list[Group]:
    """What looks at a caller's ids, and the CPU kernels of both modes, or one, to compile."""
    # imported late: a process that serves a device needs none of them, and one mode not those of the other
    from .cpu.routing import IDS

    groups = [IDS]
    if low_latency:
        from .cpu.low_latency import LOW_LATENCY

        groups.append(LOW_LATENCY)
    if normal:
        from .cpu.normal import NORMAL

        groups.append(NORMAL)
    return groups


def device_low_latency_kernels(plan: LowLatencyPlan, interpreted: bool) -> TritonLowLatencyKernels:
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


def device_normal_kernels(ranks: int, interpreted: bool) -> TritonNormalKernels:
    """The same for normal mode."""
    try:
        from .triton.normal import TritonNormalKernels
    except ImportError as error:
        raise _without_triton("normal mode", error) from error
    kernels = TritonNormalKernels(ranks)
    _check_interpreter(kernels.target.interpreted, interpreted)
    return kernels


def copy_normal_kernels(ranks: int) -> CopyNormalKernels:
    """The same whose rows bulk copies move.

    Raises:
        ConfigError: this GPU has none, or something is missing that compiles or loads these kernels.
    """
    from .cuda.normal import CopyNormalKernels, check_copies

    check_copies(ranks)
    return CopyNormalKernels(ranks)


def _without_triton(mode: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{mode} on a device needs Triton: {error}. Next step: pip install '{_TRITON}'")


def _check_interpreter(present: bool, wanted: bool) -> None:
    """Raise ConfigError when Triton was imported for something else than these kernels were asked for."""
    if present != wanted:
        raise ConfigError(
            "UCCL_EP_DEVICE=interpreter needs TRITON_INTERPRET=1 in the environment before Triton is imported"
            if wanted
            else "TRITON_INTERPRET=1 is set: kernels would run in Python on the host. Unset it"
        )
