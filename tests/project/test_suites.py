"""The time of the tests: every test belongs to a suite that is measured, and their sums keep within the budgets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests import conftest
from tests.support.source_tree import PYPROJECT, ROOT, load_script

RECORDS = json.loads((ROOT / "benchmarks/results/suites.json").read_text())


@pytest.fixture(scope="module")
def suites() -> ModuleType:
    """``scripts/suites.py`` as a module."""
    return load_script("suites")


@pytest.mark.parametrize(("whole", "budget"), [("make test", 540), (".ci/run", 1800)])
def test_the_sum_keeps_within_the_budget(whole: str, budget: int) -> None:
    parts = [suite for suite in RECORDS["suites"] if whole in suite["within"]]
    seconds = {suite["name"]: suite["measured"].get("seconds", 0) for suite in parts}
    assert RECORDS["budgets"][whole] == budget
    assert sum(seconds.values()) <= budget, sorted(seconds.items(), key=lambda one: -one[1])
    if unknown := [suite["name"] for suite in parts if not suite["measured"]]:
        pytest.skip(f"never measured, so the sum is not known (make suites): {', '.join(unknown)}")


def test_the_records_are_those_of_the_suites(suites: ModuleType) -> None:
    kept = [(suite["name"], suite["holds"], suite["target"], tuple(suite["within"])) for suite in RECORDS["suites"]]
    assert kept == [(suite.name, suite.holds, suite.target, suite.within) for suite in suites.SUITES]
    assert RECORDS["budgets"] == suites.BUDGETS


def test_every_directory_of_tests_is_a_suite(suites: ModuleType) -> None:
    directories = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    measured = {path for suite in suites.SUITES if suite.is_pytest for path in suite.command if "/" in path}
    assert directories <= measured
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py")} <= measured


def test_every_step_of_continuous_integration_is_a_suite(suites: ModuleType) -> None:
    steps = re.findall(r"^run (?:\"[^\"]*\"|\S+) (.*)$", (ROOT / "scripts/check").read_text(), re.MULTILINE)
    targets = {target for step in steps for target in step.split() if "=" not in target}
    known = {suite.target.removeprefix("make ") for suite in suites.SUITES if ".ci/run" in suite.within}
    # environments are there when the clock of the budgets runs; test-project takes a part of `make test` first
    assert targets - {"env", "env-sglang", "env-vllm", "test-project"} == known


def test_every_marker_of_another_target_has_a_suite(suites: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {suite.target.removeprefix("make ") for suite in suites.SUITES}
    markers = {marker.partition(":")[0] for marker in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert set(conftest.ELSEWHERE) <= markers
    for marker in conftest.ELSEWHERE:
        target = {"mutants": "test-rules"}.get(marker, f"test-{marker}")
        assert target in targets
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_slow_tests_are_of_a_target() -> None:
    """``slow`` by itself is run by nothing; the targets of these markers run slow tests as well."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if re.search(r"^(@|    |.*\[.*)pytest\.mark\.slow\b", text, re.MULTILINE):
            assert re.search(r"mark\.(engine|gpu|rdma)\b", text), f"{path}: mark it as one of {conftest.ELSEWHERE}"


def test_what_is_marked_triton_is_of_its_script() -> None:
    script = (ROOT / "scripts/test-triton").read_text()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"pytest\.mark\.triton\b", path.read_text()):
            name = path.stem.removeprefix("test_")
            assert re.search(rf"{path.parent.relative_to(ROOT)}/test_({name}|{{[^}}]*\b{name}\b)", script), path


def test_a_report_is_counted(suites: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.cli.test_a" time="1.25"/>'
        '<testcase classname="tests.cli.test_b.TestB" time="0.5"><skipped/></testcase>'
        '<testcase classname="tests.test_a" time="2.0"/></testsuite></testsuites>'
    )
    assert suites.counted(report) == {"tests": 2, "skipped": 1, "seconds": 1.2}
    assert suites.counted(report, of=["tests/cli"]) == {"tests": 1, "skipped": 1, "seconds": 0.6}
    assert suites.counted(report, of=["tests/test_a.py"]) == {"tests": 1, "skipped": 0, "seconds": 0.7}


def test_one_run_gives_every_suite_its_part(
    suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuite><testcase classname="tests.cli.test_a" time="3.0"/></testsuite>')
    monkeypatch.setattr(suites, "RESULTS", tmp_path / "suites.json")
    suites.keep("vllm", {"seconds": 4.0})
    assert suites.main(["--report", str(report)]) == 0
    assert (suites.record("tests/cli")["seconds"], suites.record("tests/cli")["tests"]) == (1.0, 1)
    assert suites.record("tests/gpu")["seconds"] == 0
    assert suites.record("vllm") == {"seconds": 4.0}


def test_a_target_without_a_budget_counts_what_all_its_runs_have_noted(
    suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = next(suite for suite in suites.SUITES if not suite.within)
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(suites, "NOTES", tmp_path)
    monkeypatch.setattr(suites, "UNFINISHED", tmp_path / "kept")
    monkeypatch.setattr(suites, "sources", lambda name: "abc")
    monkeypatch.setattr(suites, "describe", lambda: {"commit": "def", "when": "now"})
    monkeypatch.setattr(suites.subprocess, "run", run)
    (tmp_path / f"{suite.name}-abc.jsonl").write_text('["a", 1.25]\n["b", 2.5]\n')
    found = suites.measure(suite)
    assert commands[0] == ["make", suite.name, f"ARGS=--resume={suite.name}"]
    assert (found["tests"], found["seconds"], found["commit"]) == (2, 3.8, "def")
    assert "left" not in found
    (tmp_path / f"{suite.name}-abc.wanted").write_text("a\nb\nc\nd\n")
    (tmp_path / f"{suite.name}-abc.skipped").write_text("c\n")
    assert suites.measure(suite)["left"] == 1
    # in another checkout of the same sources it goes on there
    monkeypatch.setattr(suites, "NOTES", tmp_path / "another")
    assert suites.measure(suite)["left"] == 1
    with (tmp_path / "another" / f"{suite.name}-abc.jsonl").open("a") as last:
        last.write('["d", 1.0]\n')
    assert suites.measure(suite)["tests"] == 3
    assert not list((tmp_path / "kept").iterdir())


def test_a_record_is_kept_beside_the_others(
    suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "RESULTS", tmp_path / "suites.json")
    suites.keep("lint", {"seconds": 3.0})
    suites.keep("demo", {"seconds": 4.0})
    assert [suites.record(name) for name in ("lint", "demo", "test-rdma")] == [{"seconds": 3.0}, {"seconds": 4.0}, {}]


def test_what_is_measured_at_this_commit_is_not_measured_again(
    suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "RESULTS", tmp_path / "suites.json")
    monkeypatch.setattr(suites, "describe", lambda: {"commit": commit, "when": "now"})
    ran: list[str] = []

    def measure(suite: object) -> dict[str, object] | None:
        ran.append(getattr(suite, "name", ""))
        return None if getattr(suite, "name", "") == "demo" else {"seconds": 1.0, "commit": commit}

    monkeypatch.setattr(suites, "measure", measure)
    commit = "abc"
    assert suites.main(["lint", "demo"]) == 1
    assert suites.main(["lint", "demo"]) == 1
    assert ran == ["lint", "demo", "demo"]
    assert suites.main(["--again", "lint"]) == 0
    commit = "abc+"  # sources that no commit holds
    assert suites.main(["lint"]) == suites.main(["lint"]) == 0
    assert ran[3:] == ["lint"] * 3
