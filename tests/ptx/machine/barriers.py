"""``bar`` and ``barrier`` of a CTA: sixteen of them, each with a count of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ptx.machine.report import BadBarrier, NotModelled
from tests.ptx.memory.clocks import View

if TYPE_CHECKING:
    from tests.ptx.machine.block import Block, Warp
    from tests.ptx.machine.decoded import Decoded


class Barrier:
    """One of them, since it was completed last.

    Attributes:
        expected: threads.
        waiting: threads that wait, with their events; ``arrived``: how many only arrived, and ``views`` what they told.
    """

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.waiting: dict[int, Decoded] = {}
        self.arrived = 0
        self.views: list[View] = []


class Barriers:
    """Those of one CTA."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._open: dict[int, Barrier] = {}

    def arrive(self, warp: Warp, decoded: Decoded, lanes: list[int]) -> bool:
        """Lanes come to a barrier. False where they have to wait."""
        block = self.block
        verb = decoded.parts[1]
        if verb not in ("sync", "arrive"):
            raise NotModelled(f"{block}: {decoded.where}")
        for (number, expected), group in self._groups(warp, decoded, lanes).items():
            barrier = self._open.get(number)
            if barrier is None:
                barrier = self._open[number] = Barrier(expected)
            elif barrier.expected != expected:
                raise BadBarrier(
                    f"{block.name_of(warp.first + group[0])}: {decoded.where}: barrier {number} of {expected} threads, "
                    f"of {barrier.expected} for others"
                )
            if verb == "sync":
                for lane in group:
                    barrier.waiting[warp.first + lane] = decoded
                warp.wait(decoded, group)
            else:
                barrier.arrived += len(group)
                barrier.views += [block.machine.memory.arrive(warp.agents[lane]) for lane in group]
                warp.go_on(group)
            self._complete(number, barrier)
        if warp.movable:
            return True
        block.machine.not_ready(warp)
        self.check_exit()
        block.check()
        return False

    def _groups(self, warp: Warp, decoded: Decoded, lanes: list[int]) -> dict[tuple[int, int], list[int]]:
        """Lanes by the number and the count of threads of their barrier."""
        whole = self.block.count
        if all(how == "imm" for how, _ in decoded.args):
            number, expected = (*(n for _, n in decoded.args), whole)[:2]
            groups = {(number, expected): lanes}
        else:
            groups = {}
            for lane in lanes:
                values = [value & 0xFFFFFFFF for value in warp.operands(lane, decoded)]
                number, expected = (*values, whole)[:2]
                groups.setdefault((number, expected), []).append(lane)
        for (number, expected), group in groups.items():
            if number > 15 or (expected % 32 and expected != whole) or expected > whole:
                raise BadBarrier(
                    f"{self.block.name_of(warp.first + group[0])}: {decoded.where}: barrier {number} of {expected} "
                    f"threads, in a CTA of {whole}"
                )
        return groups

    def _complete(self, number: int, barrier: Barrier) -> None:
        if len(barrier.waiting) + barrier.arrived < barrier.expected:
            return
        block = self.block
        self._check_aligned(barrier)
        threads = sorted(barrier.waiting)
        del self._open[number]
        if threads:
            agents = [block.agents[thread] for thread in threads]
            whole = len(threads) == block.count
            block.machine.memory.barrier(agents, agents[0].block_key if whole else None, barrier.views)
        block.resume(threads)

    def _check_aligned(self, barrier: Barrier) -> None:
        """All threads of a warp come to an aligned barrier by the same instruction."""
        if len(barrier.waiting) == self.block.count and len(set(barrier.waiting.values())) == 1:
            return
        for warp in self.block.warps:
            mine = [
                barrier.waiting[thread]
                for thread in range(warp.first, warp.first + warp.count)
                if thread in barrier.waiting
            ]
            aligned = [one for one in mine if one.parts[0] == "bar" or "aligned" in one.parts]
            if aligned and (len(mine) != warp.count or len({one.number for one in mine}) > 1):
                places = sorted({one.where for one in mine})
                raise BadBarrier(
                    f"{self.block} warp {warp.number}: {len(mine)} of {warp.count} lanes come to an aligned barrier, "
                    f"at {'; '.join(places)}"
                )

    def check_exit(self) -> None:
        """A barrier that waits for more threads than are left is never completed."""
        alive = self.block.alive
        for number, barrier in self._open.items():
            if barrier.waiting and barrier.expected > alive + barrier.arrived:
                raise BadBarrier(
                    f"{self.block}: barrier {number} waits for {barrier.expected} threads, and only {alive} have not "
                    f"exited:\n{self.block.where()}"
                )
