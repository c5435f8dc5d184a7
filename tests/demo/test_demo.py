"""``uccl-ep demo`` as a user runs it: stopped at any stage it leaves nothing, and a server that fails is shown."""

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

from uccl_ep_serving.demo import supervisor

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def demo(tmp_path: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A demo whose scratch directory is ``tmp_path``."""
    with subprocess.Popen(
        [sys.executable, "-m", "uccl_ep_serving.cli.demo", "--no-reference", "--no-fp8"],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1", **environment},
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


@pytest.fixture
def environment() -> dict[str, str]:
    """More variables for the demo."""
    return {}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_is_left(demo: subprocess.Popen[str], tmp_path: Path, number: signal.Signals, status: int) -> None:
    before = supervisor.snapshot()
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
    assert supervisor.clean(before) == []


def test_interrupted_while_requests_are_answered(demo: subprocess.Popen[str], tmp_path: Path) -> None:
    before = supervisor.snapshot()
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("streaming"):  # the completions follow, several at once
            break
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    # the demo has waited for all of it
    assert servers(tmp_path) == []
    assert list(tmp_path.glob("uccl-ep-demo-*")) == []
    assert supervisor.clean(before) == []


@pytest.mark.parametrize("environment", [{"UCCL_EP_CHUNK_DEPTH": "several"}], ids=["bad-setting"])
def test_server_that_does_not_start_is_shown(demo: subprocess.Popen[str], tmp_path: Path) -> None:
    """The end of SGLang's log on the screen, with our refusal in it, and all of it in a file that stays."""
    output, _ = demo.communicate(timeout=200)
    assert demo.returncode == 1
    assert "ended while starting" in output
    assert "UCCL_EP_CHUNK_DEPTH" in output
    (kept,) = tmp_path.glob("uccl-ep-demo-*")
    assert kept.name.startswith("uccl-ep-demo-logs-")
    assert f"whole logs: {kept}" in output
    assert "UCCL_EP_CHUNK_DEPTH" in (kept / "uccl_ep.log").read_text()
