"""Which tests go to one worker of pytest-xdist, and that none of it is needed where that is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT


def _collected(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
    done = subprocess.run([*command, "tests/test_sizes.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_without_xdist_the_tests_run() -> None:
    """As where a GPU is: scripts/gpu-check asks for no more of pytest than it needs."""
    collected = _collected("-p", "no:xdist")
    assert collected
    assert collected == _collected()


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/engines/test_sglang_plugin.py::test_a[b]", "tests/engines/test_sglang"),
        ("tests/ptx/product/test_normal.py::test_a", "tests/ptx/product/"),
        ("tests/engines/test_vllm_plugin.py::test_a", "tests/engines/test_vllm_plugin.py"),
        ("tests/test_sizes.py::test_a", "tests/test_sizes.py"),
    ],
)
def test_files_that_share_go_together(nodeid: str, scope: str) -> None:
    sharing = pytest.importorskip("tests.support.sharing", reason="needs pytest-xdist", exc_type=ImportError)
    assert sharing.ByWhatIsShared._split_scope(object.__new__(sharing.ByWhatIsShared), nodeid) == scope
