"""The memory that kernels may reach: regions that the harness registers, with their names for reports."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import numpy as np

from tests.ptx.machine.report import Unmapped
from tests.ptx.translation.ranges import Ranges

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Region:
    """Bytes of this process that a kernel may access.

    Attributes:
        words: the real memory by eight bytes, as the host sees it.
        shadow: what the model knows of ``words``; where they differ the host has written. Where there is none it is
            ``words``: a copy takes memory for every page, also those that nobody touches.
        watched: the host may write it while kernels run, so it is compared after each step of the host; else only when
            a launch begins.
        fresh: a byte that nobody has written must not be read.
        private: shared memory of a CTA, which no host sees.
    """

    def __init__(
        self,
        name: str,
        address: int,
        nbytes: int,
        watched: bool,
        fresh: bool,
        private: bool = False,
        shadowed: bool = True,
    ) -> None:
        self.name, self.start, self.end = name, address, address + nbytes
        #: aligned outwards, so that cells are whole
        self.address = address & ~7
        count = (self.end - self.address + 7) // 8
        self.array = np.frombuffer((ctypes.c_uint64 * count).from_address(self.address), np.uint64)
        self.words = memoryview(self.array)
        self.shadow_array = self.array.copy() if shadowed else self.array
        self.shadow = memoryview(self.shadow_array)
        self._compared = self.address, self.shadow_array.ctypes.data, self.array.nbytes
        self.watched, self.fresh, self.private = watched, fresh, private

    def changed(self) -> list[int]:
        """The words that the host has written since the model last looked."""
        if not _libc.memcmp(*self._compared):
            return []
        return [int(index) for index in np.flatnonzero(self.array != self.shadow_array)]

    def write(self, index: int, value: int, mask: int) -> None:
        """Shows the host ``value`` in the bytes of ``mask``."""
        self.words[index] = self.shadow[index] = self.words[index] & ~mask | value

    def name_of(self, address: int) -> str:
        return f"{self.name}+{address - self.start:#x}"


class Regions:
    """All of them, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []
        #: those that are compared after each step of the host, by address; few of thousands
        self.watched: list[Region] = []
        self._last: Region | None = None
        #: asked about an address that is in no region: it may register more, and says whether it has
        self.missing: Callable[[int], bool] | None = None
        self._table: Ranges | None = None
        #: kernels that run hold older ones
        self._tables: list[Ranges] = []

    def table(self) -> int:
        """Its address: what compiled code looks into where it accesses memory by itself."""
        if self._table is None:
            self._table = Ranges((one.start, one.end) for one in self._regions)
            self._tables.append(self._table)
        return self._table.address

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def add(self, new: Region) -> list[Region]:
        """Registers ``new``, and forgets the regions that it overlaps, which are returned."""
        if new.start == new.end:
            return []  # nobody accesses it
        # none overlaps another, so they end in the order of their starts
        at = max(bisect_right(self._starts, new.start) - 1, 0)
        until = bisect_left(self._starts, new.end)
        old = [one for one in self._regions[at:until] if new.start < one.end]
        for one in old:
            self.remove(one)
        at = bisect_right(self._starts, new.start)
        self._table = None
        self._starts.insert(at, new.start)
        self._regions.insert(at, new)
        if new.watched:
            self.watched = [one for one in self._regions if one.watched]
        return old

    def remove(self, old: Region) -> None:
        at = self._regions.index(old, bisect_left(self._starts, old.start))
        del self._regions[at], self._starts[at]
        if old.watched:
            self.watched.remove(old)
        self._last = self._table = None

    def at(self, address: int, nbytes: int) -> Region:
        """The region that holds all of ``nbytes`` from ``address``; Unmapped where none does."""
        last = self._last
        if last is not None and last.start <= address and address + nbytes <= last.end:
            return last
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            found = self._regions[place]
            if address + nbytes <= found.end:
                self._last = found
                return found
        if self.missing is not None and self.missing(address):
            return self.at(address, nbytes)
        where = self._near(address)
        raise Unmapped(f"{nbytes} bytes at {address:#x} are in no registered region ({where})", address)

    def _near(self, address: int) -> str:
        near = min(self._regions, key=lambda one: max(one.start - address, address - one.end), default=None)
        if near is None:
            return "none is registered"
        if address >= near.end:
            return f"{address - near.end} bytes behind the end of {near.name}"
        return (
            f"{near.start - address} bytes before {near.name}"
            if address < near.start
            else f"over the end of {near.name}"
        )
