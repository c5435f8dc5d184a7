"""Logic, shifts, and what else works on single bits."""

from __future__ import annotations

from .code import Code, Modifiers
from .integers import integer_type, operands, signed
from .operands import Immediate, Operand
from .program import WIDTHS, Instruction

__all__ = ["BITS"]


def _logic(code: Code, one: Instruction) -> None:
    kind, bits = integer_type(one, "pred", "b16", "b32", "b64")
    d, a, b = operands(one, 3)
    if kind == "pred":
        code.set_predicate(d, code.value(f"{one.opcode} i1 {code.predicate(a)}, {code.predicate(b)}"))
    else:
        code.write(d, code.value(f"{one.opcode} i{bits} {code.read(a, bits)}, {code.read(b, bits)}"), bits)


def _not(code: Code, one: Instruction) -> None:
    kind, bits = integer_type(one, "pred", "b16", "b32", "b64")
    d, a = operands(one, 2)
    if kind == "pred":
        code.set_predicate(d, code.value(f"xor i1 {code.predicate(a)}, true"))
    else:
        code.write(d, code.value(f"xor i{bits} {code.read(a, bits)}, -1"), bits)


def _any_input(code: Code, one: Instruction) -> None:
    """lop3: by the bits of a, b and c together a bit of the table."""
    integer_type(one, "b32")
    d, a, b, c, table = operands(one, 5)
    if not isinstance(table, Immediate) or not 0 <= table.value < 256:
        raise one.error("the table of lop3 is a number of 8 bits")
    inputs = [code.read(x, 32) for x in (a, b, c)]
    inverted = [code.value(f"xor i32 {x}, -1") for x in inputs]
    value = "0"
    for row in range(8):
        if table.value >> row & 1:
            x, y, z = (inputs[n] if row >> (2 - n) & 1 else inverted[n] for n in range(3))
            both = code.value(f"and i32 {code.value(f'and i32 {x}, {y}')}, {z}")
            value = code.value(f"or i32 {value}, {both}")
    code.write(d, value, 32)


def clamped(code: Code, by: str, bits: int) -> tuple[str, str]:
    """A distance of 32 bits as one of ``bits`` that LLVM can shift by, and whether it was too far (i1)."""
    far = code.value(f"icmp uge i32 {by}, {bits}")
    near = code.value(f"select i1 {far}, i32 {bits - 1}, i32 {by}")
    if bits != 32:
        near = code.value(f"{'zext' if bits > 32 else 'trunc'} i32 {near} to i{bits}")
    return near, far


def _shift(code: Code, one: Instruction) -> None:
    """shl and shr: by more than there are bits gives 0, or the sign."""
    left = one.opcode == "shl"
    kinds = ("b16", "b32", "b64") if left else ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    kind, bits = integer_type(one, *kinds)
    d, a, b = operands(one, 3)
    x, (by, far) = code.read(a, bits), clamped(code, code.read(b, 32), bits)
    if signed(kind):
        code.write(d, code.value(f"ashr i{bits} {x}, {by}"), bits)
        return
    value = code.value(f"{'shl' if left else 'lshr'} i{bits} {x}, {by}")
    code.write(d, code.value(f"select i1 {far}, i{bits} 0, i{bits} {value}"), bits)


def _funnel(code: Code, one: Instruction) -> None:
    """shf: of the 64 bits b:a shifted, the upper or lower half."""
    modifiers = Modifiers(one)
    left = modifiers.one_of("l", "r") == "l"
    wrapped = modifiers.one_of("clamp", "wrap") == "wrap"
    modifiers.one_of("b32")
    modifiers.end()
    d, a, b, c = operands(one, 4)
    low = code.value(f"zext i32 {code.read(a, 32)} to i64")
    high = code.value(f"zext i32 {code.read(b, 32)} to i64")
    both = code.value(f"or i64 {code.value(f'shl i64 {high}, 32')}, {low}")
    by = code.read(c, 32)
    by = code.value(f"and i32 {by}, 31") if wrapped else code.value(f"call i32 @llvm.umin.i32(i32 {by}, i32 32)")
    by = code.value(f"zext i32 {by} to i64")
    value = code.value(f"{'shl' if left else 'lshr'} i64 {both}, {by}")
    if left:
        value = code.value(f"lshr i64 {value}, 32")
    code.write(d, code.value(f"trunc i64 {value} to i32"), 32)


def _byte(code: Code, operand: Operand) -> str:
    return code.value(f"and i32 {code.read(operand, 32)}, 255")


def _extract(code: Code, one: Instruction) -> None:
    """bfe: the field of c bits at bit b, with its sign; bits beyond the top are those of the sign, or 0."""
    kind, bits = integer_type(one, "u32", "s32", "u64", "s64")
    d, a, b, c = operands(one, 4)
    x, start, length = code.read(a, bits), _byte(code, b), _byte(code, c)
    by, far = clamped(code, start, bits)
    if signed(kind):
        unused, _ = clamped(code, code.value(f"call i32 @llvm.usub.sat.i32(i32 {bits}, i32 {length})"), bits)
        value = code.value(f"shl i{bits} {code.value(f'ashr i{bits} {x}, {by}')}, {unused}")
        value = code.value(f"ashr i{bits} {value}, {unused}")
        empty = code.value(f"icmp eq i32 {length}, 0")
        value = code.value(f"select i1 {empty}, i{bits} 0, i{bits} {value}")
    else:
        value = code.value(f"select i1 {far}, i{bits} 0, i{bits} {code.value(f'lshr i{bits} {x}, {by}')}")
        value = code.value(f"and i{bits} {value}, {_ones(code, length, bits)}")
    code.write(d, value, bits)


