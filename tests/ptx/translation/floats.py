"""Floating-point arithmetic.

What PTX rounds correctly is rounded correctly. Where a GPU approximates (``.approx``, ``.full``) the correctly rounded
double result, rounded once more, stands here: it is within PTX's bounds (2 ulp for ``rcp``, ``div`` and ``sqrt``,
2**-22 relative for ``ex2``, ``lg2`` and ``rsqrt``), but a GPU's last bits may be others.
"""

from __future__ import annotations

from .code import Code, Modifiers
from .integers import operands
from .operands import Operand
from .program import WIDTHS, Instruction

__all__ = ["FLOATS", "FORMS", "flushed_bits", "real", "store_real"]

#: LLVM's names of the formats.
FORMS = {"f16": "half", "bf16": "bfloat", "f32": "float", "f64": "double"}
#: The NaN that single-precision instructions give.
NAN = 0x7FFFFFFF
_ROUNDINGS = ("rn", "rz", "rm", "rp")


def flushed_bits(code: Code, bits: str) -> str:
    """float32 bits, subnormal numbers as zeros of their sign."""
    exponent = code.value(f"and i32 {bits}, {0x7F800000}")
    zero = code.value(f"and i32 {bits}, {-(1 << 31)}")
    return code.value(f"select i1 {code.value(f'icmp eq i32 {exponent}, 0')}, i32 {zero}, i32 {bits}")


def real(code: Code, operand: Operand, kind: str, flushed: bool = False) -> str:
    """A floating-point operand; the 16-bit formats as float, which holds all their values."""
    bits = code.read(operand, WIDTHS[kind])
    if flushed:
        if kind != "f32":
            raise code.error(f".ftz of {kind}")
        bits = flushed_bits(code, bits)
    value = code.value(f"bitcast i{WIDTHS[kind]} {bits} to {FORMS[kind]}")
    return code.value(f"fpext {FORMS[kind]} {value} to float") if WIDTHS[kind] == 16 else value


def store_real(code: Code, d: Operand, value: str, kind: str, flushed: bool = False, saturated: bool = False) -> None:
    """Write a float or double; NaN of single precision is the one that GPUs make."""
    if kind == "f64":
        code.write(d, code.value(f"bitcast double {value} to i64"), 64)
        return
    code.write(d, single_bits(code, value, flushed, saturated), 32)


def single_bits(code: Code, value: str, flushed: bool, saturated: bool = False) -> str:
    """Bits of a float as an instruction gives them."""
    nan = code.value(f"fcmp uno float {value}, {value}")
    bits = code.value(f"bitcast float {value} to i32")
    if flushed:
        bits = flushed_bits(code, bits)
    if saturated:
        below = code.value(f"fcmp ole float {value}, 0.0")
        above = code.value(f"fcmp oge float {value}, 1.0")
        bits = code.value(f"select i1 {above}, i32 {0x3F800000}, i32 {bits}")
        bits = code.value(f"select i1 {below}, i32 0, i32 {bits}")
    return code.value(f"select i1 {nan}, i32 {0 if saturated else NAN}, i32 {bits}")


def _arithmetic(code: Code, one: Instruction) -> None:
    """add, sub, mul, fma: rounded once, to nearest even; of f32x2 each half for itself. Of f32 with f16 or bf16, as
    sm_100 has it, all inputs but the last are of 16 bits."""
    modifiers = Modifiers(one)
    modifiers.one_of("rn") if one.opcode == "fma" else modifiers.maybe("rn")
    flushed, saturated = bool(modifiers.maybe("ftz")), bool(modifiers.maybe("sat"))
    kind = modifiers.one_of("f32", *(() if saturated else ("f32x2",)), *(() if flushed or saturated else ("f64",)))
    narrow = modifiers.maybe("f16", "bf16") if kind == "f32" and one.opcode != "mul" and not flushed else ""
    modifiers.end()
    d, *inputs = operands(one, 4 if one.opcode == "fma" else 3)
    if kind != "f32x2":
        given = [code.read(operand, WIDTHS[kind]) for operand in (inputs[-1:] if narrow else inputs)]
        if narrow:
            wide = [code.value(f"bitcast float {real(code, operand, narrow)} to i32") for operand in inputs[:-1]]
            given = wide + given
        value = _result(code, one.opcode, given, kind, flushed)
        store_real(code, d, value, kind, flushed, saturated)
        return
    pairs = [code.read(operand, 64) for operand in inputs]
    whole = "0"
    for shift in (0, 32):
        halves = [code.value(f"trunc i64 {code.value(f'lshr i64 {pair}, {shift}')} to i32") for pair in pairs]
        bits = single_bits(code, _result(code, one.opcode, halves, "f32", flushed), flushed)
        half = code.value(f"shl i64 {code.value(f'zext i32 {bits} to i64')}, {shift}")
        whole = code.value(f"or i64 {whole}, {half}")
    code.write(d, whole, 64)


