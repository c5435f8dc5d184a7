"""One rank of a group of nodes whose other ranks are memory only: a test writes what they say, and runs single steps.

Imported only where Triton is the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.support.direct_ranks import DirectGroup
from uccl_ep_serving.gpu.memory import InterpretedMemory
from uccl_ep_serving.gpu.window import DeviceSpace
from uccl_ep_serving.kernels.blocks import normal_device as block
from uccl_ep_serving.kernels.triton.launch import Launch, Variant
from uccl_ep_serving.native.pages import own_pages
from uccl_ep_serving.protocol import context as ctx
from uccl_ep_serving.protocol import relay
from uccl_ep_serving.protocol.layout import NormalPlan
from uccl_ep_serving.protocol.message import GRANT_SLOTS, HEADER_BYTES, NormalNotify
from uccl_ep_serving.protocol.ring import CAPACITY, ring_bytes
from uccl_ep_serving.protocol.streams import CREDIT, NORMAL_COMBINE, NORMAL_DISPATCH, STREAMS

Int64s = npt.NDArray[np.int64]
#: Number of the operation that runs, and lanes of its kernels.
OPERATION, LANES = 5, 32
DISPATCH, COMBINE = NormalNotify.OPERATION_DISPATCH, NormalNotify.OPERATION_COMBINE


class Stand:
    """The windows of a group, and what kernels of one rank work with in an operation that is open.

    Args:
        rank: whose kernels run; it maps every window.
        row, meta: bytes of a row and of its meta.
        combine: the operation is a combine.
    """

    def __init__(self, rank: int, ranks: int, node_ranks: int, row: int, meta: int, combine: bool) -> None:
        plan = NormalPlan(ranks, 8, heap=64 << 10, rounds=ranks * (16 << 10), chunk=4096, depth=2)
        self.group = DirectGroup(ranks, plan)
        self.rank, self.ranks, self.node_ranks = rank, ranks, node_ranks
        # nobody takes commands out, and with all windows mapped nobody puts any in
        self._ring = own_pages(ring_bytes(2 * LANES)).view(np.int64)
        self._ring[CAPACITY // 8] = 2 * LANES
        for stream in range(CREDIT):
            self.group.spaces[rank].set_ring(stream, self._ring.ctypes.data)
        self.space = DeviceSpace(self.group.spaces[rank], InterpretedMemory(), None)
        self.layout = self.group.spaces[rank].layout
        self.state = block.DeviceNormalState(self.layout, torch.device("cpu"))
        self.words: Int64s = self.state.words.numpy()
        for word, value in (
            (block.NUMBER, OPERATION),
            (block.NODE_RANKS, node_ranks),
            (block.ROW_BYTES, row),
            (block.META_BYTES, meta),
            (block.STREAM, NORMAL_COMBINE if combine else NORMAL_DISPATCH),
            (block.OPEN, 1),
            (block.STEP, 3),
            (block.KEPT, 1 << 20),
        ):
            self.words[word] = value

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the kernel context and the state block."""
        return self.space.context, self.state.address

    def table(self, name: str) -> Int64s:
        """Entries of all ranks."""
        first = block.STATE_WORDS + block.TABLES.index(name) * self.ranks
        return self.words[first : first + self.ranks]

    def set(self, peer: int, **entries: int) -> None:
        """Entries of ``peer`` in the tables of these names."""
        for name, value in entries.items():
            self.table(name)[peer] = value

    def window(self, rank: int) -> npt.NDArray[np.uint8]:
        """Of any rank."""
        return self.group.spaces[rank].window_bytes

    def board(self, rank: int, node: int) -> Int64s:
        """In the window of ``rank``, about ``node``."""
        at = self.layout.relay_boards + node * relay.BOARD_BYTES
        return self.window(rank)[at : at + relay.BOARD_BYTES].view(np.int64)

    def line(self, rank: int, node: int, writer: int) -> Int64s:
        """In the window of ``rank``, about ``node``, that ``writer`` writes."""
        at = self.layout.relay_lines + (node * self.node_ranks + writer % self.node_ranks) * relay.LINE_BYTES
        return self.window(rank)[at : at + relay.LINE_BYTES].view(np.int64)

    def grants_to(self, peer: int) -> list[list[int]]:
        """Grants of this rank in the window of ``peer``, in the order of the slots; an unused one is all zeros."""
        at = self.layout.grant_recv + self.rank * GRANT_SLOTS * HEADER_BYTES
        words = self.window(peer)[at : at + GRANT_SLOTS * HEADER_BYTES].view(np.int64)
        return [row.tolist() for row in words.reshape(GRANT_SLOTS, -1)]

    def arrive(self, peer: int, stream: int, messages: int) -> None:
        """So many messages of the stream have come from ``peer`` in all."""
        at = self.layout.direct_flags + 8 * (peer * STREAMS + stream)
        self.window(self.rank)[at : at + 8].view(np.int64)[0] = messages

    def run(self, kernel: Any, *arguments: int, grid: int = 1, **constants: Any) -> None:
        """Launch a kernel whose first arguments are the context and the state block."""
        names = {"LANES": LANES, "BACKEND": 0}
        shared = {name: value for name, value in names.items() if name in kernel.arg_names}
        Launch(Variant(kernel, {**shared, **constants}), (grid, 1, 1), (*self.addresses, *arguments)).run()

    def hold(self, peer: int) -> None:
        """``peer`` is reached through proxies from now on, which complete nothing."""
        self._nothing = np.zeros(1, dtype=np.int64)
        words = self._context
        (ctypes.c_int64 * self.ranks).from_address(words[ctx.PEER_WINDOW])[peer] = 0
        completed = (ctypes.c_int64 * (self.ranks * STREAMS)).from_address(words[ctx.COMPLETED])
        completed[peer * STREAMS : (peer + 1) * STREAMS] = [self._nothing.ctypes.data] * STREAMS

    def expire(self) -> None:
        """From now on the time of every wait is over at its first spin."""
        self._context[ctx.LIMIT] = 0

    @property
    def _context(self) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * ctx.CONTEXT_WORDS).from_address(self.space.context)

    @property
    def failure(self) -> tuple[int, int]:
        """(code, peer) that a kernel has reported; code 0: none."""
        words = (ctypes.c_int64 * ctx.ERROR_WORDS).from_address(self._context[ctx.REPORT])
        return words[ctx.ERROR_CODE], words[ctx.ERROR_PEER]

    @property
    def missed(self) -> tuple[int, int]:
        """(arrived, expected) of the failure."""
        words = (ctypes.c_int64 * ctx.ERROR_WORDS).from_address(self._context[ctx.REPORT])
        return words[ctx.ERROR_ARRIVED], words[ctx.ERROR_EXPECTED]


@contextlib.contextmanager
def standing(
    rank: int, ranks: int = 4, node_ranks: int = 2, *, row: int = 64, meta: int = 16, combine: bool = False
) -> Iterator[Stand]:
    """A :class:`Stand` that lets go of its memory."""
    stand = Stand(rank, ranks, node_ranks, row, meta, combine)
    try:
        yield stand
    finally:
        stand.space.close()


def stamp(rows: int, operation: int = OPERATION) -> int:
    """What a stamped word holds."""
    return (operation + 1) << relay.STAMP_SHIFT | rows


def rows_of(word: int, operation: int = OPERATION) -> int:
    """The rows of a word that must bear this operation's stamp."""
    assert word >> relay.STAMP_SHIFT == operation + 1, hex(word)
    return word & relay.EVERYTHING
