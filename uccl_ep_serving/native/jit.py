"""What compiled code is written in: ``@compiled`` and ``@inlined`` functions, ``@intrinsic`` instructions, libc's own.

Nothing here imports Numba. A decorated function is a name: Numba sees it when a group of entry points is compiled
(:mod:`.compiler`), and a process that finds the group's machine code in the cache (:mod:`.groups`) never imports it.

Compiled functions take and return integers, hold no Python object, and never raise: they return status codes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = [
    "Compiled",
    "External",
    "Intrinsic",
    "View",
    "c_function",
    "compiled",
    "external",
    "inlined",
    "intrinsic",
    "view",
]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

#: What an annotation means to the machine, in Numba's words. Arguments of other kinds can only be passed by compiled
#: code, whose types Numba infers.
_TYPES = {"int": "int64", "bool": "boolean", "float": "float64", "np.float32": "float32", "None": "void"}


class Compiled(Generic[P, R]):
    """A function that compiled code calls, and Python as well: without the GIL, through its machine code.

    The first call from Python compiles what no group has brought: see :func:`.groups.load`.

    Attributes:
        function: as it is written.
        inline: LLVM puts it into every caller.
        given: signature of a C function, as Numba writes them; empty where the annotations say it.
    """

    def __init__(self, function: Callable[P, R], inline: bool = False, given: str = "") -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.inline = inline
        self.given = given
        self._entry: Callable[..., Any] | None = None
        self._address = 0

    @property
    def name(self) -> str:
        """Where it is defined: in one module, unique."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def signature(self) -> str:
        """Result and arguments of the entry point, as Numba writes them: ``int64(int64, int64)``.

        Raises:
            TypeError: an annotation means nothing to the machine.
        """
        if self.given:
            return self.given
        described = inspect.signature(self.function)
        words = [parameter.annotation for parameter in described.parameters.values()]
        try:
            result, *kinds = (_TYPES[str(word)] for word in (described.return_annotation, *words))
        except KeyError as error:
            raise TypeError(f"{self.name}: Python cannot pass or take a value of kind {error}") from None
        return f"{result}({', '.join(kinds)})"

    @property
    def address(self) -> int:
        """Address of its machine code, a C function."""
        if self._entry is None:
            self._load()
        return self._address

    def bind(self, entry: Callable[..., Any], address: int) -> None:
        """From now on Python calls ``entry``, at ``address``."""
        # the address first: who sees the entry in another thread may ask for it
        self._address, self._entry = address, entry

    def _load(self) -> None:
        from .groups import Group, load

        load(Group(self.name, self))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._entry is None:
            self._load()
            assert self._entry is not None
        result: R = self._entry(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<compiled {self.name}>"


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


class Intrinsic:
    """Instructions that compiled code may use like a function; Python cannot call it.

    Attributes:
        emit: called with an ``llvmlite.ir.IRBuilder`` and the values of the arguments; returns the value of the result,
            None for a void one.
    """

    def __init__(self, emit: Callable[..., Any], signature: str) -> None:
        self.__doc__ = emit.__doc__
        self.emit = emit
        self.signature = signature


def intrinsic(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for what emits the instructions of an intrinsic, with this signature in Numba's words."""
    return lambda emit: Intrinsic(emit, signature)


class View:
    """Makes a typed view of memory, for compiled code; see :func:`view`."""

    def __init__(self, element: str) -> None:
        self.element = element


def view(element: str) -> Any:
    """A function for compiled code that takes an address and a count and returns an array of ``element`` there.

    Atomic accesses cannot be vectorised: this is for memory that nobody else touches meanwhile.
    """
    return View(element)


class External:
    """A function of libc, resolved by name when machine code is loaded."""

    def __init__(self, symbol: str, signature: str) -> None:
        self.symbol, self.signature = symbol, signature


def external(symbol: str, signature: str) -> Any:
    """The function ``symbol`` of libc, for compiled code; ``signature`` in Numba's words."""
    return External(symbol, signature)
