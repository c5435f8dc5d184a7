"""Calls through C function addresses, and the few libc functions that compiled loops need.

Addresses are passed at run time: they differ between processes, and code is cached. Symbols of libc are resolved by
name when the code is loaded.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir

from .atomics import peek, poke
from .jit import compiled, external, intrinsic

__all__ = [
    "call1",
    "call1_int",
    "call2",
    "call3",
    "call3_int",
    "call4",
    "call4_int",
    "call5_int",
    "call8",
    "monotonic_ns",
    "nanosleep_ns",
    "sched_yield",
]

_I64 = ir.IntType(64)


def _call(builder: Any, function: Any, args: tuple[Any, ...], bits: int = 64) -> Any:
    """Call the C function at an address; its result has so many bits, and is sign-extended."""
    kind = ir.FunctionType(ir.IntType(bits), [_I64] * len(args))
    result = builder.call(builder.inttoptr(function, kind.as_pointer()), args)
    return result if bits == 64 else builder.sext(result, _I64)


@intrinsic("int64(int64, int64)")
def call1(builder: Any, function: Any, a: Any) -> Any:
    """``int64 function(int64)``."""
    return _call(builder, function, (a,))


@intrinsic("int64(int64, int64, int64)")
def call2(builder: Any, function: Any, a: Any, b: Any) -> Any:
    """``int64 function(int64 x 2)``."""
    return _call(builder, function, (a, b))


@intrinsic("int64(int64, int64, int64, int64)")
def call3(builder: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """``int64 function(int64 x 3)``."""
    return _call(builder, function, (a, b, c))


@intrinsic("int64(int64, int64)")
def call1_int(builder: Any, function: Any, a: Any) -> Any:
    """``int function(int64)``: a C function that returns 32 bits, sign-extended here."""
    return _call(builder, function, (a,), 32)


@intrinsic("int64(int64, int64, int64, int64)")
def call3_int(builder: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """``int function(int64 x 3)``: likewise."""
    return _call(builder, function, (a, b, c), 32)


@intrinsic("int64(int64, int64, int64, int64, int64)")
def call4(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """``int64 function(int64 x 4)``.

    A function that takes 32-bit arguments looks at the lower halves only; what one that returns nothing leaves in the
    register means nothing.
    """
    return _call(builder, function, (a, b, c, d))


@intrinsic("int64(int64, int64, int64, int64, int64)")
def call4_int(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """``int function(int64 x 4)``: likewise, and it may take 32-bit arguments."""
    return _call(builder, function, (a, b, c, d), 32)


@intrinsic("int64(int64, int64, int64, int64, int64, int64)")
def call5_int(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """``int function(int64 x 5)``: likewise."""
    return _call(builder, function, (a, b, c, d, e), 32)


@intrinsic("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def call8(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """``int64 function(int64 x 8)``."""
    return _call(builder, function, (a, b, c, d, e, f, g, h))


sched_yield = external("sched_yield", "int32()")
_clock_gettime = external("clock_gettime", "int32(int32, int64)")
_nanosleep = external("nanosleep", "int32(int64, int64)")
_syscall = external("syscall", "int64(int64, int64, int64, int64, int64, int64, int64)")

_CLOCK_MONOTONIC = 1
#: futex has no wrapper in libc, and each machine its own number for it; 0 = unknown here, naps then end by time only.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
#: linux/futex.h: FUTEX_WAIT_BITSET (its timeout is an instant) and FUTEX_WAKE, among the threads of one process.
_WAIT, _WAKE = 9 | 128, 1 | 128
_EVERY_BIT, _EVERY_WAITER = 0xFFFFFFFF, 0x7FFFFFFF


@intrinsic("int64()")
def _two_words(builder: Any) -> Any:
    """Address of 16 bytes of the caller's stack, allocated once per function."""
    with builder.goto_entry_block():
        return builder.ptrtoint(builder.alloca(ir.ArrayType(_I64, 2)), _I64)


@compiled
def monotonic_ns() -> int:
    """CLOCK_MONOTONIC in nanoseconds, the clock of ``time.monotonic_ns``."""
    spec = _two_words()
    _clock_gettime(_CLOCK_MONOTONIC, spec)
    return peek(spec) * 1_000_000_000 + peek(spec + 8)


@compiled
def nanosleep_ns(duration: int) -> None:
    """Sleep at least ``duration`` nanoseconds (an interrupted sleep ends early)."""
    spec = _two_words()
    poke(spec, duration // 1_000_000_000)
    poke(spec + 8, duration % 1_000_000_000)
    _nanosleep(spec, 0)


@compiled
def futex_wait(word: int, value: int, until_ns: int) -> None:
    """Sleep while the 32 bits at address ``word`` equal ``value``, until CLOCK_MONOTONIC instant ``until_ns`` at most.

    Returns at once when they differ, when :func:`futex_wake` is called for ``word``, and now and then without a reason.
    """
    if _SYS_FUTEX == 0:
        nanosleep_ns(max(until_ns - monotonic_ns(), 0))
        return
    spec = _two_words()
    poke(spec, until_ns // 1_000_000_000)
    poke(spec + 8, until_ns % 1_000_000_000)
    _syscall(_SYS_FUTEX, word, _WAIT, value, spec, 0, _EVERY_BIT)


@compiled
def futex_wake(word: int) -> None:
    """Wake every thread of this process that sleeps in :func:`futex_wait` on ``word``; change the word first."""
    if _SYS_FUTEX != 0:
        _syscall(_SYS_FUTEX, word, _WAKE, _EVERY_WAITER, 0, 0, 0)
