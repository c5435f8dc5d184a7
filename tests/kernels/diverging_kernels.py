"""Kernels in which the lanes of a warp part before they exchange something, and the same ones in which they do not.

``python diverging_kernels.py TARGET ...`` compiles them and prints one JSON object for each, with what the gate finds.
It is a process of its own because Triton must not be the interpreter here.
"""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl

from tests.kernels.divergence import divergences
from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for
from uccl_ep_serving.kernels.triton.launch import Launch, Variant
from uccl_ep_serving.kernels.triton.target import CUDA, backend, lanes
from uccl_ep_serving.kernels.triton.words import acquire_each, enter, int32s, uniform


@triton.jit
def own_word(address: tl.tensor, AGREED: tl.constexpr) -> tl.tensor:
    """A word that others write: every lane has read it for itself, unless they have ``AGREED``."""
    word = acquire_each(address).to(tl.int32)
    if AGREED:
        word = uniform(word)
    return word


@triton.jit
def largest(address: tl.tensor) -> tl.tensor:
    """Of a number that each lane has: the lanes exchange them."""
    return tl.max(tl.load(int32s(address + 4 * tl.arange(0, lanes()))), axis=0)


@triton.jit
def under_a_branch(address: tl.int64, out: tl.int64, AGREED: tl.constexpr) -> None:
    if own_word(address, AGREED) != 0:
        tl.store(int32s(out), largest(out))


@triton.jit
def barrier_under_a_branch(address: tl.int64, out: tl.int64, AGREED: tl.constexpr) -> None:
    if own_word(address, AGREED) != 0:
        tl.debug_barrier()
        tl.store(int32s(out), 1)


@triton.jit
def in_a_loop(address: tl.int64, out: tl.int64, AGREED: tl.constexpr) -> None:
    """Lanes take as many turns as each has read."""
    turn = tl.full((), 0, tl.int32)
    turns = own_word(address, AGREED)
    while turn < turns:
        turn += largest(out)
    tl.store(int32s(out), turn)


@triton.jit
def after_a_return(address: tl.int64, out: tl.int64, AGREED: tl.constexpr) -> None:
    if own_word(address, AGREED) != 0:
        return
    tl.store(int32s(out), largest(out))


@triton.jit
def of_a_poll(address: tl.int64, out: tl.int64, AGREED: tl.constexpr) -> None:
    """A loop that each lane leaves when it has seen the word, with a reduction in every turn."""
    word, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while word == 0:
        word = own_word(address, AGREED)
        found += largest(out)
    tl.store(int32s(out), found)


@triton.jit(noinline=True)
def _told(word: tl.tensor, out: tl.tensor) -> tl.tensor:
    """Reached by all, and left by as many, when all are told the same. Without the barrier LLVM takes a function that
    only reads for one that no lanes wait in, and has the one lane call it that stores what it returns."""
    enter()
    found = tl.full((), 0, tl.int32)
    if word != 0:
        found = largest(out)
    return found


@triton.jit
def in_a_function(address: tl.int64, out: tl.int64, AGREED: tl.constexpr) -> None:
    tl.store(int32s(out), _told(own_word(address, AGREED), out))


@triton.jit
def hidden(address: tl.int64, out: tl.int64, AGREED: tl.constexpr) -> None:
    """What the first lane has, by a shuffle of which the compiler does not know."""
    word = own_word(address, False)
    if AGREED:
        word = uniform(word)
    elif backend() == CUDA:
        word = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [word], tl.int32, is_pure=False, pack=1
        )
    else:
        word = tl.inline_asm_elementwise("v_readfirstlane_b32 $0, $1", "=s,v", [word], tl.int32, is_pure=False, pack=1)
    if word != 0:
        tl.store(int32s(out), word)


def main(target: str) -> None:
    gpu = GPUS[target]
    every = (under_a_branch, barrier_under_a_branch, in_a_loop, after_a_return, of_a_poll, in_a_function, hidden)
    for kernel in every:
        for agreed in (True, False):
            constants = {"AGREED": agreed}
            with compiling_for(gpu):
                built = Launch(Variant(kernel, constants), (1, 1, 1), (1 << 40, 1 << 40)).build()
            said = {"target": target, "kernel": kernel.__name__, "agreed": agreed}
            print(json.dumps({**said, "faults": divergences(built.asm["llir"])}), flush=True)


if __name__ == "__main__":
    for one in sys.argv[1:]:
        main(one)
