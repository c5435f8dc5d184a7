"""What one rank does in one start of a comparison: open every backend, verify it, prove its path, then time it.

A round takes one sample of every backend, in the order of a Williams design, so that nobody always follows the same
one. A sample is the mean of the card's ``repeat`` layers without a pause, phase by phase, on each rank; what
counts is the slowest rank, of a phase and of the whole layer. A backend whose data is not the oracle's gets no figures.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from uccl_ep_serving.bench.launch import local_place
from uccl_ep_serving.bench.machine import describe, host_identity
from uccl_ep_serving.bench.measure import Group, back_to_back, call, order_of_round
from uccl_ep_serving.bench.problem import VARIANTS, FlatProblem, LowLatencyProblem, WrongData, payload
from uccl_ep_serving.bench.routing import Routing, trace_digest
from uccl_ep_serving.bench.subjects import Phases, Subject, timed
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.compare.backends import open_backend, read_counters, why_not
from uccl_ep_serving.compare.directory import variables
from uccl_ep_serving.compare.plan import Plan
from uccl_ep_serving.errors import in_words
from uccl_ep_serving.traffic.advice import device_name, transport_name

__all__ = ["measure_start"]

Progress = Callable[[int, str], None]
"""Told on rank 0: rounds that are done, and what is being done."""

#: Backends that are opened on CPU tensors, whatever the machine has.
_HOST_MEMORY = ("gloo", "gloo-gather", "mpi")
#: Between the seeds of two starts; a prime, so that users' own small seeds do not meet them.
_SEEDS = 1_000_003
#: Calls between two readings of the counters.
_COUNTED_CALLS = 8
#: What leaves after a call has returned is given so long to leave.
_SETTLE_SECONDS = 0.05
#: Variables that change what is measured, by how their names begin. Others may hold secrets.
_TELLING = ("UCCL_EP_", "NCCL_", "GLOO_", "OMPI_MCA_", "PRTE_MCA_", "UCX_", "FI_", "NVSHMEM_", "OMP_", "CUDA_VISIBLE_")


class _Slowed:
    """``subject``, each call lengthened by ``percent`` of its own time."""

    def __init__(self, subject: Subject, percent: float) -> None:
        self._subject, self._share, self.name = subject, percent / 100, subject.name
        self.touch, self.check, self.close = subject.touch, subject.check, subject.close
        self.buffer = getattr(subject, "buffer", None)

    @property
    def phases(self) -> Phases:
        return {name: self._lengthened(phase) for name, phase in self._subject.phases.items()}

    def _lengthened(self, phase: Callable[[int], None]) -> Callable[[int], None]:
        def lengthened(variant: int) -> None:
            begin = time.perf_counter()
            phase(variant)
            end = time.perf_counter()
            end += (end - begin) * self._share
            while time.perf_counter() < end:
                pass

        return lengthened


def _device() -> torch.device:
    """The GPU of this rank where every rank of this host has one, else the CPU. Raises ConfigError."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, here = local_place(os.environ)
    if torch.cuda.device_count() < here:
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _other_memory(backend: str, device: torch.device) -> str:
    """Why ``backend`` would not do the same work as those whose rows lie on ``device``, "" when it would."""
    if device.type == "cuda" and backend in _HOST_MEMORY:
        return "it moves rows of host memory, and those of the others lie on GPUs"
    return ""


class _Start:
    """One start on one rank."""

    def __init__(self, plan: Plan, group: Group, progress: Progress) -> None:
        self.plan, self.group, self._progress = plan, group, progress
        self.rank = group.exchange.rank
        self.subjects: dict[str, Subject] = {}
        self.paths: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self.distance: dict[str, float] = {}

    def tell(self, done: int, what: str) -> None:
        if self.rank == 0:
            self._progress(done, what)

    def reasons(self, reason: str) -> str:
        """What any rank has to say, "" when none has."""
        found: dict[str, list[int]] = {}
        for rank, text in enumerate(self.group.gather(reason)):
            if text:
                found.setdefault(text, []).append(rank)
        every = self.group.exchange.size
        return "; ".join(
            text if len(ranks) == every else f"{text} (rank {', '.join(map(str, ranks))})"
            for text, ranks in found.items()
        )

    def open(
        self, names: Sequence[str], flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
    ) -> None:
        """Open every backend that can run on every rank; keep the reasons of the others."""
        for name in names:
            self.tell(0, f"opening {name}")
            backend = Plan.backend_of(name)
            reason = self.reasons(why_not(backend, self.plan.card) or _other_memory(backend, device))
            if reason:
                self.skipped[name] = reason
                continue
            subject, reason = None, ""
            try:
                subject = open_backend(backend, self.plan.card, flat, low_latency, device)
            # whatever a library raises that loads and cannot work here: the others are compared without it
            except Exception as error:
                reason = f"it cannot be opened: {in_words(error)}"
            if reason := self.reasons(reason):
                self.skipped[name] = reason
                if subject is not None:
                    subject.close()
                continue
            assert subject is not None
            buffer = getattr(subject, "buffer", None)
            if isinstance(buffer, Buffer):
                self.paths[name] = transport_name(buffer.stats())
            percent = (self.plan.slowed or {}).get(name, 0.0)
            self.subjects[name] = _Slowed(subject, percent) if percent else subject

    def verify(self, when: str) -> None:
        """Compare what every backend delivers with the oracle; who is wrong on any rank is measured on none."""
        for name, subject in list(self.subjects.items()):
            self.tell(0, f"verifying {name}")
            problem = ""
            for variant in range(VARIANTS):
                call(subject, variant)
                try:
                    distance = subject.check(variant)
                    self.distance[name] = max(self.distance.get(name, 0.0), distance)
                except WrongData as error:
                    problem = problem or str(error)
            problem = self.reasons(problem)
            if problem:
                self.wrong[name] = f"{when}: {problem}"
                self.subjects.pop(name).close()

    def count(self) -> dict[str, dict[str, float]]:
        """By backend and counter, what all ranks together add to it in one layer."""
        moved = {}
        for name, subject in self.subjects.items():
            self.tell(0, f"counting what {name} moves")
            before = self._counters(subject)
            for number in range(_COUNTED_CALLS):
                call(subject, number % VARIANTS)
            after = self._counters(subject)
            by_rank = self.group.gather({key: after[key] - before.get(key, 0) for key in after})
            keys = sorted({key for one in by_rank for key in one})
            moved[name] = {key: sum(one.get(key, 0) for one in by_rank) / _COUNTED_CALLS for key in keys}
        return moved

    def _counters(self, subject: Subject) -> dict[str, float]:
        self.group.meet()
        time.sleep(_SETTLE_SECONDS)
        counters = read_counters(subject)
        # nobody goes on before everybody has read: receiving makes a rank send as well
        self.group.meet()
        return counters

    def sample(self) -> dict[str, dict[str, list[float]]]:
        """Microseconds of this rank, by backend, phase and round."""
        card, names = self.plan.card, list(self.subjects)
        samples: dict[str, dict[str, list[float]]] = {
            name: {phase: [] for phase in timed(subject) if phase != "layout"}
            for name, subject in self.subjects.items()
        }
        for number in range(card.warmup + card.iterations):
            measured = number - card.warmup
            self.tell(max(measured, 0), "warming up" if measured < 0 else "measuring")
            for name in order_of_round(names, number):
                subject, variant = self.subjects[name], number % VARIANTS
                call(subject, (variant + 1) % VARIANTS)
                taken = back_to_back(subject, self.group, variant, card.repeat, checked=False)
                # others count inside the dispatch
                if "layout" in taken:
                    taken["dispatch"] += taken.pop("layout")
                if measured >= 0:
                    for phase, nanoseconds in taken.items():
                        samples[name][phase].append(round(nanoseconds / 1000, 2))
        self.tell(card.iterations, "verifying")
        return samples


