"""How one rank samples a subject: the group of ranks that starts together, calls from rest and back to back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench.machine import host_identity
from uccl_ep_serving.bench.problem import WrongData
from uccl_ep_serving.bench.subjects import EXPERTS, Subject, timed
from uccl_ep_serving.control_plane.bootstrap import TorchExchange

__all__ = ["Group", "back_to_back", "call", "from_rest", "order_of_round"]

#: How far ahead the common start of a measured call lies: longer than a broadcast among the ranks of one host takes,
#: shorter than an idle proxy waits before it sleeps long.
_LEAD_NS = 300_000


@dataclass(frozen=True)
class Group:
    """The ranks of a run: the default process group, used between the measured calls only.

    Attributes:
        exchange: how they tell each other bytes. common_clock: all run on one host, with a core each.
    """

    exchange: TorchExchange
    common_clock: bool

    @classmethod
    def default(cls) -> Group:
        """The group that torch.distributed was initialised with. Collective."""
        group = dist.group.WORLD
        assert group is not None
        exchange = TorchExchange(group)
        hosts = set(exchange.all_gather(host_identity().encode()))
        # with more ranks than cores, spinning towards a common start would keep the others from getting there
        return cls(exchange, len(hosts) == 1 and exchange.size <= len(os.sched_getaffinity(0)))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain values), by rank."""
        return [json.loads(one) for one in self.exchange.all_gather(json.dumps(value).encode())]

    def meet(self) -> None:
        """A barrier."""
        dist.barrier()

    def start_together(self) -> None:
        """Return at the same instant on all ranks, or shortly after a barrier where they share no clock."""
        dist.barrier()
        if not self.common_clock:
            return
        start = torch.tensor([time.monotonic_ns() + _LEAD_NS])
        dist.broadcast(start, 0)
        instant = int(start.item())
        while time.monotonic_ns() < instant:
            pass

    def agree(self, problem: str) -> None:
        """Raise WrongData on all ranks when one has something to say."""
        found = [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(problem)) if text]
        if found:
            raise WrongData("; ".join(found))


def call(subject: Subject, variant: int) -> None:
    """All phases of ``subject`` once."""
    for phase in subject.phases.values():
        phase(variant)


def from_rest(subject: Subject, group: Group, variant: int) -> dict[str, int]:
    """Nanoseconds of each phase on this rank, each started at the same instant on all ranks."""
    taken = {}
    for name, phase in subject.phases.items():
        if name == EXPERTS:
            phase(variant)
            continue
        subject.touch(name, variant)
        group.start_together()
        begin = time.monotonic_ns()
        phase(variant)
        taken[name] = time.monotonic_ns() - begin
    return taken


def back_to_back(subject: Subject, group: Group, variant: int, repeat: int, *, checked: bool) -> dict[str, int]:
    """Mean nanoseconds of each phase on this rank over ``repeat`` rounds without a pause.

    Args:
        checked: the last result will be held to the oracle. Laying out what the experts return for it fills caches, of
            which the combine behind it takes up to a tenth longer: whose figures are compared with others is not
            checked.
    """
    taken = dict.fromkeys(timed(subject), 0)
    phases = list(subject.phases.items())
    group.start_together()
    for number in range(repeat):
        for name, phase in phases:
            if name == EXPERTS:
                # the others take as long whatever the rows hold
                if checked and number == repeat - 1:
                    phase(variant)
                continue
            begin = time.monotonic_ns()
            phase(variant)
            taken[name] += time.monotonic_ns() - begin
    return {name: total // repeat for name, total in taken.items()}


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Who is sampled when in round ``number``: each is first, and follows each other one, equally often
    over twice as many rounds as there are names.

    The rows of a Williams design, then the same turned round. Where the same one always came next, what was left to it
    in caches made one of two equals 1.5 % slower.
    """
    count = len(names)
    # 0, 1, n - 1, 2, n - 2, ...: every difference of neighbours comes once
    zigzag = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    order = [names[(place + number) % count] for place in zigzag]
    return order[::-1] if number // count % 2 else order
