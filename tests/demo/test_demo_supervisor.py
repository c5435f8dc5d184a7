"""The demo's guardian: whatever is killed, no process and no file of the server stays. Needs no engine."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from uccl_ep_serving.demo import supervisor
from uccl_ep_serving.demo.server import DemoServer, ServerFailed, without_interrupts
from uccl_ep_serving.demo.sglang_launch import SglangLaunch

# stands for SGLang: a worker of its own session (a process-group kill would miss it), a segment, no exit handler
SERVER = """
import os, subprocess, sys, time
from pathlib import Path
segment, marker = sys.argv[1:]
Path(segment).write_bytes(b"x")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", marker], start_new_session=True)
Path(marker).write_text(f"{os.getpid()} {worker.pid}")
time.sleep(600)
"""

# stands for the demo: it starts the guardian, says so, and waits to be killed
DEMO = """
import subprocess, sys, time
command = [sys.executable, "-I", *sys.argv[1:]]
guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
print(guardian.pid, flush=True)
time.sleep(600)
"""


@dataclass
class Scene:
    """One supervised stand-in server."""

    spec: dict[str, Any]
    segment: Path
    marker: Path
    run_directory: Path

    def pids(self) -> list[int]:
        """Server and worker, once they run."""
        wait_for(lambda: self.marker.exists() and len(self.marker.read_text().split()) == 2)
        return [int(pid) for pid in self.marker.read_text().split()]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll ``condition``; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether ``pid`` has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    # a name that SGLang would use, so that the real patterns are at work
    segment = Path(f"/dev/shm/sgl_shm_mq_test{os.getpid()}_{time.monotonic_ns()}")
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    marker = tmp_path / "pids"
    spec = {
        "command": [sys.executable, "-c", SERVER, str(segment), str(marker)],
        "directory": str(tmp_path),
        "run_directory": str(run_directory),
        "log": str(tmp_path / "log"),
        "before": supervisor.snapshot(),
    }
    yield Scene(spec, segment, marker, run_directory)
    segment.unlink(missing_ok=True)


@pytest.fixture
def guardian(scene: Scene) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-I", supervisor.__file__, json.dumps(scene.spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        scene.pids()
        yield process
        if process.poll() is None:
            process.terminate()


def test_stop_kills_the_tree_and_keeps_the_run_directory(scene: Scene, guardian: subprocess.Popen[bytes]) -> None:
    pids = scene.pids()
    output, _ = guardian.communicate(b"stop\n", timeout=30)
    last = json.loads(output.splitlines()[-1])
    assert last["removed"] == [str(scene.segment)]
    assert last["killed"] >= len(pids)
    assert all(gone(pid) for pid in pids)
    assert not scene.segment.exists()
    assert scene.run_directory.exists()


def test_demo_killed_leaves_nothing(scene: Scene) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEMO, supervisor.__file__, json.dumps(scene.spec)],
        stdout=subprocess.PIPE,
    ) as demo:
        assert demo.stdout is not None
        guardian = int(demo.stdout.readline())
        pids = scene.pids()
        demo.kill()
    wait_for(lambda: gone(guardian))
    assert all(gone(pid) for pid in pids)
    assert not scene.segment.exists()
    assert not scene.run_directory.exists()


def test_guardian_killed_takes_the_server_with_it(scene: Scene, guardian: subprocess.Popen[bytes]) -> None:
    server, worker = scene.pids()
    guardian.kill()
    guardian.wait()
    wait_for(lambda: gone(server))
    # SGLang's workers watch their parent; this stand-in does not, which is what the demo's own sweep is for
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: gone(worker))
    assert supervisor.clean(scene.spec["before"]) == [str(scene.segment)]


def test_server_that_ends_is_reported(scene: Scene) -> None:
    scene.spec["command"] = [sys.executable, "-c", "raise SystemExit(3)"]
    with subprocess.Popen(
        [sys.executable, "-I", supervisor.__file__, json.dumps(scene.spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert "pid" in json.loads(process.stdout.readline())
        assert json.loads(process.stdout.readline()) == {"exit": 3}
        process.communicate(timeout=30)


def test_detached_server_survives_the_demo_and_ends_on_sigterm(scene: Scene, guardian: subprocess.Popen[bytes]) -> None:
    pids = scene.pids()
    assert guardian.stdin is not None
    guardian.stdin.write(b"detach\n")
    guardian.stdin.close()
    time.sleep(0.5)
    assert not any(gone(pid) for pid in pids)
    guardian.terminate()
    guardian.wait(30)
    assert all(gone(pid) for pid in pids)
    assert not scene.run_directory.exists()


@dataclass(frozen=True)
class _Sleeper(SglangLaunch):
    """Something that runs in the server's place."""

    def command(self, model: Path, port: int) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)"]


