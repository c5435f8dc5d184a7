"""What one rank of a benchmark does: open every subject, measure them in turn, verify every sample.

A round measures each subject once, starting with another one each time. A measured call follows an unmeasured one, so
that proxies and caches are as in a running engine, sends what has just been read, and starts at the same instant on all
ranks of one host. Its time is that of the slowest rank. Its result is then compared with the oracle's (in back-to-back
runs only the result of the last call); a mismatch on any rank ends the run on all. Beside the phases of a subject
stands their sum, ``layer``: what a layer of a model waits for, the layout and the exchange of counts included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from uccl_ep_serving.bench.card import PATHS, Card
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.measure import Group, back_to_back, call, from_rest, order_of_round
from uccl_ep_serving.bench.peers import open_peer, why_not
from uccl_ep_serving.bench.problem import VARIANTS, FlatProblem, LowLatencyProblem, WrongData
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.bench.statistics import all_ratios, summary
from uccl_ep_serving.bench.subjects import (
    LowLatencySubject,
    MemcpySubject,
    NormalSubject,
    Subject,
    UnpackSubject,
    timed,
)
from uccl_ep_serving.bench.wire import Wire, count_wire, per_token_expert
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.variables import SETTINGS

__all__ = ["run_card", "settings_of"]

_PAGE = 4096
#: By the word of a result: all phases of a call together.
LAYER = "layer"


def _progress(rank: int, text: str) -> None:
    if rank == 0:
        print(f"bench: {text}", file=sys.stderr, flush=True)


def settings_of(card: Card, options: Mapping[str, Any]) -> Settings:
    """The environment's settings with ``options``, and room for the received rows of a few calls."""
    chosen = Settings.from_environment(**options)
    if card.mode != "normal":
        return chosen
    row = max(card.row_bytes, card.combine_row_bytes) + 1024
    heap = -(-4 * card.ranks * card.tokens * row // _PAGE) * _PAGE
    return Settings.from_environment(**{**options, "heap_bytes": max(chosen.heap_bytes, heap)})


def _open_ours(
    card: Card, path: str, group: Group, flat: FlatProblem, low_latency: LowLatencyProblem | None
) -> Subject:
    buffer = Buffer(group.exchange, low_latency_mode=low_latency is not None, settings=settings_of(card, PATHS[path]))
    device = torch.device("cpu")
    if low_latency is None:
        return NormalSubject(path, buffer, flat, device)
    return LowLatencySubject(path, buffer, low_latency, device, card.weights_at_dispatch)


def _measure(subject: Subject, group: Group, variant: int, repeat: int) -> tuple[dict[str, int], float]:
    """Nanoseconds of each phase on this rank, and the distance of the last call from the oracle."""
    call(subject, (variant + 1) % VARIANTS)
    taken = (
        from_rest(subject, group, variant)
        if repeat == 1
        else back_to_back(subject, group, variant, repeat, checked=True)
    )
    distance, problem = 0.0, ""
    try:
        distance = subject.check(variant)
    except WrongData as error:
        problem = str(error)
    group.agree(problem)
    return {**taken, LAYER: sum(taken.values())}, distance


def _rounds(
    card: Card, group: Group, subjects: Mapping[str, Subject]
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Microseconds of the slowest rank by subject and phase, and what was verified by subject."""
    samples: dict[str, dict[str, list[int]]] = {
        name: {phase: [] for phase in (*timed(subject), LAYER)} for name, subject in subjects.items()
    }
    verified = {name: {"calls": 0, "distance": 0.0} for name in subjects}
    for number in range(card.warmup + card.iterations):
        for name in order_of_round(list(subjects), number):
            taken, distance = _measure(subjects[name], group, number % VARIANTS, card.repeat)
            verified[name]["calls"] += 1
            verified[name]["distance"] = max(verified[name]["distance"], distance)
            if number >= card.warmup:
                for phase, nanoseconds in taken.items():
                    samples[name][phase].append(nanoseconds)
    by_rank = group.gather(samples)
    slowest = {
        name: {
            phase: [max(column) / 1000 for column in zip(*(one[name][phase] for one in by_rank), strict=True)]
            for phase in phases
        }
        for name, phases in samples.items()
    }
    distances = group.gather({name: entry["distance"] for name, entry in verified.items()})
    for name, entry in verified.items():
        entry["distance"] = max(one[name] for one in distances)
    return slowest, verified


def _open_all(card: Card, group: Group) -> tuple[dict[str, Subject], dict[str, str]]:
    """Subjects by name in the order of the tables, and peers that cannot run with their reasons."""
    rank = group.exchange.rank
    _progress(rank, f"card {card.name}: inputs and the oracle's answers")
    routing = Routing.draw(card)
    flat = FlatProblem(card, routing, rank)
    low_latency = LowLatencyProblem(card, routing, rank) if card.mode == "low-latency" else None
    subjects: dict[str, Subject] = {}
    for path in card.paths:
        _progress(rank, f"opening {path}")
        subjects[path] = _open_ours(card, path, group, flat, low_latency)
    subjects["memcpy"] = MemcpySubject(flat)
    if low_latency is not None:
        subjects["unpack"] = UnpackSubject(flat, low_latency)
    skipped = {}
    for name in card.against:
        reasons = group.gather(why_not(name, card))
        found = sorted({reason for reason in reasons if reason})
        if found:
            skipped[name] = "; ".join(found)
            _progress(rank, f"{name} is skipped: {skipped[name]}")
        else:
            subjects[name] = open_peer(name, card, flat, low_latency)
    return subjects, skipped


def _wire(card: Card, group: Group, subjects: Mapping[str, Subject]) -> dict[str, dict[str, dict[str, float]]]:
    counted: dict[str, dict[str, Wire]] = {}
    for path in card.paths:
        subject: Any = subjects[path]
        counted[path] = count_wire(subject, subject.buffer, group.meet, group.gather)
    counted["one per (token, expert)"] = per_token_expert(card, Routing.draw(card))
    return {name: {phase: wire._asdict() for phase, wire in wires.items()} for name, wires in counted.items()}


def run_card(card: Card, wrap: Callable[[Subject], Subject] = lambda subject: subject) -> dict[str, Any] | None:
    """Measure ``card`` on the ranks of the default process group. Collective.

    Args:
        card: with as many ranks as the group has.
        wrap: replaces each subject; tests use it to corrupt data.

    Returns:
        The result (plain values, microseconds) on rank 0, None on the others.

    Raises:
        WrongData: on every rank, when any rank's data differed from the oracle's.
        UcclEpError: a Buffer could not be opened, or an operation failed.
    """
    torch.set_num_threads(1)
    group = Group.default()
    rank = group.exchange.rank
    machine = describe()
    opened, skipped = _open_all(card, group)
    subjects = {name: wrap(subject) for name, subject in opened.items()}
    try:
        _progress(rank, f"{card.warmup} + {card.iterations} rounds of {', '.join(subjects)}")
        samples, verified = _rounds(card, group, subjects)
        wire = _wire(card, group, subjects)
    finally:
        for subject in opened.values():
            subject.close()
    if rank:
        return None
    return {
        "card": card.as_dict(),
        "machine": {**machine, "load_after": describe()["load"]},
        "settings": {
            path: {variable.name: getattr(settings_of(card, PATHS[path]), variable.field) for variable in SETTINGS}
            for path in card.paths
        },
        "common_start": group.common_clock,
        "us": {name: {phase: summary(values) for phase, values in one.items()} for name, one in samples.items()},
        "ratio": all_ratios(samples, card.paths),
        "wire": wire,
        "verified": verified,
        "skipped": skipped,
        "samples_us": samples,
    }
