"""Each rule of the stream that kernels or the host hold, taken out: its test must fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_mutants import MUTANTS, ROOT, write_copy


def test_every_rule_is_found_in_the_source(tmp_path: Path) -> None:
    write_copy(tmp_path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Exit status of each rule's test without the rule; the copy is compiled once, into a cache of its own."""
    directory = tmp_path_factory.mktemp("mutants")
    write_copy(directory)
    result = directory / "results.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT / "tests/kernels"), str(ROOT / "tests")]),
        "UCCL_EP_CACHE_DIR": str(directory / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/kernels/mutant_runner.py"), str(result)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, int] = json.loads(result.read_text())
    assert found[""] == 0, f"a test fails with all rules in force: {done.stdout[-4000:]}"
    return found


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("rule", MUTANTS)
def test_the_test_fails_without_its_rule(rule: str, results: dict[str, int]) -> None:
    assert results[rule] == 1
