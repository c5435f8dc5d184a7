"""Functions that are launched, under names by which a profile of an engine shows them as ours, and what they are
compiled for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import triton
import triton.language as tl

PREFIX = "uccl_ep_"


def kernel(aligned: Collection[str]) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for a function that the host launches: NAME is uccl_ep_NAME in profiles and in compiled code.

    Args:
        aligned: parameters that are multiples of 16 in every launch but for tensors without elements. All others are
            whatever a caller passes, and have one compiled code: none is compiled amid an operation.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        name = PREFIX + function.__name__
        arguments = [one for one in inspect.signature(function).parameters if not one.isupper()]
        assert set(aligned) <= set(arguments), aligned
        others = [one for one in arguments if one not in aligned]
        return triton.jit(repr=lambda _specialization: name, do_not_specialize=others)(function)

    return compiled


@dataclass(frozen=True, kw_only=True, repr=False)
class Shape(dict[str, int]):
    """What a kernel is compiled for: numbers under names in capitals, which it reads as ``tl.constexpr``.

    Triton's keys are made of the text and the hash of a shape, and its hooks are given it as JSON, for which it is a
    dictionary of its fields, plain numbers. So a kernel reads nothing of it but fields.
    """

    def __post_init__(self) -> None:
        self.update((one.name, getattr(self, one.name)) for one in fields(self))
        # Triton 3.6 does not take a plain number everywhere. Its interpreter takes nothing else
        if not triton.knobs.runtime.interpret:
            for name, value in self.items():
                object.__setattr__(self, name, tl.constexpr(value))

    def __repr__(self) -> str:
        # also in the names of functions that are called
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.items())})"
