"""Checks that both modes make of what callers pass: everything wrong is a ConfigError before anything moves."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from ..errors import ConfigError
from ..protocol.message import DTYPE_BF16, DTYPE_F16, DTYPE_F32

__all__ = [
    "CPU",
    "VALUE_CODES",
    "check_device",
    "check_integer",
    "check_memory",
    "check_start",
    "in_words",
    "is_tensor",
    "naming",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

CPU = torch.device("cpu")
#: DTYPE_* of the dtypes in which tokens and experts' outputs may come.
VALUE_CODES = {torch.bfloat16: DTYPE_BF16, torch.float16: DTYPE_F16, torch.float32: DTYPE_F32}


def naming(operation: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Have what a check raises begin with the ``operation`` that was called."""

    def named(check: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(check)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return check(*args, **kwargs)
            except ConfigError as error:
                raise ConfigError(f"{operation}: {error}") from None

        return checked

    return named


def in_words(tensor: object) -> str:
    """Dtype and shape, or what it is when it is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def is_tensor(tensor: object, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether ``tensor`` is one of ``dtype`` and ``shape``."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype == dtype and tensor.shape == torch.Size(shape)


def check_integer(name: str, value: object, least: int | None = None) -> int:
    """``value``, of NumPy or not, as a plain integer of 64 bits, not below ``least``. Raises ConfigError."""
    try:
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} = {value!r} is no integer") from None
    if least is not None and integer < least:
        raise ConfigError(f"{name} = {integer} must be at least {least}")
    if not -1 << 63 <= integer < 1 << 63:
        raise ConfigError(f"{name} = {integer} does not fit in 64 bits")
    return integer


def check_device(device: torch.device, **tensors: object) -> None:
    """Kernels read addresses: a tensor of another device would be a wild read. Raises ConfigError."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.device != device:
            kind = tensor.device.type
            other = f", or build another Buffer with UCCL_EP_DEVICE={kind}" if kind in ("cpu", "cuda") else ""
            raise ConfigError(
                f"{name} is on {tensor.device}, and this Buffer serves tensors on {device}: UCCL_EP_DEVICE says so, or "
                f"its first tensor was there. Next step: pass tensors on {device}{other}"
            )
        check_memory(name, tensor)


def check_memory(name: str, tensor: torch.Tensor) -> int:
    """Address of ``tensor``: kernels read there what it says that it holds.

    Raises:
        ConfigError: it only stands for another one (DTensor, a collective's result that is not there yet, FakeTensor),
            so that its address is none; or it is negated when it is read, and kernels would miss that.
    """
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # torch's own word for some of them
        start = 0
    if not start and tensor.numel():
        raise ConfigError(
            f"{name} is a {type(tensor).__name__} without memory of its own. Next step: pass what it stands for, as "
            "x.to_local() of a DTensor, x.wait() of a collective's result, x.clone() of another"
        )
    if tensor.is_neg():
        raise ConfigError(f"{name} is negated lazily, when it is read. Next step: pass x.resolve_neg()")
    return start


def check_start(name: str, tensor: torch.Tensor, device: torch.device) -> int:
    """Address of ``tensor``. Kernels on a device move 16 bytes at a time. Raises ConfigError."""
    if tensor.device != device:
        check_device(device, **{name: tensor})
    start = check_memory(name, tensor)
    if start % 16 and tensor.numel():
        raise ConfigError(f"{name} must start on a multiple of 16 bytes")
    return start
