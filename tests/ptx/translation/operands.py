"""Operands of PTX instructions: from their text to values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "Address",
    "Immediate",
    "Operand",
    "Pair",
    "PtxError",
    "Register",
    "Sink",
    "Symbol",
    "Vector",
    "parse_operand",
]


class PtxError(ValueError):
    """PTX that is not understood; the message names the PTX line, its text and the source line it comes from."""


@dataclass(frozen=True, slots=True)
class Register:
    """A declared register, by its name in the whole program.

    Attributes:
        negated: ``!p``, of predicates alone.
    """

    name: str
    negated: bool = False

    def __str__(self) -> str:
        return f"{'!' * self.negated}{self.name}"


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number.

    Attributes:
        value: an integer as it stands there, or the bits of a floating-point number.
        kind: ``"int"``, ``"f32"`` or ``"f64"``.
    """

    value: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """Anything else with a name: a label, a variable, a parameter, a special register such as ``%tid.x``."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: the result is not wanted."""


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b}``."""

    parts: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: a result and a predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``."""

    base: Register | Symbol
    offset: int


Operand = Register | Immediate | Symbol | Sink | Vector | Pair | Address

_NAME = re.compile(r"[A-Za-z_$%][\w$.]*")
_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_OCTAL = re.compile(r"([+-]?)0([0-7]+)")
_FLOATING = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_ADDRESS = re.compile(rf"({_NAME.pattern})\s*(?:\+\s*({_INTEGER.pattern}))?")


def _integer(text: str) -> int:
    digits = text.rstrip("U")
    octal = _OCTAL.fullmatch(digits)
    return int(octal[1] + octal[2], 8) if octal else int(digits, 0)


def parse_operand(text: str, registers: Mapping[str, str]) -> Operand:
    """One operand.

    Args:
        registers: by the name that the text has for a register, its name in the whole program.

    Raises:
        PtxError: no known form.
    """
    text = text.strip()
    # first of all what most of them are
    if (name := registers.get(text)) is not None:
        return Register(name)
    if text == "_":
        return Sink()
    if text.startswith("{") and text.endswith("}"):
        return Vector(tuple(parse_operand(one, registers) for one in split_operands(text[1:-1])))
    if text.startswith("[") and text.endswith("]"):
        return _address(text[1:-1].strip(), registers)
    if "|" in text:
        first, _, second = text.partition("|")
        return Pair(parse_operand(first, registers), parse_operand(second, registers))
    if text.startswith("!") and text[1:].strip() in registers:
        return Register(registers[text[1:].strip()], negated=True)
    if _INTEGER.fullmatch(text):
        return Immediate(_integer(text))
    if floating := _FLOATING.fullmatch(text):
        return Immediate(int(floating[1] or floating[2], 16), "f32" if floating[1] else "f64")
    if _NAME.fullmatch(text):
        return Symbol(text)
    raise PtxError(f"operand {text!r}")


def _address(text: str, registers: Mapping[str, str]) -> Address:
    found = _ADDRESS.fullmatch(text)
    if not found:
        raise PtxError(f"address [{text}]")
    name, digits = found.groups()
    base = Register(registers[name]) if name in registers else Symbol(name)
    return Address(base, _integer(digits) if digits else 0)


def split_operands(text: str) -> list[str]:
    """At the commas outside of braces and brackets."""
    if "{" not in text and "[" not in text:
        return text.split(",") if text.strip() else []
    parts, depth, word = [], 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append(word)
            word = ""
        else:
            word += character
    return [*parts, word] if word.strip() or parts else []
