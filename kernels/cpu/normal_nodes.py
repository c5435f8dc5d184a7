"""Nodes in normal mode: who is near and who is far, who forwards for whom, and the words that ranks of a node share.

Ranks are counted node by node. A rank is *near* when it is on this rank's node, *far* when not. The *rail* peers of a
rank are the far ranks with its own place in their nodes: only they exchange rows with it, each row on behalf of a
whole node. All of this is so only where NODE_RANKS is not 0; else every rank is near. The shared words are those of
``protocol.relay``, in windows that this rank maps: stamps, progress boards and lines.
"""

from __future__ import annotations

from ...native.atomics import load64, store64
from ...native.failure import failed
from ...native.jit import compiled, inlined
from ...protocol.context import STATUS_OK, STATUS_POISONED
from ...protocol.message import META_LINE
from ...protocol.relay import BOARD_BYTES, EVERYTHING, LINE_BYTES, STAMP_SHIFT
from ..blocks import normal as block
from .context import error_address, peer_window
from .words import get


@inlined
def node_of(operation: int, rank: int) -> int:
    """Node of a rank; NODE_RANKS must not be 0."""
    return rank // get(operation, block.NODE_RANKS)


@inlined
def place_of(operation: int, rank: int) -> int:
    """Place of a rank in its node."""
    return rank % get(operation, block.NODE_RANKS)


@inlined
def is_far(operation: int, me: int, rank: int) -> bool:
    """True when ``rank`` is on another node than ``me``."""
    size = get(operation, block.NODE_RANKS)
    return size != 0 and rank // size != me // size


@inlined
def is_rail(operation: int, me: int, rank: int) -> bool:
    """True when ``rank`` is far and has the place of ``me`` in its node."""
    size = get(operation, block.NODE_RANKS)
    return size != 0 and rank != me and rank % size == me % size


@inlined
def forwarder(operation: int, me: int, far: int) -> int:
    """The rank of the node of ``me`` through which rows of, and to, rank ``far`` pass."""
    size = get(operation, block.NODE_RANKS)
    return me // size * size + far % size


@inlined
def meta_room(nbytes: int) -> int:
    """Bytes taken by a rank's meta."""
    return (nbytes + META_LINE - 1) // META_LINE * META_LINE


@inlined
def lanes(operation: int, ranks: int) -> int:
    """Into how many lanes of two slots the landing area for rounds is cut."""
    size = get(operation, block.NODE_RANKS)
    return ranks if size == 0 else size + ranks // size


@inlined
def slot_bytes(operation: int, ranks: int) -> int:
    """Bytes of a landing slot: those of two for each rank are dealt to the peers from which rows can come."""
    return get(operation, block.ROUND_SLOT) * ranks // lanes(operation, ranks) // META_LINE * META_LINE


@inlined
def lane_of(operation: int, me: int, rank: int) -> int:
    """Lane of a near rank or of a rail peer."""
    size = get(operation, block.NODE_RANKS)
    if size == 0:
        return rank
    return size + rank // size if rank // size != me // size else rank % size


@compiled
def board_of(context: int, operation: int, rank: int, node: int) -> int:
    """Address of the progress board for ``node`` in the window of ``rank``, which is near."""
    return peer_window(context, rank) + get(operation, block.BOARDS) + node * BOARD_BYTES


@compiled
def line_of(context: int, operation: int, rank: int, node: int, writer: int) -> int:
    """Address of the progress line in the window of ``rank`` that ``writer`` writes about ``node``; both are near."""
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
    stamped = word >> STAMP_SHIFT
    if stamped == get(operation, block.NUMBER) + 1:
        return word & EVERYTHING
    return 0 if stamped <= get(operation, block.NUMBER) else EVERYTHING


@compiled
def stamp_rows(context: int, operation: int, address: int, rows: int) -> int:
    """Store ``rows`` with this operation's stamp, release; STATUS_OK or STATUS_POISONED."""
    if failed(error_address(context)):
        return STATUS_POISONED
    store64(address, (get(operation, block.NUMBER) + 1) << STAMP_SHIFT | rows)
    return STATUS_OK
