"""Bulk copies on their way: each happens late, sixteen bytes by sixteen, in any order, beside all others.

PTX ISA, cp.async.bulk: addresses and size are multiples of 16. To shared memory the bytes that have come are told to an
mbarrier. From shared memory a copy belongs to a group of the thread that issued it; ``wait_group`` waits for groups,
with ``.read`` only until they have read. Who knows of a copy, and of what it knows: tests/ptx/memory/proxies.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ptx.machine.report import BadMBarrier, Misaligned, OutsideShared, Unfinished, Unmapped
from tests.ptx.memory.clocks import Agent
from tests.ptx.memory.sequential import read, write

if TYPE_CHECKING:
    from tests.ptx.machine.block import Block, Warp
    from tests.ptx.machine.decoded import Decoded
    from tests.ptx.machine.mbarriers import MBarrier

M32 = 0xFFFFFFFF
#: Bytes that are copied at once.
UNIT = 16


class Copy:
    """One bulk copy.

    Attributes:
        source, target: addresses on the host.
        unread: offsets of what it has not read; ``held``: what it has read and not written.
        agents: who reads and who writes.
        barrier, phase: what a copy to shared memory tells.
        time: of it among the copies of its entities.
    """

    def __init__(self, block: Block, decoded: Decoded, name: str, source: int, target: int, nbytes: int) -> None:
        self.block, self.decoded, self.name = block, decoded, name
        self.source, self.target = source, target
        self.unread = list(range(0, nbytes, UNIT))
        self.held: dict[int, int] = {}
        self.barrier: MBarrier | None = None
        self.phase = self.time = 0
        self.agents: tuple[Agent, Agent]

    def __str__(self) -> str:
        return f"{self.name}: {self.decoded.where}: {UNIT * (len(self.unread) + len(self.held))} bytes left"

    @property
    def is_done(self) -> bool:
        return not self.unread and not self.held

    def step(self) -> None:
        """Some of it happens: it reads, or writes what it has read."""
        random = self.block.machine.random
        if self.unread and (not self.held or random.random() < 0.5):
            for offset in self._some(self.unread):
                self.unread.remove(offset)
                self.held[offset] = self._read(self.source + offset)
            return
        chosen = self._some(list(self.held))
        for offset in chosen:
            self._write(self.target + offset, self.held.pop(offset))
        if self.barrier is not None:
            try:
                self.block.mbarriers.copied(self.barrier, self.phase, UNIT * len(chosen))
            except BadMBarrier as error:
                raise BadMBarrier(f"{self.name}: {self.decoded.where}: {error}") from None

    def _some(self, offsets: list[int]) -> list[int]:
        random = self.block.machine.random
        return random.sample(offsets, random.choice((1, len(offsets), random.randint(1, len(offsets)))))

    def _read(self, at: int) -> int:
        if self.barrier is None and not self.block.machine.memory.every_access:
            return read(at, UNIT)
        found: int = self.block.machine.memory.load([self.agents[0]], [at], self.decoded.reading)[0]
        return found

    def _write(self, at: int, value: int) -> None:
        if self.barrier is not None and not self.block.machine.memory.every_access:
            write(at, UNIT, value)
        else:
            self.block.machine.memory.store([self.agents[1]], [at], [value], self.decoded.operation)


class Issued:
    """Copies from shared memory of one thread.

    Attributes:
        alone: those of no group yet; ``groups`` that it has not waited for to the end, the oldest first.
        count: of all of them so far.
        read: the number of the last one of which it knows that it has read.
        keys: of what they read and write, in clocks.
    """

    def __init__(self, keys: tuple[int, int]) -> None:
        self.alone: list[Copy] = []
        self.groups: list[list[Copy]] = []
        self.count = self.read = 0
        self.keys = keys


class Copies:
    """Those of a CTA."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._threads: dict[int, Issued] = {}
        self._count = 0

    def carry_out(self, warp: Warp, decoded: Decoded, lanes: list[int]) -> list[int]:
        """Each lane's instruction; the lanes that go on."""
        what = decoded.parts[3]
        if what == "wait_group":
            return [lane for lane in lanes if self._waited(warp, lane, decoded)]
        for lane in lanes:
            if what == "commit_group":
                mine = self._issued(warp, lane)
                mine.groups.append(mine.alone)
                mine.alone = []
            else:
                self._issue(warp, lane, decoded)
        return lanes

    def _issued(self, warp: Warp, lane: int) -> Issued:
        thread = warp.first + lane
        if thread not in self._threads:
            memory, rank = self.block.machine.memory, self.block.launch.rank
            self._threads[thread] = Issued((memory.new_entity(rank), memory.new_entity(rank)))
        return self._threads[thread]

    def _issue(self, warp: Warp, lane: int, decoded: Decoded) -> None:
        block, machine = self.block, self.block.machine
        who = f"{block.name_of(warp.first + lane)}: {decoded.where}"
        target, source, size, *barrier = warp.operands(lane, decoded)
        size, to_shared = size & M32, bool(barrier)
        shared, far = (target & M32, source) if to_shared else (source & M32, target)
        if shared % UNIT or far % UNIT or size % UNIT or not size:
            raise Misaligned(f"{who}: {size} bytes from {source:#x} to {target:#x}")
        if shared + size > block.launch.shared:
            raise OutsideShared(f"{who}: offset {shared:#x} of {size} bytes")
        try:
            machine.memory.regions.at(far, size)
            block.mbarriers.keep_off(shared, size)
        except Unmapped as error:
            raise Unmapped(f"{who}: {error}", error.address) from None
        except BadMBarrier as error:
            raise BadMBarrier(f"{who}: {error}") from None
        self._count += 1
        name = f"{block.name_of(warp.first + lane)}, bulk copy {self._count}"
        near = block.shared + shared
        copy = Copy(block, decoded, name, *((far, near) if to_shared else (near, far)), size)
        if to_shared:
            copy.barrier = block.mbarriers.at(warp, lane, decoded, barrier[0] & M32, copying=True)
            copy.phase = copy.time = copy.barrier.loads = copy.barrier.phase
            keys = (copy.barrier.key, copy.barrier.key)
        else:
            mine = self._issued(warp, lane)
            mine.count += 1
            mine.alone.append(copy)
            copy.time, keys = mine.count, mine.keys
        copy.agents = machine.memory.copier(warp.agents[lane], name, keys, copy.time, to_shared, block.launch)
        machine.copies.append(copy)
        machine.progress()

    def _waited(self, warp: Warp, lane: int, decoded: Decoded) -> bool:
        """Whether all groups but the last few are over, of which the thread knows then."""
        mine = self._issued(warp, lane)
        reading = "read" in decoded.parts
        upto = max(0, len(mine.groups) - (warp.operands(lane, decoded)[0] & M32))
        copies = [copy for group in mine.groups[:upto] for copy in group]
        if any(copy.unread if reading else not copy.is_done for copy in copies):
            return False
        if copies:
            mine.read = max(mine.read, copies[-1].time)
            times = dict.fromkeys(mine.keys[:1] if reading else mine.keys, copies[-1].time)
            memory = self.block.machine.memory
            memory.hear(warp.agents[lane], [memory.told_by_copies(times)])
        if not reading:
            del mine.groups[:upto]
        return True

    def check_end(self) -> None:
        """The CTA ends, and its shared memory: nothing may still be copied from it, for all that its threads know."""
        for thread, mine in self._threads.items():
            if mine.read < mine.count:
                raise Unfinished(
                    f"{self.block.name_of(thread)} has not waited until its bulk copies have read shared memory: "
                    f"{mine.count - mine.read} of {mine.count} are left"
                )
