"""Words through which the ranks of a node forward rows of other nodes: in windows that they map, so no message is sent.

A node is a group of ranks that map each other's windows. Rank i of a node is the *forwarder*, on its node, of rank i of
every other node. Each window has, for every node, a *progress board* that tells what has arrived here from that node
for this one, and for every (node, rank of the own node) a *progress line* that this rank of the own node writes.

A stamped word holds ``(operation number + 1) << STAMP_SHIFT | rows``. It only grows, so a word of an earlier operation
reads as "nothing yet" and one of a later operation as "everything". It is stored with release after whatever it
announces, and loaded with acquire.

    board word      writer                   reader               meaning
    ARRIVED         the window's rank        ranks of its node    stamped: rows that have arrived, stored last
    ROWS            the window's rank, once  ranks of its node    rows that will arrive
    ROW_OFFSET      the window's rank, once  ranks of its node    offset of the first landing slot's rows
    META_OFFSET     the window's rank, once  ranks of its node    offset of the first landing slot's meta
    SLOT_ROWS       the window's rank, once  ranks of its node    rows per landing slot
    SLOT_STRIDE     the window's rank, once  ranks of its node    bytes between the two landing slots

    line word       writer                   reader               meaning
    TAKEN           a rank of its node       the window's rank    dispatch, stamped: of the rows that have arrived here
                                                                  from the line's node, how many that rank is done with;
                                                                  all of them as soon as it misses none
    OFFERED         a rank of its node       the window's rank    combine, stamped: rows which that rank has laid out
                                                                  for the rank that this one forwards for
    FREED           a rank of its node       the window's rank    combine, stamped: rows which that rank, a forwarder,
                                                                  has read of those that this one laid out for it
"""

from __future__ import annotations

from .message import MOST_TOKENS, STAMP_SHIFT

__all__ = [
    "ARRIVED",
    "BOARD_BYTES",
    "EVERYTHING",
    "FREED",
    "LINE_BYTES",
    "META_OFFSET",
    "OFFERED",
    "ROWS",
    "ROW_OFFSET",
    "SLOT_ROWS",
    "SLOT_STRIDE",
    "STAMP_SHIFT",
    "TAKEN",
]

ARRIVED, ROWS, ROW_OFFSET, META_OFFSET, SLOT_ROWS, SLOT_STRIDE = range(6)
TAKEN, OFFERED, FREED = range(3)

#: No two writers share a cache line; a progress board is two, since prefetchers fetch pairs.
BOARD_BYTES = 128
LINE_BYTES = 64

#: Rows of a stamp that asks for nothing more.
EVERYTHING = MOST_TOKENS + 1