def _result(code: Code, opcode: str, inputs: list[str], kind: str, flushed: bool) -> str:
    """Of numbers given by their bits a float or double."""
    form, bits = FORMS[kind], WIDTHS[kind]
    if flushed:
        inputs = [flushed_bits(code, value) for value in inputs]
    values = [code.value(f"bitcast i{bits} {value} to {form}") for value in inputs]
    if opcode == "fma":
        arguments = ", ".join(f"{form} {value}" for value in values)
        return code.value(f"call {form} @llvm.fma.f{bits}({arguments})")
    return code.value(f"f{opcode} {form} {values[0]}, {values[1]}")


def _divide(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    how = modifiers.one_of("rn", "full", "approx")
    flushed = bool(modifiers.maybe("ftz"))
    kind = modifiers.one_of(*(("f32", "f64") if how == "rn" and not flushed else ("f32",)))
    modifiers.end()
    d, a, b = operands(one, 3)
    x, y = (real(code, operand, kind, flushed) for operand in (a, b))
    store_real(code, d, code.value(f"fdiv {FORMS[kind]} {x}, {y}"), kind, flushed)


def _function(code: Code, one: Instruction) -> None:
    """rcp, sqrt, rsqrt, ex2, lg2 of one argument."""
    modifiers = Modifiers(one)
    exact = one.opcode in ("rcp", "sqrt")
    modifiers.one_of("rn", "approx") if exact else modifiers.one_of("approx")
    flushed = bool(modifiers.maybe("ftz"))
    modifiers.one_of("f32")
    modifiers.end()
    d, a = operands(one, 2)
    x = code.value(f"fpext float {real(code, a, 'f32', flushed)} to double")
    name = {"ex2": "exp2", "lg2": "log2"}.get(one.opcode, "sqrt")
    value = x if one.opcode == "rcp" else code.value(f"call double @llvm.{name}.f64(double {x})")
    if one.opcode in ("rcp", "rsqrt"):
        value = code.value(f"fdiv double 1.0, {value}")
    # quotients and roots of float32 rounded to double and then to float32 are rounded as if once (53 >= 2 * 24 + 2)
    store_real(code, d, code.value(f"fptrunc double {value} to float"), "f32", flushed)


def _smaller(code: Code, one: Instruction) -> None:
    """min and max: of a number and NaN the number, unless ``.NaN``; -0 is less than +0."""
    modifiers = Modifiers(one)
    flushed, nan = bool(modifiers.maybe("ftz")), modifiers.maybe("NaN")
    kind = modifiers.one_of(*(("f32",) if flushed or nan else ("f32", "f64")))
    modifiers.end()
    d, a, b = operands(one, 3)
    form, width, x, y = FORMS[kind], WIDTHS[kind], real(code, a, kind, flushed), real(code, b, kind, flushed)
    first = code.value(f"fcmp {'olt' if one.opcode == 'min' else 'ogt'} {form} {x}, {y}")
    value = code.value(f"select i1 {first}, {form} {x}, {form} {y}")
    # equal numbers differ in the sign of a zero alone
    bits = [code.value(f"bitcast {form} {number} to i{width}") for number in (x, y)]
    sign = code.value(f"{'or' if one.opcode == 'min' else 'and'} i{width} {bits[0]}, {bits[1]}")
    same = code.value(f"fcmp oeq {form} {x}, {y}")
    value = code.value(f"select i1 {same}, {form} {code.value(f'bitcast i{width} {sign} to {form}')}, {form} {value}")
    # y where x is none, as a comparison with NaN does not hold; x where y is none
    other = y if nan else x
    value = code.value(f"select i1 {code.value(f'fcmp uno {form} {y}, {y}')}, {form} {other}, {form} {value}")
    if nan:
        value = code.value(f"select i1 {code.value(f'fcmp uno {form} {x}, {x}')}, {form} {x}, {form} {value}")
    store_real(code, d, value, kind, flushed)


def _sign(code: Code, one: Instruction) -> None:
    """abs and neg, of the bits: NaN keeps its own."""
    modifiers = Modifiers(one)
    flushed = bool(modifiers.maybe("ftz"))
    kind = modifiers.one_of(*(("f32",) if flushed else ("f32", "f64")))
    modifiers.end()
    d, a = operands(one, 2)
    bits = WIDTHS[kind]
    value = code.read(a, bits)
    if flushed:
        value = flushed_bits(code, value)
    top = 1 << (bits - 1)
    code.write(
        d,
        code.value(f"{f'and i{bits} {value}, {top - 1}' if one.opcode == 'abs' else f'xor i{bits} {value}, {-top}'}"),
        bits,
    )


FLOATS = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "fma": _arithmetic,
    "div": _divide,
    "rcp": _function,
    "sqrt": _function,
    "rsqrt": _function,
    "ex2": _function,
    "lg2": _function,
    "min": _smaller,
    "max": _smaller,
    "abs": _sign,
    "neg": _sign,
}
