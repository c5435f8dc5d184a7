"""cvt: between integers, and between them and the floating-point formats."""

from __future__ import annotations

from .code import Code, Modifiers
from .floats import FORMS, real, store_real
from .integers import operands, signed
from .operands import Operand
from .program import WIDTHS, Instruction

__all__ = ["CONVERSIONS", "PRELUDE"]

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = ("f16", "bf16", "f32", "f64")
#: Two values side by side, the first operand in the upper half.
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
#: Smaller formats: bits of the mantissa, bias of the exponent, float32 bits of the largest number, code of NaN.
_SMALL = {"e4m3": (3, 7, 0x43E00000, 0x7F), "e5m2": (2, 15, 0x47600000, 0x7F)}


def _small_function(name: str) -> str:
    """LLVM's text of the rounding of float32 bits (i32) to a small format, to nearest even, saturating.

    Normal numbers keep the upper bits of the mantissa; adding half of what is cut off, less one where the lowest kept
    bit is even, carries into them. Below those the float adder rounds: the unit of the sum with 2**(23 + the exponent
    of the least number) is the least number.
    """
    mantissa, bias, largest, nan = _SMALL[name]
    cut, least = 23 - mantissa, 1 - bias - mantissa
    magic, smallest_normal = (127 + 23 + least) << 23, (128 - bias) << 23
    return f"""
define internal i32 @{name}(i32 %bits) alwaysinline {{
  %size = and i32 %bits, {0x7FFFFFFF}
  %kept = call i32 @llvm.umin.i32(i32 %size, i32 {largest})
  %up = lshr i32 %kept, {cut}
  %odd = and i32 %up, 1
  %half = add i32 %kept, {(1 << (cut - 1)) - 1}
  %sum = add i32 %half, %odd
  %high = lshr i32 %sum, {cut}
  %normal = sub i32 %high, {(127 - bias) << mantissa}
  %real = bitcast i32 %kept to float
  %added = bitcast i32 {magic} to float
  %shifted = fadd float %real, %added
  %again = bitcast float %shifted to i32
  %small = sub i32 %again, {magic}
  %below = icmp ult i32 %kept, {smallest_normal}
  %code = select i1 %below, i32 %small, i32 %normal
  %nan = icmp ugt i32 %size, {0x7F800000}
  %told = select i1 %nan, i32 {nan}, i32 %code
  %shifted_sign = lshr i32 %bits, 24
  %sign = and i32 %shifted_sign, 128
  %signed = or i32 %told, %sign
  %whole = select i1 %nan, i32 {nan}, i32 %signed
  ret i32 %whole
}}
"""


def _half_function(name: str, nan: int) -> str:
    """Of the rounding of float32 bits to a 16-bit format, to nearest even; NaN is the one that GPUs make."""
    return f"""
define internal i32 @{name}(i32 %bits) alwaysinline {{
  %real = bitcast i32 %bits to float
  %nan = fcmp uno float %real, %real
  %narrow = fptrunc float %real to {FORMS[name]}
  %narrow_bits = bitcast {FORMS[name]} %narrow to i16
  %wide = zext i16 %narrow_bits to i32
  %whole = select i1 %nan, i32 {nan}, i32 %wide
  ret i32 %whole
}}
"""


#: Functions that the code calls: float32 bits to the lower bits of an i32.
PRELUDE = (
    _small_function("e4m3")
    + _small_function("e5m2")
    + _half_function("f16", 0x7FFF)
    + """
define internal i32 @bf16(i32 %bits) alwaysinline {
  %size = and i32 %bits, 2147483647
  %nan = icmp ugt i32 %size, 2139095040
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %half = add i32 %bits, 32767
  %sum = add i32 %half, %odd
  %rounded = lshr i32 %sum, 16
  %whole = select i1 %nan, i32 32767, i32 %rounded
  ret i32 %whole
}
"""
)


