"""Calls through C function addresses, and the few libc functions that compiled loops need.

Addresses are passed at run time: a ctypes function captured as a global would disable Numba's cache. Libc symbols are
resolved by name when the compiled code is loaded (``types.ExternalFunction``), which caches well.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .atomics import peek, poke
from .jit import compiled

__all__ = [
    "call1",
    "call1_int",
    "call3",
    "call3_int",
    "call4",
    "call8",
    "monotonic_ns",
    "nanosleep_ns",
    "sched_yield",
]

_I64 = ir.IntType(64)


def _caller(arity: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * arity)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(*[types.int64] * (arity + 1)), codegen


def _int_caller(arity: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [_I64] * arity)
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:]), _I64)

    return types.int64(*[types.int64] * (arity + 1)), codegen


@intrinsic
def call1(typingctx, function, a):  # type: ignore[no-untyped-def]
    """``int64 function(int64)``."""
    return _caller(1)


@intrinsic
def call3(typingctx, function, a, b, c):  # type: ignore[no-untyped-def]
    """``int64 function(int64 x 3)``."""
    return _caller(3)


@intrinsic
def call1_int(typingctx, function, a):  # type: ignore[no-untyped-def]
    """``int function(int64)``: a C function that returns 32 bits, sign-extended here."""
    return _int_caller(1)


@intrinsic
def call3_int(typingctx, function, a, b, c):  # type: ignore[no-untyped-def]
    """``int function(int64 x 3)``: likewise."""
    return _int_caller(3)


@intrinsic
def call4(typingctx, function, a, b, c, d):  # type: ignore[no-untyped-def]
    """``int64 function(int64 x 4)``.

    A function that takes 32-bit arguments looks at the lower halves only; what one that returns nothing leaves in the
    register means nothing.
    """
    return _caller(4)


@intrinsic
def call8(typingctx, function, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    """``int64 function(int64 x 8)``."""
    return _caller(8)


sched_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_nanosleep = types.ExternalFunction("nanosleep", types.int32(types.int64, types.int64))

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))

_CLOCK_MONOTONIC = 1
#: futex has no wrapper in libc, and each machine its own number for it; 0 = unknown here, naps then end by time only.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
#: linux/futex.h: FUTEX_WAIT_BITSET (its timeout is an instant) and FUTEX_WAKE, among the threads of one process.
_WAIT, _WAKE = 9 | 128, 1 | 128
_EVERY_BIT, _EVERY_WAITER = 0xFFFFFFFF, 0x7FFFFFFF


@intrinsic
def _two_words(typingctx):  # type: ignore[no-untyped-def]
    """Address of 16 bytes of the caller's stack, allocated once per function."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_I64, 2)), _I64)

    return types.int64(), codegen


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
