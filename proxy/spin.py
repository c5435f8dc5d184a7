"""How long an idle proxy keeps its core, polling, before it yields and sleeps.

A GPU cannot wake a thread. MoE layers come some 100 us apart, so a proxy that sleeps in between meets every message of
a step asleep: picking it up takes tens of microseconds instead of one, at both ends. But a proxy that spins takes a
core, and where ranks have none to spare it takes the one that they compute on (measured: three spinning loops on two
cores are 67 times slower than yielding ones).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import cgroup

__all__ = ["Cores", "Spin", "bound_by_openmp", "choose_spin", "own_cores"]

#: Longer than the time between two layers and between two decode steps; an engine without requests sleeps soon.
_SPIN_NS = 10_000_000
#: Cores for each proxy that may run on them: the rank itself, its engine's threads and a NIC's interrupts want theirs.
_CORES_PER_PROXY = 4
#: Variables of OpenMP by which it binds threads to cores (GNU's, and Intel's and LLVM's).
_OPENMP_BINDS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_UNBOUND = ("", "false", "none", "disabled")


class Cores(msgspec.Struct, frozen=True, array_like=True):
    """What the proxies of a rank may use, which it tells the other ranks of its host.

    Attributes:
        cpus: numbers of the cores that they may run on.
        quotas: cores' worth of CPU time that its cgroup, and those above it, may use, by the identity of the cgroup:
            what it shares with every other rank in it, wherever that one runs.
    """

    cpus: frozenset[int]
    quotas: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Spin:
    """What was chosen: nanoseconds, 0 = not at all, and why, in words."""

    nanoseconds: int
    reason: str


def choose_spin(wanted: str, mine: Cores, others: Sequence[Cores] = (), *, proxies: int, named_cores: int = 0) -> Spin:
    """How long idle proxies spin.

    Args:
        wanted: UCCL_EP_PROXY_SPIN.
        mine, others: what the proxies of this rank, and of each other rank of this host, may use. Who shares none of
            it, such as ranks that are bound to cores of their own, does not count.
        proxies: of each rank.
        named_cores: different cores that UCCL_EP_PROXY_CPUS names, 0 = none.
    """
    if wanted == "off":
        return Spin(0, "off (UCCL_EP_PROXY_SPIN)")
    if wanted != "auto":
        return Spin(int(float(wanted) * 1e6), f"{wanted} ms (UCCL_EP_PROXY_SPIN)")
    # cores and the proxies that share them: those of the affinity, then those that each quota pays for
    limits = [(float(len(mine.cpus)), proxies * (1 + sum(bool(one.cpus & mine.cpus) for one in others)))]
    limits += [
        (quota, proxies * (1 + sum(group in one.quotas for one in others))) for group, quota in mine.quotas.items()
    ]
    # dealt to all ranks of the host, wherever they are bound
    if 0 < named_cores < (dealt := proxies * (1 + len(others))):
        return Spin(0, f"off: {dealt} proxies share the {named_cores} cores of UCCL_EP_PROXY_CPUS")
    cores, threads = min(limits, key=lambda limit: limit[0] / limit[1])
    whom = f"{cores:g} cores for the {threads} {'proxy' if threads == 1 else 'proxies'} on them"
    if cores < _CORES_PER_PROXY * threads:
        return Spin(0, f"off: {whom}, {_CORES_PER_PROXY} each are needed")
    return Spin(_SPIN_NS, f"{_SPIN_NS // 1_000_000} ms: {whom}")


def bound_by_openmp(cores: Cores, environment: Mapping[str, str]) -> str:
    """In words, that OpenMP has bound this thread to one core, and with it all that it starts; "" where it has not.

    It does so with the thread that loads it: importing torch is enough.
    """
    names = [name for name in _OPENMP_BINDS if environment.get(name, "").lower() not in _UNBOUND]
    if len(cores.cpus) != 1 or not names:
        return ""
    return (
        f"core {min(cores.cpus)} alone, which they share with the thread that builds the Buffer. Likely cause: "
        f"{names[0]}={environment[names[0]]}, by which OpenMP binds that thread. Next step: unset it, or give the "
        "proxies cores of their own with UCCL_EP_PROXY_CPUS"
    )


def own_cores(groups: Path = cgroup.GROUPS, own: Path = cgroup.OWN) -> Cores:
    """What this process may use: the cores of its affinity, and the quotas of its cgroup and those above it."""
    return Cores(frozenset(os.sched_getaffinity(0)), cgroup.quotas(groups, own))