def _convert(code: Code, one: Instruction) -> None:
    if any(kind in one.modifiers for kind in _PAIRS):
        _pair(code, one)
        return
    modifiers = Modifiers(one)
    rounding = modifiers.maybe("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")
    flushed, saturated = bool(modifiers.maybe("ftz")), bool(modifiers.maybe("sat"))
    to = modifiers.one_of(*_INTEGERS, *_FLOATS)
    of = modifiers.one_of(*_INTEGERS, *_FLOATS)
    modifiers.end()
    d, a = operands(one, 2)
    if flushed and "f32" not in (to, of):
        raise one.error("unknown modifier .ftz")
    if to in _INTEGERS and of in _INTEGERS:
        if rounding:
            raise one.error(f"unknown modifier .{rounding}")
        _resize(code, d, a, to, of, saturated)
    elif to in _INTEGERS:
        if rounding not in ("rni", "rzi", "rmi", "rpi"):
            raise one.error("without a rounding to integers")
        _to_integer(code, d, real(code, a, of, flushed), rounding, to, "f64" if of == "f64" else "f32")
    elif saturated:
        raise one.error("unknown modifier .sat")
    elif of in _INTEGERS:
        if rounding != "rn" or to not in ("f32", "f64"):
            raise one.error("only .rn to f32 and f64 is known")
        x = code.read(a, WIDTHS[of], wider=True)
        value = code.value(f"{'s' if signed(of) else 'u'}itofp i{WIDTHS[of]} {x} to {FORMS[to]}")
        store_real(code, d, value, to)
    else:
        _between_floats(code, one, d, a, rounding, to, of, flushed)


def _resize(code: Code, d: Operand, a: Operand, to: str, of: str, saturated: bool) -> None:
    n, m = WIDTHS[of], WIDTHS[to]
    value = code.read(a, n, wider=True)
    if saturated:
        (least, most), (first, last) = _limits(to), _limits(of)
        if least <= first and last <= most:
            raise code.error("unknown modifier .sat: the result holds every value")
        value = _saturated(code, value, to, of)
    elif n != m:
        value = code.value(f"{'trunc' if m < n else 'sext' if signed(of) else 'zext'} i{n} {value} to i{m}")
    code.write(d, value, m, signed(to))


def _limits(kind: str) -> tuple[int, int]:
    """The least and the largest number."""
    bits = WIDTHS[kind]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed(kind) else (0, (1 << bits) - 1)


def _saturated(code: Code, value: str, to: str, of: str) -> str:
    """The nearest number that ``to`` has, computed in 128 bits."""
    m = WIDTHS[to]
    least, most = _limits(to)
    wide = code.value(f"{'sext' if signed(of) else 'zext'} i{WIDTHS[of]} {value} to i128")
    wide = code.value(f"call i128 @llvm.smax.i128(i128 {wide}, i128 {least})")
    wide = code.value(f"call i128 @llvm.smin.i128(i128 {wide}, i128 {most})")
    return code.value(f"trunc i128 {wide} to i{m}")


def _integral(code: Code, value: str, rounding: str, kind: str) -> str:
    form = FORMS[kind]
    name = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[rounding]
    return code.value(f"call {form} @llvm.{name}.f{WIDTHS[kind]}({form} {value})")


def _to_integer(code: Code, d: Operand, value: str, rounding: str, to: str, kind: str) -> None:
    """The nearest number that ``to`` has; 0 of NaN."""
    value = _integral(code, value, rounding, kind)
    name = f"llvm.fpto{'s' if signed(to) else 'u'}i.sat.i{WIDTHS[to]}.f{WIDTHS[kind]}"
    found = code.value(f"call i{WIDTHS[to]} @{name}({FORMS[kind]} {value})")
    code.write(d, found, WIDTHS[to], signed(to))


