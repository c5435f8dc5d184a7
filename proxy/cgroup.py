"""What the control groups of this process allow it: a container's, a pod's, a job's, and those above.

Without a group, or where one cannot be read, there is no limit: as for the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["GROUPS", "OWN", "memory_left", "quotas", "tasks_left"]

#: Where the groups are mounted, and what says in which this process is (cgroups(7)).
GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def quotas(groups: Path = GROUPS, own: Path = OWN) -> dict[str, float]:
    """Cores' worth of CPU time that this process's group, and those above it, may use; by device and inode of the
    group: a container sees the path of its own as ``/``."""
    found = {}
    for level, version_1 in _levels("cpu", groups, own):
        if version_1:
            quota, period = _text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us")
        else:
            quota, _, period = _text(level / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            found[_identity(level)] = int(quota) / int(period)
    return found


def memory_left(groups: Path = GROUPS, own: Path = OWN) -> int | None:
    """Bytes until the next limit of memory; None without one. Pages of files that nobody uses count as free, as
    Kubernetes counts them."""
    left = []
    for level, version_1 in _levels("memory", groups, own):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version_1 else ("memory.max", "memory.current")
        limit, used = (_text(level / name) for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:  # version 1 writes the largest number for none
            stat = dict(line.split() for line in _text(level / "memory.stat").splitlines())
            unused = int(stat.get("total_inactive_file" if version_1 else "inactive_file", 0))
            left.append(int(limit) - int(used) + unused)
    return max(min(left), 0) if left else None


def tasks_left(groups: Path = GROUPS, own: Path = OWN) -> int | None:
    """Threads that may still begin until the next limit of processes; None without one."""
    left = []
    for level, _ in _levels("pids", groups, own):
        limit, used = _text(level / "pids.max"), _text(level / "pids.current")
        if limit.isdigit() and used.isdigit():
            left.append(int(limit) - int(used))
    return max(min(left), 0) if left else None


def _levels(controller: str, groups: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's groups that may limit what ``controller`` counts, and whether each is of version 1."""
    for line in _text(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        version_1 = controller in controllers.split(",")
        if controllers and not version_1:
            continue
        root = groups / controller if version_1 else groups
        place = root / path.lstrip("/")
        # in a container the path may be the host's, and what is mounted is the group itself
        for level in {root, place, *(above for above in place.parents if root in above.parents)}:
            yield level, version_1


def _identity(directory: Path) -> str:
    try:
        status = directory.stat()
    except OSError:
        return str(directory)
    return f"{status.st_dev}:{status.st_ino}"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
