"""One CTA and its warps: threads run alone from event to event, and meet only where ``.sync`` says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.machine import accesses, cross_lane
from tests.ptx.machine.barriers import Barriers
from tests.ptx.machine.copies import Copies
from tests.ptx.machine.decoded import Decoded
from tests.ptx.machine.mbarriers import MBarriers
from tests.ptx.machine.report import BadBarrier, BadParticipation, MachineError, NotModelled, fault
from tests.ptx.translation.event import CAUSES, CTAX, CTAY, FAULT, FAULT_CAUSE, RANGES, SHARED

if TYPE_CHECKING:
    from tests.ptx.machine.launched import Launched
    from tests.ptx.machine.machine import Machine

#: what ``pending`` says of a thread that is to be run, and of one that has exited; else the number of its event
TO_RUN, EXITED = -1, 0


class Block:
    """A CTA.

    Attributes:
        state: registers of each thread, uint64 [threads, slots].
        pending: the event at which each thread stands, int32 [threads].
        agents: what memory knows of each thread.
    """

    def __init__(self, machine: Machine, launch: Launched, place: tuple[int, int]) -> None:
        self.machine, self.launch, self.place = machine, launch, place
        self.count = launch.kernel.program.threads
        self._shared = launch.shared_at_first.copy()
        self.shared = self._shared.ctypes.data + (-self._shared.ctypes.data) % 16
        if launch.shared:
            machine.memory.open_shared(str(self), self.shared, launch.shared)
        state = self.state = launch.state_at_first.copy()
        state[:, CTAX], state[:, CTAY] = place
        state[:, SHARED] = self.shared
        state[:, RANGES] = machine.memory.table()
        self.pending = np.full(self.count, TO_RUN, np.int32)
        #: of both arrays, for the compiled code
        self.addresses = state.ctypes.data, self.pending.ctypes.data
        self.agents = machine.memory.new_block(launch, str(self), self.count)
        self.barriers, self.mbarriers, self.copies = Barriers(self), MBarriers(self), Copies(self)
        self.warps = [Warp(self, first, number) for number, first in enumerate(range(0, self.count, 32))]

    def name_of(self, thread: int) -> str:
        return f"{self} thread {thread}"

    def __str__(self) -> str:
        return f"rank {self.launch.rank} {self.launch.kernel.program.name} CTA {self.place}"

    def close(self) -> None:
        """All its threads have exited."""
        self.mbarriers.check_end()
        self.copies.check_end()
        if self.launch.shared:
            self.machine.memory.close_shared(self.shared)
        # they refer to it, and nobody looks for garbage while the machine runs: a block has a megabyte of registers
        self.warps.clear()
        del self.barriers, self.mbarriers, self.copies

    def decoded(self, number: int) -> Decoded:
        return self.launch.decoded[number]

    @property
    def alive(self) -> int:
        return int(np.count_nonzero(self.pending))

    def resume(self, threads: Sequence[int]) -> None:
        """What they waited for has come."""
        self.pending[list(threads)] = TO_RUN
        for thread in threads:
            del self.warps[thread >> 5].waiting[thread & 31]
        for number in sorted({thread >> 5 for thread in threads}):
            self.machine.ready(self.warps[number])

    def exited(self, warp: Warp, lanes: Sequence[int]) -> None:
        """Whoever waits for these lanes waits for ever."""
        for lane, decoded in warp.waiting.items():
            if decoded.kind == "meet" and any(cross_lane.mask_of(warp, lane, decoded) >> gone & 1 for gone in lanes):
                raise BadParticipation(
                    f"{self.name_of(warp.first + lane)} waits at {decoded.where} for lanes that have exited: "
                    f"{list(lanes)}"
                )
        self.barriers.check_exit()
        self.check()

    def check(self) -> None:
        """Everybody waits: nobody is left who could come."""
        if any(warp.movable for warp in self.warps) or not self.alive:
            return
        meeting = any(decoded.kind == "meet" for warp in self.warps for decoded in warp.waiting.values())
        raise (BadParticipation if meeting else BadBarrier)(
            f"{self}: all threads wait, and never meet:\n{self.where()}"
        )

    def where(self) -> str:
        """Where each warp stands, and what mbarriers wait for."""
        lines = [f"  {self} warp {warp.number}: {warp.where()}" for warp in self.warps]
        return "\n".join(lines + [f"  {self} {barrier}" for barrier in self.mbarriers.made.values()])


class Warp:
    """Up to 32 threads. Between ``.sync`` operations nothing keeps them together.

    Attributes:
        waiting: lanes that wait for others, and at which event.
        stored: the stores, atomics and fences that it has come to.
        place: its index among the machine's warps that can move, -1 while it cannot.
    """

    def __init__(self, block: Block, first: int, number: int) -> None:
        self.block, self.first, self.number = block, first, number
        self.count = min(32, block.count - first)
        self.machine = block.machine
        self.state = block.state[first : first + self.count]
        self.pending = block.pending[first : first + self.count]
        self.agents = block.agents[first : first + self.count]
        self.waiting: dict[int, Decoded] = {}
        self.stored: set[Decoded] = set()
        self.place = -1
        #: where each lane that waits for lanes of this warp meets them
        self._masks: dict[int, int] = {}
        self._everybody = list(range(self.count))
        #: for the compiled code: threads of all lanes up and down, and of some
        self._orders = np.arange(first, first + self.count, dtype=np.int32)
        self._orders = np.concatenate([self._orders, self._orders[::-1], self._orders])
        self._orders_address = self._orders.ctypes.data

    @property
    def movable(self) -> bool:
        """Some lane neither has exited nor waits."""
        return int(np.count_nonzero(self.pending)) > len(self.waiting)

    def where(self) -> str:
        names = Counter()  # type: Counter[str]
        for lane, number in enumerate(self.pending.tolist()):
            standing = (
                "exited" if number == EXITED else "runs" if number == TO_RUN else self.block.decoded(number).where
            )
            names[standing + (" (waits)" if lane in self.waiting else "")] += 1
        return "; ".join(f"{count} lanes: {name}" for name, count in names.items())

    # -- registers

    def column(self, lanes: list[int], slot: int) -> list[int]:
        """One of each lane."""
        found: list[int] = (self.state[:, slot] if len(lanes) == self.count else self.state[lanes, slot]).tolist()
        return found

    def put(self, lanes: list[int], slot: int, values: list[int]) -> None:
        """Results, as wide as they are: the compiled code extends them. Slot -1: nobody wants them."""
        if slot >= 0:
            self.state[slice(None) if len(lanes) == self.count else lanes, slot] = np.array(values, np.uint64)

    def operands(self, lane: int, decoded: Decoded) -> list[int]:
        """Of one lane, as they stand in its registers."""
        return [int(self.state[lane, n]) if how == "slot" else n for how, n in decoded.args]

    # -- execution

    def advance(self) -> bool:
        """Runs lanes to their next event and carries one event out. False: another's turn should come."""
        standing = self.pending.tolist()
        if TO_RUN in standing:
            whole = standing.count(TO_RUN) == self.count
            self._drive(self._everybody if whole else [n for n, number in enumerate(standing) if number == TO_RUN])
            before, standing = standing, self.pending.tolist()
            lowest = min(standing)
            if lowest < 0:
                raise self._fault(standing.index(lowest), -lowest)
            if EXITED in standing:
                gone = [lane for lane, number in enumerate(standing) if number == EXITED and before[lane] == TO_RUN]
                if gone:
                    self.machine.progress()
                    self.block.exited(self, gone)
                if not any(standing):
                    self.machine.warp_exited(self)
                    return False
                if not self.movable:
                    self.machine.not_ready(self)
                    return False
        number, lanes = self._choose(standing)
        decoded = self.block.decoded(number)
        self.machine.record(self, number, lanes)
        return self._carry_out(decoded, lanes)

    def _drive(self, lanes: list[int]) -> None:
        count = len(lanes)
        down = count > 1 and self.machine.random.random() < 0.5
        if count == self.count:
            at = 4 * count * down
        else:
            at = 8 * self.count
            some = self._orders[2 * self.count :][:count]
            some[:] = lanes[::-1] if down else lanes
            some += self.first
        block = self.block
        block.launch.kernel.drive(block.addresses[0], self._orders_address + at, count, block.addresses[1])

    def _fault(self, lane: int, number: int) -> MachineError:
        """The compiled code has stopped at what the thread must not do."""
        block = self.block
        cause, address = CAUSES[int(self.state[lane, FAULT_CAUSE])], int(self.state[lane, FAULT])
        return fault(cause)(f"{block.name_of(self.first + lane)}: {block.decoded(number).where}: {cause} {address:#x}")

    def _choose(self, standing: list[int]) -> tuple[int, list[int]]:
        """The event, and the lanes that stand at it, that go on now."""
        random = self.machine.random
        first = standing[0]
        if not self.waiting and standing.count(first) == len(standing):
            number, lanes = first, self._everybody
        else:
            free = [lane for lane, number in enumerate(standing) if number > 0 and lane not in self.waiting]
            numbers = sorted({standing[lane] for lane in free})
            number = numbers[0] if len(numbers) == 1 else random.choice(numbers)
            lanes = [lane for lane in free if standing[lane] == number]
        parting = self.machine.parting
        if parting and len(lanes) > 1 and random.random() < parting:
            lanes = sorted(random.sample(lanes, random.randint(1, len(lanes) - 1)))
        return number, lanes

    def _carry_out(self, decoded: Decoded, lanes: list[int]) -> bool:
        kind = decoded.kind
        decoded.reached = True
        self.machine.memory.step = self.machine.steps
        if kind in ("load", "store", "atomic", "fence"):
            accesses.carry_out(self, decoded, lanes)
            # a store that comes again and again is of a loop that waits
            if kind != "load" and decoded not in self.stored:
                self.stored.add(decoded)
                self.machine.progress()
            self.go_on(lanes)
            return True
        if kind == "meet":
            return self._meet(decoded, lanes)
        if kind == "barrier":
            return self.block.barriers.arrive(self, decoded, lanes)
        if kind == "clock":
            for slot, width in decoded.dests:
                self.state[lanes, slot] = self._clock(decoded) & (1 << width) - 1
        elif kind in ("copies", "mbarrier", "proxy"):
            return self._asynchronous(decoded, lanes)
        elif kind == "active":
            self.state[lanes, decoded.dests[0][0]] = sum(1 << lane for lane in lanes)
        elif kind != "nap":
            raise NotModelled(f"{self.block}: {decoded.where}")
        self.go_on(lanes)
        return False

    def _asynchronous(self, decoded: Decoded, lanes: list[int]) -> bool:
        """Bulk copies and mbarriers. Lanes that wait for groups of copies stay where they are."""
        block = self.block
        moved = True
        if decoded.kind == "copies":
            on = block.copies.carry_out(self, decoded, lanes)
            moved = len(on) == len(lanes)
            lanes = on
        elif decoded.kind == "mbarrier":
            moved = block.mbarriers.carry_out(self, decoded, lanes)
        elif decoded.parts[1] == "mbarrier_init":
            block.mbarriers.fence(self, lanes)
        else:
            space = decoded.parts[-1]
            agents = [self.agents[lane] for lane in lanes]
            self.machine.memory.fence_proxy(agents, space != "global", not space.startswith("shared"))
        self.go_on(lanes)
        return moved

    def _clock(self, decoded: Decoded) -> int:
        name = decoded.event.text
        now = self.machine.now_ns if "globaltimer" in name else self.machine.steps
        return now >> 32 if "globaltimer_hi" in name else now

    def go_on(self, lanes: list[int]) -> None:
        if len(lanes) == self.count:
            self.pending[:] = TO_RUN
        else:
            self.pending[lanes] = TO_RUN

    def wait(self, decoded: Decoded, lanes: list[int]) -> None:
        """They wait at ``decoded``."""
        for lane in lanes:
            self.waiting[lane] = decoded

    def _meet(self, decoded: Decoded, lanes: list[int]) -> bool:
        """Lanes arrive at an operation of the lanes in their masks; those whose lanes are all there go on."""
        masks = cross_lane.masks_of(self, decoded, lanes)
        if masks.count((1 << self.count) - 1) == self.count and not self.waiting:
            # all of the warp at once, as nearly always
            self._all_met(dict.fromkeys(lanes, decoded))
            return True
        self.wait(decoded, lanes)
        self._masks.update(zip(lanes, masks, strict=True))
        moved = False
        for mask in dict.fromkeys(masks):
            named = [one for one in range(32) if mask >> one & 1]
            mine = [lane for lane, one in zip(lanes, masks, strict=True) if one == mask]
            self._check_mask(decoded, mine, named, mask)
            there = {one: self.waiting[one] for one in named if self._masks.get(one) == mask}
            if len(there) == len(named) and {one.op for one in there.values()} == {decoded.op}:
                self._all_met(there)
                for one in there:
                    del self.waiting[one], self._masks[one]
                moved = True
        if not moved and not self.movable:
            self.machine.not_ready(self)
            self.block.check()
        return moved

    def _all_met(self, there: dict[int, Decoded]) -> None:
        """Everybody has come."""
        cross_lane.carry_out(self, there)
        if next(iter(there.values())).parts[0] in ("bar", "barrier"):
            agents = [self.agents[one] for one in there]
            self.machine.memory.barrier(agents, agents[0].warp_key if len(there) == self.count else None)
        self.go_on(list(there))

    def _check_mask(self, decoded: Decoded, lanes: list[int], named: list[int], mask: int) -> None:
        """Of ``lanes``, which come with it."""
        beside = next((lane for lane in lanes if not mask >> lane & 1), None)
        if beside is not None:
            who = f"{self.block.name_of(self.first + beside)}: {decoded.where}"
            raise BadParticipation(f"{who}: lane {beside} is not in its own mask {mask:#x}")
        standing = self.pending.tolist()
        gone = [one for one in named if one >= self.count or standing[one] == EXITED]
        if gone:
            who = f"{self.block.name_of(self.first + lanes[0])}: {decoded.where}"
            raise BadParticipation(f"{who}: lanes {gone} of its mask {mask:#x} have exited")
