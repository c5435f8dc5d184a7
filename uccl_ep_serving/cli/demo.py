"""``uccl-ep demo``: SGLang serves a tiny DeepSeek-V3 through this backend on two CPU ranks, and proves the answers.

Three servers run one after another, each as a user would start it: the reference (``--moe-a2a-backend none``), ours,
and ours with FP8 dispatch. The first two must give the same greedy answers; the third stays within a tolerance of
log-probabilities. Each rank plays a node of its own, so every remote token goes through rings, proxies and a transport.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from uccl_ep_serving.cli.checkpoint import write_checkpoint
from uccl_ep_serving.cli.demo_client import Answer, Client, compare
from uccl_ep_serving.cli.demo_remains import PREFIX, new_run_directory, sweep
from uccl_ep_serving.cli.demo_report import reduced_rows, traffic_tables
from uccl_ep_serving.cli.demo_server import (
    MODEL,
    DemoServer,
    Launch,
    ServerFailed,
    port_is_free,
    without_interrupts,
)

__all__ = ["app", "demo"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PROMPTS = (
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
_TOKENS = 24
_AT_ONCE = 4

_EXACT = 1e-3
"""Largest logprob difference in float32: sums in another order differ by about 5e-6 in this model."""

_FP8 = 0.4
"""Largest mean logprob difference with e4m3 dispatch. Measured: 0.14 (most of it where three bits of mantissa tip the
router to another expert), 6e-6 without quantisation, 1.5 when the rows of remote experts are lost."""

_WINDOW = 128
"""Tokens of the low-latency window (SGLang's default); one prefill step must fit when every step goes through it."""


class Transport(StrEnum):
    """Transports that need no hardware."""

    SHM = "shm"
    TCP = "tcp"


class Mode(StrEnum):
    """``--deepep-mode``."""

    AUTO = "auto"
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


@dataclass
class _Run:
    """The settings, the console and the outcome of one demo."""

    console: Console
    directory: Path
    timeout: float
    failures: list[str] = field(default_factory=list)
    kept: bool = False  # a server was left running: its directory stays

    def prepare(self, transport: Transport) -> None:
        """Write the checkpoint; compile what the servers' ranks would otherwise compile at their first request."""
        shape = write_checkpoint(self.directory / "model")
        self.console.print(
            f"checkpoint: DeepSeek-V3, {shape.num_hidden_layers} layers, {shape.n_routed_experts} experts, "
            f"top-{shape.num_experts_per_tok}, hidden {shape.hidden_size}, random weights",
            highlight=False,
        )
        started = time.monotonic()
        with self.console.status("compiling the kernels and the proxy loop, once"):
            _compile(transport)
        self.console.print(f"kernels and proxy loop: ready after {time.monotonic() - started:.0f} s", highlight=False)

    def wait(self, server: DemoServer, title: str) -> None:
        """Wait until ``server`` is ready, with one live line."""
        self.console.rule(escape(title), align="left")
        started = time.monotonic()
        with self.console.status("starting SGLang") as status:
            announced = 0.0

            def progress(elapsed: float, phase: str) -> None:
                nonlocal announced
                line = f"starting SGLang, {elapsed:4.0f} s: {phase}"
                status.update(escape(line))
                if not self.console.is_terminal and elapsed - announced >= 10:  # a log file gets a line now and then
                    announced = elapsed
                    self.console.print(escape(line), highlight=False)

            server.wait_ready(self.timeout, progress)
        self.console.print(f"ready after {time.monotonic() - started:.0f} s at {server.url}", highlight=False)

    def talk(self, server: DemoServer) -> list[Answer]:
        """Send chat, streaming and completion requests; print the answers; return the completions."""
        client = Client(server.url)
        self.console.print(f"[bold]chat[/]        {escape(client.chat(_CHAT, _TOKENS))}", highlight=False)
        self.console.print("[bold]streaming[/]   ", end="")
        for piece in client.stream(_CHAT, _TOKENS):
            self.console.print(escape(piece), end="", highlight=False)
        self.console.print()
        answers = client.complete_all(_PROMPTS, _TOKENS, _AT_ONCE)
        for prompt, answer in zip(_PROMPTS, answers, strict=True):
            shown = prompt if len(prompt) <= 34 else f"{prompt[:24]}… ({len(prompt)} B)"
            self.console.print(f"[bold]completion[/]  {escape(shown)!s:<36} {escape(answer.text)}", highlight=False)
        return answers


def _compile(transport: Transport) -> None:
    """Put everything that a rank runs into the cache of compiled code, where later runs find it."""
    from uccl_ep_serving.kernels.select import low_latency_kernels, normal_kernels
    from uccl_ep_serving.proxy.warm import warm

    low_latency_kernels("cpu")
    normal_kernels("cpu")
    warm(transport.value)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@app.command()
def demo(
    dp_attention: Annotated[
        bool, typer.Option("--dp-attention", help="Attention data-parallel over the ranks.")
    ] = False,
    deepep_mode: Annotated[Mode, typer.Option(help="SGLang's --deepep-mode.")] = Mode.AUTO,
    transport: Annotated[Transport, typer.Option(help="How the ranks' proxies reach each other.")] = Transport.SHM,
    proxies: Annotated[int, typer.Option(min=1, max=16, help="Proxy threads of each rank.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up and print how to use it.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 chooses a free one.")] = 0,
    reference: Annotated[bool, typer.Option(help="Compare with the same server without us.")] = True,
    fp8: Annotated[bool, typer.Option(help="A second pass that dispatches FP8.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds a server may take to start.")] = 300.0,
) -> None:
    """Serve a tiny random DeepSeek-V3 with SGLang through uccl_ep on two CPU ranks, and check the answers.

    Exit status 0 when every check holds, 1 when one does not, 130 after Ctrl-C. Nothing is downloaded. Nothing is left
    behind, except for the server of --keep, and the servers' logs after a failure (the demo says where they are).
    """
    console = _console()
    if importlib.util.find_spec("sglang") is None:
        console.print("[bold red]FAILED[/] SGLang is not installed; `make demo` installs it for CPU, then runs this")
        sys.exit(1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    launch = Launch(
        backend="uccl_ep",
        dp_attention=dp_attention,
        deepep_mode=deepep_mode.value,
        chunked_prefill=_WINDOW if deepep_mode is Mode.LOW_LATENCY else 1024,
        environment={
            "UCCL_EP_DIRECT": "0",  # each rank plays a node of its own: no rank writes another's memory itself
            "UCCL_EP_TRANSPORT": transport.value,
            "UCCL_EP_PROXIES": str(proxies),
        },
    )
    run: _Run | None = None
    status = 1
    try:
        if port and not port_is_free(port):  # said now, not after the servers before it have run
            raise ServerFailed(f"port {port} of 127.0.0.1 is in use; choose another with --port, or none")
        if removed := sweep():
            console.print(f"removed what a killed demo left: {escape(', '.join(removed))}", highlight=False)
        run = _Run(console, new_run_directory(), timeout)
        run.prepare(transport)
        _passes(run, launch, reference=reference, fp8=fp8, keep=keep, port=port)
        status = 1 if run.failures else 0
        console.rule(align="left")
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


def _console() -> Console:
    console = Console()
    # a log file has no width of its own, and 80 columns would break the sentences
    return console if console.is_terminal else Console(width=max(console.width, 120))


def _keep_logs(run: _Run) -> None:
    """Put the servers' logs where they outlive the run's directory, and say where."""
    logs = sorted(run.directory.glob("*.log"))
    if not logs or run.kept:
        return
    with contextlib.suppress(OSError):  # the failure itself has been told; a full disk may be what it was about
        place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}logs-"))
        for log in logs:
            shutil.copy(log, place)
        run.console.print(f"whole logs: {escape(str(place))}", highlight=False)


def _passes(run: _Run, launch: Launch, *, reference: bool, fp8: bool, keep: bool, port: int) -> None:
    """Run the servers one after another; checks that fail are added to ``run.failures``."""
    expected: list[Answer] = []
    if reference:
        with DemoServer(replace(launch, backend="none"), run.directory, "reference") as server:
            run.wait(server, "reference: --moe-a2a-backend none")
            expected = run.talk(server)
    if fp8:
        with DemoServer(replace(launch, dispatch_dtype="fp8"), run.directory, "fp8") as server:
            run.wait(server, "--moe-a2a-backend uccl_ep, rows dispatched in FP8")
            _check_fp8(run.console, expected, run.talk(server), run.failures)
    with DemoServer(launch, run.directory, "uccl_ep", port=port) as server:
        run.wait(server, "--moe-a2a-backend uccl_ep")
        answers = run.talk(server)
        _check_traffic(run.console, server.traffic(), run.failures)
        _check_equal(run.console, expected, answers, run.failures)
        if keep:
            run.kept = True  # first: from here on the directory is the server's
            server.detach()
            _explain(run.console, server)


def _check_equal(console: Console, expected: Sequence[Answer], answers: Sequence[Answer], failures: list[str]) -> None:
    if not expected:
        return
    difference = compare(expected, answers)
    console.print(
        f"same server without us: {difference.equal} of {difference.answers} greedy answers equal, "
        f"logprobs differ by {difference.mean:.1e} on average, at most {difference.largest:.1e}",
        highlight=False,
    )
    if difference.equal < difference.answers or difference.largest > _EXACT:
        failures.append(
            f"answers differ from --moe-a2a-backend none: {difference.answers - difference.equal} of "
            f"{difference.answers} texts, logprobs by {difference.largest:.2e} (at most {_EXACT:.0e} expected)"
        )


def _check_fp8(console: Console, expected: Sequence[Answer], answers: Sequence[Answer], failures: list[str]) -> None:
    if not expected:
        return
    difference = compare(expected, answers)
    console.print(
        f"FP8 against float32: logprobs at {difference.positions} positions differ by {difference.mean:.3f} on "
        f"average (tolerance {_FP8}), at most {difference.largest:.3f}",
        highlight=False,
    )
    if difference.mean > _FP8:
        failures.append(f"FP8 dispatch: logprobs differ by {difference.mean:.3f} on average, more than {_FP8}")
    if difference.largest < _EXACT:
        failures.append("FP8 dispatch: logprobs equal those of float32, so nothing was quantised")


def _check_traffic(console: Console, ranks: Sequence[dict[str, Any]], failures: list[str]) -> None:
    if not ranks:
        failures.append("no rank serves counters: the engine did not run on this backend")
        return
    console.print(traffic_tables(ranks))
    sent, returned = reduced_rows(ranks)
    if sent:
        console.print(
            f"low latency: {sent:,} rows went to other ranks, one per (token, remote rank), and {returned:,} came back",
            highlight=False,
        )
    if sent != returned:
        failures.append(
            f"{returned} rows returned for {sent} (token, remote rank) pairs: the expert side did not reduce"
        )
    for counters in ranks:
        if not counters["bytes_sent"]:
            failures.append(f"rank {counters['rank']} sent nothing through its proxies")


def _explain(console: Console, server: DemoServer) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "Mixture of experts", "max_tokens": 16, "temperature": 0}}'
    console.print(f"\nthe server stays up (log: {server.log}); ask it:", highlight=False)
    console.print(
        f"  curl -s {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    console.print(f"stop it, and remove everything it made:  kill {server.guardian_pid}", highlight=False)


if __name__ == "__main__":
    app()
