"""What compiled code is written in: ``@compiled`` and ``@inlined`` functions, ``@intrinsic`` instructions, libc's own.

Nothing here imports Numba. A decorated function is a name: Numba sees it when a group of entry points is compiled
(:mod:`.compiler`), and a process that finds the group's machine code in the cache (:mod:`.groups`) never imports it.

Compiled functions take and return integers, hold no Python object, and never raise: they return status codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from .groups import Group, load
from .parts import External, Function, Intrinsic, View

__all__ = [
    "Compiled",
    "c_function",
    "compiled",
    "external",
    "inlined",
    "intrinsic",
    "view",
]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Compiled(Function, Generic[P, R]):
    """A function that compiled code calls, and Python as well: without the GIL, through its machine code.

    The first call from Python compiles what no group has brought: see :func:`.groups.load`.
    """

    def __init__(self, function: Callable[P, R], inline: bool = False, given: str = "") -> None:
        super().__init__(function, inline, given)
        functools.update_wrapper(self, function)

    @property
    def address(self) -> int:
        """Address of its machine code, a C function."""
        if self._entry is None:
            load(Group(self.name, self))
        return self._address

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._entry is None:
            load(Group(self.name, self))
            assert self._entry is not None
        result: R = self._entry(*args, **kwargs)
        return result


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Decorator: a function for compiled code. No bounds checks, no exceptions."""
    return Compiled(function)


def inlined(function: Callable[P, R]) -> Compiled[P, R]:
    """:func:`compiled`, and LLVM puts its code into every caller: for the small functions on a hot path.

    A call that stays one costs 2 to 5 ns here, because each passes a status and a result through memory.
    """
    return Compiled(function, inline=True)


def c_function(signature: str) -> Callable[[Callable[..., Any]], Compiled[..., Any]]:
    """Decorator: a function whose ``.address`` goes to C code or into a table, with a C signature of its own.

    Args:
        signature: as Numba writes them, for example ``"int32(int64, uint32)"``.
    """
    return functools.partial(Compiled, given=signature)


def intrinsic(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for what emits the instructions of an intrinsic, with this signature in Numba's words."""
    return lambda emit: Intrinsic(emit, signature)


def view(element: str) -> Any:
    """A function for compiled code that takes an address and a count and returns an array of ``element`` there.

    Atomic accesses cannot be vectorised: this is for memory that nobody else touches meanwhile.
    """
    return View(element)


def external(symbol: str, signature: str) -> Any:
    """The function ``symbol`` of libc, for compiled code; ``signature`` in Numba's words."""
    return External(symbol, signature)
