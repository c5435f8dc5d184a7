"""Seeded cases on the ``fake`` transport: a few ranks in one process, their production proxies, a wire that misbehaves.

A seed decides everything that is chosen (ranks, channels, proxies, ring, shapes, routing, modes, adversary); threads
interleave as they please, so a case may be repeated to meet the same interleaving again.

What must hold, by what the wire does:

``recovers``
    reorder, delay, repeat, complete late, refuse for now: every operation of every rank equals the oracle.
``drop``, ``lose``, ``kill``
    a write fails and its sender is told; a write vanishes; a rank vanishes. Every rank either finishes, with data
    equal to the oracle up to there, or raises an error of ours, in bounded time; nothing wrong is ever returned. After
    a kill the error of at least one survivor names the dead rank, unless nobody needed it any more.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.soak.soak_samples import Sample, sample
from tests.support import ll_cases, normal_cases
from tests.support.direct_ranks import DirectRuntime
from tests.support.fake_ranks import FakeGroup
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import PeerError, UcclEpError
from uccl_ep_serving.kernels.cpu.normal import NORMAL_NODES
from uccl_ep_serving.kernels.select import cpu_groups
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.native.groups import load
from uccl_ep_serving.protocol.layout import LowLatencyPlan, LowLatencyRoom, NormalPlan
from uccl_ep_serving.proxy.transport.fake import Adversary

__all__ = ["AdversarialCase", "Failed", "Result", "Stretch", "draw", "run_case", "stretch"]

TROUBLES = ("recovers", "recovers", "recovers", "drop", "lose", "kill")
#: Seconds that one wait may last, by trouble: short where only the deadline can end it.
TIMEOUTS = {"recovers": 60.0, "drop": 5.0, "lose": 0.5, "kill": 5.0}
#: Seconds beyond the deadlines for building, computing and the oracle, on a busy machine.
SLACK = 60.0
FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": torch.float16},
    {"dtype": torch.float32},
    {"fp8": True},
    {"fp8": True, "round_scale": True},
    {"fp8": True, "round_scale": True, "ue8m0": True},
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
ROUTINGS = ("random", "random", "holes", "none", "one", "last", "far", "twice")


class Failed(AssertionError):
    """A case did not end as it must."""


class _Killed(UcclEpError):
    """This rank is the one that the adversary killed: a process would not exist any more."""


@dataclass(frozen=True)
class AdversarialCase:
    """One group and what it does. ``operations`` are round trips (dispatch and combine), in order, the same on all
    ranks."""

    seed: int
    ranks: int
    trouble: str
    adversary: Adversary
    settings: Settings
    plan: LowLatencyPlan
    normal: NormalPlan
    operations: tuple[ll_cases.Case | normal_cases.Case, ...]
    hosts: int  # ranks per host that map each other's window; 1 = none do

    @property
    def node_ranks(self) -> int:
        """Ranks of a node: those of a host, where all hosts have as many."""
        return self.hosts if self.ranks % self.hosts == 0 else 1

    def __str__(self) -> str:
        modes = "".join("l" if isinstance(one, ll_cases.Case) else "n" for one in self.operations)
        settings = self.settings
        return (
            f"seed {self.seed}: {self.trouble}, {self.ranks} ranks, {settings.channels} channels, {settings.proxies} "
            f"proxies, ring of {settings.ring_slots}, quantum {settings.quantum}, {self.hosts} ranks a host, "
            f"nodes of {self.node_ranks}, modes "
            f"{modes}, hidden {self.plan.hidden}, {self.plan.experts} experts, top-{self.plan.topk}, {self.adversary}"
        )


@dataclass
class Result:
    """How a case ended: ``finished`` ranks, and what the others raised, by rank; wall and processor seconds."""

    seconds: float
    busy: float = 0.0
    finished: list[int] = field(default_factory=list)
    errors: dict[int, UcclEpError] = field(default_factory=dict)


def draw(seed: int) -> AdversarialCase:
    """The case of a seed."""
    dice = random.Random(seed)
    trouble = dice.choice(TROUBLES)
    ranks = dice.choices((2, 3, 4, 5, 8), (8, 6, 3, 1, 1))[0]
    channels = dice.choice((1, 1, 2, 3, 5, 16))
    proxies = dice.randint(1, min(3, channels))
    topk = dice.randint(1, 6)
    local = dice.randint(max(1, -(-topk // ranks)), 6)
    # UE8M0 scales are packed by four blocks of 128
    hidden, tokens = dice.choice((128, 256, 512, 1024)), dice.choice((1, 4, 8, 24))
    formats = [one for one in FORMATS if not one.get("ue8m0") or hidden % 512 == 0]
    settings = Settings(
        timeout=TIMEOUTS[trouble],
        channels=channels,
        proxies=proxies,
        ring_slots=max(dice.choice((2, 8, 64, 4096)), 2),
        quantum=dice.choice((4096, 16384, 1 << 20)),
        writes_in_flight=dice.choice((1, 3, 64, 4096)),
    )
    return AdversarialCase(
        seed=seed,
        ranks=ranks,
        trouble=trouble,
        adversary=_adversary(dice, trouble, ranks),
        settings=settings,
        plan=LowLatencyPlan(ranks, tokens, hidden, ranks * local, topk, 4),
        normal=NormalPlan(
            ranks,
            64,
            heap=dice.choice((4096, 256 << 10, 4 << 20)),
            rounds=96 << 10,
            chunk=dice.choice((8192, 65536)),
            depth=dice.choice((1, 2, 4)),
        ),
        operations=tuple(
            _low_latency(dice, ranks, tokens, hidden, local, topk, formats)
            if mode
            else _normal(dice, ranks, hidden, local, topk)
            for mode in dice.choices((True, False), k=dice.randint(2, 6))
        ),
        # a dead rank's kernels would go on writing the windows they map: only a real kill shows that (system tests)
        hosts=dice.choice((1, 1, 2)) if trouble == "recovers" else 1,
    )


def _adversary(dice: random.Random, trouble: str, ranks: int) -> Adversary:
    hostile: dict[str, Any] = {
        "reorder": dice.choice((0.0, 0.3, 0.7)),
        "delay": dice.choice((0.0, 0.1, 0.5)),
        "duplicate": dice.choice((0.0, 0.3, 0.6)),
        "linger": dice.choice((0.0, 0.5, 0.95)),
        "busy": dice.choice((0.0, 0.1, 0.5)),
    }
    if trouble in ("drop", "lose"):
        hostile[trouble] = dice.choice((0.01, 0.05, 0.3))
    if trouble == "kill":
        hostile |= {"kill": dice.randrange(ranks), "kill_after": dice.randint(1, 60)}
    return Adversary(**hostile)


def _low_latency(
    dice: random.Random,
    ranks: int,
    tokens: int,
    hidden: int,
    local: int,
    topk: int,
    formats: list[dict[str, Any]],
) -> ll_cases.Case:
    return ll_cases.Case(
        ranks=ranks,
        tokens=tokens,
        hidden=hidden,
        experts=ranks * local,
        topk=topk,
        counts=tuple(dice.choice((0, 1, tokens, dice.randint(0, tokens))) for _ in range(ranks)),
        routing=dice.choice(ROUTINGS),
        reduced=dice.random() < 0.5,
        seed=dice.randrange(1 << 30),
        **dice.choice(formats),
    )


def _normal(dice: random.Random, ranks: int, hidden: int, local: int, topk: int) -> normal_cases.Case:
    return normal_cases.Case(
        tokens=tuple(dice.choice((0, 1, dice.randint(2, 60))) for _ in range(ranks)),
        hidden=hidden,
        experts=ranks * local,
        topk=topk,
        dtype=dice.choice(DTYPES),
        lost=dice.choice((0.0, 0.2, 0.9)),
        hot=dice.randrange(ranks) if topk <= local and dice.random() < 0.2 else -1,
        seed=dice.randrange(1 << 30),
    )


class _Group(FakeGroup):
    """A fake group whose windows have room for the case's low-latency plan from the start."""

    def __init__(self, case: AdversarialCase) -> None:
        self._plan = case.plan
        hosts = case.hosts
        super().__init__(
            case.ranks,
            adversary=case.adversary,
            seed=case.seed,
            normal=case.normal,
            settings=case.settings,
            mapped=lambda rank, peer: hosts > 1 and rank // hosts == peer // hosts,
        )
        # normal mode then crosses once to each node
        self.node_ranks = case.node_ranks

    def build(self, room: LowLatencyRoom | None) -> None:
        super().build(room or self._plan.room)


