"""Low latency on the model machine, held to the oracle: one seed chooses the schedule, the memory and its adversary."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.ptx.machine.machine import Machine
from tests.ptx.memory.sequential import Sequential
from tests.ptx.memory.weak import Weak
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import TIMEOUT, ModelGroup, ModelRuntime
from tests.support import ll_cases, normal_cases
from tests.support.bits import check_bits
from tests.support.fake_ranks import HOSTILE
from tests.support.ll_cases import Case
from tests.support.ll_player import Player
from uccl_ep_serving.config import Settings
from uccl_ep_serving.proxy.transport.fake import Adversary

#: Kernels write mapped windows themselves, or a proxy does, over the fake transport at its worst.
PATHS = ("mapped", "proxied")
#: What moves rows of normal mode over mapped windows.
COPIES = ("triton", "tma")
#: Sequentially consistent, or as weak as PTX allows.
MEMORIES = ("sequential", "weak")
#: Steps after which a run of two ranks is taken for one that never ends; a few thousand are usual of low latency.
LIMIT_STEPS = 2_000_000


@dataclass(frozen=True)
class Outcome:
    """Of a run that was right.

    Attributes:
        digest: of all steps; the same seed gives the same.
        steps: turns of warps, hosts and proxies.
    """

    digest: str
    steps: int


def machine_of(memory: str, seed: int) -> Machine:
    """A machine whose habits follow from the seed: how long turns are, who goes together, how old a value may be."""
    choose = random.Random(f"habits {seed}")
    model = Weak(stale=choose.choice((0.2, 0.5, 0.9)), lag=choose.choice((0.0, 0.002, 0.02)))
    return Machine(
        seed,
        model if memory == "weak" else Sequential(),
        resident=choose.choice((1, 2, 8)),
        shuffled=choose.random() < 0.5,
        burst=choose.choice((0.05, 0.3, 0.8)),
        parting=choose.choice((0.0, 0.05, 0.2)),
        host_share=choose.choice((0.02, 0.1, 0.3)),
        # the first turn of a host compiles
        host_limit_s=600.0,
    )


def group_of(
    machine: Machine,
    compiled: Compiled,
    ranks: int,
    path: str,
    settings: Settings | None = None,
    adversary: Adversary = HOSTILE,
    **options: Any,
) -> ModelGroup:
    """``ranks`` ranks that reach each other by ``path``; ``options`` of the group."""
    return ModelGroup(
        machine,
        compiled,
        ranks,
        seed=machine.seed,
        adversary=adversary,
        settings=settings,
        mapped=lambda rank, peer: path == "mapped",
        **options,
    )


def play(
    compiled: Compiled, memory: str, path: str, cases: Sequence[Case], programs: Sequence[str], seed: int
) -> Outcome:
    """Each rank plays its program (:class:`Player`) of dispatches of ``cases`` in turn.

    Raises whatever is wrong, with the seed and the step.
    """
    machine = machine_of(memory, seed)
    with group_of(machine, compiled, len(programs), path) as group:

        def body(runtime: ModelRuntime) -> None:
            low_latency = group.low_latency(runtime)
            for case in cases:
                ll_cases.reserve(low_latency, case)
            Player(low_latency, runtime.rank, *cases).play(programs[runtime.rank])

        group.run(body, limit_steps=LIMIT_STEPS)
    return Outcome(machine.digest(), machine.steps)


def layers(compiled: Compiled, memory: str, path: str, case: Case, seed: int, count: int = 2) -> Outcome:
    """``count`` dispatches, each with its combine, on every rank: no hooks, one after another."""
    machine = machine_of(memory, seed)
    cases = [replace(case, seed=number) for number in range(count)]
    with group_of(machine, compiled, case.ranks, path) as group:

        def body(runtime: ModelRuntime) -> None:
            low_latency: Any = group.low_latency(runtime)
            for one in cases:
                inputs = one.inputs()
                combined = ll_cases.run_rank(one, low_latency, runtime.rank, inputs)
                ll_cases.check_combined(one, inputs, runtime.rank, combined)

        group.run(body, limit_steps=LIMIT_STEPS)
    return Outcome(machine.digest(), machine.steps)


#: Rings of a few rows, which are used many times in an operation.
NARROW = {"heap": 0, "rounds": 8192, "chunk": 4096, "depth": 1}


def exchange(
    compiled: Compiled,
    memory: str,
    path: str,
    case: normal_cases.Case,
    seed: int,
    narrow: bool = False,
    node_ranks: int = 1,
    settings: Settings | None = None,
    copies: Sequence[str] = ("triton",),
) -> Outcome:
    """Normal mode: :func:`round_trips`.

    Args:
        narrow: through rings of a few rows.
        node_ranks: more than 1: rows cross once to nodes of so many ranks, over proxies, whatever ``path`` says.
        copies: by rank, in turn: UCCL_EP_COPY.
    """
    machine = machine_of(memory, seed)
    settings = settings or Settings(timeout=TIMEOUT, window="host", programs=2)
    if "tma" in copies:
        # those kernels are CUDA's, whose programs start in order: they take no numbers
        machine.shuffled = False
    options: dict[str, Any] = {"sizes": NARROW} if narrow else {}
    with group_of(machine, compiled, case.ranks, path, settings, node_ranks=node_ranks, **options) as group:

        def body(runtime: ModelRuntime) -> None:
            runtime.settings = replace(runtime.settings, copy=copies[runtime.rank % len(copies)])
            round_trips(group.normal_mode(runtime), runtime.rank, case)

        # six ranks have needed 2,049,102, through rings of a few rows
        group.run(body, limit_steps=LIMIT_STEPS // 2 * case.ranks)
    return Outcome(machine.digest(), machine.steps)


def round_trips(normal: Any, rank: int, case: normal_cases.Case) -> None:
    """A dispatch and its combine, of a size that is read back and of ids that are counted by what opens it; the same
    again with a promise, of a layout; and from the handle of that, with a bias for tokens without rows."""
    inputs, worst = case.inputs(), sum(case.tokens)
    for promised in (0, worst):
        outcome = normal_cases.round_trip(normal, inputs, rank, counted=promised > 0, num_worst_tokens=promised)
        normal_cases.check_rank(inputs, rank, outcome, worst=promised)
    again, *_ = normal.dispatch(inputs.rows(rank), handle=outcome.handle)
    rows = again[0] if isinstance(again, tuple) else again
    nowhere = (inputs.topk_idx[rank] < 0).all(dim=1, keepdim=True)
    # minus zero changes no bit of what it is added to
    bias = torch.where(nowhere, 0.5, -torch.zeros_like(outcome.combined))
    back, *_ = normal.combine(normal_cases.expert_outputs(rows, rank), outcome.handle, bias=bias)
    check_bits(f"combined again, rank {rank}", back, torch.where(nowhere, bias, outcome.combined))
