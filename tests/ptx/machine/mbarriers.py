"""Mbarriers of a CTA: phases that are over once all have arrived, and all bytes of bulk copies that were expected.

PTX ISA, mbarrier: contents of the object, phase, pending count and tx-count. ``arrive`` is a release and a wait is an
acquire, unless they say ``.relaxed``; the end of a copy is a release. All act on one object, so who finds a phase over
knows of all the phases before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ptx.machine.report import BadMBarrier, Misaligned, OutsideShared, Unfinished
from tests.ptx.memory.clocks import View

if TYPE_CHECKING:
    from tests.ptx.machine.block import Block, Warp
    from tests.ptx.machine.decoded import Decoded
    from tests.ptx.memory.proxies import Stamp

M32 = 0xFFFFFFFF
#: Arrivals, and bytes that are expected or have come too early, of a phase.
MOST = (1 << 20) - 1
#: Chance that a wait says no where the phase is over: a thread sees that late, and ``try_wait`` has a time limit.
LATE = 0.3


class MBarrier:
    """One of them.

    Attributes:
        made: its initialisation, and ``fenced``: the fence of that for the async proxy.
        phase: that goes on; how many are over.
        pending: arrivals that are missing in it; ``expected`` of the next one.
        missing: bytes; negative where copies came before it was told that they would.
        found: how many phases some wait has found over.
        loads: phase of the last copy that tells it; ``key`` of these copies in clocks.
        told: by whom has arrived in this phase; ``over``: by all the phases before it, copies included.
    """

    def __init__(self, offset: int, expected: int, made: Stamp, key: int) -> None:
        self.offset, self.expected, self.made, self.key = offset, expected, made, key
        self.fenced: Stamp | None = None
        self.phase, self.pending, self.missing = 0, expected, 0
        self.found, self.loads = 0, -1
        self.told: list[View] = []
        self.over = View({}, {})

    def __str__(self) -> str:
        return (
            f"mbarrier at offset {self.offset:#x}, phase {self.phase}: {self.pending} of {self.expected} arrivals and "
            f"{self.missing} bytes are missing"
        )


class MBarriers:
    """Those of one CTA, by their offset in shared memory."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.made: dict[int, MBarrier] = {}

    def carry_out(self, warp: Warp, decoded: Decoded, lanes: list[int]) -> bool:
        """Each lane's instruction. False where a wait has found nothing."""
        what = decoded.parts[1]
        found = True
        for lane in lanes:
            offset, *values = (value & M32 for value in warp.operands(lane, decoded))
            if what == "init":
                self._init(warp, lane, decoded, offset, values[0])
                continue
            barrier = self.at(warp, lane, decoded, offset)
            try:
                if what == "inval":
                    self._end(barrier)
                    del self.made[offset]
                elif what == "arrive":
                    self._arrive(warp, lane, decoded, barrier, *values)
                else:
                    found = self._wait(warp, lane, decoded, barrier, values[0]) and found
            except BadMBarrier as error:
                raise BadMBarrier(f"{self._who(warp, lane, decoded)}: {error}") from None
        if what not in ("try_wait", "test_wait") and decoded not in warp.stored:
            warp.stored.add(decoded)
            self.block.machine.progress()
        return found

    def _who(self, warp: Warp, lane: int, decoded: Decoded) -> str:
        return f"{self.block.name_of(warp.first + lane)}: {decoded.where}"

    def _check(self, warp: Warp, lane: int, decoded: Decoded, offset: int) -> None:
        if offset % 8 or offset + 8 > self.block.launch.shared:
            kind = Misaligned if offset % 8 else OutsideShared
            raise kind(f"{self._who(warp, lane, decoded)}: an mbarrier at offset {offset:#x}")

    def _init(self, warp: Warp, lane: int, decoded: Decoded, offset: int, count: int) -> None:
        self._check(warp, lane, decoded, offset)
        if offset in self.made or not 1 <= count <= MOST:
            why = "there is one already" if offset in self.made else f"{count} arrivals"
            raise BadMBarrier(f"{self._who(warp, lane, decoded)}: an mbarrier at offset {offset:#x}: {why}")
        memory = self.block.machine.memory
        made = memory.stamp(warp.agents[lane])
        self.made[offset] = MBarrier(offset, count, made, memory.new_entity(self.block.launch.rank))

    def at(self, warp: Warp, lane: int, decoded: Decoded, offset: int, copying: bool = False) -> MBarrier:
        """The one at ``offset``, of which the thread knows, and its bulk copies where it is ``copying``."""
        self._check(warp, lane, decoded, offset)
        barrier, memory, agent = self.made.get(offset), self.block.machine.memory, warp.agents[lane]
        if barrier is None:
            raise BadMBarrier(f"{self._who(warp, lane, decoded)}: there is no mbarrier at offset {offset:#x}")
        if not memory.knows(agent, barrier.made):
            raise BadMBarrier(
                f"{self._who(warp, lane, decoded)}: nothing orders it behind the initialisation of the {barrier}"
            )
        fenced = barrier.fenced is not None and memory.knows(agent, barrier.fenced)
        if copying and not fenced and not memory.proxy_knows(agent, barrier.made):
            raise BadMBarrier(
                f"{self._who(warp, lane, decoded)}: no fence tells bulk copies of the initialisation of the {barrier}"
            )
        return barrier

    def fence(self, warp: Warp, lanes: list[int]) -> None:
        """fence.mbarrier_init: of what these threads have initialised."""
        memory = self.block.machine.memory
        for barrier in self.made.values():
            for agent in [warp.agents[lane] for lane in lanes]:
                if barrier.made[0] is agent and barrier.fenced is None:
                    barrier.fenced = memory.stamp(agent)

    def _arrive(self, warp: Warp, lane: int, decoded: Decoded, barrier: MBarrier, number: int = 1) -> None:
        count = 1
        if "expect_tx" in decoded.parts:
            self._expect(barrier, number)
        else:
            count = number
        if not 1 <= count <= barrier.pending:
            raise BadMBarrier(f"{count} arrivals at the {barrier}")
        if "relaxed" not in decoded.parts:
            barrier.told.append(self.block.machine.memory.arrive(warp.agents[lane]))
        barrier.pending -= count
        self._complete(barrier)

    def _expect(self, barrier: MBarrier, nbytes: int) -> None:
        barrier.missing += nbytes
        if not -MOST <= barrier.missing <= MOST:
            raise BadMBarrier(f"more than {MOST} bytes, or as many too early: {barrier}")

    def copied(self, barrier: MBarrier, phase: int, nbytes: int) -> None:
        """``nbytes`` more of a copy that was issued in ``phase`` are there."""
        if barrier.phase != phase:
            raise BadMBarrier(f"{nbytes} bytes of a copy of phase {phase}, which is over: {barrier}")
        self._expect(barrier, -nbytes)
        if barrier.missing < 0 and not barrier.pending:
            raise BadMBarrier(f"more bytes than were expected: {barrier}")
        self._complete(barrier)

    def _complete(self, barrier: MBarrier) -> None:
        if not barrier.pending and not barrier.missing:
            memory = self.block.machine.memory
            copies = memory.told_by_copies({barrier.key: barrier.phase})
            barrier.over = memory.united([barrier.over, *barrier.told, copies])
            barrier.told = []
            barrier.phase += 1
            barrier.pending = barrier.expected

    def _wait(self, warp: Warp, lane: int, decoded: Decoded, barrier: MBarrier, parity: int) -> bool:
        """Whether the phase of ``parity`` is over, for the thread to see: the one before the one that goes on."""
        if parity > 1:
            raise BadMBarrier(f"parity {parity}: {barrier}")
        machine = self.block.machine
        over = barrier.phase & 1 != parity and machine.random.random() >= LATE
        if over:
            barrier.found = barrier.phase
            if "relaxed" not in decoded.parts:
                machine.memory.hear(warp.agents[lane], [barrier.over])
        warp.put([lane], decoded.dests[0][0], [int(over)])
        return over

    def keep_off(self, offset: int, nbytes: int) -> None:
        """Nothing else may access the bytes of an mbarrier."""
        for at, barrier in self.made.items():
            if offset < at + 8 and at < offset + nbytes:
                raise BadMBarrier(f"{nbytes} bytes at offset {offset:#x} are of the {barrier}")

    @staticmethod
    def _end(barrier: MBarrier) -> None:
        if barrier.found <= barrier.loads:
            raise Unfinished(f"nobody has waited for the copies of phase {barrier.loads}: {barrier}")

    def check_end(self) -> None:
        """The CTA ends, and its shared memory: nothing may still be copied to it."""
        for barrier in self.made.values():
            self._end(barrier)
