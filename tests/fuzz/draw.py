"""Random numbers of compiled code: a word of state, seeded by the number of a case (xorshift64)."""

from __future__ import annotations

from uccl_ep_serving.native.atomics import peek, poke
from uccl_ep_serving.native.jit import compiled, inlined

__all__ = ["below", "draw", "one_in", "seed"]

# the factors of splitmix64, as signed words
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_LOW34, _LOW37, _LOW33, _LOW57 = (1 << 34) - 1, (1 << 37) - 1, (1 << 33) - 1, (1 << 57) - 1
_POSITIVE = (1 << 62) - 1


@compiled
def seed(rng: int, case: int) -> None:
    """Begin with ``case``: neighbours have nothing in common (splitmix64)."""
    word = (case + 1) * _STEP
    word = (word ^ ((word >> 30) & _LOW34)) * _FIRST
    word = (word ^ ((word >> 27) & _LOW37)) * _SECOND
    word = word ^ ((word >> 31) & _LOW33)
    poke(rng, word if word != 0 else 1)


@inlined
def draw(rng: int) -> int:
    """64 random bits; never 0."""
    word = peek(rng)
    word ^= word << 13
    word ^= (word >> 7) & _LOW57
    word ^= word << 17
    poke(rng, word)
    return word


@inlined
def below(rng: int, limit: int) -> int:
    """0 to ``limit`` - 1."""
    return ((draw(rng) >> 1) & _POSITIVE) % limit


@inlined
def one_in(rng: int, count: int) -> bool:
    """True once in ``count``."""
    return below(rng, count) == 0
