"""``uccl-ep warm``: compiles what is missing, says what it does, and names what fails."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.cli import warm_groups
from tests.support.empty_cache import empty_cache
from tests.support.source_tree import ROOT, run_python
from uccl_ep_serving.cli.doctor import software
from uccl_ep_serving.cli.main import app
from uccl_ep_serving.cli.warm import progress, workers
from uccl_ep_serving.cli.warm.tasks import Kernels, Outcome, Task, all_groups
from uccl_ep_serving.cli.warm.workers import results
from uccl_ep_serving.native.groups import Group
from uccl_ep_serving.protocol.layout import LowLatencyPlan

KERNELS = Kernels(LowLatencyPlan(8, 128, 7168, 256, 8, 2), ("bf16",), 0)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with empty_cache(tmp_path) as place:
        yield place


def warmed(groups: Callable[[], list[Group]], **options: object) -> int:
    """Exit status of a run without a GPU."""
    return progress.run([], KERNELS, groups=groups, **options)  # type: ignore[arg-type]


def test_everything_is_compiled_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal each group is a line; a second run compiles nothing."""
    assert warmed(warm_groups.small) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert sorted(re.sub(r"\d+\.\d s", "N s", line) for line in lines) == [
        "first: compiled, N s",
        "second: compiled, N s",
    ]
    assert re.fullmatch(rf"compiled 2 of 2 groups .* in \d+\.\d s; .* in {cache}", last)
    assert all(group.cached for group in warm_groups.small())
    assert warmed(warm_groups.small) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"everything is there: 2 groups .*; .* in {cache}", line)
    assert warm_groups.twice(21) == 42


def test_a_damaged_one_is_compiled_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmed(warm_groups.small) == 0
    first, second = warm_groups.small()
    whole, other = first.path.read_bytes(), second.path.stat()
    first.path.write_bytes(whole[:-1])
    capsys.readouterr()
    assert warmed(warm_groups.small) == 0
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("first: compiled")
    assert last.startswith("compiled 1 of 2 groups")
    assert ", 1 were there;" in last
    assert first.path.read_bytes() == whole
    assert second.path.stat().st_mtime_ns == other.st_mtime_ns


