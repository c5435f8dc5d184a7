"""A memory as weak as PTX lets it be: a load returns any value that its thread has not been told is old.

The model of PTX ISA 8 (Lustig, Sahasrabuddhe, Giroux: A Formal Analysis of the NVIDIA PTX Memory Consistency Model,
ASPLOS 2019), made executable: each eight bytes keep every value that they have had (histories.py), and agents know of
accesses by program order, barriers, release and acquire patterns whose scopes include each other, and fence.sc
(clocks.py, knowledge.py).

* A load may read any write that is not older, in coherence order, than one that its agent has heard of or has read.
* A store goes anywhere in coherence order behind those. What a read-modify-write read stays next to it.
* A vector is one access for each eight bytes, in any order.
* What the host sees: visibility.py. Data races: races.py.

What PTX allows and this does not, and what is assumed of the host: docs/architecture/model-machine.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.ptx.machine.report import Uninitialised
from tests.ptx.memory.clocks import Agent, Release, all_heard, heard, warp_heard
from tests.ptx.memory.histories import Cell, Message, Reading, StrongMessage
from tests.ptx.memory.operation import Operation
from tests.ptx.memory.proxies import Proxies
from tests.ptx.memory.races import Races, account
from tests.ptx.memory.regions import Region, Regions
from tests.ptx.memory.visibility import HostSide

M64 = (1 << 64) - 1
#: strong reads that wait for a fence. More are forgotten, oldest first: that makes the model weaker
PENDING = 64


class Weak(Proxies):
    """See the module.

    Args:
        stale: chance that a load, or the place of a store, is drawn among all that are allowed.
        lag: chance, an instruction of a warp, that one store becomes visible to the host; 0: every store at once.
        races: "raise", "keep" (see ``self.races.found``) or "ignore".
        shared_fresh: shared memory that no thread has written must not be read.
    """

    #: kernels must be translated so that they stop at every access
    every_access = True

    def __init__(self, stale: float = 0.5, lag: float = 0.0, races: str = "raise", shared_fresh: bool = True) -> None:
        self.stale, self.lag = stale, lag
        self.shared_fresh = shared_fresh
        super().__init__(HostSide(self))
        self.regions = Regions()
        self.cells: dict[int, Cell] = {}
        self.races = Races(races == "raise")
        self._racing = races != "ignore"
        self.random = random.Random(0)
        self.step = 0
        self.accesses = self.stale_reads = 0

    # -- for the machine and the harness

    def seed(self, source: random.Random) -> None:
        """All choices come from ``source``."""
        self.random = source

    def register(self, name: str, address: int, nbytes: int, watched: bool = True, fresh: bool = False) -> None:
        """Lets kernels access ``nbytes`` from ``address`` (:class:`Region`); what was there before is forgotten."""
        new = Region(name, address, nbytes, watched, fresh)
        for old in self.regions.add(new):
            self._forget(old)

    def is_registered(self, address: int, nbytes: int) -> bool:
        """Whether exactly these bytes are one region."""
        return any(one.start == address and one.end == address + nbytes for one in self.regions)

    def unregister(self, address: int) -> None:
        """Of the region that begins at ``address``."""
        (old,) = [one for one in self.regions if one.start == address]
        self.regions.remove(old)
        self._forget(old)

    def _forget(self, old: Region) -> None:
        first = old.address >> 3
        for key in range(first, first + len(old.words)):
            cell = self.cells.pop(key, None)
            if cell is not None and not old.private:
                self.host.forget(cell)

    def open_shared(self, block: str, address: int, nbytes: int) -> None:
        """A CTA starts, with shared memory of its own."""
        self.regions.add(Region(f"shared memory of {block}", address, nbytes, False, self.shared_fresh, private=True))

    def close_shared(self, address: int) -> None:
        self.unregister(address)

    @staticmethod
    def table() -> int:
        """None: the compiled code accesses nothing of these regions by itself."""
        return 0

    def account(self, address: int) -> str:
        """The last accesses of the eight bytes at ``address``."""
        cell = self.cells.get(address >> 3)
        return account(cell) if cell is not None else f"no access of {address:#x}"

    def settle(self, launch: Any) -> bool:
        """All threads have exited: shows the host some of what is late. True once nothing is."""
        return self.host.settle(launch.rank)

    def catch_up(self) -> bool:
        """Nothing happens but waiting: one late store becomes visible. False where none is late."""
        return self.host.show_some()

    @property
    def behind(self) -> bool:
        """Whether the host does not see some store yet."""
        return self.host.behind

    def host_stepped(self) -> None:
        """A host thread or a proxy has had its turn."""
        self.host.look()

    def host_read(self, address: int, nbytes: int, since: int | None = None) -> int:
        """In this turn the host or a NIC has read ``nbytes`` from ``address``, or may have; and at any time ``since``
        another such turn, by the number that it returned."""
        if since is not None:
            self.host.check_unwritten(address, nbytes, since)
        self.host.read(address, nbytes)
        return self.step

    # -- accesses; a batch is one instruction of some lanes of a warp

    def load(self, agents: Sequence[Agent], addresses: Sequence[int], operation: Operation) -> list[int]:
        """What each agent reads, as one number of ``operation.nbytes`` bytes."""
        n = operation.nbytes
        self.accesses += len(addresses)
        if n > 8:
            values = self._load_both(agents, addresses, operation)
        else:
            values = self._load_same(agents, addresses, operation) or self._load_each(agents, addresses, operation)
        self._some_time_passes()
        return values

    def _load_each(self, agents: Sequence[Agent], addresses: Sequence[int], operation: Operation) -> list[int]:
        """A cell each, or a part of one."""
        n, ones = operation.nbytes, (1 << 8 * operation.nbytes) - 1
        # all of them are of one CTA, and a load lets no time go by
        time = agents[0].timer.time
        parts = [Reading(time, ones << shift, operation, self.step) for shift in range(0, 64, 8 * n)]
        return [
            self._read(agent, at, parts[(at & 7) // n]) >> 8 * (at & 7)
            for agent, at in zip(agents, addresses, strict=True)
        ]

    def _load_both(self, agents: Sequence[Agent], addresses: Sequence[int], operation: Operation) -> list[int]:
        """Two cells each."""
        reading = Reading(agents[0].timer.time, M64, operation, self.step)
        values = []
        for agent, at in zip(agents, addresses, strict=True):
            if operation.strong and self.random.random() < 0.5:
                high = self._read(agent, at + 8, reading)
                values.append(self._read(agent, at, reading) | high << 64)
            else:
                low = self._read(agent, at, reading)
                values.append(self._read(agent, at + 8, reading) << 64 | low)
        return values

    def _load_same(self, agents: Sequence[Agent], addresses: Sequence[int], operation: Operation) -> list[int]:
        """What a whole warp reads in one place, where all know the last write of it; else nothing."""
        at, warp = addresses[0], agents[0].warp
        if len(agents) != len(warp) or addresses.count(at) != len(warp):
            return []
        shift = 8 * (at & 7)
        mask = (1 << 8 * operation.nbytes) - 1 << shift
        cell = self.cells.get(at >> 3) or self._checked_cell(at, mask)
        last = cell.last_of(mask)
        if mask & ~last.mask or (last.chain and operation.strong) or not all_heard(warp, last.agent, last.time):
            return []
        value = last.value & mask
        if self._racing:
            cell.readers[warp, mask, operation.scope] = Reading(agents[0].timer.time, mask, operation, self.step), value
        return [value >> shift] * len(warp)

    def store(
        self, agents: Sequence[Agent], addresses: Sequence[int], values: Sequence[int], operation: Operation
    ) -> None:
        n = operation.nbytes
        self.accesses += len(addresses)
        ones = (1 << 8 * n) - 1
        if (
            len(addresses) == len(agents[0].warp) > 1
            and not operation.strong
            and n <= 8
            and addresses.count(addresses[0]) == len(addresses) == values.count(values[0])
            and self._store_same(agents, addresses[0], values[0] & ones, ones, operation)
        ):
            self._some_time_passes()
            return
        if n >= 8 and not operation.strong:
            self._write_whole(agents, addresses, values, operation)
            if n == 16:
                self._write_whole(agents, [at + 8 for at in addresses], [value >> 64 for value in values], operation)
            self._some_time_passes()
            return
        for agent, at, value in zip(agents, addresses, values, strict=True):
            release = self._release(agent, operation.scope) if operation.release else None
            if n <= 8:
                shift = 8 * (at & 7)
                self._write(agent, at, value << shift, ones << shift, operation, release)
            elif operation.strong and self.random.random() < 0.5:
                self._write(agent, at + 8, value >> 64, M64, operation, release)
                self._write(agent, at, value & M64, M64, operation, release)
            else:
                self._write(agent, at, value & M64, M64, operation, release)
                self._write(agent, at + 8, value >> 64, M64, operation, release)
        self._some_time_passes()

    def _store_same(self, agents: Sequence[Agent], at: int, value: int, ones: int, operation: Operation) -> bool:
        """What a whole warp stores in one place, all of it one value, as one write; False where others may come between
        its lanes' ones: they do not know all that was written there, and it was not the same value by the same
        instruction."""
        shift = 8 * (at & 7)
        value, mask, joint = value << shift, ones << shift, agents[0].joint
        cell = self.cells.get(at >> 3) or self._checked_cell(at, mask)
        for message in reversed(cell.history):
            if message.mask & mask:
                if all_heard(agents, message.agent, message.time):
                    break
                if message.operation is not operation or message.agent.block_key != joint.block_key:
                    return False
                if (message.value, message.mask) != (value, mask):
                    return False
        if cell.readers:
            self._overwrite(agents[0], cell, mask, operation)
        time, order = joint.timer.time, cell.history[-1].order + 1.0
        message = Message(value, mask, joint, time, operation, order, self.step)
        cell.append(message)
        self.host.stored(cell, message)
        return True

    def atomic(
        self,
        agents: Sequence[Agent],
        addresses: Sequence[int],
        changes: Sequence[Callable[[int], int]],
        operation: Operation,
    ) -> list[int]:
        """What each agent's location held; ``changes`` say what it holds then."""
        self.accesses += len(addresses)
        values = []
        for agent, at, change in zip(agents, addresses, changes, strict=True):
            shift = 8 * (at & 7)
            mask = ((1 << 8 * operation.nbytes) - 1) << shift
            values.append(self._modify(agent, at, shift, mask, change, operation))
        self._some_time_passes()
        return values

    def _some_time_passes(self) -> None:
        if self.lag and self.random.random() < self.lag:
            self.host.show_some()

    def _cell(self, address: int) -> Cell:
        cell = self.cells.get(address >> 3)
        if cell is None:
            within = self.regions.at(address, 1)
            cell = self.cells[address >> 3] = Cell(within, (address - within.address) >> 3)
        return cell

    def _checked_cell(self, address: int, mask: int) -> Cell:
        """Of a new cell also that the access is inside its region."""
        first = (mask & -mask).bit_length() - 1 >> 3
        self.regions.at((address & ~7) + first, mask.bit_count() // 8)
        return self._cell(address)

    def _read(self, agent: Agent, at: int, reading: Reading) -> int:
        mask = reading.mask
        cell = self.cells.get(at >> 3) or self._checked_cell(at, mask)
        last = cell.last_of(mask)
        if (
            not mask & ~last.mask
            and (last.agent is agent or last.agent is agent.joint or heard(agent.clock, last.agent, last.time))
            and not (last.chain and reading.operation.strong)
        ):
            value = last.value & mask
        else:
            value = self._read_any(agent, cell, mask, reading.operation)
        if self._racing:
            cell.readers[agent.alone, mask, reading.operation.scope] = reading, value
        return value

    def _read_any(self, agent: Agent, cell: Cell, mask: int, operation: Operation) -> int:
        """Reads where the last write is not known to ``agent``, or is not of all bytes: then from several writes."""
        value, left = 0, mask
        while left:
            options = self._options(agent, cell, left)
            if not options:
                raise Uninitialised(
                    f"{agent.name} reads {cell}, which nobody has written, by {operation}\n{account(cell)}"
                )
            message = options[0]
            if len(options) > 1 and self.random.random() < self.stale:
                message = self.random.choice(options)
                self.stale_reads += message is not options[0]
            if self._racing:
                self._check_read(agent, cell, options, mask, operation)
            part = message.mask & left
            value |= message.value & part
            left &= ~part
            self._observe(agent, cell, message, mask, operation)
        return value

    def _options(self, agent: Agent, cell: Cell, mask: int) -> list[Message]:
        """The writes of bytes of ``mask`` that ``agent`` may read, the last one first."""
        options = []
        for message in reversed(cell.history):
            if message.mask & mask:
                options.append(message)
                if self._is_floor(agent, cell, message):
                    break
        return options

    def _check_read(self, agent: Agent, cell: Cell, options: list[Message], mask: int, operation: Operation) -> None:
        """A read races with a write that it could have read or not, whichever it did."""
        for message in options:
            if (
                message.touched & mask
                and not self._is_floor(agent, cell, message)
                and not self._morally_strong(agent, operation, mask, message)
            ):
                self.races.with_write(cell, message, mask, agent, operation, self.step)

    def _observe(self, agent: Agent, cell: Cell, message: Message, mask: int, operation: Operation) -> None:
        """What ``agent`` learns by reading ``message``."""
        if not self._morally_strong(agent, operation, mask, message):
            return
        if not self._heard_of(agent, message) and agent.seen.get((cell, mask), -1.0) < message.order:
            agent.seen = {**agent.seen, (cell, mask): message.order}
            if mask not in cell.observed:
                cell.observed.append(mask)
        if operation.acquire:
            for place, earlier in agent.pending:
                if place is cell and earlier.mask == mask:
                    self._acquire(agent, operation.scope, earlier)
            self._acquire(agent, operation.scope, message)
            return
        carries = (message.own or message.chain) and not operation.reduces
        if carries and (not agent.pending or agent.pending[-1][1] is not message):
            agent.pending.append((cell, message))
            del agent.pending[:-PENDING]

    def _write_whole(
        self, agents: Sequence[Agent], addresses: Sequence[int], values: Sequence[int], operation: Operation
    ) -> None:
        """Weak stores of whole cells: most of what kernels do, and most of it to what their threads know all about."""
        cells, late, step = self.cells, self.host.late(agents[0].rank), self.step
        time = agents[0].timer.time
        for agent, at, value in zip(agents, addresses, values, strict=True):
            cell = cells.get(at >> 3)
            last = cell.history[-1] if cell else None
            if not cell or not last or last.mask != M64 or not self._heard_of(agent, last):
                self._write(agent, at, value & M64, M64, operation, None)
                continue
            if cell.readers:
                if any(lanes is not agent.alone for lanes, _, _ in cell.readers):
                    self._overwrite(agent, cell, M64, operation)
                else:
                    cell.readers.clear()
            message = Message(value & M64, M64, agent, time, operation, last.order + 1.0, step)
            cell.append(message)
            if cell.region.private:
                continue
            if late is not None:
                late[cell] = None
            else:
                self.host.stored(cell, message)

    def _write(
        self, agent: Agent, at: int, value: int, mask: int, operation: Operation, release: Release | None
    ) -> None:
        cell = self.cells.get(at >> 3) or self._checked_cell(at, mask)
        last = cell.last_of(mask)
        known = not mask & ~last.mask and self._heard_of(agent, last)
        place = -1 if known else self._place(agent, cell, value, mask, operation)
        if cell.readers:
            self._overwrite(agent, cell, mask, operation)
        order = cell.history[-1].order + 1.0
        if operation.strong:
            own = self._patterns(agent, cell, mask, release)
            message: Message = StrongMessage(value, mask, agent, operation, order, self.step, own)
        else:
            message = Message(value, mask, agent, agent.timer.time, operation, order, self.step)
        self._put(cell, message, place)

    def _put(self, cell: Cell, message: Message, place: int) -> None:
        """In coherence order; -1: at the end."""
        if place < 0:
            cell.append(message)
            self.host.stored(cell, message)
        else:
            history = cell.history
            message.order = (history[place - 1].order + history[place].order) / 2
            history.insert(place, message)

    def _place(self, agent: Agent, cell: Cell, value: int, mask: int, operation: Operation) -> int:
        """Where in coherence order a store goes, behind all that ``agent`` has heard of; -1: at the end.

        Threads of a CTA that store the same by one instruction do not race: Triton lets those that hold the same.
        """
        history = cell.history
        lowest, free, left = len(history), True, mask
        for place in range(len(history) - 1, 0, -1):
            message = history[place]
            if not message.mask & left:
                free = False
                continue
            if self._is_floor(agent, cell, message):
                free, left = False, left & ~message.mask
                if not left:
                    break
                continue
            same = message.operation is operation and message.agent.block_key == agent.block_key
            same = same and not (message.value ^ value) & mask & message.mask
            same = same or not message.touched & mask
            if self._racing and not same and not self._morally_strong(agent, operation, mask, message):
                self.races.with_write(cell, message, mask, agent, operation, self.step)
            free = free and message.operation.kind != "atomic" and message.mask & mask == mask
            if free:
                lowest = place
        if lowest < len(history) and self.random.random() < self.stale:
            chosen = self.random.randint(lowest, len(history))
            # the halves of a gap end when the numbers between them do
            if chosen < len(history) and history[chosen].order - history[chosen - 1].order > 1e-6:
                return chosen
        return -1

    def _overwrite(self, agent: Agent, cell: Cell, mask: int, operation: Operation, touched: int = M64) -> None:
        """``agent`` writes what others have read: has it heard of all those reads?

        Args:
            touched: the bytes of ``mask`` that are certainly written.
        """
        clock = agent.clock if agent.over is None else agent.over
        block, until = None, -1
        for (lanes, _, _), (reading, value) in cell.readers.items():
            # most are of one CTA, of which all is known
            if lanes[0].block_key != block:
                block = lanes[0].block_key
                until = clock.get(block, -1)
            if reading.time <= until:
                continue
            if not reading.mask & mask & touched or warp_heard(clock, lanes[0], reading.time):
                continue
            for reader in lanes:
                if reader is agent or heard(clock, reader, reading.time):
                    continue
                if not (
                    (reading.mask == mask or (agent is self.host.agent and not reading.mask & ~mask))
                    and reading.operation.strong
                    and operation.strong
                    and self._includes(operation.scope, agent, reader)
                    and self._includes(reading.operation.scope, reader, agent)
                ):
                    self.races.with_read(cell, reader, reading, value, mask & touched, agent, operation, self.step)
        if mask & touched == M64:
            cell.readers.clear()
        else:
            cell.readers = {one: read for one, read in cell.readers.items() if read[0].mask & ~(mask & touched)}

    def _modify(
        self, agent: Agent, at: int, shift: int, mask: int, change: Callable[[int], int], operation: Operation
    ) -> int:
        cell = self._checked_cell(at, mask)
        source, place = self._source(agent, cell, mask, operation)
        if source is None:
            before = self._read_any(agent, cell, mask, operation) >> shift
        else:
            before = (source.value & mask) >> shift
            self._observe(agent, cell, source, mask, operation)
        if cell.readers:
            self._overwrite(agent, cell, mask, operation)
        release = self._release(agent, operation.scope) if operation.release else None
        own = self._patterns(agent, cell, mask, release)
        chain: tuple[Release, ...] = ()
        if source is not None and self._morally_strong(agent, operation, mask, source):
            chain = self._carried(source, release)
        order = cell.history[-1].order + 1.0
        message = StrongMessage(change(before) << shift, mask, agent, operation, order, self.step, own, chain)
        self._put(cell, message, place)
        return before

    def _source(self, agent: Agent, cell: Cell, mask: int, operation: Operation) -> tuple[Message | None, int]:
        """The write that a read-modify-write reads, and where it goes in coherence order itself (-1: at the end): right
        behind that one, unless what comes behind is not strong to it.

        None where the last writes are of some of the bytes only.
        """
        last = cell.history[-1]
        if last.operation.kind != "atomic" and not self._heard_of(agent, last):
            place = self._place(agent, cell, 0, mask, operation)
            before = last if place < 0 else cell.history[place - 1]
            # nothing races with what it has heard of or is strong to
            safe = self._heard_of(agent, before) or self._morally_strong(agent, operation, mask, before)
            if place >= 0 and safe and not mask & ~before.mask:
                return before, place
        options: list[Message] = []
        for message in self._options(agent, cell, mask):
            if message.mask & mask != mask:
                return None, -1
            options.append(message)
            if self._heard_of(agent, message) or self._morally_strong(agent, operation, mask, message):
                break
            if self._racing:
                self.races.with_write(cell, message, mask, agent, operation, self.step)
        if not options:
            return None, -1
        some = len(options) > 1 and self.random.random() < self.stale
        return (self.random.choice(options) if some else options[0]), -1
