"""What the host and NICs see of a GPU's stores, and GPUs of the host's.

A GPU's store reaches host memory late, in any order save three: each eight bytes in their coherence order; a store
that ends a release pattern at system scope after everything that the release knows of; and nothing is late when the
kernel has ended, or behind a ``fence.sc.sys``. The host reads real memory, so what is late is not there yet.

The host's stores are found by comparing real memory with what the model knows of it, after each step of a host thread
or proxy. Each is a release at system scope of all that the host knows of, as x86 has it. What it reads is told by the
harness, where somebody may overwrite it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ptx.memory import clocks
from tests.ptx.memory.clocks import Release, View, heard
from tests.ptx.memory.histories import ALL_BYTES, Cell, HostMessage, Message, Reading
from tests.ptx.memory.operation import HOST_LOAD, HOST_STORE, Scope
from tests.ptx.memory.regions import Region

if TYPE_CHECKING:
    from tests.ptx.memory.weak import Weak

#: of a byte: all of its bits where it has one
_WHOLE = bytes([0] + [255] * 255)
#: cells shown in a step in which a kernel that has exited settles; so many are usual
SETTLED = 64


class HostSide:
    """The host as an agent, and the stores that are on their way to it.

    Attributes:
        settled: cells shown in a step in which a kernel that has exited settles; below 1: the chance that one is.
        newest_first: not any, but those that it has stored last.
    """

    def __init__(self, memory: Weak) -> None:
        self.memory = memory
        self.settled: float = SETTLED
        self.newest_first = False
        self.agent = clocks.host_agent()
        #: by the rank that stored: cells whose last writes the host does not see
        self._late: dict[int, dict[Cell, None]] = {}

    def view(self) -> View:
        """All that the host knows of, its own stores included."""
        return View({**self.agent.clock, self.agent.key: self.agent.timer.time}, self.agent.seen)

    def hear(self, view: View) -> None:
        clocks.join(self.agent, view)

    def forget(self, cell: Cell) -> None:
        for late in self._late.values():
            late.pop(cell, None)

    # -- a GPU's stores

    def late(self, rank: int) -> dict[Cell, None] | None:
        """Where the cells of ``rank``'s late stores go; None where no store is late."""
        return self._late.setdefault(rank, {}) if self.memory.lag else None

    def stored(self, cell: Cell, message: Message) -> None:
        """A GPU's store is the last of ``cell``."""
        if cell.region.private:
            return
        late = self.late(message.agent.rank)
        if late is not None:
            late[cell] = None
        else:
            self._show(cell, message.order)

    @property
    def behind(self) -> bool:
        """Whether some store is late."""
        return any(self._late.values())

    def show_some(self) -> bool:
        """One cell, drawn at random, becomes what it was at some time since the host saw it last, or is now. False
        where nothing was left to show."""
        late = [cell for cells in self._late.values() for cell in cells]
        if not late:
            return False
        cell = self.memory.random.choice(late)
        orders = [one.order for one in cell.history if one.order > cell.shown]
        self._show(cell, self.memory.random.choice(orders))
        return True

    def settle(self, rank: int) -> bool:
        """Shows some of what ``rank`` has stored. True where nothing was left to show."""
        late = self._late.get(rank)
        if not late:
            return True
        if self.settled < 1 and self.memory.random.random() >= self.settled:
            return False
        cells = list(late)
        count = min(max(int(self.settled), 1), len(cells))
        for cell in cells[-count:] if self.newest_first else self.memory.random.sample(cells, count):
            self._show(cell, cell.history[-1].order)
        return False

    def show(self, view: View) -> None:
        """Everything that ``view`` knows of."""
        for late in list(self._late.values()):
            for cell in list(late):
                for message in reversed(cell.history):
                    if message.order <= cell.shown:
                        break
                    if self._knows(view, cell, message):
                        self._show(cell, message.order)
                        break

    @staticmethod
    def _knows(view: View, cell: Cell, message: Message) -> bool:
        if heard(view.clock, message.agent, message.time):
            return True
        return any(mask & message.mask and view.seen.get((cell, mask), -1.0) >= message.order for mask in cell.observed)

    def _show(self, cell: Cell, order: float) -> None:
        """Shows the host what ``cell`` became up to a place in its order; what releases cover comes first."""
        messages = []
        for one in reversed(cell.history):
            if one.order <= cell.shown:
                break
            if one.order <= order:
                messages.insert(0, one)
        if not messages:
            return
        cell.shown = order
        if order == cell.history[-1].order:
            self.forget(cell)
        for message in messages:
            if message.operation.strong:
                for release in self._releases(message):
                    self.show(release.view)
                    self.hear(release.view)
        for message in messages:
            cell.region.write(cell.index, message.value, message.mask)

    @staticmethod
    def _releases(message: Message) -> list[Release]:
        """Those that the host is told of: an acquire of the host is of system scope."""
        if message.operation.scope != Scope.SYS:
            return []
        return [one for one in message.own + message.chain if one.scope == Scope.SYS]

    # -- the host's accesses

    def read(self, address: int, nbytes: int) -> None:
        """The host, or a NIC for it, reads: who overwrites that must have heard of it. By no order of its own, since a
        NIC has none."""
        memory = self.memory
        # what the host has told before says nothing of it
        self.agent.timer.time += 1
        stamp = Reading(self.agent.timer.time, ALL_BYTES, HOST_LOAD, memory.step)
        for cell in self._cells(address, nbytes):
            cell.readers[self.agent.alone, ALL_BYTES, HOST_LOAD.scope] = stamp, cell.region.words[cell.index]

    def check_unwritten(self, address: int, nbytes: int, since: int) -> None:
        """Nobody has written these bytes after step ``since``: a NIC may have read them at any time."""
        stamp = Reading(self.agent.timer.time, ALL_BYTES, HOST_LOAD, since)
        for cell in self._cells(address, nbytes):
            value = cell.region.words[cell.index]
            for one in cell.history[1:]:
                if one.step > since and one.agent is not self.agent:
                    self.memory.races.with_read(
                        cell, self.agent, stamp, value, one.mask, one.agent, one.operation, one.step
                    )

    def _cells(self, address: int, nbytes: int) -> list[Cell]:
        """Those of these bytes that a kernel has accessed, or the host has written."""
        cells = self.memory.cells
        return [cells[key] for key in range(address >> 3, address + nbytes + 7 >> 3) if key in cells]

    def look(self, everywhere: bool = False) -> None:
        """Takes in what the host has written, in watched regions or ``everywhere``."""
        release: Release | None = None
        regions = self.memory.regions
        for within in regions if everywhere else regions.watched:
            if not within.private:
                for index in within.changed():
                    if release is None:
                        self.agent.timer.time += 1
                        release = Release(self.agent, Scope.SYS, self.view())
                    self._wrote(within, index, release)

    def _wrote(self, within: Region, index: int, release: Release) -> None:
        memory = self.memory
        real = within.words[index]
        changed = self._bytes(real ^ within.shadow[index])
        cell, mask = memory.cells.get((within.address >> 3) + index), ALL_BYTES
        if cell is None:
            # no kernel has been here
            cell = memory.cells[(within.address >> 3) + index] = Cell(within, index)
        else:
            mask = self._whole_words(cell, changed)
            within.words[index] = within.shadow[index]
            self._show(cell, cell.history[-1].order)
            if memory._racing:
                self._check(cell, mask, changed)
        order = cell.history[-1].order + 1.0
        message = HostMessage(real & mask, mask, changed, self.agent, order, memory.step, release)
        cell.append(message)
        cell.shown = message.order
        within.write(index, message.value, mask)

    def _check(self, cell: Cell, mask: int, changed: int) -> None:
        agent, memory, left = self.agent, self.memory, changed
        for message in reversed(cell.history):
            if not message.mask & left:
                continue
            left &= ~message.mask
            # words as wide as the kernel's: the host may have written several in its turn
            if not memory._is_floor(agent, cell, message) and not memory._morally_strong(
                agent, HOST_STORE, message.mask & mask, message
            ):
                memory.races.with_write(cell, message, changed, agent, HOST_STORE, memory.step)
        memory._overwrite(agent, cell, mask, HOST_STORE, changed)

    @staticmethod
    def _bytes(changed: int) -> int:
        """All bits of the bytes that have some of ``changed``."""
        return int.from_bytes(changed.to_bytes(8, "little").translate(_WHOLE), "little")

    @staticmethod
    def _whole_words(cell: Cell, changed: int) -> int:
        """What the host is taken to have written: eight bytes, or as few as kernels access here at a time."""
        masks = [one.mask for one in cell.history] + [reading.mask for reading, _ in cell.readers.values()]
        width = min((one.bit_count() for one in masks if one), default=64)
        mask = 0
        for shift in range(0, 64, width):
            word = ((1 << width) - 1) << shift
            if changed & word:
                mask |= word
        return mask & ALL_BYTES
