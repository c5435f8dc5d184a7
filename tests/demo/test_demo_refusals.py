"""``uccl-ep demo`` where it cannot run: what the user is told, the exit status, and that nothing is left. No server."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from uccl_ep_serving.demo.server import free_port, port_is_free

pytestmark = pytest.mark.engine

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start the demo with ``tmp_path`` as its scratch place; output is a pipe, not a terminal."""

    def demo(*arguments: str, preexec: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "uccl_ep_serving.cli.demo", *arguments],
            env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=preexec,
        )

    return demo


def finish(process: subprocess.Popen[str]) -> str:
    """Output of a demo that must end soon."""
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Traceback" not in output
    return output


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("uccl-ep-demo-*"))


def test_port_in_use_is_said_before_anything_is_started(start: Start, tmp_path: Path) -> None:
    """Another server on that port would answer the readiness check in the place of ours."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not port_is_free(port)
        process = start("--port", str(port))
        output = finish(process)
    assert process.returncode == 1
    assert f"port {port} of 127.0.0.1 is in use" in output
    assert "checkpoint" not in output
    assert left(tmp_path) == []
    port = free_port()
    assert all(port_is_free(port + more) for more in (0, *range(233, 256)))
    assert port + 256 <= int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_full_disk_is_named(start: Start, tmp_path: Path) -> None:
    """No file may grow past 100 KiB: the configuration is written, the weights are not."""
    limit = 100 << 10
    process = start(preexec=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    output = finish(process)
    assert process.returncode == 1
    assert "FAILED" in output
    assert "model.safetensors" in output
    assert "TMPDIR" in output
    assert left(tmp_path) == []


def test_interrupted_before_the_first_server(start: Start, tmp_path: Path) -> None:
    process = start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("checkpoint:"):
            break
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130
    assert "interrupted" in output
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_interrupted_in_source_text_that_is_executed(tmp_path: Path, name: str) -> None:
    """As in an import: CPython would end by SIGINT, not with the status, if the exception were a KeyboardInterrupt."""
    (tmp_path / "interrupted.py").write_text(
        "import signal\n"
        "from uccl_ep_serving.demo.run import serve_and_leave_nothing\n"
        f"source = 'signal.raise_signal(signal.{name})'\n"
        "serve_and_leave_nothing('json', 'JSON', 'demo', 0, 1.0, lambda run: exec(source))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "interrupted"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "interrupted" in finish(process)
    assert process.returncode == 130
    assert left(tmp_path) == []
