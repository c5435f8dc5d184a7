"""The words of ``protocol.relay`` in windows that this rank maps: stamps, boards and lines."""

from __future__ import annotations

from ...native.atomics import load64, store64
from ...native.failure import failed
from ...native.jit import compiled
from ...protocol.context import STATUS_OK, STATUS_POISONED
from ...protocol.relay import BOARD_BYTES, EVERYTHING, LINE_BYTES, STAMP_SHIFT
from ..blocks import normal as block
from .context import error_address, peer_window
from .normal_nodes import place_of
from .words import get

__all__ = ["board_of", "is_current", "line_of", "rows_at", "stamp_rows"]


@compiled
def board_of(context: int, operation: int, rank: int, node: int) -> int:
    """Address of the board for ``node`` in the window of ``rank``, which is near."""
    return peer_window(context, rank) + get(operation, block.BOARDS) + node * BOARD_BYTES


@compiled
def line_of(context: int, operation: int, rank: int, node: int, writer: int) -> int:
    """Address of the line in the window of ``rank`` that ``writer`` writes about ``node``; both are near."""
    index = node * get(operation, block.NODE_RANKS) + place_of(operation, writer)
    return peer_window(context, rank) + get(operation, block.LINES) + index * LINE_BYTES


@compiled
def is_current(operation: int, word: int) -> bool:
    """True when a stamp is of this operation."""
    return word >> STAMP_SHIFT == get(operation, block.NUMBER) + 1


@compiled
def rows_at(operation: int, address: int) -> int:
    """Rows of the stamp at ``address``, acquire: 0 when it is of an earlier operation, all when of a later one."""
    word = load64(address)
    turn = word >> STAMP_SHIFT
    if turn == get(operation, block.NUMBER) + 1:
        return word & EVERYTHING
    return 0 if turn <= get(operation, block.NUMBER) else EVERYTHING


@compiled
def stamp_rows(context: int, operation: int, address: int, rows: int) -> int:
    """Store ``rows`` with this operation's stamp, release; STATUS_OK or STATUS_POISONED."""
    if failed(error_address(context)):
        return STATUS_POISONED
    store64(address, (get(operation, block.NUMBER) + 1) << STAMP_SHIFT | rows)
    return STATUS_OK
