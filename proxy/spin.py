"""How long an idle proxy keeps its core, polling, before it yields and sleeps.

A GPU cannot wake a thread. MoE layers come some 100 us apart, so a proxy that sleeps in between meets every message of
a step asleep: picking it up takes tens of microseconds instead of one, at both ends. But a proxy that spins takes a
core, and where ranks have none to spare it takes the one that they compute on (measured: three spinning loops on two
cores are 67 times slower than yielding ones).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Spin", "available_cores", "choose_spin"]

#: Longer than the time between two layers and between two decode steps; an engine without requests sleeps soon.
_SPIN_NS = 10_000_000
#: Cores that this process may use, for each proxy of the host: the rank itself, its engine's threads and a NIC's
#: interrupts want theirs.
_CORES_PER_PROXY = 4
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Spin:
    """What was chosen: nanoseconds, 0 = not at all, and why, in words."""

    nanoseconds: int
    reason: str


def choose_spin(wanted: str, *, cores: int, proxies: int, local_ranks: int, named_cores: int = 0) -> Spin:
    """How long idle proxies spin.

    Args:
        wanted: UCCL_EP_PROXY_SPIN.
        cores: that this process may use.
        proxies, local_ranks: of each rank; of this host.
        named_cores: different cores that UCCL_EP_PROXY_CPUS names, 0 = none.
    """
    if wanted == "off":
        return Spin(0, "off (UCCL_EP_PROXY_SPIN)")
    if wanted != "auto":
        return Spin(int(float(wanted) * 1e6), f"{wanted} ms (UCCL_EP_PROXY_SPIN)")
    threads = proxies * local_ranks
    whom = f"{threads} {'proxy' if threads == 1 else 'proxies'} of this host"
    if 0 < named_cores < threads:
        return Spin(0, f"off: {whom} share the {named_cores} cores of UCCL_EP_PROXY_CPUS")
    if cores < _CORES_PER_PROXY * threads:
        return Spin(0, f"off: {cores} cores for {whom}, {_CORES_PER_PROXY} each are needed")
    return Spin(_SPIN_NS, f"{_SPIN_NS // 1_000_000} ms: {cores} cores for {whom}")


def available_cores(cgroup: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: those of its affinity, and no more than its cgroup's quota pays for."""
    return max(1, min(len(os.sched_getaffinity(0)), *(int(quota) for quota in _quotas(cgroup, own))))


def _quotas(cgroup: Path, own: Path) -> list[float]:
    """Cores' worth of CPU time that this process's cgroup and those above it grant (version 2, then version 1)."""
    found = [float(os.cpu_count() or 1)]
    for line in _text(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        version_1 = "cpu" in controllers.split(",")
        if controllers and not version_1:
            continue
        root = cgroup / "cpu" if version_1 else cgroup
        place = root / path.lstrip("/")
        # in a container the path may be the host's, and what is mounted is the cgroup itself
        for level in {root, place, *(above for above in place.parents if root in above.parents)}:
            if version_1:
                quota, period = _text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us")
            else:
                quota, _, period = _text(level / "cpu.max").partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                found.append(int(quota) / int(period))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
