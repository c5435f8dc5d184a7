"""A memory as weak as PTX lets it be: a load returns any value that its thread has not been told is old.

The model of PTX ISA 8 (Lustig, Sahasrabuddhe, Giroux: A Formal Analysis of the NVIDIA PTX Memory Consistency Model, ASPLOS
2019), made executable: each eight bytes keep every value that they have had (histories.py), and agents know of accesses
by program order, barriers, release and acquire patterns whose scopes include each other, and fence.sc (clocks.py).

* A load may read any write that is not older, in coherence order, than one that its agent has heard of or has read.
* A store goes anywhere in coherence order behind those. What a read-modify-write read stays next to it.
* A vector is one access for each eight bytes, in any order.
* What the host sees: visibility.py. Data races: races.py.

Weaker in PTX than here: a load never sees a store that comes later in time (load buffering); elements of a vector that
share eight bytes go together; all proxies are the generic one; a CTA is a cluster. The host is stronger than x86: its
accesses are sequentially consistent, one step of it is atomic, it has read all that it can see, and it writes whole words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.ptx import clocks
from tests.ptx.clocks import Agent, Clock, Release, Seen, Timer, View, heard, merged, merged_seen
from tests.ptx.histories import Cell, Message, Reading
from tests.ptx.operation import Operation, Scope
from tests.ptx.races import Races, account
from tests.ptx.regions import Region, Regions
from tests.ptx.report import Uninitialised
from tests.ptx.visibility import HostSide

M64 = (1 << 64) - 1
#: strong reads that wait for a fence. More are forgotten, oldest first: that makes the model weaker
PENDING = 64


class Weak:
    """See the module.

    Args:
        stale: chance that a load, or the place of a store, is drawn among all that are allowed.
        lag: chance, an instruction of a warp, that one store becomes visible to the host; 0: every store at once.
        races: "raise", "keep" (see ``self.races.found``) or "ignore".
    """

    #: kernels must be translated so that they stop at every access
    every_access = True

    def __init__(self, stale: float = 0.5, lag: float = 0.0, races: str = "raise") -> None:
        self.stale, self.lag = stale, lag
        self.regions = Regions()
        self.cells: dict[int, Cell] = {}
        self.races = Races(races == "raise")
        self._racing = races != "ignore"
        self.host = HostSide(self)
        self.random = random.Random(0)
        self.step = 0
        self.accesses = self.stale_reads = 0
        self._streams: dict[int, View] = {}
        self._fence_views: dict[tuple[Scope, Scope, int], View] = {}
        self._keys = 0

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
        for index in range(len(old.words)):
            cell = self.cells.pop((old.address >> 3) + index, None)
            if cell is not None:
                self.host.forget(cell)

    @staticmethod
    def table() -> int:
        """None: the compiled code accesses nothing of these regions by itself."""
        return 0

    def account(self, address: int) -> str:
        """The last accesses of the eight bytes at ``address``."""
        cell = self.cells.get(address >> 3)
        return account(cell) if cell is not None else f"no access of {address:#x}"

    def launched(self, launch: Any) -> None:
        """The host puts a kernel on a stream."""
        self.host.look(everywhere=True)
        launch.host = self.host.view()

    def begin(self, launch: Any) -> None:
        """A kernel starts: it knows what the kernels before it on its stream did, and what the host did before it launched."""
        stream = self._streams.get(launch.rank)
        host = launch.host
        launch.clock = merged((stream.clock, host.clock)) if stream else host.clock
        launch.seen = merged_seen((stream.seen, host.seen)) if stream else host.seen

    def new_block(self, launch: Any, name: Callable[[int], str], count: int) -> list[Agent]:
        """The agents of a block's threads. Entities of a rank are told by their lowest byte, so that they can be dropped."""
        warps = -(-count // 32)
        first, step = self._keys * 256 + launch.rank + 2, 256
        self._keys += 1 + warps + count
        timer, agents = Timer(), []
        for number in range(count):
            keys = (
                first + step * (1 + warps + number),
                first + step * (1 + number // 32),
                first,
                clocks.rank_key(launch.rank),
            )
            agent = Agent(name(number), launch.rank, launch.sequence, timer, keys)
            agent.clock, agent.seen = launch.clock, launch.seen
            agents.append(agent)
        return agents

    def settle(self, launch: Any) -> bool:
        """All threads have exited: shows the host some of what is late. True once nothing is."""
        return self.host.settle(launch.rank)

    def end(self, launch: Any, agents: Sequence[Agent]) -> None:
        """The kernel is over: the next one of its stream knows all it did, and the host does once it has waited for it."""
        clock = merged(agent.clock for agent in agents)
        rank = launch.rank + 2
        kept = {entity: time for entity, time in clock.items() if entity < 0 or entity & 255 != rank or not entity}
        kept[clocks.rank_key(launch.rank)] = launch.sequence
        self._streams[launch.rank] = View(kept, merged_seen(agent.seen for agent in agents))

    def host_waited(self, rank: int) -> None:
        """The host knows that everything on ``rank``'s stream has ended."""
        if rank in self._streams:
            self.host.hear(self._streams[rank])

    def host_stepped(self) -> None:
        """A host thread or a proxy has had its turn."""
        self.host.look()

    # -- knowledge

    def _heard_of(self, agent: Agent, message: Message) -> bool:
        return message.agent is agent or heard(agent.clock, message.agent, message.time)

    def _is_floor(self, agent: Agent, cell: Cell, message: Message) -> bool:
        """Whether ``agent`` must not read anything older than ``message``."""
        if self._heard_of(agent, message):
            return True
        seen = agent.seen
        return any(mask & message.mask and seen.get((cell, mask), -1.0) >= message.order for mask in cell.observed)

    def _includes(self, scope: Scope, agent: Agent, other: Agent) -> bool:
        return clocks.includes(scope, agent, other)

    def _morally_strong(self, agent: Agent, operation: Operation, mask: int, message: Message) -> bool:
        whole = message.mask == mask or (message.agent is self.host.agent and message.mask & mask == mask)
        return (
            whole
            and operation.strong
            and message.operation.strong
            and self._includes(operation.scope, agent, message.agent)
            and self._includes(message.operation.scope, message.agent, agent)
        )

    def _release(self, agent: Agent, scope: Scope) -> Release:
        """What ``agent`` tells from here on, of all before."""
        timer = agent.timer
        clock = {**agent.clock, agent.key: timer.time}
        timer.time += 1
        return Release(agent, scope, View(clock, agent.seen))

    def _acquire(self, agent: Agent, scope: Scope, message: Message) -> None:
        for release in message.own + message.chain:
            if self._includes(scope, agent, release.agent) and self._includes(release.scope, release.agent, agent):
                clocks.join(agent, release.view)

    # -- accesses; a batch is one instruction of some lanes of a warp

    def load(self, agents: Sequence[Agent], addresses: Sequence[int], operation: Operation) -> list[int]:
        """What each agent reads, as one number of ``operation.nbytes`` bytes."""
        n = operation.nbytes
        self.accesses += len(addresses)
        values = []
        if n <= 8:
            ones = (1 << 8 * n) - 1
            for agent, at in zip(agents, addresses, strict=True):
                shift = 8 * (at & 7)
                values.append(self._read(agent, at, ones << shift, operation) >> shift)
        else:
            for agent, at in zip(agents, addresses, strict=True):
                places = range(0, n, 8)
                if operation.strong:
                    places = self.random.sample(places, len(places))  # type: ignore[assignment]
                values.append(sum(self._read(agent, at + place, M64, operation) << 8 * place for place in places))
        self._some_time_passes()
        return values

    def store(
        self, agents: Sequence[Agent], addresses: Sequence[int], values: Sequence[int], operation: Operation
    ) -> None:
        n = operation.nbytes
        self.accesses += len(addresses)
        for agent, at, value in zip(agents, addresses, values, strict=True):
            release = self._release(agent, operation.scope) if operation.release else None
            if n <= 8:
                shift = 8 * (at & 7)
                self._write(agent, at, value << shift, ((1 << 8 * n) - 1) << shift, operation, release)
            else:
                places: Sequence[int] = range(0, n, 8)
                if operation.strong:
                    places = self.random.sample(places, len(places))
                for place in places:
                    self._write(agent, at + place, value >> 8 * place & M64, M64, operation, release)
        self._some_time_passes()

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

    def _read(self, agent: Agent, at: int, mask: int, operation: Operation) -> int:
        cell = self.cells.get(at >> 3) or self._checked_cell(at, mask)
        last = cell.history[-1]
        if (
            last.mask & mask == mask
            and (last.agent is agent or heard(agent.clock, last.agent, last.time))
            and not (last.chain and operation.strong)
        ):
            value = last.value & mask
        else:
            value = self._read_any(agent, cell, mask, operation)
        if self._racing:
            cell.readers[agent] = Reading(agent.timer.time, mask, operation, self.step, value)
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

    def _observe(self, agent: Agent, cell: Cell, message: Message, mask: int, operation: Operation) -> None:
        """What ``agent`` learns by reading ``message``."""
        known = self._heard_of(agent, message)
        if not self._morally_strong(agent, operation, mask, message):
            if self._racing and not known and not self._is_floor(agent, cell, message):
                self.races.with_write(cell, message, mask, agent, operation, self.step)
            return
        if not known and agent.seen.get((cell, mask), -1.0) < message.order:
            agent.seen = {**agent.seen, (cell, mask): message.order}
            if mask not in cell.observed:
                cell.observed.append(mask)
        if operation.acquire:
            for place, earlier in agent.pending:
                if place is cell and earlier.mask == mask:
                    self._acquire(agent, operation.scope, earlier)
            self._acquire(agent, operation.scope, message)
        elif (message.own or message.chain) and (not agent.pending or agent.pending[-1][1] is not message):
            agent.pending.append((cell, message))
            del agent.pending[:-PENDING]

    def _write(
        self, agent: Agent, at: int, value: int, mask: int, operation: Operation, release: Release | None
    ) -> None:
        cell = self.cells.get(at >> 3) or self._checked_cell(at, mask)
        history = cell.history
        last = history[-1]
        place = len(history)
        if not (last.agent is agent or heard(agent.clock, last.agent, last.time)):
            place = self._place(agent, cell, mask, operation)
        if cell.readers:
            self._overwrite(agent, cell, mask, operation)
        message = Message(value, mask, agent, agent.timer.time, operation, last.order + 1.0, self.step)
        if operation.strong:
            message.own = self._patterns(agent, cell, mask, release)
        if place == len(history):
            cell.append(message)
            self.host.stored(cell, message)
        else:
            message.order = (history[place - 1].order + history[place].order) / 2
            history.insert(place, message)

    def _place(self, agent: Agent, cell: Cell, mask: int, operation: Operation) -> int:
        """Where in coherence order a store goes: somewhere behind everything that ``agent`` has heard of."""
        history = cell.history
        lowest, free = len(history), True
        for place in range(len(history) - 1, 0, -1):
            message = history[place]
            if not message.mask & mask:
                free = False
                continue
            if self._is_floor(agent, cell, message):
                break
            if self._racing and not self._morally_strong(agent, operation, mask, message):
                self.races.with_write(cell, message, mask, agent, operation, self.step)
            free = free and message.operation.kind != "atomic" and message.mask & mask == mask
            if free:
                lowest = place
        if lowest < len(history) and self.random.random() < self.stale:
            chosen = self.random.randint(lowest, len(history))
            # the halves of a gap end when the numbers between them do
            if chosen == len(history) or history[chosen].order - history[chosen - 1].order > 1e-6:
                return chosen
        return len(history)

    def _overwrite(self, agent: Agent, cell: Cell, mask: int, operation: Operation) -> None:
        """``agent`` writes what others have read: has it heard of all those reads?"""
        for reader, reading in cell.readers.items():
            if reader is agent or not reading.mask & mask or heard(agent.clock, reader, reading.time):
                continue
            strong = reading.mask == mask and reading.operation.strong and operation.strong
            if (
                strong
                and self._includes(operation.scope, agent, reader)
                and self._includes(reading.operation.scope, reader, agent)
            ):
                continue
            self.races.with_read(cell, reader, reading, mask, agent, operation, self.step)
        cell.readers.clear()

    def _patterns(self, agent: Agent, cell: Cell, mask: int, release: Release | None) -> tuple[Release, ...]:
        """The release patterns that a strong store of ``agent`` ends: for each scope the latest one."""
        found: dict[Scope, Release] = {}
        for message in reversed(cell.history):
            if message.agent is agent and message.mask == mask:
                found = {one.scope: one for one in message.own}
                break
        found.update({one.scope: one for one in agent.fences})
        if release is not None:
            found[release.scope] = release
        return tuple(found.values())

    def _modify(
        self, agent: Agent, at: int, shift: int, mask: int, change: Callable[[int], int], operation: Operation
    ) -> int:
        cell = self._checked_cell(at, mask)
        source = self._source(agent, cell, mask, operation)
        if source is None:
            before = self._read_any(agent, cell, mask, operation) >> shift
        else:
            before = (source.value & mask) >> shift
            self._observe(agent, cell, source, mask, operation)
        if cell.readers:
            self._overwrite(agent, cell, mask, operation)
        release = self._release(agent, operation.scope) if operation.release else None
        message = Message(
            change(before) << shift, mask, agent, agent.timer.time, operation, cell.history[-1].order + 1.0, self.step
        )
        message.own = self._patterns(agent, cell, mask, release)
        if source is not None and self._morally_strong(agent, operation, mask, source):
            message.chain = self._carried(source, release)
        cell.append(message)
        self.host.stored(cell, message)
        return before

    def _source(self, agent: Agent, cell: Cell, mask: int, operation: Operation) -> Message | None:
        """The write that a read-modify-write reads: the last one, unless those behind it are not strong to it.

        None where the last writes are of some of the bytes only.
        """
        options: list[Message] = []
        for message in self._options(agent, cell, mask):
            if message.mask & mask != mask:
                return None
            options.append(message)
            if self._heard_of(agent, message) or self._morally_strong(agent, operation, mask, message):
                break
            if self._racing:
                self.races.with_write(cell, message, mask, agent, operation, self.step)
        if not options:
            return None
        return self.random.choice(options) if len(options) > 1 and self.random.random() < self.stale else options[0]

    def _carried(self, source: Message, release: Release | None) -> tuple[Release, ...]:
        """Release patterns that go on through a read-modify-write, less those that its own release tells anyway."""
        found: dict[tuple[Agent, Scope], Release] = {}
        for one in source.chain + source.own:
            told = release is not None and release.scope >= one.scope
            if not (told and heard(release.view.clock, one.agent, one.view.clock[one.agent.key])):  # type: ignore[union-attr]
                found[one.agent, one.scope] = one
        return tuple(found.values())

    # -- fences and barriers

    def fence(self, agents: Sequence[Agent], operation: Operation) -> None:
        """Completes acquire patterns, begins release patterns, and, ``sc``, hears of all earlier fences strong to it."""
        scope = operation.scope
        for agent in agents:
            if operation.acquire:
                for _, message in agent.pending:
                    self._acquire(agent, scope, message)
            if operation.sequential:
                self._hear_fences(agent, scope)
            if operation.release:
                release = self._release(agent, scope)
                agent.fences = [one for one in agent.fences if one.scope > scope] + [release]
                if operation.sequential:
                    self._tell_fences(agent, scope, release.view)

    @staticmethod
    def _domains(agent: Agent) -> tuple[tuple[Scope, int], ...]:
        return (Scope.SYS, 0), (Scope.GPU, agent.rank), (Scope.CTA, agent.block_key)

    def _hear_fences(self, agent: Agent, scope: Scope) -> None:
        """Two fences are strong to each other in the narrower of their scopes, if both agents are in it."""
        for other in (Scope.SYS, Scope.GPU, Scope.CTA):
            for domain, name in self._domains(agent):
                if domain == min(scope, other):
                    view = self._fence_views.get((other, domain, name))
                    if view is not None:
                        clocks.join(agent, view)
        if scope == Scope.SYS:
            clocks.join(agent, self.host.view())

    def _tell_fences(self, agent: Agent, scope: Scope, view: View) -> None:
        for domain, name in self._domains(agent):
            if domain <= scope:
                key = (scope, domain, name)
                old = self._fence_views.get(key)
                self._fence_views[key] = self._together((old, view)) if old else view
        if scope == Scope.SYS:
            self.host.show(view)
            self.host.hear(view)

    @staticmethod
    def _together(views: Sequence[View]) -> View:
        return View(merged(view.clock for view in views), merged_seen(view.seen for view in views))

    def arrive(self, agent: Agent) -> View:
        """What ``agent`` tells by ``barrier.arrive``."""
        return self._release(agent, Scope.CTA).view

    def barrier(self, agents: Sequence[Agent], entity: int | None, arrived: Sequence[View] = ()) -> None:
        """``agents`` hear of each other's accesses, and of what has ``arrived``.

        Args:
            entity: the CTA or warp if ``agents`` are all its threads.
        """
        timer = agents[0].timer
        views: list[View] = list(arrived)
        clock: Clock = dict(merged([agent.clock for agent in agents] + [view.clock for view in views]))
        seen: Seen = merged_seen([agent.seen for agent in agents] + [view.seen for view in views])
        if entity is not None:
            clock[entity] = timer.time
            for agent in agents:
                clock.pop(agent.key, None)
                if entity == agent.block_key:
                    clock.pop(agent.warp_key, None)
        else:
            for agent in agents:
                clock[agent.key] = timer.time
        timer.time += 1
        for agent in agents:
            agent.clock, agent.seen = clock, seen
