"""Moving, comparing and choosing."""

from __future__ import annotations

from .code import Code, Modifiers
from .floats import real
from .integers import operands, signed
from .operands import Operand, Pair, Symbol, Vector
from .program import WIDTHS, Instruction

__all__ = ["CLOCKS", "MOVES"]

_TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
#: What every reading of changes.
CLOCKS = {"%globaltimer": 64, "%globaltimer_lo": 32, "%globaltimer_hi": 32, "%clock": 32, "%clock64": 64}

_UNORDERED = {"equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge"}
_FLOATS = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "num": "ord", "nan": "uno"}
_FLOATS |= _UNORDERED
_UNSIGNED = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}


def _move(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    kind = modifiers.one_of("pred", *_TYPES)
    modifiers.end()
    d, a = operands(one, 2)
    bits = WIDTHS[kind]
    if isinstance(a, Symbol) and a.name in CLOCKS:
        if CLOCKS[a.name] != bits:
            raise one.error(f"{a.name} has {CLOCKS[a.name]} bits")
        code.event([d])
    elif kind == "pred":
        code.set_predicate(d, code.predicate(a))
    elif isinstance(d, Vector):
        _unpack(code, one, d, code.read(a, bits), bits)
    elif isinstance(a, Vector):
        code.write(d, _packed(code, one, a, bits), bits)
    else:
        code.write(d, code.read(a, bits), bits)


def _part(one: Instruction, vector: Vector, bits: int) -> int:
    if len(vector.parts) not in (2, 4):
        raise one.error(f"a vector of {len(vector.parts)}")
    return bits // len(vector.parts)


def _unpack(code: Code, one: Instruction, into: Vector, value: str, bits: int) -> None:
    width = _part(one, into, bits)
    parts = []
    for number in range(len(into.parts)):
        shifted = code.value(f"lshr i{bits} {value}, {number * width}")
        parts.append(code.value(f"trunc i{bits} {shifted} to i{width}"))
    for register, part in zip(into.parts, parts, strict=True):
        code.write(register, part, width)


def _packed(code: Code, one: Instruction, vector: Vector, bits: int) -> str:
    width = _part(one, vector, bits)
    value = "0"
    for number, register in enumerate(vector.parts):
        part = code.value(f"zext i{width} {code.read(register, width)} to i{bits}")
        value = code.value(f"or i{bits} {value}, {code.value(f'shl i{bits} {part}, {number * width}')}")
    return value


def _comparison(code: Code, one: Instruction, name: str, kind: str, flushed: bool, a: Operand, b: Operand) -> str:
    bits = WIDTHS[kind]
    if kind in ("f16", "bf16", "f32", "f64"):
        if name not in _FLOATS:
            raise one.error(f"comparison .{name} of {kind}")
        form = "double" if kind == "f64" else "float"
        x, y = (real(code, operand, kind, flushed) for operand in (a, b))
        return code.value(f"fcmp {_FLOATS[name]} {form} {x}, {y}")
    if flushed:
        raise one.error("unknown modifier .ftz")
    if name in ("eq", "ne"):
        how = name
    elif name in _UNSIGNED and kind.startswith("u"):
        how = _UNSIGNED[name]
    elif name in ("lt", "le", "gt", "ge") and not kind.startswith("b"):
        how = ("s" if signed(kind) else "u") + name
    else:
        raise one.error(f"comparison .{name} of {kind}")
    return code.value(f"icmp {how} i{bits} {code.read(a, bits)}, {code.read(b, bits)}")


def _compare(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    name = modifiers.one_of("eq", "ne", "lt", "le", "gt", "ge", *_UNSIGNED, *_UNORDERED, "num", "nan")
    combined = modifiers.maybe("and", "or", "xor")
    flushed = bool(modifiers.maybe("ftz"))
    kind = modifiers.one_of(*_TYPES, "f16", "bf16")
    modifiers.end()
    d, a, b, *c = operands(one, 4 if combined else 3)
    value = _comparison(code, one, name, kind, flushed, a, b)
    other = code.value(f"xor i1 {value}, true")
    if combined:
        third = code.predicate(c[0])
        value, other = (code.value(f"{combined} i1 {which}, {third}") for which in (value, other))
    if isinstance(d, Pair):
        code.set_predicate(d.first, value)
        code.set_predicate(d.second, other)
    else:
        code.set_predicate(d, value)


def _select(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    kind = modifiers.one_of(*_TYPES)
    modifiers.end()
    bits = WIDTHS[kind]
    d, a, b, p = operands(one, 4)
    x, y = code.read(a, bits), code.read(b, bits)
    code.write(d, code.value(f"select i1 {code.predicate(p)}, i{bits} {x}, i{bits} {y}"), bits)


def _address(code: Code, one: Instruction) -> None:
    """cvta: of global memory the addresses are generic ones as well; shared memory begins where the host has it."""
    modifiers = Modifiers(one)
    back = modifiers.maybe("to")
    space = modifiers.one_of("global", "shared")
    modifiers.one_of("u64")
    modifiers.end()
    d, a = operands(one, 2)
    at = code.read(a, 64)
    if space == "shared":
        first = code.value("ptrtoint ptr %shared to i64")
        at = code.value(f"{'sub' if back else 'add'} i64 {at}, {first}")
    code.write(d, at, 64)


MOVES = {"mov": _move, "setp": _compare, "selp": _select, "cvta": _address}
