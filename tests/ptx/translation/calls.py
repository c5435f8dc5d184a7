"""Functions of a PTX module that its kernel calls. Their bodies are read where they are called, as if the compiler had
put them there; what is passed lies in registers, one for each place of a ``.param`` variable that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .operands import PtxError

__all__ = ["Call", "Function", "functions", "parse_call"]

_FUNCTION = re.compile(r"\.func\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)\s*([{;])")
_CALL = re.compile(r"(?:\(([\w$]+)\), )?([\w$]+)(?:, \(([^)]*)\))?")
#: ``.param .align 16 .b8 name[24]``, of a kernel or a function: kind, name and how many.
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)\s*(?:\[(\d+)\])?"
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the text defines.

    Attributes:
        result: name of the variable that it returns, or "".
        parameters: names of its variables.
        body: where in the text it begins, behind its brace.
    """

    name: str
    result: str
    parameters: tuple[str, ...]
    body: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call, by the names of what it passes: variables of the caller.

    Attributes:
        result: "" where nothing is returned.
    """

    callee: str
    result: str
    arguments: tuple[str, ...]


def functions(text: str) -> dict[str, Function]:
    """By name those whose bodies stand in ``text``, which is without comments.

    Raises:
        PtxError: a variable of one is not understood.
    """
    found = {}
    for one in _FUNCTION.finditer(text):
        result, name, parameters, what = one.groups()
        if what == "{":
            (returned,) = _names(result or "") or ("",)
            found[name] = Function(name, returned, _names(parameters), one.end())
    return found


def _names(text: str) -> tuple[str, ...]:
    names = []
    for one in filter(str.strip, text.split(",")):
        found = PARAMETER.fullmatch(one.strip())
        if not found:
            raise PtxError(f"parameter {one.strip()!r}")
        names.append(found[2])
    return tuple(names)


def parse_call(text: str) -> Call:
    """From what stands behind ``call.uni``.

    Raises:
        PtxError: it is not understood.
    """
    found = _CALL.fullmatch(text)
    if not found:
        raise PtxError("a call that is not understood")
    result, callee, arguments = found.groups()
    return Call(callee, result or "", tuple(one.strip() for one in (arguments or "").split(",") if one.strip()))