def _between_floats(
    code: Code, one: Instruction, d: Operand, a: Operand, rounding: str, to: str, of: str, flushed: bool
) -> None:
    value = real(code, a, of, flushed and of == "f32")
    kind = "f64" if of == "f64" else "f32"
    if rounding.endswith("i"):
        if to != of or to not in ("f32", "f64"):
            raise one.error("rounding to integers between these formats")
        store_real(code, d, _integral(code, value, rounding, kind), to, flushed)
    elif WIDTHS[to] > WIDTHS[of]:
        if rounding:
            raise one.error(f"unknown modifier .{rounding}")
        if to == "f64":
            value = code.value(f"fpext float {value} to double")
        store_real(code, d, value, to, flushed and to == "f32")
    elif of == "f32" and rounding == "rn" and to in ("f16", "bf16"):
        bits = code.value(f"bitcast float {value} to i32")
        code.write(d, code.value(f"trunc i32 {code.value(f'call i32 @{to}(i32 {bits})')} to i16"), 16)
    elif (of, to, rounding) == ("f64", "f32", "rn"):
        store_real(code, d, code.value(f"fptrunc double {value} to float"), "f32", flushed)
    else:
        raise one.error("conversion between these formats with this rounding")


def _pair(code: Code, one: Instruction) -> None:
    """Two values at once: two float32 into a pair, or a pair of e4m3 or e5m2 into one of float16."""
    modifiers = Modifiers(one)
    modifiers.one_of("rn")
    saturated = modifiers.maybe("satfinite")
    relu = bool(modifiers.maybe("relu"))
    to = modifiers.one_of(*_PAIRS)
    of = modifiers.one_of("f32", "e4m3x2", "e5m2x2")
    modifiers.end()
    small = _PAIRS[to] in _SMALL
    if of != "f32":
        if saturated or to != "f16x2":
            raise one.error("conversion between these formats")
        _widen(code, one, _PAIRS[of], relu)
        return
    if small != bool(saturated):
        raise one.error("saturation as it is known for this format")
    d, a, b = operands(one, 3)
    width = 8 if small else 16
    halves = []
    for operand in (a, b):
        bits = code.read(operand, 32)
        if relu:
            # NaN stays
            negative = code.value(f"fcmp ole float {code.value(f'bitcast i32 {bits} to float')}, 0.0")
            bits = code.value(f"select i1 {negative}, i32 0, i32 {bits}")
        halves.append(code.value(f"call i32 @{_PAIRS[to]}(i32 {bits})"))
    both = code.value(f"or i32 {code.value(f'shl i32 {halves[0]}, {width}')}, {halves[1]}")
    code.write(d, code.value(f"trunc i32 {both} to i16") if small else both, 2 * width)


def _widen(code: Code, one: Instruction, of: str, relu: bool) -> None:
    """Every e4m3 and e5m2 number is one of float16. The exponent of e5m2 is that of float16."""
    d, a = operands(one, 2)
    pair, whole = code.read(a, 16), "0"
    for number in range(2):
        byte = code.value(f"and i16 {code.value(f'lshr i16 {pair}, {8 * number}')}, 255")
        if of == "e5m2":
            half = code.value(f"shl i16 {byte}, 8")
            nan = code.value(f"icmp ugt i16 {code.value(f'and i16 {byte}, 127')}, 124")
        else:
            sign = code.value(f"shl i16 {code.value(f'and i16 {byte}, 128')}, 8")
            size = code.value(f"and i16 {byte}, 127")
            # as float16 bits with the same exponent it is 2**8 too small, the difference of the biases
            small = code.value(f"bitcast i16 {code.value(f'shl i16 {size}, 7')} to half")
            scaled = code.value(f"fmul half {small}, 256.0")
            half = code.value(f"or i16 {code.value(f'bitcast half {scaled} to i16')}, {sign}")
            nan = code.value(f"icmp eq i16 {size}, 127")
        if relu:
            half = code.value(f"select i1 {code.value(f'icmp slt i16 {half}, 0')}, i16 0, i16 {half}")
        half = code.value(f"select i1 {nan}, i16 {0x7FFF}, i16 {half}")
        part = code.value(f"shl i32 {code.value(f'zext i16 {half} to i32')}, {16 * number}")
        whole = code.value(f"or i32 {whole}, {part}")
    code.write(d, whole, 32)


CONVERSIONS = {"cvt": _convert}