def run_case(case: AdversarialCase) -> Result:
    """Run a case in threads of this process and hold its end against what must hold.

    Raises:
        Failed: wrong data, an error that is not ours, a thread that does not end, or an end that the trouble does not
            explain. The message tells which.
    """
    started, busy = time.monotonic(), time.process_time()
    inputs = [one.inputs() for one in case.operations]
    with _Group(case) as group:
        result = _run(case, group, inputs)
    result.seconds, result.busy = time.monotonic() - started, time.process_time() - busy
    _judge(case, result)
    return result


def _run(case: AdversarialCase, group: FakeGroup, inputs: list[Any]) -> Result:
    result = Result(0.0)
    wrong: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            runtime = DirectRuntime(group, rank, case.settings)
            _end_when_killed(runtime, group)
            _operate(case, runtime, inputs)
            result.finished.append(rank)
        except UcclEpError as error:
            result.errors[rank] = error.with_traceback(None)  # frames would keep the windows alive
            group.fabric.kill(rank)  # an engine's process ends on such an error, and its peers see that
        except BaseException as error:
            wrong[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(case.ranks)]
    deadline = time.monotonic() + 2 * case.settings.timeout + SLACK
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if late := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        raise Failed(f"ranks {late} are still at it after two deadlines: a wait without bound")
    for rank, error in wrong.items():
        raise Failed(f"rank {rank}: {type(error).__name__}: {error}") from error
    return result


