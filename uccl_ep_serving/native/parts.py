"""What compiled code is made of, as it is written: functions, instructions, views of memory, functions of libc.

:mod:`.jit` makes these, :mod:`.compiler` turns them into machine code, :mod:`.groups` keeps that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["External", "Function", "Intrinsic", "View"]

#: What an annotation means to the machine, in Numba's words. Arguments of other kinds can only be passed by compiled
#: code, whose types Numba infers.
_TYPES = {"int": "int64", "bool": "boolean", "float": "float64", "np.float32": "float32", "None": "void"}


class Function:
    """A function for compiled code, and the machine code that some group has brought for it.

    Attributes:
        function: as it is written.
        inline: LLVM puts it into every caller.
        given: signature of a C function, as Numba writes them; empty where the annotations say it.
    """

    def __init__(self, function: Callable[..., Any], inline: bool = False, given: str = "") -> None:
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

    def bind(self, entry: Callable[..., Any], address: int) -> None:
        """From now on Python calls ``entry``, at ``address``."""
        # the address first: who sees the entry in another thread may ask for it
        self._address, self._entry = address, entry

    def __repr__(self) -> str:
        return f"<compiled {self.name}>"


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


class View:
    """Makes a typed view of memory, for compiled code; see :func:`.jit.view`."""

    def __init__(self, element: str) -> None:
        self.element = element


class External:
    """A function of libc, resolved by name when machine code is loaded."""

    def __init__(self, symbol: str, signature: str) -> None:
        self.symbol, self.signature = symbol, signature
