"""Atomic memory access on raw int64 addresses, for compiled functions only.

LLVM atomic instructions, not inline assembly. A plain load in a spin loop would be hoisted: always use these for
memory that another thread, process or device writes. ``load_*`` are acquire, ``store_*`` are release, ``peek`` and
``poke`` are relaxed (never torn, no order), for private counters that others only watch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _loader(bits: int, ordering: str) -> Any:
    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load_atomic(_pointer(builder, args[0], bits), ordering, bits // 8)
            return value if bits == 64 else builder.zext(value, _I64)

        return types.int64(types.int64), codegen

    return typing


def _storer(bits: int, ordering: str) -> Any:
    def typing(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store_atomic(word, _pointer(builder, args[0], bits), ordering, bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return typing


@intrinsic
def load64(typingctx, address):  # type: ignore[no-untyped-def]
    """int64 at ``address``, acquire."""
    return _loader(64, "acquire")(typingctx, address)


@intrinsic
def load32(typingctx, address):  # type: ignore[no-untyped-def]
    """Unsigned 32-bit value at ``address`` as int64, acquire."""
    return _loader(32, "acquire")(typingctx, address)


@intrinsic
def peek(typingctx, address):  # type: ignore[no-untyped-def]
    """int64 at ``address``, relaxed."""
    return _loader(64, "monotonic")(typingctx, address)


@intrinsic
def peek32(typingctx, address):  # type: ignore[no-untyped-def]
    """Unsigned 32-bit value at ``address`` as int64, relaxed."""
    return _loader(32, "monotonic")(typingctx, address)


@intrinsic
def peek8(typingctx, address):  # type: ignore[no-untyped-def]
    """Byte at ``address`` as int64, relaxed."""
    return _loader(8, "monotonic")(typingctx, address)


@intrinsic
def store64(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store int64, release."""
    return _storer(64, "release")(typingctx, address, value)


@intrinsic
def poke(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store int64, relaxed."""
    return _storer(64, "monotonic")(typingctx, address, value)


@intrinsic
def poke32(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store the low 32 bits, relaxed."""
    return _storer(32, "monotonic")(typingctx, address, value)


@intrinsic
def poke8(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store the low 8 bits, relaxed."""
    return _storer(8, "monotonic")(typingctx, address, value)


@intrinsic
def fetch_add(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Add to the int64 at ``address`` (acquire-release); returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], 64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_exchange(typingctx, address, expected, desired):  # type: ignore[no-untyped-def]
    """Store ``desired`` if the int64 equals ``expected`` (acquire-release); True when it did."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], 64)
        result = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "monotonic")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spin loop (x86 ``pause``; aarch64 ``isb``, whose ``yield`` does nothing)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86" in builder.module.triple:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), ()), "llvm.x86.sse2.pause"
            )
            builder.call(function, ())
        elif "aarch64" in builder.module.triple:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), (_I32,)), "llvm.aarch64.isb"
            )
            builder.call(function, (_I32(15),))  # option SY, the only one there is
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def copy(typingctx, target, source, nbytes):  # type: ignore[no-untyped-def]
    """memcpy of ``nbytes`` between two addresses that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.raw_memcpy(builder, _pointer(builder, args[0], 8), _pointer(builder, args[1], 8), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero(typingctx, target, nbytes):  # type: ignore[no-untyped-def]
    """Set ``nbytes`` bytes to 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, _pointer(builder, args[0], 8), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