def _end_when_killed(runtime: DirectRuntime, group: FakeGroup) -> None:
    """Waits of a rank that the adversary killed end at once: there is nobody left to wait."""
    space = runtime.space
    check = space.watch

    def watch() -> None:
        if not group.fabric.alive(space.rank):
            raise _Killed(f"rank {space.rank} was killed")
        check()

    space.watch = watch


def _operate(case: AdversarialCase, runtime: Any, inputs: list[Any]) -> None:
    """Every operation of one rank, each checked at once: what comes before an error must be right too."""
    low_latency, normal = LowLatency(runtime), Normal(runtime)
    for one, given in zip(case.operations, inputs, strict=True):
        if isinstance(one, ll_cases.Case):
            combined = ll_cases.run_rank(one, low_latency, runtime.rank, given)
            ll_cases.check_combined(one, given, runtime.rank, combined)
        else:
            outcome = normal_cases.round_trip(normal, given, runtime.rank)
            normal_cases.check_rank(given, runtime.rank, outcome)


def _judge(case: AdversarialCase, result: Result) -> None:
    errors, dead = result.errors, case.adversary.kill
    # in the order in which they were raised: the later ones are often consequences of the first
    told = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())
    if case.trouble == "recovers" and errors:
        raise Failed(f"this wire loses nothing, but {told}")
    survivors = {rank: error for rank, error in errors.items() if rank != dead}
    named = any(isinstance(error, PeerError) and error.peer == dead for error in survivors.values())
    if case.trouble == "kill" and survivors and not named:
        raise Failed(f"rank {dead} was killed and no error names it: {told}")
    if case.trouble == "lose" and any(not isinstance(error, PeerError) for error in errors.values()):
        raise Failed(f"a lost write must end in the error of a peer, but {told}")


@dataclass
class Stretch:
    """What became of some seeds.

    Attributes:
        ends: (trouble, what the ranks raised, or "finished") -> number of cases.
        slowest: (wall seconds, processor seconds, case in words) of the slowest case.
        operations: round trips that ranks were asked for.
        held: what the process holds afterwards.
        failure: why the last seed failed, with its case in words; "" when all ended as they must.
    """

    held: Sample
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: tuple[float, float, str] = (0.0, 0.0, "")
    operations: int = 0
    failure: str = ""


def stretch(_exchange: object, seeds: range, repeat: int) -> Stretch:
    """Run the cases of ``seeds``, each ``repeat`` times, up to the first that fails."""
    load(*cpu_groups(), NORMAL_NODES)  # compiled before the first deadline runs
    done = Stretch(sample(seeds.start))
    for seed in seeds:
        case = draw(seed)
        for _ in range(repeat):
            try:
                result = run_case(case)
            except Exception as error:
                done.failure = f"{case}\n{type(error).__name__}: {error}"
                return done
            raised = {type(error).__name__.strip("_") for error in result.errors.values()}
            done.ends[case.trouble, ", ".join(sorted(raised)) or "finished"] += 1
            done.operations += len(case.operations) * case.ranks
            done.slowest = max(done.slowest, (result.seconds, result.busy, str(case)))
    gc.collect()  # windows hang in cycles of threads and groups, which would look like growth
    done.held = sample(seeds.stop)
    return done
