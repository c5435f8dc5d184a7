"""How agents hear of each other: release and acquire patterns, fences, barriers. The rules of PTX ISA 8.8 and 8.9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.ptx.memory import clocks
from tests.ptx.memory.clocks import Agent, Clock, Release, Seen, Timer, View, heard, merged, merged_seen
from tests.ptx.memory.histories import Cell, Message
from tests.ptx.memory.operation import Operation, Scope
from tests.ptx.memory.visibility import HostSide


class Knowledge:
    """What every agent has heard of, and may no longer read anything older than."""

    def __init__(self, host: HostSide) -> None:
        self.host = host
        #: by rank: what the kernels of its stream that have ended knew
        self._streams: dict[int, View] = {}
        self._keys = 0
        #: by rank and number of the launch: where the entities of its threads begin
        self._first: dict[int, dict[int, int]] = {}
        #: what fences of a scope have told, in each domain that they are in
        self._fence_views: dict[tuple[Scope, Scope, int], View] = {}

    # -- launches

    def launched(self, launch: Any) -> None:
        """The host puts a kernel on a stream."""
        self.host.look(everywhere=True)
        launch.host = self.host.view()

    def begin(self, launch: Any) -> None:
        """A kernel starts: it knows what its stream did before, and what the host did before it launched."""
        self._first.setdefault(launch.rank, {})[launch.sequence] = self._keys * 256
        stream = self._streams.get(launch.rank)
        host = launch.host
        launch.clock = merged((stream.clock, host.clock)) if stream else host.clock
        launch.seen = merged_seen((stream.seen, host.seen)) if stream else host.seen
        # where a kernel ends, and where it starts, nothing is left for a fence to do
        before = View(launch.clock, launch.seen)
        launch.fenced = (before, before)

    def new_block(self, launch: Any, block: str, count: int) -> list[Agent]:
        """The agents of a block's threads. Entities of a rank have the same lowest byte."""
        warps = -(-count // 32)
        first, step = self._keys * 256 + launch.rank + 2, 256
        self._keys += 1 + 2 * warps + count
        timer, agents = Timer(), []
        for number in range(count):
            keys = (
                first + step * (1 + warps + number),
                first + step * (1 + number // 32),
                first,
                clocks.rank_key(launch.rank),
            )
            agent = Agent((block, number), launch.rank, launch.sequence, timer, keys)
            agent.clock, agent.seen, agent.fenced = launch.clock, launch.seen, launch.fenced
            agents.append(agent)
        for begin in range(0, count, 32):
            warp, one = clocks.Lanes(agents[begin : begin + 32]), agents[begin]
            keys = first + step * (1 + warps + count + begin // 32), one.warp_key, one.block_key, one.rank_key
            joint = Agent((f"{block} warp {begin // 32}", -1), launch.rank, launch.sequence, timer, keys)
            for agent in warp:
                agent.warp, agent.joint = warp, joint
        return agents

    def end(self, launch: Any, agents: Sequence[Agent]) -> None:
        """The kernel is over: the next one of its stream knows all it did."""
        clock = {**merged(agent.clock for agent in agents), clocks.rank_key(launch.rank): launch.sequence}
        self._streams[launch.rank] = View(self._without_ended(clock), merged_seen(agent.seen for agent in agents))

    def _without_ended(self, clock: Clock) -> Clock:
        """Entities of launches that ``clock`` knows to have ended tell nothing more."""
        bounds = {
            rank: first.get(clock[clocks.rank_key(rank)] + 1, self._keys * 256)
            for rank, first in self._first.items()
            if clocks.rank_key(rank) in clock
        }
        return {
            entity: time for entity, time in clock.items() if entity <= 0 or entity >= bounds.get((entity & 255) - 2, 0)
        }

    def host_waited(self, rank: int) -> None:
        """The host knows that everything on ``rank``'s stream has ended."""
        if rank in self._streams:
            self.host.hear(self._streams[rank])
            self.host.agent.clock = self._without_ended(self.host.agent.clock)

    # -- what is known

    def _heard_of(self, agent: Agent, message: Message) -> bool:
        return _is_own(message, agent) or heard(agent.clock, message.agent, message.time)

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
        clock = {**agent.clock, agent.key: timer.time, agent.joint.key: timer.time}
        timer.time += 1
        return Release(agent, scope, View(clock, agent.seen, agent.fenced))

    def _acquire(self, agent: Agent, scope: Scope, message: Message) -> None:
        for release in message.own + message.chain:
            if self._includes(scope, agent, release.agent) and self._includes(release.scope, release.agent, agent):
                clocks.join(agent, release.view)
                if release.agent.block_key == agent.block_key:
                    agent.fenced = clocks.merged_fenced((agent.fenced, release.view.fenced))

    def _patterns(self, agent: Agent, cell: Cell, mask: int, release: Release | None) -> tuple[Release, ...]:
        """The release patterns that a strong store of ``agent`` ends: for each scope the latest one."""
        found: dict[Scope, Release] = {}
        for message in reversed(cell.history):
            if _is_own(message, agent) and message.mask == mask:
                found = {one.scope: one for one in message.own}
                break
        found.update({one.scope: one for one in agent.fences})
        if release is not None:
            found[release.scope] = release
        return tuple(found.values())

    def _carried(self, source: Message, release: Release | None) -> tuple[Release, ...]:
        """Release patterns that go on through a read-modify-write, less those that its own release tells anyway."""
        found: dict[tuple[Agent, Scope], Release] = {}
        for one in source.chain + source.own:
            if release is None or release.scope < one.scope or not _holds(release.view, one):
                found[one.agent, one.scope] = one
        return tuple(found.values())

    # -- fences and barriers

    def fence(self, agents: Sequence[Agent], operation: Operation) -> None:
        """Completes acquire patterns, begins release patterns, and, ``sc``, hears of the earlier ones strong to it."""
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
                clock.pop(agent.joint.key, None)
                if entity == agent.block_key:
                    clock.pop(agent.warp_key, None)
        else:
            for agent in agents:
                clock[agent.key] = clock[agent.joint.key] = timer.time
        timer.time += 1
        fenced = clocks.merged_fenced([agent.fenced for agent in agents] + [view.fenced for view in views])
        for agent in agents:
            agent.clock, agent.seen, agent.fenced = clock, seen, fenced


def _is_own(message: Message, agent: Agent) -> bool:
    return message.agent is agent or message.agent is agent.joint


def _holds(view: View, release: Release) -> bool:
    """Whether who hears of ``view`` hears of ``release``."""
    return heard(view.clock, release.agent, release.view.clock[release.agent.key])
