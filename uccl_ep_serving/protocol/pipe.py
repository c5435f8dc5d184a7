"""Pipes: rings of rows through which ranks on GPUs exchange rows in normal mode.

A pipe goes from one rank to another on one channel. Its rows stand one behind the other, each with its meta, in a ring
in the receiver's window. Each channel of a rank talks to the same channel of the others, and to no other one.

With R ranks in nodes of M, pipes of a rank are numbered 0 .. R + R / M - 1, those that come in and those that go out
alike. Pipe ``j * M + p`` connects it with rank p of its own node, about node j: for its own node these are rows of the
two; else rows that one of them forwards, or sums, for the rank of node j that has the forwarder's place. Pipe ``R + j``
connects it with the rank of node j that has its place, its rail peer. Where rows go to each rank directly all ranks
count as one node, and there are no rails.

A mapped peer tells how far it is in words of the other's window, int64 ``[2, NORMAL_CHANNELS, pipes]`` at
``pipe_words``:

    word     writer               reader             meaning
    ARRIVED  the sender's GPU     the window's GPU   stamped: rows that stand in the pipe
    FREED    the receiver's GPU   the window's GPU   stamped: rows of the pipe that are read

A stamped word holds ``(operation number + 1) << STAMP_SHIFT | rows``: one of an earlier operation says nothing. It is
stored with release after whatever it announces, and loaded with acquire.

Through proxies rows travel in messages of the phase's stream of the channel, ``chunk_rows`` each, which the ring holds
a whole number of. What is read is told in messages without content, on the stream that the other phase has for that
channel: operations follow each other, so it carries nothing else meanwhile, and both ends know how many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .message import MOST_TOKENS, STAMP_SHIFT
from .streams import NORMAL_CHANNELS

if TYPE_CHECKING:
    from .layout import WindowLayout

__all__ = [
    "ARRIVED",
    "EVERYTHING",
    "FREED",
    "LINE",
    "STAMP_SHIFT",
    "STEP",
    "channel_count",
    "pipe_count",
    "ring_rows",
    "words_bytes",
]

ARRIVED, FREED = range(2)
#: More rows than there are.
EVERYTHING = MOST_TOKENS + 1
#: Rings begin at multiples of so many bytes.
LINE = 128
#: Most rows of a pipe that a program moves before it looks again how far the others are: one for each lane of a wave of
#: AMD's, so that no two count the same one.
STEP = 64
#: Rows of a ring below which fewer channels are better: two on their way while two are read.
_LEAST_ROWS = 4


def pipe_count(ranks: int) -> int:
    """How many pipes there is room for, whatever the nodes."""
    return 2 * ranks


def words_bytes(ranks: int) -> int:
    """Bytes of the words of a window."""
    return 8 * 2 * NORMAL_CHANNELS * pipe_count(ranks)


def ring_rows(layout: WindowLayout, row: int, node_ranks: int, channels: int) -> int:
    """Rows of ``row`` bytes, meta included, that each ring holds with so many channels.

    Args:
        node_ranks: ranks of a node when each row crosses once to a node, else 0.
    """
    nodes = layout.ranks // node_ranks if node_ranks else 0
    landing = layout["normal_heap"].offset + layout["normal_heap"].nbytes - layout.normal_rounds
    rings = landing // (layout.ranks + nodes), layout["normal_send"].nbytes // (nodes or layout.ranks)
    return min(rings) // channels // LINE * LINE // row


def channel_count(layout: WindowLayout, row: int, node_ranks: int, most: int) -> int:
    """Channels of an operation: as many as leave room for four rows in each ring, at most ``most``, at least one."""
    channels = most
    while channels > 1 and ring_rows(layout, row, node_ranks, channels) < _LEAST_ROWS:
        channels -= 1
    return channels
