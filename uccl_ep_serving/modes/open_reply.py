"""What the opening of a normal-mode operation on a device tells the host: words in pinned memory that a kernel stores.

Writer: ``open_operation``, the ticket last, with release. Reader: the host, with acquire, which compares the ticket
with that of its call. Operations of a Buffer do not overlap, so a ticket that stands there belongs to everything beside
it.
"""

from __future__ import annotations

import logging
import mmap

import numpy as np
import numpy.typing as npt

from ..errors import TransportError
from ..gpu.memory import DeviceMemory
from ..kernels.blocks.normal_device import PEER_INFO_WORDS
from ..native.failure import acquired

__all__ = ["OpenReply"]

_log = logging.getLogger("uccl_ep_serving")


class OpenReply:
    """The words of one epoch.

    Args:
        memory: of the device.
        nbytes: of all words.
        ranks_at, rank_words: where what the ranks told begins, and how many words it has; counts of experts follow.

    Attributes:
        address: as the kernels see it.
    """

    def __init__(self, memory: DeviceMemory, nbytes: int, ranks_at: int, rank_words: int) -> None:
        self._memory = memory
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, size)
        self._words: npt.NDArray[np.int64] = np.frombuffer(self._pages, dtype=np.int64)
        self._host = int(self._words.ctypes.data)
        self._ranks = slice(ranks_at, ranks_at + rank_words)
        self.address = memory.map_host(self._host, size)

    def __getitem__(self, word: int) -> int:
        return acquired(self._host + 8 * word)

    def clear(self, word: int) -> None:
        """Set a word to 0: the host has raised what it says."""
        self._words[word] = 0

    def counts(self, experts: int) -> npt.NDArray[np.int64]:
        """Rows of each local expert."""
        return self._words[self._ranks.stop : self._ranks.stop + experts].copy()

    def take_shapes(self) -> list[tuple[int, int, int, int]]:
        """(rank, coding, bytes of a row, bytes of meta) of the ranks that told of another shape, at most eight; they
        are forgotten, since the host raises them now."""
        words = self._words[self._ranks].reshape(-1, PEER_INFO_WORDS)
        found = [
            (rank, int(coding), int(row), int(meta)) for rank, (shape, coding, row, meta) in enumerate(words) if shape
        ]
        words[:] = 0
        return found[:8]

    def close(self) -> None:
        """Unmap; the device has finished. Of one that has failed this is logged: a Buffer closes all the same."""
        try:
            self._memory.unmap_host(self._host)
        except TransportError as error:
            _log.error("%s. What was mapped stays until this process ends", error)
