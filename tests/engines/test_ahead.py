"""Compiling while an engine imports: in a process that ends by itself, or with the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from uccl_ep_serving.engines import ahead
from uccl_ep_serving.native.groups import Group

#: A process that compiles ahead into an empty cache, says so, and lives on.
STARTS = """
import time
from uccl_ep_serving.engines.ahead import compile_ahead
process = compile_ahead("{device}")
print(process.pid if process else 0, flush=True)
time.sleep(120)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "UCCL_EP_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS.format(device="cuda")], env=environment, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def _first_line(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_it_compiles_what_is_missing_and_ends(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    child = psutil.Process(_first_line(launcher))
    deadline = time.monotonic() + 100
    while child.is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not child.is_running()
    assert {path.name.rsplit("-", 1)[0] for path in tmp_path.rglob("*.o")} == {"proxy_loop", "sticky_error"}


def test_it_ends_with_the_process_that_started_it(launcher: subprocess.Popen[str]) -> None:
    child = psutil.Process(_first_line(launcher))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert not alive


def test_nothing_is_started_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "cached", True)
    assert ahead.compile_ahead("cpu") is None


def test_a_system_without_processes_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(Group, "cached", False)
    monkeypatch.setattr(subprocess, "Popen", none)
    assert ahead.compile_ahead("cuda:0") is None
