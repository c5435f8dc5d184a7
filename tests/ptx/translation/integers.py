"""Arithmetic of integers."""

from __future__ import annotations

from .code import Code, Modifiers
from .program import WIDTHS, Instruction

__all__ = ["INTEGERS", "integer_type", "operands", "signed"]

_TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")


def operands(one: Instruction, *counts: int) -> tuple:
    """Its operands, of which there are as many as one of ``counts``."""
    if len(one.operands) not in counts:
        raise one.error(f"{len(one.operands)} operands where {' or '.join(map(str, counts))} are known")
    return one.operands


def signed(kind: str) -> bool:
    """Whether a type is signed."""
    return kind.startswith("s")


def integer_type(one: Instruction, *types: str) -> tuple[str, int]:
    """The only modifier: one of ``types``; and its bits."""
    modifiers = Modifiers(one)
    kind = modifiers.one_of(*types)
    modifiers.end()
    return kind, WIDTHS[kind]


def _sum(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    saturated = modifiers.maybe("sat")
    kind = modifiers.one_of(*(("s32",) if saturated else _TYPES))
    modifiers.end()
    bits = WIDTHS[kind]
    d, a, b = operands(one, 3)
    x, y = code.read(a, bits), code.read(b, bits)
    if saturated:
        code.write(d, code.value(f"call i32 @llvm.s{one.opcode}.sat.i32(i32 {x}, i32 {y})"), bits)
    else:
        code.write(d, code.value(f"{one.opcode} i{bits} {x}, {y}"), bits)


def _extended(code: Code, value: str, kind: str) -> str:
    """Twice as wide."""
    bits = WIDTHS[kind]
    return code.value(f"{'sext' if signed(kind) else 'zext'} i{bits} {value} to i{2 * bits}")


def _product(code: Code, one: Instruction) -> None:
    """mul and mad: of the product its lower half, its upper half or both."""
    modifiers = Modifiers(one)
    half = modifiers.one_of("lo", "hi", "wide")
    kind = modifiers.one_of(*(_TYPES[:4] if half == "wide" else _TYPES))
    modifiers.end()
    bits = WIDTHS[kind]
    d, a, b, *c = operands(one, 3 if one.opcode == "mul" else 4)
    x, y = code.read(a, bits), code.read(b, bits)
    if half == "lo":
        value = code.value(f"mul i{bits} {x}, {y}")
    else:
        value = code.value(f"mul i{2 * bits} {_extended(code, x, kind)}, {_extended(code, y, kind)}")
        if half == "hi":
            value = code.value(f"trunc i{2 * bits} {code.value(f'lshr i{2 * bits} {value}, {bits}')} to i{bits}")
        else:
            bits *= 2
    if c:
        value = code.value(f"add i{bits} {value}, {code.read(c[0], bits)}")
    code.write(d, value, bits)


def _quotient(code: Code, one: Instruction) -> None:
    """div and rem. PTX leaves open what a division by 0 gives; here all ones, and the dividend as the remainder."""
    kind, bits = integer_type(one, *_TYPES)
    d, a, b = operands(one, 3)
    x, y = code.read(a, bits), code.read(b, bits)
    zero = code.value(f"icmp eq i{bits} {y}, 0")
    # the processor traps on both of these
    divisor = code.value(f"select i1 {zero}, i{bits} 1, i{bits} {y}")
    if signed(kind):
        minus = code.value(f"icmp eq i{bits} {y}, -1")
        divisor = code.value(f"select i1 {minus}, i{bits} 1, i{bits} {divisor}")
    value = code.value(f"{'s' if signed(kind) else 'u'}{one.opcode} i{bits} {x}, {divisor}")
    if signed(kind):
        # the rest of a division by -1 is 0, which that by 1 gives as well
        negative = code.value(f"sub i{bits} 0, {x}") if one.opcode == "div" else "0"
        value = code.value(f"select i1 {minus}, i{bits} {negative}, i{bits} {value}")
    otherwise = "-1" if one.opcode == "div" else x
    code.write(d, code.value(f"select i1 {zero}, i{bits} {otherwise}, i{bits} {value}"), bits)


def _smaller(code: Code, one: Instruction) -> None:
    """min and max; with ``.relu`` never less than 0."""
    modifiers = Modifiers(one)
    positive = modifiers.maybe("relu")
    kind = modifiers.one_of(*(("s32",) if positive else _TYPES))
    modifiers.end()
    bits = WIDTHS[kind]
    d, a, b = operands(one, 3)
    name = f"llvm.{'s' if signed(kind) else 'u'}{one.opcode}.i{bits}"
    found = code.value(f"call i{bits} @{name}(i{bits} {code.read(a, bits)}, i{bits} {code.read(b, bits)})")
    if positive:
        found = code.value(f"call i32 @llvm.smax.i32(i32 {found}, i32 0)")
    code.write(d, found, bits)


def _negative(code: Code, one: Instruction) -> None:
    _, bits = integer_type(one, "s16", "s32", "s64")
    d, a = operands(one, 2)
    code.write(d, code.value(f"sub i{bits} 0, {code.read(a, bits)}"), bits)


def _size(code: Code, one: Instruction) -> None:
    """abs; that of the least number is itself."""
    _, bits = integer_type(one, "s16", "s32", "s64")
    d, a = operands(one, 2)
    code.write(d, code.value(f"call i{bits} @llvm.abs.i{bits}(i{bits} {code.read(a, bits)}, i1 false)"), bits)


def _distance(code: Code, one: Instruction) -> None:
    """sad: c + |a - b|."""
    kind, bits = integer_type(one, *_TYPES)
    d, a, b, c = operands(one, 4)
    x, y = code.read(a, bits), code.read(b, bits)
    less = code.value(f"icmp {'slt' if signed(kind) else 'ult'} i{bits} {x}, {y}")
    up, down = code.value(f"sub i{bits} {y}, {x}"), code.value(f"sub i{bits} {x}, {y}")
    size = code.value(f"select i1 {less}, i{bits} {up}, i{bits} {down}")
    code.write(d, code.value(f"add i{bits} {code.read(c, bits)}, {size}"), bits)


INTEGERS = {
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "mad": _product,
    "div": _quotient,
    "rem": _quotient,
    "min": _smaller,
    "max": _smaller,
    "neg": _negative,
    "abs": _size,
    "sad": _distance,
}
