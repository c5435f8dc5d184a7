"""``uccl-ep demo`` as a user runs it: interrupted or killed while its server starts, it leaves nothing."""

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

from uccl_ep_serving.cli import demo_supervisor

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo whose scratch directory is ``tmp_path``."""
    with subprocess.Popen(
        [sys.executable, "-m", "uccl_ep_serving.cli.demo", "--no-reference", "--no-fp8"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def servers(directory: Path) -> list[int]:
    """Processes that work below ``directory``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(f"{directory}/"):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_is_left(demo: subprocess.Popen[str], tmp_path: Path, number: signal.Signals, status: int) -> None:
    before = demo_supervisor.snapshot()
    deadline = time.monotonic() + 200
    while len(servers(tmp_path)) < 4:  # the server, its two schedulers and a detokenizer are being started
        assert demo.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    demo.send_signal(number)
    assert demo.wait(60) == status
    while servers(tmp_path) or list(tmp_path.glob("uccl-ep-demo-*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert demo_supervisor.clean(before) == []
