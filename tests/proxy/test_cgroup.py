"""What the cgroups of a process allow it, of both versions, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from uccl_ep_serving.proxy import cgroup

GIB = 1 << 30


def write(directory: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {**files, "own": own}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text + "\n")
    return directory, directory / "own"


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("", {}, None),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, None),
        ("0::/a", {"a/memory.max": str(4 * GIB), "a/memory.current": str(GIB)}, 3 * GIB),
        # the pod's limit is nearer than the container's
        (
            "0::/a/b",
            {
                "a/b/memory.max": str(4 * GIB),
                "a/b/memory.current": "0",
                "a/memory.max": str(2 * GIB),
                "a/memory.current": str(GIB),
                "a/memory.stat": f"anon {GIB}\ninactive_file 1000\n",
            },
            GIB + 1000,
        ),
        ("0::/", {"memory.max": "5", "memory.current": "6"}, 0),
        (
            "4:memory:/x",
            {
                "memory/x/memory.limit_in_bytes": str(2 * GIB),
                "memory/x/memory.usage_in_bytes": str(GIB),
                "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 2",
            },
            GIB + 2,
        ),
        # no limit, as version 1 writes it
        (
            "4:memory:/",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"},
            None,
        ),
    ],
)
def test_memory_until_the_nearest_limit(own: str, files: dict[str, str], left: int | None, tmp_path: Path) -> None:
    assert cgroup.memory_left(*write(tmp_path, own, files)) == left


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/a", {"a/pids.max": "max", "a/pids.current": "3"}, None),
        ("0::/a", {"a/pids.max": "100", "a/pids.current": "30"}, 70),
        ("7:pids:/x\n4:cpu,cpuacct:/x", {"pids/x/pids.max": "100", "pids/x/pids.current": "99"}, 1),
    ],
)
def test_threads_until_the_nearest_limit(own: str, files: dict[str, str], left: int | None, tmp_path: Path) -> None:
    assert cgroup.tasks_left(*write(tmp_path, own, files)) == left
