"""A demo killed at the same moment as its guardian: the next one removes what they left, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from uccl_ep_serving.demo import supervisor
from uccl_ep_serving.demo.remains import new_run_directory, sweep

# a demo and its guardian, as far as the run directory is concerned; the "server" makes a file as SGLang does
DEMO = """
import json, subprocess, sys, time
from uccl_ep_serving.demo import supervisor
from uccl_ep_serving.demo.remains import new_run_directory
directory = new_run_directory()
server = "import sys, time; open(sys.argv[1], 'w').write('x'); time.sleep(100)"
spec = {
    "command": [sys.executable, "-c", server, sys.argv[1]],
    "directory": str(directory),
    "run_directory": str(directory),
    "log": str(directory / "log"),
    "before": supervisor.snapshot(),
}
guardian = subprocess.Popen(
    [sys.executable, "-I", supervisor.__file__, json.dumps(spec)],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
)
server = json.loads(guardian.stdout.readline())["pid"]
print(json.dumps({"directory": str(directory), "guardian": guardian.pid, "server": server}), flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def left() -> Iterator[Path]:
    """A file that SGLang leaves when it is killed."""
    path = Path(f"/dev/shm/sgl_shm_mq_{os.getpid()}_uccl_ep_test")
    yield path
    path.unlink(missing_ok=True)


def test_both_killed_at_once(left: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DEMO, str(left)], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        told = json.loads(demo.stdout.readline())
        deadline = time.monotonic() + 20
        while not left.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert sweep() == []  # alive: nothing of it is touched
        os.kill(told["guardian"], signal.SIGSTOP)  # it must not see the demo go
        demo.kill()
        demo.wait()
        assert sweep() == []  # the guardian alone holds it too
        os.kill(told["guardian"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{told['guardian']}").exists() or Path(f"/proc/{told['server']}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert left.exists()
    assert Path(told["directory"]).exists()
    assert sweep() == [str(left), told["directory"]]
    assert not left.exists()
    assert not Path(told["directory"]).exists()
    assert sweep() == []


def test_demo_killed_before_it_has_a_guardian(tmp_path: Path) -> None:
    code = "from uccl_ep_serving.demo.remains import new_run_directory; print(new_run_directory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    directory = done.stdout.strip()
    assert Path(directory).parent == tmp_path
    assert sweep() == [directory]


def test_what_is_no_run_directory_stays(tmp_path: Path, left: Path) -> None:
    left.write_text("somebody's, older than the demo")
    own = new_run_directory()
    logs = tmp_path / "uccl-ep-demo-logs-1"
    logs.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / supervisor.LOCK).touch()
    (elsewhere / "before.json").write_text("[]")
    (tmp_path / "uccl-ep-demo-3").symlink_to(elsewhere)  # as another user may put one into /tmp
    half_made = tmp_path / "uccl-ep-demo-2"
    half_made.mkdir()
    (half_made / supervisor.LOCK).touch()  # killed before it had written what was there before it
    assert sweep() == []
    assert own.exists()
    assert logs.exists()
    assert (elsewhere / "before.json").exists()
    assert left.exists()
