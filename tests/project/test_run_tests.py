"""``scripts/run-tests``: a second chance for few, for none that never ran, and the names of those that needed it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run-tests"

RIGHT = "def test_right(): pass\n"
WRONG = "def test_wrong(): assert False\n"
#: fails unless it has failed before
FLAKY = """
import pathlib
def test_flaky():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    failed_before = mark.exists()
    mark.touch()
    assert failed_before
"""


@pytest.fixture(autouse=True)
def no_options_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # most of a second in each of many runs
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run_tests(tmp_path: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script on a file of ``tests``; its own directory of caches, whatever runs this test."""
    (tmp_path / "test_them.py").write_text(tests)
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "bin").symlink_to(Path(sys.executable).parent)
    command = [SCRIPT, venv, "-q", "test_them.py", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)


def test_all_pass(tmp_path: Path) -> None:
    ran = run_tests(tmp_path, RIGHT)
    assert ran.returncode == 0
    assert "run-tests" not in ran.stdout


def test_one_that_passes_the_second_time_is_named(tmp_path: Path) -> None:
    ran = run_tests(tmp_path, RIGHT + FLAKY)
    assert ran.returncode == 0
    assert ran.stdout.endswith("run-tests: FLAKY, passed the second time: test_them.py::test_flaky\n")
    assert "1 passed, 1 deselected" in ran.stdout


def test_one_that_never_passes_fails(tmp_path: Path) -> None:
    ran = run_tests(tmp_path, RIGHT + FLAKY + WRONG)
    assert ran.returncode == 1
    assert "FLAKY" not in ran.stdout


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('case', range(6))\n" + WRONG.replace("()", "(case)")
    ran = run_tests(tmp_path, many)
    assert ran.returncode == 1
    assert "once more" not in ran.stdout


@pytest.mark.parametrize("option", ["-x", "-xv", "-vx", "--exitfirst", "--maxfail=1"])
def test_tests_that_never_ran_are_not_taken_for_right(tmp_path: Path, option: str) -> None:
    ran = run_tests(tmp_path, FLAKY + WRONG, option)
    assert ran.returncode == 1
    assert "once more" not in ran.stdout


def test_tests_that_the_environment_keeps_from_running_are_not_taken_for_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    ran = run_tests(tmp_path, FLAKY + WRONG)
    assert ran.returncode == 1
    assert "once more" not in ran.stdout


@pytest.mark.parametrize("option", ["-kflaky or x", "-oxfail_strict=true"])
def test_an_x_in_a_value_takes_no_second_chance_away(tmp_path: Path, option: str) -> None:
    ran = run_tests(tmp_path, RIGHT + FLAKY, option)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith("run-tests: FLAKY, passed the second time: test_them.py::test_flaky\n")


def test_nothing_to_run_is_no_success(tmp_path: Path) -> None:
    assert run_tests(tmp_path, RIGHT, "-k", "absent").returncode == 5
