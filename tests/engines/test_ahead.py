"""Compiling while an engine imports: in a process that ends by itself, or with the one that started it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from uccl_ep_serving.engines import ahead
from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.native import cache, groups
from uccl_ep_serving.native.groups import Group

#: A process that compiles ahead and lives on.
STARTS = """
import time
from uccl_ep_serving.engines.ahead import compile_ahead
compile_ahead("cuda:0")
time.sleep(120)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setattr(groups, "cache_directory", lambda: tmp_path / "uccl_ep_serving" / cache._source_digest())
    environment = {**os.environ, "UCCL_EP_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", STARTS], env=environment, text=True)
    yield process
    process.kill()
    process.wait()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_it_compiles_what_is_missing_and_ends(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    _until(lambda: len(list(tmp_path.rglob("*.o"))) == 2)
    assert {path.name.rsplit("-", 1)[0] for path in tmp_path.rglob("*.o")} == {"proxy_loop", "sticky_error"}
    _until(lambda: not psutil.Process(launcher.pid).children())


def test_it_ends_with_the_process_that_started_it(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    """While it waits for somebody else's compilation, so that it cannot have ended by itself."""
    locks = [group.path.with_suffix(".lock") for group in ahead._groups(False)]
    locks[0].parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for lock in locks:
            fcntl.flock(stack.enter_context(open(lock, "w")), fcntl.LOCK_EX)
        _until(lambda: psutil.Process(launcher.pid).children())
        (child,) = psutil.Process(launcher.pid).children()
        # it has opened the lock that it waits for: it is past its start
        _until(lambda: any("llvmlite" in entry.path for entry in child.memory_maps()))
        time.sleep(0.5)
        assert child.is_running()
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        _, alive = psutil.wait_procs([child], timeout=20)
        assert not alive


def test_nothing_is_started_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "cached", True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    ahead._compile(True)


def test_a_system_without_processes_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    def none_of_them(*_: object) -> None:
        raise TransportError("no more threads", device="thread", errno=11)

    monkeypatch.setattr(Group, "cached", False)
    monkeypatch.setattr(subprocess, "run", none)
    ahead._compile(False)
    monkeypatch.setattr(ahead, "start_thread", none_of_them)
    ahead.compile_ahead.__wrapped__("cuda:0")
