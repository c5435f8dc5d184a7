"""Single words of memory told by address: plain, acquire and release accesses, and the last program to arrive.

Plain accesses are ordered by kernel boundaries. ``addresses`` may be a scalar or a tensor of int64.
"""

from __future__ import annotations

import time
from typing import Any

import triton
import triton.language as tl

from .target import CUDA, HIP, INTERPRETER, backend, lanes

#: Who an acquire looks at: programs of the same device, or whoever shares the memory (peers, proxies, the host).
DEVICE, SYSTEM = tl.constexpr("gpu"), tl.constexpr("sys")


def _interpreter_clock() -> int:
    """CLOCK_MONOTONIC in ns. Only waiting loops ask for it, so it also leaves the core to those waited for."""
    time.sleep(20e-6)
    return time.monotonic_ns()


# Triton refuses plain Python functions in a kernel; this one is in a branch that only the interpreter takes
_interpreter_clock.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def int64s(addresses: tl.tensor) -> tl.tensor:
    """Pointers to int64."""
    return addresses.to(tl.pointer_type(tl.int64))


@triton.jit
def int32s(addresses: tl.tensor) -> tl.tensor:
    """Pointers to int32."""
    return addresses.to(tl.pointer_type(tl.int32))


@triton.jit
def uint8s(addresses: tl.tensor) -> tl.tensor:
    """Pointers to uint8."""
    return addresses.to(tl.pointer_type(tl.uint8))


@triton.jit
def floats(addresses: tl.tensor) -> tl.tensor:
    """Pointers to float32."""
    return addresses.to(tl.pointer_type(tl.float32))


