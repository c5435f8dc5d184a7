"""One server of the demo or of a test, of either engine: its start, readiness and stop."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

from uccl_ep_serving.demo import supervisor
from uccl_ep_serving.errors import UcclEpError

__all__ = [
    "DemoServer",
    "ServerFailed",
    "ServerLaunch",
    "free_port",
    "kill_users_of",
    "port_is_free",
    "without_interrupts",
]

_STOP_SECONDS = 30.0
_HEALTH_SECONDS = 3.0
_POLL_SECONDS = 0.2
#: Distances from the server's port at which SGLang may listen with DP attention: 233 + 6 + one for each DP rank.
_DERIVED_PORTS = range(233, 256)
_LEAST_PORT = 10000
_PHASE_WIDTH = 50  # what remains of 80 columns beside the spinner and the seconds


class ServerFailed(UcclEpError, RuntimeError):
    """The server ended, or did not become ready in time; the message ends with its last log lines."""


class ServerLaunch(Protocol):
    """What :class:`DemoServer` asks of an engine."""

    @property
    def engine(self) -> str:
        """Its name, for messages."""

    @property
    def chatter(self) -> str:
        """What the log line that prints every argument contains: it is left out of messages."""

    @property
    def environment(self) -> Mapping[str, str]:
        """More environment variables, which win."""

    def command(self, model: Path, port: int) -> list[str]:
        """The command a user would type, for a machine without a GPU."""

    def cpu_environment(self, directory: Path) -> dict[str, str]:
        """What the engine needs on a CPU; files may be written below ``directory``."""

    def phase(self, line: str) -> str | None:
        """What a log line says without its prefix; None for a line that is no log line of the engine."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on right now, nor on those that SGLang derives from it.

    With DP attention SGLang also listens on ports from ``port + 233`` on (``PortArgs.init_new`` in its server_args),
    and only later. So they lie below those that the kernel gives to outgoing connections, where that range leaves room.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - _DERIVED_PORTS.stop
    for _ in range(100):
        port = random.SystemRandom().randrange(_LEAST_PORT, end) if end > _LEAST_PORT else 0
        if port and all(port_is_free(port + more) for more in (0, *_DERIVED_PORTS)):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class DemoServer:
    """A server under its guardian (:mod:`.supervisor`). Use as a context manager, or :meth:`start` and
    :meth:`stop`.

    Args:
        launch: what to start.
        run_directory: directory of the demo run; holds ``model/``. The guardian removes it if the demo dies.
        name: names the log file.
        port: TCP port, 0 for a free one.
        url: where it answers, when that is not this port of the loopback interface.
        directory: where it runs, the run directory by default.
        grace: seconds that it gets to end by itself when it is stopped, before it is killed.
    """

    def __init__(
        self,
        launch: ServerLaunch,
        run_directory: Path,
        name: str,
        *,
        port: int = 0,
        url: str = "",
        directory: Path | None = None,
        grace: float = 0.0,
    ) -> None:
        self.launch = launch
        self.run_directory = run_directory
        self.log = run_directory / f"{name}.log"
        self.port = port or free_port()
        #: base of the HTTP addresses
        self.url = url or f"http://127.0.0.1:{self.port}"
        self._here = not url
        self._directory = directory or run_directory
        self._grace = grace
        #: of the server's process, once it has been started
        self.environment: dict[str, str] = {}
        self.pid = 0
        self.removed: list[str] = []
        self._before: list[str] = []
        self._guardian: subprocess.Popen[bytes] | None = None
        self._exit: int | None = None
        self._detached = False

    @property
    def guardian_pid(self) -> int:
        """Process to send SIGTERM to in order to stop a detached server."""
        return self._guardian.pid if self._guardian else 0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # Ctrl-C too: nobody calls __exit__ for what did not finish __enter__
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._detached:
            self.stop()

    def start(self) -> None:
        """Start guardian and server; returns at once, see :meth:`wait_ready`. Entering the context calls it."""
        if self._guardian is not None:
            raise ServerFailed("this server has been started already")
        if self._here and not port_is_free(self.port):
            raise ServerFailed(f"port {self.port} of 127.0.0.1 is in use; choose another with --port, or none")
        scratch = self.run_directory / "tmp"  # engines put their ZeroMQ sockets where TMPDIR points
        scratch.mkdir(exist_ok=True)
        self.environment = {
            **os.environ,
            **self.launch.cpu_environment(self.run_directory),
            "TMPDIR": str(scratch),
            "PYTHONSAFEPATH": "1",  # `python -m` must not find packages in the directory it is run from
            "PYTHONUNBUFFERED": "1",
            **self.launch.environment,
        }
        self._before = supervisor.snapshot()
        spec: dict[str, Any] = {
            "command": self.launch.command(self.run_directory / "model", self.port),
            "directory": str(self._directory),
            "run_directory": str(self.run_directory),
            "log": str(self.log),
            "before": self._before,
            "grace": self._grace,
        }
        # its own session: Ctrl-C at the terminal reaches the demo only. Nor does it hold the terminal or a pipe of the
        # demo's open: with --keep, whoever reads the demo's output would wait for it.
        with self.log.open("ab") as log:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,  # the guardian ignores and passes it on; anybody could read arguments
                start_new_session=True,
            )
        assert self._guardian.stdout is not None
        # a guardian that could not start it says only what it ended
        first = json.loads(self._guardian.stdout.readline() or "{}")
        if "pid" not in first:
            raise ServerFailed(f"the server could not be started: {' '.join(spec['command'])}\n{self.tail()}")
        self.pid = int(first["pid"])

    def wait_ready(self, timeout: float, progress: Callable[[float, str], None]) -> None:
        """Wait until the server answers.

        Args:
            timeout: seconds.
            progress: called a few times a second with the seconds so far and what the server does.

        Raises:
            ServerFailed: the server ended or the time is over.
        """
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < timeout:
            if not self.alive():
                raise ServerFailed(f"the {self.launch.engine} server ended while starting.\n{self.tail()}")
            progress(elapsed, self._phase())
            with contextlib.suppress(OSError, HTTPException):
                urllib.request.urlopen(f"{self.url}/health", timeout=_HEALTH_SECONDS).read()
                return
            time.sleep(_POLL_SECONDS)
        raise ServerFailed(f"the {self.launch.engine} server was not ready after {timeout:.0f} s.\n{self.tail()}")

    def alive(self) -> bool:
        """Whether the server's main process runs."""
        with contextlib.suppress(psutil.Error):
            return self.pid != 0 and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def pids(self) -> list[int]:
        """The server's main process and everything below it."""
        try:
            main = psutil.Process(self.pid)
            return [self.pid, *(child.pid for child in main.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def traffic(self) -> list[dict[str, Any]]:
        """Counters of every open Buffer of this server, by rank (``Buffer.stats()``)."""
        from uccl_ep_serving import stats as live

        found = [counters for pid in self.pids() for counters in live.query(pid)]
        return sorted(found, key=lambda counters: int(counters["rank"]))

    def settled_traffic(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        """:meth:`traffic` once nothing is under way: idle data-parallel ranks step on for a while after an answer."""
        deadline = time.monotonic() + timeout
        before: list[dict[str, Any]] = []
        while True:
            now = self.traffic()
            if [one["ops"] for one in now] == [one["ops"] for one in before] or time.monotonic() > deadline:
                return now
            before = now
            time.sleep(5 * _POLL_SECONDS)

    def detach(self) -> None:
        """Leave the server running after this process; SIGTERM to :attr:`guardian_pid` stops it."""
        assert self._guardian is not None
        assert self._guardian.stdin is not None
        self._guardian.stdin.write(b"detach\n")
        self._guardian.stdin.flush()
        self._detached = True

    def stop(self) -> None:
        """Kill the whole process tree and remove what it left; bounded, and never interrupted by Ctrl-C."""
        guardian, self._guardian = self._guardian, None
        if guardian is None:
            return
        with without_interrupts():
            assert guardian.stdin is not None
            assert guardian.stdout is not None
            with contextlib.suppress(OSError):
                guardian.stdin.write(b"stop\n")
                guardian.stdin.flush()
            last: dict[str, Any] = {}
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = guardian.communicate(timeout=_STOP_SECONDS + self._grace)
                for line in output.splitlines():
                    last = json.loads(line)
            # the guardian was killed: the processes died with it, the files did not
            if "removed" not in last:
                guardian.kill()
                kill_users_of(self.run_directory)
                last["removed"] = supervisor.clean(self._before)
            self.removed = last["removed"]

    def tail(self, lines: int = 25) -> str:
        """The last lines of the server's log, without the one that prints every argument."""
        return "\n".join(list(self._log_lines())[-lines:])

    def _log_lines(self) -> Iterator[str]:
        if self.log.exists():
            for line in self.log.read_text(errors="replace").splitlines():
                if self.launch.chatter not in line:
                    yield line

    def _phase(self) -> str:
        for line in reversed(list(self._log_lines())):
            if text := self.launch.phase(line):
                return text[:_PHASE_WIDTH]
        return "importing"


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold off Ctrl-C and the signals that the demo treats like it, while something is being cleaned up."""
    previous = {}
    # another thread than the main one may not set handlers: these signals do not reach it anyway
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def kill_users_of(directory: Path) -> None:
    """Kill every process that works in ``directory``, as all of the server's do, until there is none."""
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # environ would not do: engines write their titles over it
                if process.cwd() == str(directory):
                    process.kill()
                    alive.append(process)
        if not alive:
            return
        psutil.wait_procs(alive, timeout=_POLL_SECONDS)
