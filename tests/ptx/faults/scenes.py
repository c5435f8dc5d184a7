"""What ranks do while a kernel of theirs is wrong: a program for each, small, on a machine that is hard on them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.ptx.machine.block import Warp
from tests.ptx.machine.machine import Machine
from tests.ptx.memory.weak import Weak
from tests.ptx.product import trials
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import TIMEOUT, ModelGroup, ModelRuntime
from tests.support.fake_ranks import HOSTILE
from tests.support.ll_cases import Case
from tests.support.ll_player import Player
from uccl_ep_serving.config import Settings
from uccl_ep_serving.protocol.message import HEADER_BYTES

#: Plays something on a machine with these kernels, this memory and this seed.
Play = Callable[[Compiled, str, int], Machine]
#: A fault is noticed within so many seeds of a scene or a failure; the kernels as they are pass ten times as many. Of
#: those in PTX none took more than four (benchmarks/results/kernel_faults.json, e9edf71), in the source some do.
WITHIN = 6
CASE = Case(tokens=4, experts=4, topk=2, counts=(4, 3))
THREE = replace(CASE, ranks=3, experts=6, counts=(2, 1, 1))
IN_ORDER, EXPANDED = replace(CASE, deterministic=True), replace(CASE, reduced=False)
#: Of a kernel's late stores the host gets to see so few that proxies look amid them: one in a fifth of its turns. Of
#: every other seed those come first that were stored last: a command before what it is about.
SETTLED = 0.2
#: Of the turns, at least so many are the proxies': else most are those of kernels that wait for them.
HOST_SHARE = 0.2
#: Steps of waiting after which the clock goes faster where writes are held back, and after which they complete.
_PATIENCE, _HELD = 400, 1500
#: Which writes are held back, by their bytes.
HELD: dict[str, Callable[[int], bool]] = {
    "messages": lambda nbytes: nbytes != HEADER_BYTES,
    "notices": lambda nbytes: nbytes == HEADER_BYTES,
}
#: Nothing is repeated: that would be something else than waiting.
SLOW = replace(HOSTILE, duplicate=0.0, linger=0.9)
#: Of the turns of a stalled program, so many are nobody's.
_STALL = 0.99
#: So often a proxy looks for what has completed, at once.
_POLLS = 50


def machine_of(memory: str, seed: int) -> Machine:
    """A machine that is hard on what kernels store late. Programs start in the order of their numbers, as CUDA's do:
    kernels that take their numbers have another text."""
    machine = trials.machine_of(memory, seed)
    machine.shuffled = False
    if isinstance(machine.memory, Weak):
        machine.memory.host.settled, machine.memory.host.newest_first = SETTLED, seed % 2 == 0
    return machine


def _stall(machine: Machine) -> None:
    turn = machine._warp_turn

    def some(warp: Warp) -> None:
        # no other exchange releases
        told = any("release.exch" in one.op for one in warp.stored)
        if not told or machine.random.random() >= _STALL:
            turn(warp)

    machine._warp_turn = some  # type: ignore[method-assign]


@dataclass(frozen=True)
class Scene:
    """Ranks that play a program (:class:`tests.support.ll_player.Player`) each.

    Attributes:
        path: of :data:`trials.PATHS`.
        channels: that a message is striped over.
        ring_slots: of each ring.
        held: of :data:`HELD`: those complete only when everybody has waited for long,
        until: or as soon as a rank has launched this kernel for the time of this number, from 0.
        stalled: programs that have told READY have few turns, so that what others do for their peer comes first.
        case: what they exchange.
    """

    name: str
    path: str
    programs: tuple[str, ...]
    channels: int = 1
    ring_slots: int = 1024
    held: str = ""
    until: tuple[str, int] | None = None
    stalled: bool = False
    case: Case = CASE

    def __str__(self) -> str:
        return f"{self.name}, {self.path}"

    def play(self, compiled: Compiled, memory: str, seed: int) -> Machine:
        """The machine on which all was right.

        Raises whatever is wrong, with the seed and the step.
        """
        machine = machine_of(memory, seed)
        if self.stalled:
            _stall(machine)
        if self.path == "proxied":
            machine.host_share = max(machine.host_share, HOST_SHARE)
        settings = Settings(timeout=TIMEOUT, window="host", channels=self.channels, ring_slots=self.ring_slots)
        with trials.group_of(
            machine, compiled, len(self.programs), self.path, settings, SLOW if self.held else HOSTILE
        ) as group:
            if self.held:
                hold(machine, group, HELD[self.held], _until(machine, group, *self.until) if self.until else None)

            def body(runtime: ModelRuntime) -> None:
                Player(group.low_latency(runtime), runtime.rank, self.case).play(self.programs[runtime.rank])

            group.run(body, limit_steps=trials.LIMIT_STEPS)
        return machine


def hold(
    machine: Machine,
    group: ModelGroup,
    wanted: Callable[[int], bool],
    back: Callable[[], bool] | None = None,
    patience: int = _PATIENCE,
) -> None:
    """Writes whose bytes are ``wanted`` are held back while ``back`` says so, by default until all have waited.

    Args:
        patience: of the machine.
    """
    machine.patience = patience
    back = back or (lambda: machine.waited < _HELD or machine.memory.behind)
    group.stepped = lambda: group.fabric.hold(wanted, back())


def _until(machine: Machine, group: ModelGroup, kernel: str, number: int) -> Callable[[], bool]:
    """What says that no rank has launched ``kernel`` for the time of this number. The proxies of one that has look at
    once for what has completed."""
    launched, launch = Counter[int](), group.launch

    def counted(one: Any) -> None:
        rank = group.calling
        launch(one)
        if one.kernel.fn.__name__ != kernel:
            return
        launched[rank] += 1
        if launched[rank] == number + 1:
            # before any thread of it looks, and then each sees that at once
            for _, proxy in itertools.product(range(_POLLS), range(group.settings.proxies)):
                group.step(rank, proxy)
            if isinstance(machine.memory, Weak):
                machine.memory.stale = 0.0

    group.launch = counted  # type: ignore[method-assign]
    return lambda: all(count <= number for count in launched.values())


def _layers(count: int) -> str:
    return " ".join(f"D d{number} C{number} c{number}" for number in range(count))


#: Two operations in flight, received in another order, so that acknowledgements travel in notices.
_TOGETHER = (
    "D D d0 d1 D D d2 d3 C0 C1 c0 c1 C2 C3 c2 c3",
    "D D d1 d0 D D d3 d2 C0 C1 c1 c0 C2 C3 c3 c2",
)
#: So many pairs of dispatches in flight that a fifth notice takes the slot of the first.
_PAIRS = " ".join(f"D D d{2 * number} d{2 * number + 1}" for number in range(6))
#: The same of combines.
_RETURNS = "D d0 " + " ".join(f"C0 C0 c{2 * number} c{2 * number + 1}" for number in range(6))
#: Both end with the operation whose notice is the fifth.
_FIFTH = " ".join(f"D D d{2 * number} d{2 * number + 1}" for number in range(5)) + " D d10"
_FIFTH_RETURN = "D d0 " + " ".join(f"C0 C0 c{2 * number} c{2 * number + 1}" for number in range(3)) + " C0 c6"
#: Where rows to one peer are packed, those to the other were, or are.
TWO_COMBINES = Scene(
    "two combines to two peers",
    "proxied",
    ("D D d0 d1 C0 C1 c0 c1",) * 3,
    channels=2,
    case=replace(THREE, counts=(4, 3, 4)),
)
#: Every command is put into a slot that had one before.
LAPS = Scene("laps", "proxied", (_layers(3),) * 2, ring_slots=2)
#: Kernels wait for room in the ring of two channels.
FULL_RING = Scene("a full ring", "proxied", (_layers(2),) * 2, channels=2, ring_slots=4)
#: A notice takes the last slot, or waits for it.
FULL_OF_NOTICES = Scene("notices in a full ring", "proxied", _TOGETHER, ring_slots=2)
SCENES = (
    Scene("a layer", "mapped", (_layers(1),) * 2),
    Scene("a layer", "proxied", (_layers(1),) * 2, channels=2),
    Scene("layers", "mapped", (_layers(3),) * 2),
    Scene("rows in order", "mapped", (_layers(2),) * 2, case=IN_ORDER),
    Scene("a row for each expert", "mapped", (_layers(2),) * 2, case=EXPANDED),
    Scene("layers", "proxied", (_layers(3),) * 2, channels=2),
    Scene("two in flight", "mapped", _TOGETHER),
    Scene("two in flight", "proxied", _TOGETHER, channels=2),
    # a dispatch is there, not received yet, whose header says that an earlier one is read, or a combine
    Scene("a dispatch behind another one", "mapped", ("D d0 D D d1 d2 D d3 D D d4 d5",) * 2),
    Scene("a combine behind a dispatch", "mapped", ("D d0 C0 C0 c0 c1 D C0 d1 c2",) * 2),
    Scene("a dispatch whose headers come last", "mapped", ("D d0",) * 2, stalled=True),
    Scene("dispatches that end late", "proxied", ("D d0 D D d1 d2",) * 2, held="messages"),
    Scene("combines that end late", "proxied", ("D d0 C0 C0 c0 c1",) * 2, held="messages"),
    Scene("notices of dispatches that end late", "proxied", (_PAIRS,) * 2, held="notices"),
    Scene("notices of combines that end late", "proxied", (_RETURNS,) * 2, held="notices"),
    Scene(
        "a notice of dispatches that ends in time",
        "proxied",
        (_FIFTH,) * 2,
        held="notices",
        until=("dispatch_send", 10),
    ),
    Scene(
        "a notice of combines that ends in time",
        "proxied",
        (_FIFTH_RETURN,) * 2,
        held="notices",
        until=("combine_send", 6),
    ),
    FULL_RING,
    FULL_OF_NOTICES,
    Scene("dispatches to two peers in a full ring", "proxied", ("D D d0 d1 D d2 D d3",) * 3, ring_slots=4, case=THREE),
    Scene(
        "combines to two peers in a full ring",
        "proxied",
        ("D D d0 d1 C0 C0 c0 C0 c1 c2",) * 3,
        ring_slots=4,
        case=THREE,
    ),
)
