"""Atomic memory access on raw int64 addresses, for compiled functions only.

LLVM atomic instructions, not inline assembly. A plain load in a spin loop would be hoisted: always use these for
memory that another thread, process or device writes. ``load_*`` are acquire, ``store_*`` are release, ``peek`` and
``poke`` are relaxed (never torn, no order), for private counters that others only watch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .jit import intrinsic

__all__ = [
    "compare_exchange",
    "copy",
    "fetch_add",
    "load32",
    "load64",
    "pause",
    "peek",
    "peek8",
    "peek32",
    "poke",
    "poke8",
    "poke32",
    "store64",
    "zero",
]

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _load(builder: Any, address: Any, bits: int, ordering: str) -> Any:
    value = builder.load_atomic(_pointer(builder, address, bits), ordering, bits // 8)
    return value if bits == 64 else builder.zext(value, _I64)


def _store(builder: Any, address: Any, value: Any, bits: int, ordering: str) -> None:
    word = value if bits == 64 else builder.trunc(value, ir.IntType(bits))
    builder.store_atomic(word, _pointer(builder, address, bits), ordering, bits // 8)


@intrinsic("int64(int64)")
def load64(builder: Any, address: Any) -> Any:
    """int64 at ``address``, acquire."""
    return _load(builder, address, 64, "acquire")


@intrinsic("int64(int64)")
def load32(builder: Any, address: Any) -> Any:
    """Unsigned 32-bit value at ``address`` as int64, acquire."""
    return _load(builder, address, 32, "acquire")


@intrinsic("int64(int64)")
def peek(builder: Any, address: Any) -> Any:
    """int64 at ``address``, relaxed."""
    return _load(builder, address, 64, "monotonic")


@intrinsic("int64(int64)")
def peek32(builder: Any, address: Any) -> Any:
    """Unsigned 32-bit value at ``address`` as int64, relaxed."""
    return _load(builder, address, 32, "monotonic")


@intrinsic("int64(int64)")
def peek8(builder: Any, address: Any) -> Any:
    """Byte at ``address`` as int64, relaxed."""
    return _load(builder, address, 8, "monotonic")


@intrinsic("void(int64, int64)")
def store64(builder: Any, address: Any, value: Any) -> None:
    """Store int64, release."""
    _store(builder, address, value, 64, "release")


@intrinsic("void(int64, int64)")
def poke(builder: Any, address: Any, value: Any) -> None:
    """Store int64, relaxed."""
    _store(builder, address, value, 64, "monotonic")


@intrinsic("void(int64, int64)")
def poke32(builder: Any, address: Any, value: Any) -> None:
    """Store the low 32 bits, relaxed."""
    _store(builder, address, value, 32, "monotonic")


@intrinsic("void(int64, int64)")
def poke8(builder: Any, address: Any, value: Any) -> None:
    """Store the low 8 bits, relaxed."""
    _store(builder, address, value, 8, "monotonic")


@intrinsic("int64(int64, int64)")
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at ``address`` (acquire-release); returns the value before."""
    return builder.atomic_rmw("add", _pointer(builder, address, 64), value, "acq_rel")


@intrinsic("boolean(int64, int64, int64)")
def compare_exchange(builder: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Store ``desired`` if the int64 equals ``expected`` (acquire-release); True when it did."""
    result = builder.cmpxchg(_pointer(builder, address, 64), expected, desired, "acq_rel", "monotonic")
    return builder.extract_value(result, 1)


def call_void(builder: Any, name: str, *args: Any) -> None:
    """Call one of LLVM's instructions that returns nothing."""
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in args])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)


@intrinsic("void()")
def pause(builder: Any) -> None:
    """Tell the core that this is a spin loop (x86 ``pause``; aarch64 ``isb``, whose ``yield`` does nothing)."""
    if "x86" in builder.module.triple:
        call_void(builder, "llvm.x86.sse2.pause")
    elif "aarch64" in builder.module.triple:
        call_void(builder, "llvm.aarch64.isb", _I32(15))  # option SY, the only one there is


@intrinsic("void(int64, int64, int64)")
def copy(builder: Any, target: Any, source: Any, nbytes: Any) -> None:
    """memcpy of ``nbytes`` between two addresses that do not overlap."""
    pointers = _pointer(builder, target, 8), _pointer(builder, source, 8)
    memcpy = builder.module.declare_intrinsic("llvm.memcpy", [_I8.as_pointer(), _I8.as_pointer(), _I64])
    builder.call(memcpy, [*pointers, nbytes, ir.IntType(1)(0)])


@intrinsic("void(int64, int64)")
def zero(builder: Any, target: Any, nbytes: Any) -> None:
    """Set ``nbytes`` bytes to 0."""
    memset = builder.module.declare_intrinsic("llvm.memset", [_I8.as_pointer(), _I64])
    builder.call(memset, [_pointer(builder, target, 8), _I8(0), nbytes, ir.IntType(1)(0)])
