"""Who has heard of whose accesses: clocks of threads, warps, CTAs and ranks, and the views that releases carry.

An access has a stamp: its agent and the time of its CTA. Agent ``a`` has heard of an access when ``a``'s clock holds a
time that is not earlier for the other's thread, or for its warp or CTA (after a barrier), or when it knows that the
launch has ended. So a clock has an entry for each CTA or thread that was synchronised with, however many threads there
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tests.ptx.memory.operation import Scope

if TYPE_CHECKING:
    from tests.ptx.memory.histories import Cell, Message

#: entity: the time until which its accesses are known. Never changed once made: agents share it.
Clock = dict[int, int]
#: (cell, bytes of it as a mask): the place in the cell's order that was observed
Seen = dict[tuple["Cell", int], float]

HOST_KEY = 0
#: the number of a launch that never ends: what was done outside of kernels
_ENDLESS = 1 << 62


class Timer:
    """The time of one CTA, or of the host: it goes on with each release, so that stamps tell before from after."""

    __slots__ = ("time",)

    def __init__(self) -> None:
        self.time = 0


class View:
    """What a release tells: everything that the releasing agent had heard of, itself included.

    Attributes:
        fenced: what of it lies before a fence of the async proxy, of shared and of global memory. It counts for
            the CTA alone whose thread has executed the fence.
    """

    __slots__ = ("clock", "fenced", "seen")

    def __init__(self, clock: Clock, seen: Seen, fenced: tuple[View, View] | None = None) -> None:
        self.clock, self.seen, self.fenced = clock, seen, fenced


class Release:
    """One release pattern: the view of its first operation, that operation's scope, and who executed it."""

    __slots__ = ("agent", "scope", "view")

    def __init__(self, agent: Agent, scope: Scope, view: View) -> None:
        self.agent, self.scope, self.view = agent, scope, view


class Lanes(tuple["Agent", ...]):
    """Who reads together: a warp, or one agent. One is equal to itself only."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Agent:
    """A thread of a kernel, or the host (all host threads and proxies, which share one view).

    Attributes:
        clock, seen: what it has heard of.
        fences: for each scope the last fence, which later strong stores carry.
        fenced: what its CTA's bulk copies may be told of, by it (:class:`View`).
        over: of a bulk copy, what the thread that issued it had heard of: reads, which need no fence of a proxy before
            a copy overwrites what they have read.
        pending: strong reads that a later fence, or acquire of the same cell, completes to an acquire pattern.
        alone, warp: itself, and all of its warp.
        joint: whose a store is by which all of the warp store one value in one place: it is one write, of each of them.
    """

    __slots__ = (
        "_place",
        "alone",
        "block_key",
        "clock",
        "fenced",
        "fences",
        "joint",
        "key",
        "over",
        "pending",
        "rank",
        "rank_key",
        "seen",
        "sequence",
        "timer",
        "warp",
        "warp_key",
    )

    def __init__(
        self, place: tuple[str, int], rank: int, sequence: int, timer: Timer, keys: tuple[int, int, int, int]
    ) -> None:
        self._place, self.rank, self.sequence, self.timer = place, rank, sequence, timer
        self.key, self.warp_key, self.block_key, self.rank_key = keys
        self.clock: Clock = {}
        self.seen: Seen = {}
        self.fences: list[Release] = []
        self.fenced: tuple[View, View] | None = None
        self.over: Clock | None = None
        self.pending: list[tuple[Cell, Message]] = []
        self.warp = self.alone = Lanes((self,))
        self.joint = self

    @property
    def name(self) -> str:
        block, thread = self._place
        return f"{block} thread {thread}" if thread >= 0 else block


def host_agent() -> Agent:
    return Agent(("the host", -1), -1, _ENDLESS, Timer(), (HOST_KEY, HOST_KEY, HOST_KEY, HOST_KEY))


#: of what memory held at the start: everybody knows it, because its stamps are of time -1
NOBODY = Agent(("nobody", -1), -1, _ENDLESS, Timer(), (-1, -1, -1, -1))


def rank_key(rank: int) -> int:
    """The entity of all launches of a rank, whose time is the number of the last one that has ended."""
    return -2 - rank


def heard(clock: Clock, agent: Agent, time: int) -> bool:
    """Whether who has ``clock`` knows of ``agent``'s accesses of ``time``."""
    get = clock.get
    return (
        time < 0
        or get(agent.block_key, -1) >= time
        or get(agent.key, -1) >= time
        or get(agent.warp_key, -1) >= time
        or get(agent.rank_key, -1) >= agent.sequence
    )


def warp_heard(clock: Clock, agent: Agent, time: int) -> bool:
    """Whether who has ``clock`` knows of the accesses of ``time`` of ``agent``'s whole warp."""
    get = clock.get
    return (
        get(agent.block_key, -1) >= time or get(agent.warp_key, -1) >= time or get(agent.rank_key, -1) >= agent.sequence
    )


def all_heard(agents: Sequence[Agent], agent: Agent, time: int) -> bool:
    """Whether all of ``agents`` do. Most have the same clock, as one object."""
    if time < 0:
        return True
    known: Clock | None = None
    for one in agents:
        if one.clock is not known and one is not agent and one.joint is not agent:
            if not heard(one.clock, agent, time):
                return False
            known = one.clock
    return True


def includes(scope: Scope, agent: Agent, other: Agent) -> bool:
    """Whether ``scope``, of an operation of ``agent``, includes ``other``."""
    if scope == Scope.SYS:
        return True
    if scope == Scope.GPU:
        return agent.rank == other.rank
    return scope == Scope.CTA and agent.block_key == other.block_key


def merged(clocks: Iterable[Clock]) -> Clock:
    """The later time of each entity. Clocks that are the same object cost nothing."""
    distinct = list({id(clock): clock for clock in clocks}.values())
    if len(distinct) == 1:
        return distinct[0]
    whole = dict(distinct[0])
    for clock in distinct[1:]:
        for entity, time in clock.items():
            if whole.get(entity, -1) < time:
                whole[entity] = time
    return whole


def merged_seen(all_seen: Iterable[Seen]) -> Seen:
    distinct = list({id(seen): seen for seen in all_seen if seen}.values())
    if len(distinct) <= 1:
        return distinct[0] if distinct else {}
    whole = dict(distinct[0])
    for seen in distinct[1:]:
        for place, order in seen.items():
            if whole.get(place, -1.0) < order:
                whole[place] = order
    return whole


def merged_fenced(all_fenced: Iterable[tuple[View, View] | None]) -> tuple[View, View] | None:
    """What lies before a fence of any of them (:class:`View`)."""
    distinct = list({id(fenced): fenced for fenced in all_fenced if fenced}.values())
    if len(distinct) <= 1:
        return distinct[0] if distinct else None
    of_shared, of_global = (
        View(merged(view.clock for view in views), merged_seen(view.seen for view in views))
        for views in zip(*distinct, strict=True)
    )
    return of_shared, of_global


def join(agent: Agent, view: View) -> None:
    """``agent`` hears of everything in ``view``."""
    agent.clock = merged((agent.clock, view.clock))
    agent.seen = merged_seen((agent.seen, view.seen))
