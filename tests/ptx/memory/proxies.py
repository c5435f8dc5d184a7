"""What bulk copies know, and who knows of them: the async proxy of each CTA.

A bulk copy is no access of the thread that issued it (PTX ISA, Asynchronous operations; Proxies). So it has agents of
its own, one that reads and one that writes:

* They know what the issuing thread knew, less what no ``fence.proxy.async`` stands behind. The fence may be that of any
  thread of the CTA, before or after the barrier that tells the issuing one; one of another CTA counts for nothing.
* What a CTA's copies have written needs no fence for others of its copies, and for no thread: a copy ends with one.
* What the host or a NIC writes while the kernel runs is known like a peer's writes: by an acquire, and then a fence.
* What was read needs none to be overwritten: a load is over when its value is there.
* Nobody knows of a copy before it is told that it is complete: by a phase of an mbarrier, or by ``wait_group``, with
  ``.read`` of what the copy has read alone.
* The host, and kernels behind this one on its stream, know of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.ptx.memory import clocks
from tests.ptx.memory.clocks import Agent, Clock, Timer, View, heard, merged
from tests.ptx.memory.knowledge import Knowledge

#: An access: whose it is, and its time.
Stamp = tuple[Agent, int]


class Proxies(Knowledge):
    """The part of weak memory that bulk copies and mbarriers ask."""

    def new_entity(self, rank: int) -> int:
        """Of copies that are told of one after another: an entry of clocks."""
        self._keys += 1
        return (self._keys - 1) * 256 + rank + 2

    def fence_proxy(self, agents: Sequence[Agent], shared: bool, everywhere: bool) -> None:
        """fence.proxy.async, of ``shared`` memory, and of global memory (``everywhere``)."""
        for agent in agents:
            now = self.arrive(agent)
            before = agent.fenced
            assert before
            fenced = [
                self._together((old, now)) if wanted else old
                for old, wanted in zip(before, (shared, everywhere), strict=True)
            ]
            agent.fenced = fenced[0], fenced[1]

    def copier(
        self, issuer: Agent, name: str, keys: tuple[int, int], time: int, to_shared: bool, launch: Any
    ) -> tuple[Agent, Agent]:
        """Who reads, and who writes, for a copy that ``issuer`` issues now.

        Args:
            keys: entities of what is read and what is written.
            time: of the copy; who knows of it in an entity knows of the earlier ones.
        """
        now = self.arrive(issuer)
        fenced = issuer.fenced
        assert fenced
        agents = []
        for key, view in zip(keys, reversed(fenced) if to_shared else fenced, strict=True):
            timer = Timer()
            timer.time = time
            agent = Agent(
                (name, -1), issuer.rank, launch.sequence, timer, (key, key, key, clocks.rank_key(issuer.rank))
            )
            agent.clock, agent.seen = view.clock, view.seen
            agents.append(agent)
        reader, writer = agents
        writer.over = now.clock
        return reader, writer

    def stamp(self, agent: Agent) -> Stamp:
        """What ``agent`` does now."""
        return agent, agent.timer.time

    def knows(self, agent: Agent, stamp: Stamp) -> bool:
        who, time = stamp
        return who is agent or heard(agent.clock, who, time)

    def proxy_knows(self, agent: Agent, stamp: Stamp) -> bool:
        """Whether copies that ``agent`` issues know of what happened in shared memory."""
        assert agent.fenced
        return heard(agent.fenced[0].clock, *stamp)

    def told_by_copies(self, times: Clock) -> View:
        """That copies are complete, by entity: generic and to other copies."""
        told = View(times, {})
        return View(times, {}, (told, told))

    def hear(self, agent: Agent, views: Sequence[View]) -> None:
        """``agent`` is told of ``views``, by an mbarrier of its CTA, or of its own copies."""
        agent.clock = merged((agent.clock, *(view.clock for view in views)))
        agent.seen = clocks.merged_seen((agent.seen, *(view.seen for view in views)))
        agent.fenced = clocks.merged_fenced((agent.fenced, *(view.fenced for view in views)))

    def united(self, views: Sequence[View]) -> View:
        """All of ``views`` as one."""
        whole = self._together(views)
        return View(whole.clock, whole.seen, clocks.merged_fenced(view.fenced for view in views))