@triton.jit
def aligned(addresses: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Pointers to TYPE at ``addresses`` [rows], multiples of 16: accesses from there on may be 16 bytes wide.

    The compiler forgets what it knows of an address when that becomes a pointer, and a hint only holds in the function
    that made the value: hence both here.
    """
    return tl.multiple_of(addresses.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def peek(address: tl.tensor) -> tl.tensor:
    """int64 at ``address``."""
    return tl.load(int64s(address))


@triton.jit
def poke(address: tl.tensor, value: tl.tensor) -> None:
    """Store int64."""
    tl.store(int64s(address), value)


@triton.jit
def divide(number: tl.tensor, by: tl.tensor) -> tuple[tl.tensor, ...]:
    """(Quotient, rest), int64, of values from 0 to 2^31 - 1: a division of 64 bits takes five times as long, and
    registers for a call."""
    number, by = number.to(tl.int32), by.to(tl.int32)
    return (number // by).to(tl.int64), (number % by).to(tl.int64)


@triton.jit
def clock_ns() -> tl.tensor:
    """A clock in nanoseconds that all programs share. Its steps are up to a microsecond on CUDA, 10 ns on ROCm."""
    if backend() == INTERPRETER:
        return _interpreter_clock()
    elif backend() == CUDA:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1)
    else:
        # a constant 100 MHz
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], tl.int64, is_pure=False, pack=1
        )
        return ticks * 10


@tl.core.builtin
def _threads(lanes: tl.constexpr, _semantic: Any = None) -> tl.constexpr:
    """Threads of this program, in warps of so many lanes."""
    return tl.constexpr(_semantic.builder.options.num_warps * lanes.value)


@triton.jit
def uniform(value: tl.tensor) -> tl.tensor:
    """The largest of what the threads have for the int32 scalar ``value``, in every thread.

    A reduction and not a shuffle in inline assembly: the compiler knows that lanes exchange values in it, and moves it
    under no branch on which they part.
    """
    if backend() == INTERPRETER:
        return value
    else:
        return tl.max(_in_each_lane(value, tl.int32), axis=0)


@triton.jit
def _in_each_lane(value: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """The scalar ``value`` as a tensor of one element a thread: what each has for it."""
    THREADS: tl.constexpr = _threads(lanes())
    return tl.zeros([THREADS], TYPE) + value


@triton.jit
def any_of(chosen: tl.tensor) -> tl.tensor:
    """1 when one of the lanes is chosen, the same in every lane."""
    return tl.max(chosen.to(tl.int32), axis=0)


@triton.jit
def least(values: tl.tensor) -> tl.tensor:
    """Smallest of int64 ``values`` [lanes], in two reductions of 32 bits: CUDA has an instruction for each, where one
    of 64 bits takes ten shuffles."""
    high, low = (values >> 32).to(tl.int32), values.to(tl.uint32)
    smallest = tl.min(high, axis=0)
    low = tl.where(high == smallest, low, 0xFFFFFFFF).to(tl.uint32)
    return (smallest.to(tl.int64) << 32) | tl.min(low, axis=0).to(tl.int64)


@triton.jit
def of_lane(values: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """The one of int64 ``values`` [lanes] that is ``chosen``."""
    return least(tl.where(chosen, values, (1 << 63) - 1))


@triton.jit
def column_of(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Column ``index`` of ``values`` [rows, columns]."""
    one = tl.zeros([values.shape[0], 1], tl.int32) + index
    return tl.sum(tl.gather(values, one, 1), axis=1)


@triton.jit
def acquire(address: tl.tensor) -> tl.tensor:
    """A count at one ``address``, int64, acquire at system scope, the same in every thread.

    The count only grows. Every thread acquires for itself, and the least of what they read is returned. One writer
    stores the count, each time with release: whatever it did before it stored the least it has also done before it
    stored what a thread has read, and that thread's later loads and stores come after its own acquire. So no barrier
    is needed."""
    if backend() == INTERPRETER:
        return tl.load(int64s(address))
    else:
        return least(acquire_each(_in_each_lane(address, tl.int64)))


@triton.jit
def acquire_each(addresses: tl.tensor, SCOPE: tl.constexpr = SYSTEM) -> tl.tensor:
    """int64 at each of ``addresses``, acquire. Copies of an element in several threads may differ."""
    if backend() == CUDA:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b64 $0, [$1];" if SCOPE == DEVICE else "ld.acquire.sys.global.b64 $0, [$1];",
            "=l,l,~{memory}",
            [addresses],
            tl.int64,
            is_pure=False,
            pack=1,
        )
    elif backend() == HIP:
        # assembly, because the compiler hoists volatile loads out of the loop
        return tl.inline_asm_elementwise(
            "global_load_dwordx2 $0, $1, off sc1\ns_waitcnt vmcnt(0)\nbuffer_inv sc1"
            if SCOPE == DEVICE
            else "global_load_dwordx2 $0, $1, off sc0 sc1\ns_waitcnt vmcnt(0)\nbuffer_inv sc0 sc1",
            "=&v,v,~{memory}",
            [addresses],
            tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(int64s(addresses))


@triton.jit
def release_each(addresses: tl.tensor, values: tl.tensor, chosen: tl.tensor, sink: tl.tensor) -> None:
    """Store int64 where ``chosen``, release at system scope; :func:`settle` comes before it.

    ``sink``: address of a word that takes what is not chosen, where stores cannot be predicated.
    """
    if backend() == CUDA:
        tl.inline_asm_elementwise(
            """{
            .reg .pred take;
            setp.ne.b32 take, $3, 0;
            @take st.release.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r,~{memory}",
            [addresses, values, chosen.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    elif backend() == HIP:
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nglobal_store_dwordx2 $1, $2, off sc0 sc1\nv_mov_b32 $0, 0",
            "=&v,v,v,~{memory}",
            [tl.where(chosen, addresses, sink), values],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(int64s(addresses), values, mask=chosen, sem="release", scope="sys")


@triton.jit
def settle() -> None:
    """All threads of the program have reached this point, and their stores are performed on the device."""
    if backend() == HIP:
        # a barrier of AMD's does not wait for stores
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v,~{memory}", [], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def enter() -> None:
    """Comes first in a function that is called (``noinline``). Without this barrier a thread might still read what the
    caller exchanged in shared memory, which the function overwrites: Triton 3.6 and 3.8 place such barriers within one
    function only. And LLVM would let one thread alone call a function that only reads."""
    tl.debug_barrier()


@triton.jit
def program_number(tickets: tl.tensor, STARTS_IN_ORDER: tl.constexpr) -> tl.tensor:
    """Number of this program, 0 .. tl.num_programs(0) - 1, once a kernel: where programs do not start in the order of
    theirs, the next of ``tickets``."""
    if STARTS_IN_ORDER:
        return tl.program_id(0).to(tl.int64)
    else:
        number = tl.atomic_add(int64s(tickets), 1, sem="relaxed", scope="gpu")
        if number == tl.num_programs(0) - 1:
            # nobody takes one any more
            tl.atomic_xchg(int64s(tickets), 0, sem="relaxed", scope="gpu")
        return number


@triton.jit
def arrive_last(counter: tl.tensor, many: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """True in the last of ``programs`` programs, which then sees what the others stored; it resets ``counter``. This
    one counts as ``many`` of them, at least one."""
    # without the barrier the atomic releases the stores of its own thread only
    settle()
    before = tl.atomic_add(int64s(counter), many, sem="acq_rel", scope="gpu")
    last = before + many == programs
    if last:
        poke(counter, 0)
    return last
