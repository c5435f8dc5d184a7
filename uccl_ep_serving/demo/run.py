"""What the demos of both engines share: the run and its outcome, requests, checks, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape

from uccl_ep_serving.demo.client import Answer, Client, compare
from uccl_ep_serving.demo.remains import PREFIX, new_run_directory, sweep
from uccl_ep_serving.demo.report import reduced_rows, traffic_tables
from uccl_ep_serving.demo.server import DemoServer, ServerFailed, port_is_free, without_interrupts

__all__ = [
    "EXACT",
    "PROMPTS",
    "Run",
    "Transport",
    "as_nodes",
    "check_equal",
    "check_traffic",
    "explain",
    "serve_and_leave_nothing",
]

PROMPTS = (
    "The capital of France is",
    "def dispatch(tokens, experts):",
    "Mixture of experts",
    "a",
    "Once upon a time there was a router that sent every token to two experts, and " * 6,
    "0123456789 " * 4,
    "How do I reorder packets?",
    "EFA gives no order",
)
_CHAT = "Say something about experts."
_TOKENS, _CHAT_TOKENS = 24, 48

EXACT = 1e-3
"""Largest logprob difference in float32: sums in another order differ by about 5e-6 in these models."""


class Transport(StrEnum):
    """Transports that need no hardware."""

    SHM = "shm"
    TCP = "tcp"


def as_nodes(transport: Transport, proxies: int) -> dict[str, str]:
    """Settings under which each rank plays a node of its own: no rank writes another's memory itself."""
    return {"UCCL_EP_DIRECT": "0", "UCCL_EP_TRANSPORT": transport.value, "UCCL_EP_PROXIES": str(proxies)}


@dataclass
class Run:
    """The console, the settings and the outcome of one demo.

    Attributes:
        directory: holds the checkpoint, the logs and what the servers write; removed at the end.
        timeout: seconds a server may take to start.
        failures: checks that did not hold.
        kept: a server was left running, so its directory stays.
    """

    console: Console
    directory: Path
    timeout: float
    failures: list[str] = field(default_factory=list)
    kept: bool = False
    #: what was begun when (monotonic seconds)
    steps: list[tuple[str, float]] = field(default_factory=list)

    def step(self, title: str) -> None:
        """What follows is ``title``."""
        self.steps.append((title, time.monotonic()))

    def time_line(self) -> str:
        """How long each step took, and all."""
        ends = [began for _, began in self.steps[1:]] + [time.monotonic()]
        parts = [f"{title} {end - began:.0f} s" for (title, began), end in zip(self.steps, ends, strict=True)]
        return f"{', '.join(parts)}; {ends[-1] - self.steps[0][1]:.0f} s in all" if self.steps else ""

    def compile(self, transport: Transport) -> None:
        """Put what the servers' ranks would compile at their first request into the cache of compiled code."""
        from uccl_ep_serving.kernels.select import cpu_groups
        from uccl_ep_serving.native.failure import STICKY_ERROR
        from uccl_ep_serving.native.groups import load
        from uccl_ep_serving.proxy.service import proxy_groups

        self.step("compiling")
        started = time.monotonic()
        with self.console.status("compiling the kernels and the proxy loop, once"):
            load(STICKY_ERROR, *cpu_groups(), *proxy_groups(transport.value))
        self.console.print(f"kernels and proxy loop: ready after {time.monotonic() - started:.0f} s", highlight=False)

    def wait(self, server: DemoServer, title: str) -> None:
        """Wait until ``server`` is ready, with one live line."""
        self.console.rule(escape(title), align="left")
        self.step(title)
        started = time.monotonic()
        engine = server.launch.engine
        with self.console.status(f"starting {engine}") as status:
            announced = 0.0

            def progress(elapsed: float, phase: str) -> None:
                nonlocal announced
                line = f"starting {engine}, {elapsed:4.0f} s: {phase}"
                status.update(escape(line))
                if not self.console.is_terminal and elapsed - announced >= 10:  # a log file gets a line now and then
                    announced = elapsed
                    self.console.print(escape(line), highlight=False)

            server.wait_ready(self.timeout, progress)
        self.console.print(f"ready after {time.monotonic() - started:.0f} s at {server.url}", highlight=False)

    def talk(self, client: Client, at_once: int) -> list[Answer]:
        """Send chat, streaming and completion requests, ``at_once`` in flight; print the answers, return the last."""
        self.console.print(f"[bold]chat[/]        {escape(client.chat(_CHAT, _CHAT_TOKENS))}", highlight=False)
        self.console.print("[bold]streaming[/]   ", end="")
        for piece in client.stream(_CHAT, _CHAT_TOKENS):
            self.console.print(escape(piece), end="", highlight=False)
        self.console.print()
        answers = client.complete_all(PROMPTS, _TOKENS, at_once)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            shown = prompt if len(prompt) <= 34 else f"{prompt[:24]}… ({len(prompt)} B)"
            self.console.print(f"[bold]completion[/]  {escape(shown)!s:<36} {escape(answer.text)}", highlight=False)
        return answers


