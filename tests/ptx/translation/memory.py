"""Loads and stores. What other threads may see the order of is an event; the rest is compiled."""

from __future__ import annotations

from .code import Code, Modifiers
from .event import MISALIGNED, OUTSIDE, RANGES, SHARED_BYTES, UNMAPPED
from .integers import operands, signed
from .operands import Operand, Register, Symbol
from .program import WIDTHS, Instruction

__all__ = ["MEMORY"]

_TYPES = (*(f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)), "f32", "f64")
_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release")
_CACHES = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
#: Advice about caches, which changes no value.
_ADVICE = (
    *(f"L1::{what}" for what in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
    *(f"L2::{what}" for what in ("evict_normal", "evict_first", "evict_last", "64B", "128B", "256B")),
)
_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")


def _space(one: Instruction, modifiers: Modifiers) -> str:
    found = modifiers.one_of("global", "shared", "shared::cta")
    return found.partition("::")[0]


def _elements(code: Code, operand: Operand, vector: str) -> tuple[Operand, ...]:
    parts = code.vector(operand)
    if len(parts) != int(vector[1:] or 1):
        raise code.error(f"{len(parts)} registers where {vector[1:] or 1} are known")
    return parts


def _access(code: Code, one: Instruction) -> None:
    """ld and st of global and shared memory."""
    load = one.opcode == "ld"
    if load and "param" in one.modifiers:
        _parameter(code, one)
        return
    modifiers = Modifiers(one)
    order = modifiers.one_of("relaxed") if modifiers.maybe("mmio") else modifiers.maybe(*_ORDERS)
    scope = modifiers.maybe("cta", "cluster", "gpu", "sys")
    if (order in ("relaxed", "acquire", "release")) != bool(scope) or order == ("release" if load else "acquire"):
        raise one.error("an order without its scope, a scope without an order, or the order of the other direction")
    space = _space(one, modifiers)
    cached = modifiers.maybe(*_CACHES)
    while modifiers.maybe(*_ADVICE):
        pass
    vector = modifiers.maybe("v2", "v4")
    kind = modifiers.one_of(*_TYPES)
    modifiers.end()
    first, second = operands(one, 2)
    values, where = (first, second) if load else (second, first)
    elements = _elements(code, values, vector)
    bits = WIDTHS[kind]
    nbytes = len(elements) * bits // 8
    ordered = order not in ("", "weak") or cached == "cv"
    if code.weak or ordered:
        if load:
            _stop_at_load(code, elements, kind, where, nbytes)
        else:
            code.event((), [code.operand(element, bits) for element in elements], where, nbytes)
        return
    pointer = _pointer(code, where, space, nbytes)
    if not load:
        for number, element in enumerate(elements):
            value = code.read(element, bits, wider=True)
            code.emit(f"store i{bits} {value}, ptr {_element(code, pointer, bits, number)}")
        return
    loaded = [code.value(f"load i{bits}, ptr {_element(code, pointer, bits, n)}") for n in range(len(elements))]
    for element, value in zip(elements, loaded, strict=True):
        code.write(element, value, bits, signed(kind))


def _element(code: Code, pointer: str, bits: int, number: int) -> str:
    return code.value(f"getelementptr i{bits}, ptr {pointer}, i64 {number}") if number else pointer


def _stop_at_load(code: Code, elements: tuple[Operand, ...], kind: str, where: Operand, nbytes: int) -> None:
    """The machine writes what it has loaded as wide as it was loaded; a wider register is filled after that."""
    bits = WIDTHS[kind]
    code.event(elements, (), where, nbytes)
    for element in elements:
        if isinstance(element, Register) and code.width(element) > bits:
            code.write(element, code.read(element, bits, wider=True), bits, signed(kind))


def _parameter(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    modifiers.one_of("param")
    vector = modifiers.maybe("v2", "v4")
    kind = modifiers.one_of(*_TYPES)
    modifiers.end()
    d, where = operands(one, 2)
    base, offset = code.address(where)
    found = [one for one in code.program.parameters if isinstance(base, Symbol) and one.name == base.name]
    elements = _elements(code, d, vector)
    bits = WIDTHS[kind]
    if not found or not 0 <= offset <= found[0].nbytes - len(elements) * bits // 8:
        raise one.error("no parameter of this kernel, or beyond its end")
    for number, element in enumerate(elements):
        at = found[0].offset + offset + number * bits // 8
        pointer = code.value(f"getelementptr i8, ptr %params, i64 {at}")
        code.write(element, code.value(f"load i{bits}, ptr {pointer}, align 1"), bits, signed(kind))


def _pointer(code: Code, where: Operand, space: str, nbytes: int) -> str:
    """A host pointer to what an instruction accesses, after its checks."""
    base, offset = code.address(where)
    if space == "global":
        at = code.read(base, 64)
        at = code.value(f"add i64 {at}, {offset}") if offset else at
    else:
        wide = isinstance(base, Register) and code.width(base) == 64
        at = code.read(base, 64 if wide else 32)
        at = at if wide else code.value(f"zext i32 {at} to i64")
        at = code.value(f"add i64 {at}, {offset}") if offset else at
    number = 0
    if nbytes > 1:
        low = code.value(f"and i64 {at}, {nbytes - 1}")
        number = code.fault(code.value(f"icmp ne i64 {low}, 0"), MISALIGNED, at, number)
    if space == "global":
        table = code.value(f"load ptr, ptr {code.slot(RANGES)}")
        good = code.value(f"call i1 @mapped(ptr {table}, i64 {at}, i64 {nbytes})")
        code.fault(code.value(f"xor i1 {good}, true"), UNMAPPED, at, number)
        return code.value(f"inttoptr i64 {at} to ptr")
    size = code.value(f"load i64, ptr {code.slot(SHARED_BYTES)}")
    last = code.value(f"add i64 {at}, {nbytes}")
    beyond = code.value(f"icmp ugt i64 {last}, {size}")
    wrapped = code.value(f"icmp ult i64 {last}, {at}")
    code.fault(code.value(f"or i1 {beyond}, {wrapped}"), OUTSIDE, at, number)
    return code.value(f"getelementptr i8, ptr %shared, i64 {at}")


def _atomic(code: Code, one: Instruction) -> None:
    """atom and red: always an event. The space comes after order and scope, as in PTX, or before them, as in Triton.
    Without an order it is ``relaxed``, without a scope ``gpu``: that is for the machine to know."""
    result = one.opcode == "atom"
    modifiers = Modifiers(one)
    orders, scopes = ("relaxed", "acquire", "release", "acq_rel"), ("cta", "cluster", "gpu", "sys")
    order, scope = modifiers.maybe(*orders), modifiers.maybe(*scopes)
    _space(one, modifiers)
    if not order and not scope:
        scope, order = modifiers.maybe(*scopes), modifiers.maybe(*orders)
        scope = scope or modifiers.maybe(*scopes)
    operation = modifiers.one_of(*_OPERATIONS)
    kind = modifiers.one_of("b32", "b64", "u32", "u64", "s32", "s64")
    modifiers.end()
    if kind.startswith("b") != (operation in ("and", "or", "xor", "exch", "cas")):
        raise one.error(f".{operation} of {kind}")
    bits = WIDTHS[kind]
    d, where, *values = operands(one, (4 if operation == "cas" else 3)) if result else (None, *operands(one, 2))
    for value in values:
        if isinstance(value, Register) and code.width(value) != bits:
            raise one.error(f"{value.name} has other than {bits} bits")
    code.event([d] if d is not None else (), [code.operand(value, bits) for value in values], where, bits // 8)


def _matrix(code: Code, one: Instruction) -> None:
    """ldmatrix and stmatrix of 8 x 8 numbers of 16 bits: of all threads of a warp together."""
    modifiers = Modifiers(one)
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    modifiers.one_of("m8n8")
    count = modifiers.one_of("x1", "x2", "x4")
    modifiers.maybe("trans")
    modifiers.one_of("shared", "shared::cta")
    modifiers.one_of("b16")
    modifiers.end()
    first, second = operands(one, 2)
    load = one.opcode == "ldmatrix"
    values, where = (first, second) if load else (second, first)
    elements = _elements(code, values, f"v{count[1:]}" if count != "x1" else "")
    for element in elements:
        if code.width(element) != 32:
            raise one.error("registers of 32 bits hold the parts of a matrix")
    code.event(elements if load else (), [] if load else [code.operand(one, 32) for one in elements], where, 16)


MEMORY = {
    "ld": _access,
    "st": _access,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
}