def _ones(code: Code, length: str, bits: int) -> str:
    """As many of the lowest bits as ``length`` (i32), at most all."""
    size, whole = clamped(code, length, bits)
    mask = code.value(f"xor i{bits} {code.value(f'shl i{bits} -1, {size}')}, -1")
    return code.value(f"select i1 {whole}, i{bits} -1, i{bits} {mask}")


def _insert(code: Code, one: Instruction) -> None:
    """bfi: the lower d bits of a into b, at bit c."""
    _, bits = integer_type(one, "b32", "b64")
    f, a, b, c, d = operands(one, 5)
    x, into, start, length = code.read(a, bits), code.read(b, bits), _byte(code, c), _byte(code, d)
    field = _ones(code, length, bits)
    by, far = clamped(code, start, bits)
    mask = code.value(f"select i1 {far}, i{bits} 0, i{bits} {code.value(f'shl i{bits} {field}, {by}')}")
    put = code.value(f"and i{bits} {code.value(f'shl i{bits} {x}, {by}')}, {mask}")
    kept = code.value(f"and i{bits} {into}, {code.value(f'xor i{bits} {mask}, -1')}")
    code.write(f, code.value(f"or i{bits} {put}, {kept}"), bits)


def _counted(code: Code, one: Instruction) -> None:
    """popc, clz (of 0: all bits)."""
    _, bits = integer_type(one, "b32", "b64")
    d, a = operands(one, 2)
    x = code.read(a, bits)
    if one.opcode == "popc":
        value = code.value(f"call i{bits} @llvm.ctpop.i{bits}(i{bits} {x})")
    else:
        value = code.value(f"call i{bits} @llvm.ctlz.i{bits}(i{bits} {x}, i1 false)")
    code.write(d, value if bits == 32 else code.value(f"trunc i64 {value} to i32"), 32)


def _reversed(code: Code, one: Instruction) -> None:
    _, bits = integer_type(one, "b32", "b64")
    d, a = operands(one, 2)
    code.write(d, code.value(f"call i{bits} @llvm.bitreverse.i{bits}(i{bits} {code.read(a, bits)})"), bits)


def _leading(code: Code, one: Instruction) -> None:
    """bfind: place of the highest bit unlike the sign, or its distance from the top; all ones without any."""
    modifiers = Modifiers(one)
    amount = modifiers.maybe("shiftamt")
    kind = modifiers.one_of("u32", "s32", "u64", "s64")
    modifiers.end()
    bits = WIDTHS[kind]
    d, a = operands(one, 2)
    x = code.read(a, bits)
    if signed(kind):
        x = code.value(f"xor i{bits} {x}, {code.value(f'ashr i{bits} {x}, {bits - 1}')}")
    zeros = code.value(f"call i{bits} @llvm.ctlz.i{bits}(i{bits} {x}, i1 false)")
    found = zeros if amount else code.value(f"sub i{bits} {bits - 1}, {zeros}")
    found = code.value(f"select i1 {code.value(f'icmp eq i{bits} {x}, 0')}, i{bits} -1, i{bits} {found}")
    code.write(d, found if bits == 32 else code.value(f"trunc i64 {found} to i32"), 32)


def _permute(code: Code, one: Instruction) -> None:
    """prmt: by each nibble of c one of the eight bytes of b:a, or the sign of that byte."""
    integer_type(one, "b32")
    d, a, b, c = operands(one, 4)
    low = code.value(f"zext i32 {code.read(a, 32)} to i64")
    high = code.value(f"shl i64 {code.value(f'zext i32 {code.read(b, 32)} to i64')}, 32")
    both, selector = code.value(f"or i64 {high}, {low}"), code.read(c, 32)
    value = "0"
    for place in range(4):
        nibble = code.value(f"lshr i32 {selector}, {4 * place}")
        which = code.value(f"and i32 {nibble}, 7")
        by = code.value(f"zext i32 {code.value(f'shl i32 {which}, 3')} to i64")
        byte = code.value(f"trunc i64 {code.value(f'lshr i64 {both}, {by}')} to i8")
        sign = code.value(f"trunc i32 {code.value(f'lshr i32 {nibble}, 3')} to i1")
        byte = code.value(f"select i1 {sign}, i8 {code.value(f'ashr i8 {byte}, 7')}, i8 {byte}")
        part = code.value(f"shl i32 {code.value(f'zext i8 {byte} to i32')}, {8 * place}")
        value = code.value(f"or i32 {value}, {part}")
    code.write(d, value, 32)


BITS = {
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _not,
    "lop3": _any_input,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "bfe": _extract,
    "bfi": _insert,
    "popc": _counted,
    "clz": _counted,
    "brev": _reversed,
    "bfind": _leading,
    "prmt": _permute,
}
