"""Access to the words of the blocks of ``kernels.blocks.normal`` from compiled code (private memory: relaxed)."""

from __future__ import annotations

from ...native.atomics import peek, poke
from ...native.jit import compiled
from ...protocol.streams import NORMAL_DISPATCH
from ..blocks.normal import PHASE

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


@compiled
def phase_of(operation: int) -> int:
    """0 in a dispatch, 1 in a combine: which of the two CHUNKS_SENT and CHUNKS_TAKEN of a peer count."""
    return 0 if get(operation, PHASE) == NORMAL_DISPATCH else 1
