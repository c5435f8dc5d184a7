"""``uccl-ep demo``: SGLang serves a tiny DeepSeek-V3 through this backend on two CPU ranks, and proves the answers.

Three servers run one after another, each as a user would start it: the reference (``--moe-a2a-backend none``), ours,
and ours with FP8 dispatch. The first two must give the same greedy answers; the third stays within a tolerance of
log-probabilities. Each rank plays a node of its own, so every remote token goes through rings, proxies and a transport.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from uccl_ep_serving.cli.checkpoint import write_checkpoint
from uccl_ep_serving.cli.demo_client import Answer, Client, compare
from uccl_ep_serving.cli.demo_report import reduced_rows, traffic_tables
from uccl_ep_serving.cli.demo_server import MODEL, DemoServer, Launch, ServerFailed

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
    """The settings and the console of one demo."""

    console: Console
    directory: Path
    timeout: float

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

    Exit status 0 when every check holds, 1 when one does not, 130 after Ctrl-C. Nothing is downloaded, and nothing is
    left behind unless --keep is given.
    """
    console = Console()
    if importlib.util.find_spec("sglang") is None:
        console.print("[bold red]FAILED[/] SGLang is not installed; `make demo` installs it for CPU, then runs this")
        sys.exit(1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    directory = Path(tempfile.mkdtemp(prefix="uccl-ep-demo-"))  # 0700; short, for Unix socket paths below it
    run = _Run(console, directory, timeout)
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
    kept = False
    status = 1
    try:
        shape = write_checkpoint(directory / "model")
        console.print(
            f"checkpoint: DeepSeek-V3, {shape.num_hidden_layers} layers, {shape.n_routed_experts} experts, "
            f"top-{shape.num_experts_per_tok}, hidden {shape.hidden_size}, random weights",
            highlight=False,
        )
        failures, kept = _passes(run, launch, reference=reference, fp8=fp8, keep=keep, port=port)
        status = 1 if failures else 0
        console.rule(align="left")
        for failure in failures:
            console.print(f"[bold red]FAILED[/] {escape(failure)}", highlight=False)
        if not failures:
            console.print("[bold green]all checks passed[/]")
    except KeyboardInterrupt:
        status = 130
        console.print("\ninterrupted; the servers are stopped and what they left is removed")
    except ServerFailed as error:
        console.print(f"[bold red]FAILED[/] {escape(str(error))}", highlight=False)
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(status)


def _passes(run: _Run, launch: Launch, *, reference: bool, fp8: bool, keep: bool, port: int) -> tuple[list[str], bool]:
    """Run the servers; returns the checks that failed, and whether one was left running."""
    failures: list[str] = []
    expected: list[Answer] = []
    if reference:
        with DemoServer(replace(launch, backend="none"), run.directory, "reference") as server:
            run.wait(server, "reference: --moe-a2a-backend none")
            expected = run.talk(server)
    if fp8:
        with DemoServer(replace(launch, dispatch_dtype="fp8"), run.directory, "fp8") as server:
            run.wait(server, "--moe-a2a-backend uccl_ep, rows dispatched in FP8")
            _check_fp8(run.console, expected, run.talk(server), failures)
    with DemoServer(launch, run.directory, "uccl_ep", port=port) as server:
        run.wait(server, "--moe-a2a-backend uccl_ep")
        answers = run.talk(server)
        _check_traffic(run.console, server.traffic(), failures)
        _check_equal(run.console, expected, answers, failures)
        if keep:
            server.detach()
            _explain(run.console, server)
    return failures, keep


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