def test_interrupted_while_the_guardian_starts(tmp_path: Path) -> None:
    """Nobody calls ``__exit__`` when ``__enter__`` does not return, so that it must clean up itself."""

    class Interrupted(DemoServer):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    server = Interrupted(_Sleeper("none"), tmp_path, "sleeper")
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert server.pid
    assert gone(server.pid)


KEEP = """
import sys
from pathlib import Path
from uccl_ep_serving.demo.server import DemoServer
from uccl_ep_serving.demo.sglang_launch import SglangLaunch

class Sleeper(SglangLaunch):
    def command(self, model, port):
        return [sys.executable, "-c", "import time; time.sleep(600)"]

with DemoServer(Sleeper("none"), Path(sys.argv[1]), "sleeper") as server:
    server.detach()
    print(server.guardian_pid)
"""


def test_detached_server_does_not_hold_the_output_of_the_demo(tmp_path: Path) -> None:
    """``uccl-ep demo --keep 2>&1 | tee log`` ends although the server goes on."""
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KEEP, str(run_directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=30,
    )
    guardian = int(done.stdout)
    assert not gone(guardian)
    os.kill(guardian, signal.SIGTERM)
    wait_for(lambda: gone(guardian) and not run_directory.exists())


def test_server_is_not_started_on_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = DemoServer(_Sleeper("none"), tmp_path, "sleeper", port=other.getsockname()[1])
        with pytest.raises(ServerFailed, match="in use"):
            server.start()
    assert server.guardian_pid == 0


def test_what_cannot_be_run_is_said(tmp_path: Path) -> None:
    class Absent(SglangLaunch):
        def command(self, model: Path, port: int) -> list[str]:
            return ["no-such-engine", "serve"]

    server = DemoServer(Absent("none"), tmp_path, "absent")
    with pytest.raises(ServerFailed, match="could not be started: no-such-engine serve"):
        server.__enter__()
    assert not server.run_directory.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_cleaning_up_is_not_interrupted(number: signal.Signals) -> None:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(number, interrupt)
    try:
        with without_interrupts():
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, previous)


def test_clean_spares_older_foreign_and_mapped_files(tmp_path: Path) -> None:
    patterns = (f"{tmp_path}/mine_*",)
    old, new, other, mapped = (tmp_path / name for name in ("mine_old", "mine_new", "other", "mine_mapped"))
    old.touch()
    before = supervisor.snapshot(patterns)
    for path in (new, other, mapped):
        path.write_bytes(b"x" * 4096)
    holder = (
        "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096); "
        "print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, str(mapped)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert supervisor.clean(before, patterns) == [str(new)]
        process.kill()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine_mapped", "mine_old", "other"]


def test_clean_spares_semaphores_of_living_processes() -> None:
    """A semaphore is mapped under another name than it has, so the name alone would not tell that it is in use."""
    before = supervisor.snapshot()
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    name = f"/dev/shm/sem.{semaphore._semlock.name.lstrip('/')}"
    assert name not in Path("/proc/self/maps").read_text()
    assert name in supervisor.snapshot()
    assert name not in supervisor.clean(before)
    assert Path(name).exists()
