"""Each rule of the memory model taken out: a litmus test notices, and so would notice the rule's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.ptx.litmus import programs
from tests.ptx.litmus.tests import ALL
from tests.ptx.memory import clocks
from tests.ptx.memory.clocks import Agent, Clock, Release, View
from tests.ptx.memory.histories import Cell, Message
from tests.ptx.memory.operation import Operation, Scope
from tests.ptx.memory.weak import Weak

TESTS = {test.name: test for test in ALL}
SEEDS = range(16)


class ScopesDoNotCount(Weak):
    def _includes(self, scope: Scope, agent: Agent, other: Agent) -> bool:
        return True


class EverythingIsStrong(Weak):
    def _morally_strong(self, agent: Agent, operation: Operation, mask: int, message: Message) -> bool:
        return True


class ReleaseForgets(Weak):
    def _release(self, agent: Agent, scope: Scope) -> Release:
        super()._release(agent, scope)
        return Release(agent, scope, View({agent.key: -1}, {}))


class ReleaseIsNotCumulative(Weak):
    def _release(self, agent: Agent, scope: Scope) -> Release:
        own = super()._release(agent, scope).view.clock[agent.key]
        return Release(agent, scope, View({agent.key: own}, {}))


class AcquireHearsNothing(Weak):
    def _acquire(self, agent: Agent, scope: Scope, message: Message) -> None:
        pass


class BarrierJoinsNobody(Weak):
    def barrier(self, agents: Sequence[Agent], entity: int | None, arrived: Sequence[View] = ()) -> None:
        pass


class ArrivingTellsNothing(Weak):
    def arrive(self, agent: Agent) -> View:
        return View({}, {})


class NothingSeenCounts(Weak):
    def _is_floor(self, agent: Agent, cell: Cell, message: Message) -> bool:
        return self._heard_of(agent, message)


class SeenIsNotToldOn(Weak):
    def _release(self, agent: Agent, scope: Scope) -> Release:
        release = super()._release(agent, scope)
        return Release(agent, scope, View(release.view.clock, {}))


class ModifyingEndsTheSequence(Weak):
    def _carried(self, source: Message, release: Release | None) -> tuple[Release, ...]:
        return ()


class ModifyingReadsAnything(Weak):
    def _source(self, agent: Agent, cell: Cell, mask: int, operation: Operation) -> tuple[Message | None, int]:
        return self.random.choice(self._options(agent, cell, mask)), -1


class ModifyingReadsTheLast(Weak):
    def _place(self, agent: Agent, cell: Cell, value: int, mask: int, operation: Operation) -> int:
        return -1 if operation.kind == "atomic" else super()._place(agent, cell, value, mask, operation)


class StoresEndTheSequence(Weak):
    def _patterns(self, agent: Agent, cell: Cell, mask: int, release: Release | None) -> tuple[Release, ...]:
        return tuple(agent.fences) + ((release,) if release else ())


class FencesReleaseNothing(Weak):
    def fence(self, agents: Sequence[Agent], operation: Operation) -> None:
        super().fence(agents, operation)
        for agent in agents:
            agent.fences = []


class ReductionsAcquire(Weak):
    def _observe(self, agent: Agent, cell: Cell, message: Message, mask: int, operation: Operation) -> None:
        super()._observe(agent, cell, message, mask, replace(operation, reduces=False))


class FencesAcquireNothing(Weak):
    def fence(self, agents: Sequence[Agent], operation: Operation) -> None:
        for agent in agents:
            agent.pending = []
        super().fence(agents, operation)


class FencesAreInNoOrder(Weak):
    def _hear_fences(self, agent: Agent, scope: Scope) -> None:
        pass


class FencesAreOfAnyScope(Weak):
    def _hear_fences(self, agent: Agent, scope: Scope) -> None:
        for view in self._fence_views.values():
            clocks.join(agent, view)


class StoresGoToTheEnd(Weak):
    def _place(self, agent: Agent, cell: Cell, value: int, mask: int, operation: Operation) -> int:
        return -1


class StoresGoAnywhere(Weak):
    def _is_floor(self, agent: Agent, cell: Cell, message: Message) -> bool:
        return message.agent is not agent and super()._is_floor(agent, cell, message)


class LoadsReadTheLast(Weak):
    def _options(self, agent: Agent, cell: Cell, mask: int) -> list[Message]:
        return super()._options(agent, cell, mask)[:1]


class CopiesKnowWhatTheirThreadKnows(Weak):
    def copier(
        self, issuer: Agent, name: str, keys: tuple[int, int], time: int, to_shared: bool, launch: object
    ) -> tuple[Agent, Agent]:
        agents = super().copier(issuer, name, keys, time, to_shared, launch)
        for agent in agents:
            agent.clock = agents[1].over or {}
        return agents


class CopiesAreNeverTold(Weak):
    def told_by_copies(self, times: Clock) -> View:
        return View({}, {})


class CopiesAreToldToThreadsOnly(Weak):
    def told_by_copies(self, times: Clock) -> View:
        return View(times, {})


class FencesOfProxiesDoNothing(Weak):
    def fence_proxy(self, agents: Sequence[Agent], shared: bool, everywhere: bool) -> None:
        pass


class FencesOfProxiesAreOfAllMemory(Weak):
    def fence_proxy(self, agents: Sequence[Agent], shared: bool, everywhere: bool) -> None:
        super().fence_proxy(agents, True, True)


class FencesOfProxiesCountInOtherCtas(Weak):
    def _acquire(self, agent: Agent, scope: Scope, message: Message) -> None:
        super()._acquire(agent, scope, message)
        for release in message.own:
            agent.fenced = clocks.merged_fenced((agent.fenced, release.view.fenced))


class BarriersTellNoFences(Weak):
    def barrier(self, agents: Sequence[Agent], entity: int | None, arrived: Sequence[View] = ()) -> None:
        before = [agent.fenced for agent in agents]
        super().barrier(agents, entity, arrived)
        for agent, fenced in zip(agents, before, strict=True):
            agent.fenced = fenced


#: the mutant, and the tests that must change their minds
MUTANTS: tuple[tuple[type[Weak], tuple[str, ...]], ...] = (
    (ScopesDoNotCount, ("MP cta between CTAs", "MP gpu between ranks", "bar, then release.gpu")),
    (EverythingIsStrong, ("CoRR weak", "CoRR gpu between ranks")),
    (ReleaseForgets, ("MP release, acquire", "MP fences", "the last to arrive", "ring")),
    (ReleaseIsNotCumulative, ("ISA2", "bar, then release")),
    (AcquireHearsNothing, ("MP release, acquire", "MP fences")),
    (BarrierJoinsNobody, ("bar", "bar, then release", "acquire, then bar")),
    (ArrivingTellsNothing, ("bar, of one that arrives",)),
    (NothingSeenCounts, ("CoRR", "CoRW2")),
    (SeenIsNotToldOn, ("CoRR, told",)),
    (ModifyingEndsTheSequence, ("release sequence",)),
    (ModifyingReadsAnything, ("atomicity", "exchange")),
    (ModifyingReadsTheLast, ("MP read by an atomic", "SB read by atomics", "S exchange")),
    (StoresEndTheSequence, ("release sequence, own store",)),
    (FencesReleaseNothing, ("MP fences", "MP fence, acquire")),
    (FencesAcquireNothing, ("MP fences", "MP release, fence")),
    (ReductionsAcquire, ("the last to arrive, by a reduction",)),
    (FencesAreInNoOrder, ("SB sc", "IRIW sc", "R sc")),
    (FencesAreOfAnyScope, ("SB sc.cta", "SB sc.gpu between ranks")),
    (StoresGoToTheEnd, ("2+2W relaxed", "S relaxed")),
    (StoresGoAnywhere, ("CoWR",)),
    (LoadsReadTheLast, ("MP relaxed", "SB relaxed", "CoRR weak")),
    (CopiesKnowWhatTheirThreadKnows, ("bulk without a fence", "MP bulk read without a fence")),
    (CopiesAreNeverTold, ("MP bulk waited for", "bulk once the phase is over")),
    (CopiesAreToldToThreadsOnly, ("bulk in and out again",)),
    (FencesOfProxiesDoNothing, ("bulk behind a fence", "MP bulk read behind a fence")),
    (
        FencesOfProxiesAreOfAllMemory,
        ("bulk behind a fence of global memory", "MP bulk read behind a fence of shared memory"),
    ),
    (FencesOfProxiesCountInOtherCtas, ("MP bulk read behind a fence of another CTA",)),
    (BarriersTellNoFences, ("bulk behind a fence and a barrier",)),
)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [(mutant, name) for mutant, names in MUTANTS for name in names],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_litmus_test_notices(mutant: type[Weak], name: str) -> None:
    test = TESTS[name]
    found = programs.outcomes(test, SEEDS, lambda: mutant(stale=0.7, races="ignore"))
    if test.allowed:
        assert programs.outcomes(test, SEEDS, lambda: Weak(stale=0.7, races="ignore"))[True], "of too few seeds"
    assert bool(found[True]) != (test.allowed and not test.beyond), (
        f"{test.outcome}: {found[True]} of {found.total()} runs"
    )
