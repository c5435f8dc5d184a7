"""Ranks, connections and faults in one thread, under a clock of its own: what :class:`.Membership` is proved on.

Connections keep their order and lose nothing until they are cut. A process that ends is seen on each of its connections
after all it had sent there; on a cut one, its end may be proven by other means, without what was lost.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from uccl_ep_serving.control_plane.membership import Membership
from uccl_ep_serving.control_plane.reports import Note, Report, Wait

__all__ = ["Crash", "Cut", "Fault", "GiveUp", "Stall", "World", "crowded_world"]

_STEP = 0.005
_DEAD, _GONE, _DOWN = "dead", "gone", "down"


@dataclass(frozen=True)
class Crash:
    """``rank`` ends at ``at`` seconds, after ``sends`` more of its messages are out."""

    rank: int
    at: float
    sends: int = 0


@dataclass(frozen=True)
class Cut:
    """The connection between two ranks is cut; each end notices after a while of its own, if its process runs."""

    pair: tuple[int, int]
    at: float
    notice: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Stall:
    """``rank`` does not run for a while."""

    rank: int
    at: float
    seconds: float


@dataclass(frozen=True)
class GiveUp:
    """An operation of ``rank`` reaches its deadline while it waits for ``peer``."""

    rank: int
    peer: int
    at: float


Fault = Crash | Cut | Stall | GiveUp


@dataclass
class _Rank:
    machine: Membership
    ended: bool = False
    sends_left: int = -1
    stalled_until: float = 0.0
    groups: list[tuple[int, frozenset[int]]] = field(default_factory=list)


class World:
    """``ranks`` machines of type ``machine``; ``waits``: by rank, for whom it waits when something fails.

    Attributes:
        notes, reports: that were sent, the latter in the former.
    """

    def __init__(
        self,
        ranks: int,
        faults: Sequence[Fault],
        seed: int,
        *,
        delay: float = 0.004,
        waits: dict[int, int] | None = None,
        machine: Callable[..., Membership] = Membership,
    ) -> None:
        self._draw = random.Random(seed)
        self._delay = delay
        self.now = 0.0
        self.notes = self.reports = 0
        self.waits = waits or {}
        self.ranks = [_Rank(machine(rank, ranks, lambda rank=rank: self._begin(rank))) for rank in range(ranks)]
        self._links: dict[tuple[int, int], deque[tuple[float, Note | str]]] = {
            (a, b): deque() for a in range(ranks) for b in range(ranks) if a != b
        }
        self._cut: set[frozenset[int]] = set()
        self._faults = sorted(faults, key=lambda fault: fault.at)

    def _begin(self, rank: int) -> Report:
        peer = self.waits.get(rank)
        return Report(waits=None if peer is None else Wait(peer))

    def run(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        end = self.now + seconds
        while self.now < end:
            while self._faults and self._faults[0].at <= self.now:
                self._strike(self._faults.pop(0))
            order = list(range(len(self.ranks)))
            self._draw.shuffle(order)
            for rank in order:
                self._let_run(rank)
            self.check_safety()
            self.now += _STEP

    def _strike(self, fault: Fault) -> None:
        if isinstance(fault, Crash):
            self.ranks[fault.rank].sends_left = fault.sends
            if not fault.sends:
                self._end(fault.rank)
        elif isinstance(fault, Cut):
            self._cut_link(fault)
        elif isinstance(fault, Stall):
            self.ranks[fault.rank].stalled_until = self.now + fault.seconds
        elif not self.ranks[fault.rank].ended:
            wait = Wait(fault.peer)
            self.ranks[fault.rank].machine.observe(lambda report: report.grown(gave_up=True, waits=wait), 0)

    def _cut_link(self, fault: Cut) -> None:
        pair = frozenset(fault.pair)
        if pair in self._cut:
            return
        self._cut.add(pair)
        for (a, b), notice in zip((fault.pair, fault.pair[::-1]), fault.notice, strict=True):
            under_way = self._links[a, b]
            for _ in range(self._draw.randint(0, len(under_way))):
                under_way.pop()
            if not self.ranks[a].ended:
                under_way.append((self.now + notice, _DOWN))

    def _end(self, rank: int) -> None:
        one = self.ranks[rank]
        if one.ended:
            return
        one.ended = True
        for (a, b), under_way in self._links.items():
            if a == rank:
                cut = frozenset((a, b)) in self._cut
                if not cut or self._draw.random() < 0.5:
                    last = under_way[-1][0] if under_way else self.now
                    under_way.append((max(last, self.now + self._draw.random() * self._delay), _GONE if cut else _DEAD))

    def _let_run(self, rank: int) -> None:
        one = self.ranks[rank]
        if one.ended or self.now < one.stalled_until:
            return
        machine = one.machine
        for (a, b), under_way in self._links.items():
            while b == rank and under_way and under_way[0][0] <= self.now:
                self._deliver(machine, a, under_way.popleft()[1])
        before = machine.number
        outgoing = machine.advance(self.now)
        for peer, note in outgoing:
            if one.sends_left == 0:
                self._end(rank)
                return
            one.sends_left -= 1
            self.notes += 1
            self.reports += len(note.reports)
            if frozenset((rank, peer)) in self._cut:
                continue
            again = Note.decode(rank, note.encode(), len(self.ranks))
            under_way = self._links[rank, peer]
            last = under_way[-1][0] if under_way else 0.0
            under_way.append((max(last, self.now + self._draw.random() * self._delay), again))
        if machine.number != before:
            one.groups.append((machine.number, machine.members))

    def _deliver(self, machine: Membership, by: int, what: Note | str) -> None:
        if isinstance(what, Note):
            machine.hear(by, what)
        elif what == _DEAD:
            machine.observe(lambda report: report.grown(dead={by}))
        elif what == _GONE:
            machine.observe(lambda report: report.grown(gone={by}))
        else:
            machine.observe(lambda report: report.grown(down={by}))

    # -- what must hold -------------------------------------------------------------------------------------------

    @property
    def going_on(self) -> list[int]:
        """Ranks that run at present and have not stopped."""
        return [
            rank
            for rank, one in enumerate(self.ranks)
            if not one.ended and not one.machine.stopped and self.now >= one.stalled_until
        ]

    def check_safety(self) -> None:
        """Groups that living ranks act on, or have acted on, follow each other, each a part of the last."""
        acted = {group for one in self.ranks if not one.ended for group in one.groups}
        chain = sorted(acted, key=lambda group: group[0])
        for (number, members), (later, fewer) in itertools.pairwise(chain):
            assert number != later, f"two groups {sorted(members)} and {sorted(fewer)} have number {number}"
            assert fewer < members, f"{sorted(fewer)} ({later}) is no part of {sorted(members)} ({number})"
        for rank, one in enumerate(self.ranks):
            assert rank in one.machine.members

    def check_one_group(self) -> frozenset[int]:
        """All ranks that go on are in one group, and nobody else is in it but who has just ended; returns it."""
        groups = {self.ranks[rank].machine.members for rank in self.going_on}
        assert len(groups) <= 1, f"ranks go on in {[sorted(group) for group in groups]}"
        return next(iter(groups), frozenset())


def crowded_world(seed: int, machine: Callable[..., Membership] = Membership) -> World:
    """Several faults within the few messages that an agreement takes, which is where it could go wrong."""
    draw = random.Random(seed)
    ranks, span = draw.randint(3, 6), draw.choice([0.02, 0.05, 0.1])
    faults: list[Fault] = []
    for _ in range(draw.randint(2, 6)):
        kind = draw.choice(["crash", "crash", "cut", "cut", "part", "stall"])
        one, at = draw.randrange(ranks), draw.random() * span
        if kind == "crash":
            faults.append(Crash(one, at, draw.randint(0, 12)))
        elif kind == "stall":
            faults.append(Stall(one, at, draw.random() * span * 4))
        else:
            side = {one} if kind == "cut" else set(draw.sample(range(ranks), draw.randint(1, ranks // 2)))
            others = [rank for rank in range(ranks) if rank not in side]
            for pair in [(a, b) for a in side for b in (others if kind == "part" else [draw.choice(others)])]:
                faults.append(Cut(pair, at, (draw.random() * span, draw.random() * span)))
    return World(ranks, faults, seed, delay=draw.choice([0.01, 0.02, 0.05]), machine=machine)
