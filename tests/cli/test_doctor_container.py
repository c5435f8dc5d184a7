"""What the doctor says of an unprivileged container: what is needed, and what is not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from uccl_ep_serving.cli.doctor import container as room
from uccl_ep_serving.cli.doctor import software
from uccl_ep_serving.cli.doctor.findings import Finding, Status

NONE = Path("/nowhere")


def found(monkeypatch: pytest.MonkeyPatch, **places: Path | str) -> dict[str, Finding]:
    given: dict[str, Path | str] = {"status": NONE, "modules": NONE, "options": NONE, "shm": "/"}
    return {one.name: one for one in room.container(**{**given, **places})}  # type: ignore[arg-type]


def test_privileges_are_looked_at_and_none_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, options = tmp_path / "status", tmp_path / "params"
    status.write_text("Name:\tpython\nCapEff:\t0000000000204000\n")
    options.write_text('EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\nOther: 3\n')
    (tmp_path / "gdrdrv").mkdir()
    monkeypatch.setattr(room.shutil, "which", lambda name: f"/usr/bin/{name}")
    privileged = found(monkeypatch, status=status, options=options, modules=tmp_path)
    assert privileged["SYS_ADMIN"].value == "held, not needed"
    assert privileged["IPC_LOCK"].value.startswith("held, ")
    assert privileged["gdrdrv"].value == "loaded, not needed"
    assert privileged["nvcc"].value.startswith("/usr/bin/nvcc, not needed")
    assert 'EnableStreamMemOPs=1, RegistryDwords="PeerMappingOverride=1;", not' in privileged["driver options"].value
    monkeypatch.setattr(room.shutil, "which", lambda name: None)
    bare = found(monkeypatch)
    assert [bare[name].value for name in ("SYS_ADMIN", "gdrdrv")] == ["not held, not needed", "not loaded, not needed"]
    assert bare["driver options"].value == "no NVIDIA driver, not needed"
    assert not [one for one in bare.values() if one.status is Status.PROBLEM]


@pytest.mark.parametrize(
    ("capabilities", "users", "freely"),
    [
        ("0000000000004000", "         0          0 4294967295\n", True),
        ("0000000000000000", "         0          0 4294967295\n", False),
        # the kernel asks for it in the system's own user namespace
        ("000001ffffffffff", "         0     100000      65536\n", False),
    ],
)
def test_who_may_pin_more_than_memlock_says(capabilities: str, users: str, freely: bool, tmp_path: Path) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    (tmp_path / "uid_map").write_text(users)
    assert room.pins_freely(tmp_path / "status", tmp_path / "uid_map") is freely
    assert not room.pins_freely(tmp_path / "status", NONE)


@pytest.mark.parametrize(
    ("quotas", "memory", "tasks", "values", "status"),
    [
        ({}, None, None, ["", "", None], None),
        (
            {"pod": 3.0, "container": 1.5},
            1 << 20,
            2000,
            [", for 1.5 cores' worth of time by its cgroup", "1 MiB available by its cgroup", "2000 may still begin"],
            Status.OK,
        ),
        ({}, 1 << 60, 40, ["", "", "40 may still begin"], Status.NOTE),
    ],
)
def test_what_a_container_may_use_of_the_machine(
    quotas: dict[str, float],
    memory: int | None,
    tasks: int | None,
    values: list[str | None],
    status: Status | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"quotas": quotas, "memory_left": memory, "tasks_left": tasks}
    for name, value in limits.items():
        monkeypatch.setattr(software.cgroup, name, lambda value=value: value)
    said = {one.name: one for one in software.environment()}
    cores, room_left, threads = values
    assert said["cores"].value.endswith(cores or f"of {psutil.cpu_count()}")
    assert room_left == said["memory"].value if room_left else "cgroup" not in said["memory"].value
    if threads is None:
        assert "threads" not in said
    else:
        assert said["threads"].value == f"{threads} by its cgroup"
        assert (said["threads"].status, bool(said["threads"].next_step)) == (status, status is Status.NOTE)


@pytest.mark.parametrize(("total", "status"), [(64 << 20, Status.NOTE), (8 << 30, Status.OK)])
def test_a_small_dev_shm_is_noted(total: int, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.psutil, "disk_usage", lambda path: SimpleNamespace(free=total, total=total))
    shm = found(monkeypatch, shm="/dev/shm")["/dev/shm"]
    assert shm.status is status
    assert bool(shm.next_step) == (status is Status.NOTE)


def test_a_missing_dev_shm_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, shm="/nowhere/shm")["/nowhere/shm"].value.startswith("missing: ")


def test_nothing_of_what_is_not_needed_is_used() -> None:
    """No module but the doctor's names gdrdrv, GDRCopy or nvcc."""
    root = Path(sys.modules["uccl_ep_serving"].__file__ or "").parent
    folders = [root, (root / "kernels").resolve(), (root / "proxy").resolve()]
    files = [file for folder in folders for file in folder.rglob("*.py") if "doctor" not in file.parts]
    assert len(files) > 200
    named = [file for file in files for word in ("gdrdrv", "gdrcopy", "nvcc") if word in file.read_text().lower()]
    assert not named