def test_one_that_fails_is_named_with_the_cause(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are compiled all the same."""
    assert warmed(warm_groups.broken, jobs=1) == 1
    shown = capsys.readouterr()
    assert re.search(r"^warm: not compiled: broken: \w*Error: ", shown.err, re.MULTILINE)
    assert "compiled 2 of 3 groups" in shown.out
    assert [group.cached for group in warm_groups.broken()] == [True, False, True]


def test_a_bar_on_a_terminal(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    assert warmed(warm_groups.small, jobs=1, console=console) == 0
    assert "0/2" in screen.getvalue()
    assert "first" in screen.getvalue()
    assert "first: compiled" not in screen.getvalue()
    (last,) = capsys.readouterr().out.splitlines()
    assert last.startswith("compiled 2 of 2 groups")


def test_a_directory_that_cannot_be_written_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", "/dev/null/nowhere")
    monkeypatch.setattr(progress, "cache_directory", lambda: tmp_path)
    assert warmed(warm_groups.small) == 1
    assert "UCCL_EP_CACHE_DIR=/dev/null/nowhere cannot be written" in capsys.readouterr().err


def test_what_root_has_warmed_need_not_be_written_by_who_runs_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warmed(warm_groups.small) == 0
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", "/dev/null/nowhere")
    assert warmed(warm_groups.small) == 0


def nothing() -> Outcome:
    return Outcome()


def two_more() -> Outcome:
    return Outcome(tasks=(Task("", "found", nothing, ()), Task("", "found too", nothing, ())))


def test_a_process_that_dies_is_named_and_the_others_go_on() -> None:
    begun: list[str] = []
    tasks = deque([Task("", "dies", os.abort, ()), Task("", "ends", os._exit, (3,)), Task("", "lives", nothing, ())])
    found = {one.task.name: one for one in results(tasks, 1, lambda task: begun.append(task.name))}
    assert begun == ["dies", "ends", "lives"]
    assert found["dies"].cause == "the process that compiled it was ended by SIGABRT"
    assert found["ends"].cause == "the process that compiled it ended with status 3"
    assert found["lives"].outcome == Outcome()


def hang(began: Path) -> Outcome:
    compilers = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]
    began.write_text(" ".join(str(one.pid) for one in compilers))
    compilers[0].wait()
    return Outcome()


@pytest.mark.parametrize("ends", ["by its time", "with who has asked"])
def test_one_that_hangs_is_named_and_leaves_nothing_behind(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, given = tmp_path / "began", time.monotonic()
    # not before it has begun
    monkeypatch.setattr(
        workers._Worker, "left", property(lambda one: 0.1 if one.task.name == "lives" or not began.exists() else 0.0)
    )
    tasks = deque([Task("", "hangs", hang, (began,)), Task("", "lives", nothing, ())])
    if ends == "by its time":
        found = {one.task.name: one for one in results(tasks, 1, lambda _: None)}
        assert found["hangs"].cause == "it took more than 1800 s, and the process that compiled it was ended"
        assert found["lives"].outcome == Outcome()
    else:

        def interrupted(*_: object) -> list[object]:
            if began.exists():
                raise KeyboardInterrupt
            assert time.monotonic() < given + 60
            time.sleep(0.1)
            return []

        monkeypatch.setattr(workers, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(results(tasks, 1, lambda _: None))
    for pid in map(int, began.read_text().split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            compiler = psutil.Process(pid)
            while compiler.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < given + 60
                time.sleep(0.05)


def test_where_no_more_processes_can_begin_those_that_did_go_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, begun = workers._Worker, []

    def limited() -> object:
        if len(begun) == most:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        begun.append(real())
        return begun[-1]

    monkeypatch.setattr(workers, "_Worker", limited)
    most = 1
    tasks = deque(Task("", name, nothing, ()) for name in "abc")
    assert {one.task.name for one in results(tasks, 8, lambda _: None)} == {"a", "b", "c"}
    most = 0
    begun.clear()
    assert warmed(warm_groups.small) == 1
    assert "not compiled: first: no process can begin: Resource temporarily" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "quotas", "memory", "jobs"),
    [(64, {}, None, 64), (64, {"a": 3.5}, None, 3), (64, {}, 5 << 30, 5), (2, {"a": 0.5}, None, 1), (8, {}, 1000, 1)],
)
def test_as_many_processes_as_cores_and_memory_allow(
    cores: int, quotas: dict[str, float], memory: int | None, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(workers.cgroup, "quotas", lambda: quotas)
    monkeypatch.setattr(workers.cgroup, "memory_left", lambda: memory)
    monkeypatch.setattr(workers.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert workers.most_jobs() == jobs


def test_what_a_task_finds_to_do_is_done() -> None:
    tasks = deque([Task("", "looks", two_more, ())])
    assert {one.task.name for one in results(tasks, 2, lambda _: None)} == {"looks", "found", "found too"}


def meet(directory: Path, me: str, other: str) -> Outcome:
    """Wait until the other one runs as well."""
    (directory / me).touch()
    until = time.monotonic() + 60
    while not (directory / other).exists():
        assert time.monotonic() < until, "the other one does not run"
        time.sleep(0.01)
    return Outcome()


def test_tasks_run_at_the_same_time(tmp_path: Path) -> None:
    pairs = ("first", "second"), ("second", "first")
    tasks = deque(Task("", me, meet, (tmp_path, me, other)) for me, other in pairs)
    assert [one.cause for one in results(tasks, 2, lambda _: None)] == ["", ""]


def test_what_is_compiled_is_what_a_process_loads(tmp_path: Path) -> None:
    """Neither Numba nor torch is imported: not by the command itself, nor by a process that finds a warm cache."""
    code = """
import sys
from tests.cli.warm_groups import real
from uccl_ep_serving.cli.warm import progress
from uccl_ep_serving.cli.warm.tasks import Kernels
from uccl_ep_serving.protocol.layout import LowLatencyPlan
print(progress.run([], Kernels(LowLatencyPlan(8, 128, 7168, 256, 8, 2), ("bf16",), 0), groups=real))
sys.modules["numba"] = None
from uccl_ep_serving.native.groups import load
load(*real())
print(real()[0].loaded, "torch" in sys.modules)
"""
    done = run_python(code, cwd=ROOT, UCCL_EP_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    line, last, status, loaded = done.stdout.splitlines()
    assert line.startswith("sticky error: compiled")
    assert last.startswith("compiled 1 of 1 groups")
    assert (status, loaded) == ("0", "True False")


def test_no_group_is_forgotten() -> None:
    for folder in ("kernels.cpu", "native", "proxy", "preflight"):
        package = importlib.import_module(f"uccl_ep_serving.{folder}")
        for module in pkgutil.walk_packages(package.__path__, f"uccl_ep_serving.{folder}."):
            if not module.name.endswith(".compiler"):
                importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("uccl_ep_serving.")]
    present = {one.name for module in modules for one in vars(module).values() if isinstance(one, Group)}
    # for tests
    assert {group.name for group in all_groups()} == present - {"transport fake"}


class TestDoctor:
    def found(self) -> software.Finding:
        (found,) = [one for one in software.environment() if one.name == "compiled code"]
        return found

    def test_says_what_is_missing(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(software, "all_groups", warm_groups.small)
        found = self.found()
        assert (found.status, found.value) == ("note", f"{cache}: 2 of 2 groups missing: first, second")
        assert found.next_step.startswith("uccl-ep warm")
        warm_groups.small()[0].compile()
        assert self.found().value == f"{cache}: 1 of 2 groups missing: second"
        warm_groups.small()[1].compile()
        found = self.found()
        assert (found.status, found.value) == ("ok", f"{cache}: warm, all of 2 groups")

    def test_needs_neither_numba_nor_torch(self, tmp_path: Path) -> None:
        code = """
import sys
sys.modules["numba"] = sys.modules["torch"] = None
from uccl_ep_serving.cli.doctor import software
print(software._compiled_code().value)
"""
        done = run_python(code, cwd=ROOT, UCCL_EP_CACHE_DIR=str(tmp_path))
        assert re.search(r": (\d+) of \1 groups missing: normal mode", done.stdout), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "sm_80"], "--gpu sm_80 is none of sm_90, sm_100, gfx942, gfx950"),
        (["--gpu", "none", "--gpu", "sm_90"], "--gpu none, and --gpu sm_90: leave one of them out"),
        (["--dtype", "fp4"], "--dtype fp4 is none of bf16, fp8, ue8m0"),
        (["--ranks", "7"], "256"),
        (["--node-ranks", "3"], "8 ranks do not fill hosts of 3"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_compiled(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["warm", *arguments])
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    ("arguments", "gpus", "kernels"),
    [
        ([], [""], Kernels(KERNELS.plan, ("bf16", "fp8", "ue8m0"), 0)),
        (["--gpu", "none", "--dtype", "bf16"], [], KERNELS),
        (
            ["--gpu", "sm_90", "--gpu", "gfx942", "--ranks", "16", "--node-ranks", "8", "--hidden", "1280"],
            ["sm_90", "gfx942"],
            Kernels(LowLatencyPlan(16, 128, 1280, 256, 8, 2), ("bf16", "fp8"), 8),
        ),
    ],
)
def test_options(monkeypatch: pytest.MonkeyPatch, arguments: list[str], gpus: list[str], kernels: Kernels) -> None:
    given: list[object] = []
    monkeypatch.setattr(progress, "run", lambda *options: given.extend(options) or 0)
    assert CliRunner().invoke(app, ["warm", *arguments]).exit_code == 0
    assert given == [gpus, kernels, 0]