def _machines(group: Group, before: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """By host, in the order of their first ranks: what it is, and which ranks it holds."""
    hosts: dict[str, dict[str, Any]] = {}
    machine = {**before, "load_after": describe()["load"]}
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device), "driver": f"cuda_{torch.version.cuda}"}
    for rank, one in enumerate(group.gather({"host": host_identity(), "machine": machine})):
        entry = hosts.setdefault(one["host"], {**one["machine"], "ranks": []})
        entry["ranks"].append(rank)
    return list(hosts.values())


def _digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for one in tensors:
        found.update(payload(one).numpy().tobytes())
    return found.hexdigest()


def measure_start(plan: Plan, number: int, progress: Progress = lambda done, what: None) -> dict[str, Any] | None:
    """Measure ``plan`` once, as one rank of the default process group of torch.distributed. Collective.

    Args:
        number: of the start, from 1; kept with the result.
        progress: called on rank 0, between the timed calls.

    Returns:
        Plain values on rank 0, None on the others.

    Raises:
        WrongData: the ranks were not given one routing.
        UcclEpError: a Buffer could not be opened, or an operation failed.
    """
    torch.set_num_threads(1)
    # another draw of inputs and routing in each start: what is said then holds for more than one of them
    card = replace(plan.card, seed=plan.card.seed + _SEEDS * (number - 1))
    group = Group.default()
    machine = describe()
    start = _Start(plan, group, progress)
    start.tell(0, "inputs and the oracle's answers")
    routing = Routing.draw(card)
    digest = _digest(*routing.topk_idx, *routing.topk_weights)
    if len(set(group.gather(digest))) != 1:
        raise WrongData(f"the ranks drew different routes: {digest[:16]} on rank {start.rank}")
    flat = FlatProblem(card, routing, start.rank)
    low_latency = LowLatencyProblem(card, routing, start.rank) if card.mode == "low-latency" else None
    inputs = _digest(*(low_latency.x if low_latency else flat.x))
    device = _device()
    try:
        # who is opened first has its memory and its threads elsewhere: not always the same one
        start.open(order_of_round(plan.backends, number - 1), flat, low_latency, device)
        start.verify("before timing")
        moved = start.count()
        samples = start.sample()
        start.verify("after timing")
    finally:
        for subject in start.subjects.values():
            subject.close()
    gathered = group.gather({"samples": samples, "distance": start.distance, "inputs": inputs, "device": device.type})
    machines = _machines(group, machine, device)
    if start.rank:
        return None
    return {
        "plan": plan.digest,
        "start": number,
        "machines": machines,
        "environment": variables(_TELLING),
        "device": device_name(device),
        "devices": sorted({one["device"] for one in gathered}),
        "routing": digest,
        "trace": trace_digest(card),
        "inputs": hashlib.sha256("".join(one["inputs"] for one in gathered).encode()).hexdigest(),
        "paths": start.paths,
        "skipped": start.skipped,
        "wrong": start.wrong,
        "distance": {name: max(one["distance"].get(name, 0.0) for one in gathered) for name in start.subjects},
        "moved": {name: moved[name] for name in start.subjects},
        "samples_us": {name: _by_rank([one["samples"][name] for one in gathered]) for name in start.subjects},
    }


def _by_rank(ranks: Sequence[Mapping[str, list[float]]]) -> dict[str, list[list[float]]]:
    """By phase and rank, the rounds' samples."""
    return {phase: [one[phase] for one in ranks] for phase in ranks[0]}
