"""What ranks do while a kernel of theirs is wrong: a program for each, small, on a machine that is hard on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.ptx.machine.machine import Machine
from tests.ptx.memory.weak import Weak
from tests.ptx.product import trials
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import TIMEOUT, ModelGroup, ModelRuntime
from tests.support.ll_cases import Case
from tests.support.ll_player import Player
from uccl_ep_serving.config import Settings
from uccl_ep_serving.proxy.stats import proxy_counters

#: Plays something on a machine with these kernels, this memory and this seed.
Play = Callable[[Compiled, str, int], Machine]
#: A fault is noticed within so many seeds of a scene; the kernels as they are pass ten times as many.
WITHIN = 3
CASE = Case(tokens=4, experts=4, topk=2, counts=(4, 3))
#: Of a kernel's late stores the host gets to see so few that proxies look amid them: one in a fifth of its turns. Of
#: every other seed those come first that were stored last: a command before what it is about.
_SETTLED = 0.2
#: Of the turns, at least so many are the proxies': else most are those of kernels that wait for them.
_HOST_SHARE = 0.2


@dataclass(frozen=True)
class Scene:
    """Ranks that play a program (:class:`tests.support.ll_player.Player`) each.

    Attributes:
        path: of :data:`trials.PATHS`.
        channels: that a message is striped over.
        ring_slots: of each ring.
        held: writes complete only when a kernel has waited for that.
    """

    name: str
    path: str
    programs: tuple[str, ...]
    channels: int = 1
    ring_slots: int = 1024
    held: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.path}"

    def play(self, compiled: Compiled, memory: str, seed: int) -> Machine:
        """The machine on which all was right.

        Raises whatever is wrong, with the seed and the step.
        """
        machine = trials.machine_of(memory, seed)
        if self.path == "proxied":
            machine.host_share = max(machine.host_share, _HOST_SHARE)
        if isinstance(machine.memory, Weak):
            machine.memory.host.settled, machine.memory.host.newest_first = _SETTLED, seed % 2 == 0
        settings = Settings(timeout=TIMEOUT, window="host", channels=self.channels, ring_slots=self.ring_slots)
        with trials.group_of(machine, compiled, len(self.programs), self.path, settings) as group:
            if self.held:
                machine.actor("who holds completions back", _holding(machine, group))
            machine.actor("who reads the proxies' counters", lambda: _no_ring_is_less_than_empty(group))

            def body(runtime: ModelRuntime) -> None:
                Player(group.low_latency(runtime), runtime.rank, CASE).play(self.programs[runtime.rank])

            group.run(body, limit_steps=trials.LIMIT_STEPS)
        return machine


def _holding(machine: Machine, group: ModelGroup) -> Callable[[], bool]:
    """No write completes but while a kernel waits for one, be it of another rank."""
    since: dict[object, int] = {}

    def step() -> bool:
        running = [one for rank in range(group.ranks) if (one := machine.running(rank))]
        asking = [one for one in running if one.kernel.program.name in _ASKING]
        for one in asking:
            since.setdefault(one, machine.steps)
        group.fabric.linger(not any(machine.steps - since[one] > _WAITS for one in asking))
        return False

    return step


def _no_ring_is_less_than_empty(group: ModelGroup) -> bool:
    """Whoever sees that a command was taken sees that it was put."""
    for service in group.services:
        for state in service.states:
            assert proxy_counters(state)["ring_depth"] >= 0, "the tail of a ring is ahead of its head"
    return False


def _layers(count: int) -> str:
    return " ".join(f"D d{number} C{number} c{number}" for number in range(count))


#: Two operations in flight, received in another order, so that acknowledgements travel in notices.
_TOGETHER = (
    "D D d0 d1 D D d2 d3 C0 C1 c0 c1 C2 C3 c2 c3",
    "D D d1 d0 D D d3 d2 C0 C1 c1 c0 C2 C3 c3 c2",
)
#: Kernels that wait until own writes are over, and steps after which they do nothing else.
_ASKING, _WAITS = ("uccl_ep_route", "uccl_ep_prepare_combine"), 3000
#: The cheapest first.
SCENES = (
    Scene("a layer", "mapped", (_layers(1),) * 2),
    Scene("a layer", "proxied", (_layers(1),) * 2, channels=2),
    Scene("layers", "mapped", (_layers(3),) * 2),
    Scene("layers", "proxied", (_layers(3),) * 2, channels=2, held=True),
    Scene("two in flight", "mapped", _TOGETHER),
    Scene("two in flight", "proxied", _TOGETHER, channels=2, held=True),
)
#: Every command is put into a slot that had one before.
LAPS = Scene("laps", "proxied", (_layers(3),) * 2, ring_slots=2)
#: Kernels wait for room in the ring of two channels.
FULL_RING = Scene("a full ring", "proxied", (_layers(2),) * 2, channels=2, ring_slots=4)
#: A notice takes the last slot, or waits for it.
FULL_OF_NOTICES = Scene("notices in a full ring", "proxied", _TOGETHER, ring_slots=2)