def serve_and_leave_nothing(
    module: str, engine: str, target: str, port: int, timeout: float, passes: Callable[[Run], None]
) -> None:
    """Run ``passes`` and end the process: status 0 when every check holds, 1 when one does not, 130 after Ctrl-C.

    Nothing is left behind, except for a server that was to be kept, and the servers' logs after a failure.

    Args:
        module, engine: the engine's package and its name.
        target: make target that installs it.
        port: HTTP port asked for, or 0.
        timeout: seconds a server may take to start.
        passes: starts servers and adds the checks that fail to ``run.failures``.
    """
    console = Console()
    if not console.is_terminal:  # a log file has no width of its own, and 80 columns would break the sentences
        console = Console(width=max(console.width, 120))
    if importlib.util.find_spec(module) is None:
        console.print(
            f"[bold red]FAILED[/] {engine} is not installed; `make {target}` installs it for CPU, then runs this"
        )
        sys.exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    run: Run | None = None
    status = 1
    try:
        if port and not port_is_free(port):  # said now, not after the servers before it have run
            raise ServerFailed(f"port {port} of 127.0.0.1 is in use; choose another with --port, or none")
        if removed := sweep():
            console.print(f"removed what a killed demo left: {escape(', '.join(removed))}", highlight=False)
        run = Run(console, new_run_directory(), timeout)
        passes(run)
        status = 1 if run.failures else 0
        console.rule(align="left")
        console.print(escape(run.time_line()), highlight=False)
        for failure in run.failures:
            console.print(f"[bold red]FAILED[/] {escape(failure)}", highlight=False)
        if run.failures:
            _keep_logs(run)
        else:
            console.print("[bold green]all checks passed[/]")
    except KeyboardInterrupt:
        status = 130
        console.print("\ninterrupted; the servers are stopped and what they left is removed")
    except ServerFailed as error:
        console.print(f"[bold red]FAILED[/] {escape(str(error))}", highlight=False)
        if run is not None:
            _keep_logs(run)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "; TMPDIR chooses a directory with more room" if full else ""
        console.print(f"[bold red]FAILED[/] {escape(str(error))}{hint}", highlight=False)
    finally:
        if run is not None and not run.kept:
            with without_interrupts():
                shutil.rmtree(run.directory, ignore_errors=True)
    sys.exit(status)


class _Interrupted(KeyboardInterrupt):
    """What the signals raise. A plain KeyboardInterrupt that has left an ``exec`` of source text, as dataclasses run,
    makes ``python -m`` end by SIGINT instead of with its status, whoever has caught it (CPython's Py_RunMain).
    """


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise _Interrupted


def _keep_logs(run: Run) -> None:
    """Put the servers' logs where they outlive the run's directory, and say where."""
    logs = sorted(run.directory.glob("*.log"))
    if not logs or run.kept:
        return
    with contextlib.suppress(OSError):  # the failure itself has been told; a full disk may be what it was about
        place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}logs-"))
        for log in logs:
            shutil.copy(log, place)
        run.console.print(f"whole logs: {escape(str(place))}", highlight=False)


def check_equal(run: Run, expected: Sequence[Answer], answers: Sequence[Answer], reference: str) -> None:
    """The same greedy answers as ``reference`` gave; nothing to compare with is no failure."""
    if not expected:
        return
    difference = compare(expected, answers)
    run.console.print(
        f"{reference}: {difference.equal} of {difference.answers} greedy answers equal, "
        f"logprobs differ by {difference.mean:.1e} on average, at most {difference.largest:.1e}",
        highlight=False,
    )
    if difference.equal < difference.answers or difference.largest > EXACT:
        run.failures.append(
            f"answers differ from {reference}: {difference.answers - difference.equal} of {difference.answers} texts, "
            f"logprobs by {difference.largest:.2e} (at most {EXACT:.0e} expected)"
        )


def check_traffic(run: Run, ranks: Sequence[dict[str, Any]]) -> None:
    """Print what moved; every rank must have sent through its proxies, and a row must return for each that went out."""
    if not ranks:
        run.failures.append("no rank serves counters: the engine did not run on this backend")
        return
    run.console.print(traffic_tables(ranks))
    sent, returned = reduced_rows(ranks)
    if sent:
        run.console.print(
            f"low latency: {sent:,} rows went to other ranks, one per (token, remote rank), and {returned:,} came back",
            highlight=False,
        )
    if sent != returned:
        run.failures.append(
            f"{returned} rows returned for {sent} (token, remote rank) pairs: the expert side did not reduce"
        )
    for counters in ranks:
        if not counters["bytes_sent"]:
            run.failures.append(f"rank {counters['rank']} sent nothing through its proxies")


def explain(run: Run, server: DemoServer, model: str) -> None:
    """How to use and stop a server that stays up."""
    body = f'{{"model": "{model}", "prompt": "Mixture of experts", "max_tokens": 16, "temperature": 0}}'
    run.console.print(f"\nthe server stays up (log: {server.log}); ask it:", highlight=False)
    run.console.print(
        f"  curl -s {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    run.console.print(f"stop it, and remove everything it made:  kill {server.guardian_pid}", highlight=False)
