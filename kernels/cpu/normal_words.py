"""Access to the words of the blocks of ``kernels.normal_block`` from compiled code (private memory: relaxed)."""

from __future__ import annotations

from ...native.atomics import peek, poke
from ...native.jit import compiled

__all__ = ["MOVED", "NOTHING", "add", "get", "put"]

#: What a step of the exchange returns: nothing could be done, something was done, or minus a STATUS_*.
NOTHING, MOVED = 0, 1


@compiled
def get(block: int, word: int) -> int:
    """Word ``word`` of the block at address ``block``."""
    return peek(block + 8 * word)


@compiled
def put(block: int, word: int, value: int) -> None:
    """Set a word."""
    poke(block + 8 * word, value)


@compiled
def add(block: int, word: int, value: int) -> None:
    """Add to a word."""
    poke(block + 8 * word, peek(block + 8 * word) + value)
