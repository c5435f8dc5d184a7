"""``pytest --resume``: what has passed with these sources is not run again, and nothing else is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import resume
from tests.support.resume import Note, Resume, left, notes
from tests.support.source_tree import ROOT

FILE = "run-abc.jsonl"


def _report(plugin: Resume, test: str, *outcomes: str) -> None:
    """What pytest reports of a test: its set-up, call and teardown."""
    for when, outcome in zip(("setup", "call", "teardown"), outcomes, strict=True):
        plugin.pytest_runtest_logreport(
            pytest.TestReport(test, ("", 0, ""), {}, outcome, None, when, duration=0.5)  # type: ignore[arg-type]
        )


def _left(plugin: Resume, *tests: str) -> list[str]:
    """Which of ``tests`` a run with this plugin has to run; the others are told as deselected."""
    items: list[Any] = [SimpleNamespace(nodeid=test) for test in tests]
    told: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    plugin.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)  # type: ignore[arg-type]
    assert sorted(item.nodeid for item in [*items, *told]) == sorted(tests)
    return [item.nodeid for item in items]


def _git(tree: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tree, check=True)


def test_only_what_passed_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / FILE
    first = Resume(file, writes=True)
    assert _left(first, "a", "b", "c", "d", "e") == ["a", "b", "c", "d", "e"]
    _report(first, "a", "passed", "passed", "passed")
    _report(first, "b", "passed", "failed", "passed")
    _report(first, "c", "passed", "passed", "failed")
    _report(first, "d", "passed", "skipped", "passed")
    assert notes(file) == [Note("a", 1.5)]
    with file.open("a") as half:
        half.write('["e", ')  # the run ended while it wrote
    assert _left(Resume(file, writes=True), "a", "b", "c", "d", "e") == ["b", "c", "d", "e"]
    assert left(file) == 3  # a has passed, d was skipped


def test_a_worker_leaves_out_the_same_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / FILE
    _report(Resume(file, writes=True), "a", "passed", "passed", "passed")
    worker = Resume(file, writes=False)
    assert _left(worker, "a", "b") == ["b"]
    _report(worker, "b", "passed", "passed", "passed")
    assert notes(file) == [Note("a", 1.5)]


def test_sources_without_a_commit_are_never_resumed(tmp_path: Path) -> None:
    plugin = Resume(None, writes=True)
    _report(plugin, "a", "passed", "passed", "passed")
    assert _left(plugin, "a") == ["a"]
    assert not list(tmp_path.iterdir())


def test_sources_are_the_same_whatever_stands_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "ROOT", tmp_path)
    assert resume.sources() == ""
    (tmp_path / "docs").mkdir()
    for name in ("a.py", "docs/a.py", "README.md"):
        (tmp_path / name).write_text("first")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    first = resume.sources()
    assert first
    (tmp_path / "docs/a.py").write_text("second")
    (tmp_path / "README.md").write_text("second")
    assert resume.sources() == first
    _git(tmp_path, "commit", "-qam", "second")
    assert resume.sources() == first
    (tmp_path / "a.py").write_text("second")
    assert resume.sources() == ""
    _git(tmp_path, "commit", "-qam", "third")
    assert resume.sources() not in ("", first)


def test_what_a_run_does_not_load_changes_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "ROOT", tmp_path)
    engine = tmp_path / "uccl_ep_serving/engines/a.py"
    engine.parent.mkdir(parents=True)
    engine.write_text("first")
    (tmp_path / "a.py").write_text("first")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    model, other = resume.sources("test-model"), resume.sources("test-long")
    assert model != other == resume.sources()
    engine.write_text("second")
    assert resume.sources("test-model") == model
    assert resume.sources("test-long") == ""
    (tmp_path / "a.py").write_text("second")
    assert resume.sources("test-model") == ""


def test_what_is_said_not_to_be_loaded_is_not() -> None:
    """By any test of a target, nor by what they start."""
    pytest.importorskip("triton")
    files = sorted({*ROOT.glob("tests/ptx/**/*.py"), *ROOT.glob("benchmarks/*_counts.py")})
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem != "__main__"]
    program = (
        "import importlib, sys\n"
        f"for name in ['tests.conftest', *{modules}]: importlib.import_module(name)\n"
        "files = (getattr(module, '__file__', None) for module in list(sys.modules.values()))\n"
        "print(*filter(None, files), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {Path(name).resolve() for name in done.stdout.splitlines()}
    assert ROOT / "proxy/transport/select.py" in loaded
    for one in resume.NOT_LOADED["test-model"]:
        assert (ROOT / one).exists()
        assert not [path for path in loaded if path.is_relative_to(ROOT / one)]


@pytest.mark.parametrize(("before", "status"), [(["a"], pytest.ExitCode.OK), ([], pytest.ExitCode.NO_TESTS_COLLECTED)])
@pytest.mark.parametrize("worker", [False, True])
def test_nothing_left_to_run_is_success(
    tmp_path: Path, before: list[str], status: pytest.ExitCode, worker: bool
) -> None:
    for test in before:
        _report(Resume(tmp_path / FILE, writes=True), test, "passed", "passed", "passed")
    plugin = Resume(tmp_path / FILE, writes=True)
    if worker:
        _left(one := Resume(tmp_path / FILE, writes=False), *before)
        node: Any = SimpleNamespace(workeroutput={})
        one.pytest_sessionfinish(SimpleNamespace(config=node))  # type: ignore[arg-type]
        plugin.pytest_testnodedown(node)
        plugin.pytest_testnodedown(SimpleNamespace())  # one that has crashed
    else:
        _left(plugin, *before)
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.NO_TESTS_COLLECTED)
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == status
