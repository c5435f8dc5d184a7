"""``uccl-ep demo``: SGLang serves a tiny DeepSeek-V3 through this backend on two CPU ranks, and proves the answers.

Three servers run one after another, each as a user would start it: the reference (``--moe-a2a-backend none``), ours,
and ours with FP8 dispatch. The first two must give the same greedy answers; the third stays within a tolerance of
log-probabilities. Each rank plays a node of its own, so every remote token goes through rings, proxies and a transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from uccl_ep_serving.demo.checkpoint import write_trained
from uccl_ep_serving.demo.client import Answer, Client, compare
from uccl_ep_serving.demo.run import (
    EXACT,
    Run,
    Transport,
    as_nodes,
    check_equal,
    check_traffic,
    explain,
    serve_and_leave_nothing,
)
from uccl_ep_serving.demo.server import DemoServer
from uccl_ep_serving.demo.sglang_launch import MODEL, SglangLaunch

__all__ = ["app", "demo"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_AT_ONCE = 4
_REFERENCE = "same server without us"

_FP8 = 0.4
"""Largest mean logprob difference with e4m3 dispatch. Measured: 0.14 (most of it where three bits of mantissa tip the
router to another expert), 6e-6 without quantisation, 1.5 when the rows of remote experts are lost."""

_WINDOW = 128
"""Tokens of the low-latency window (SGLang's default); one prefill step must fit when every step goes through it."""


class Mode(StrEnum):
    """``--deepep-mode``."""

    AUTO = "auto"
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


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
    """Serve a tiny DeepSeek-V3 with SGLang through uccl_ep on two CPU ranks, and check the answers.

    Exit status 0 when every check holds, 1 when one does not, 130 after Ctrl-C. Nothing is downloaded. Nothing is left
    behind, except for the server of --keep, and the servers' logs after a failure (the demo says where they are).
    """
    launch = SglangLaunch(
        backend="uccl_ep",
        dp_attention=dp_attention,
        deepep_mode=deepep_mode.value,
        chunked_prefill=_WINDOW if deepep_mode is Mode.LOW_LATENCY else 1024,
        environment=as_nodes(transport, proxies),
    )

    def passes(run: Run) -> None:
        shape = write_trained(run.directory / "model")
        run.console.print(
            f"checkpoint: DeepSeek-V3, {shape.num_hidden_layers} layers, {shape.n_routed_experts} experts, "
            f"top-{shape.num_experts_per_tok}, hidden {shape.hidden_size}; it has read this project's documents",
            highlight=False,
        )
        run.compile(transport)
        _passes(run, launch, reference=reference, fp8=fp8, keep=keep, port=port)

    serve_and_leave_nothing("sglang", "SGLang", "demo", port, timeout, passes)


def _passes(run: Run, launch: SglangLaunch, *, reference: bool, fp8: bool, keep: bool, port: int) -> None:
    """Run the servers one after another; checks that fail are added to ``run.failures``."""
    expected: list[Answer] = []
    if reference:
        with DemoServer(replace(launch, backend="none"), run.directory, "reference") as server:
            run.wait(server, "reference: --moe-a2a-backend none")
            expected = run.talk(Client(server.url), _AT_ONCE)
    if fp8:
        with DemoServer(replace(launch, dispatch_dtype="fp8"), run.directory, "fp8") as server:
            run.wait(server, "--moe-a2a-backend uccl_ep, rows dispatched in FP8")
            _check_fp8(run, expected, run.talk(Client(server.url), _AT_ONCE))
    with DemoServer(launch, run.directory, "uccl_ep", port=port) as server:
        run.wait(server, "--moe-a2a-backend uccl_ep")
        answers = run.talk(Client(server.url), _AT_ONCE)
        check_traffic(run, server.traffic())
        check_equal(run, expected, answers, _REFERENCE)
        if keep:
            run.kept = True  # first: from here on the directory is the server's
            server.detach()
            explain(run, server, MODEL)


def _check_fp8(run: Run, expected: Sequence[Answer], answers: Sequence[Answer]) -> None:
    if not expected:
        return
    difference = compare(expected, answers)
    run.console.print(
        f"FP8 against float32: logprobs at {difference.positions} positions differ by {difference.mean:.3f} on "
        f"average (tolerance {_FP8}), at most {difference.largest:.3f}",
        highlight=False,
    )
    if difference.mean > _FP8:
        run.failures.append(f"FP8 dispatch: logprobs differ by {difference.mean:.3f} on average, more than {_FP8}")
    if difference.largest < EXACT:
        run.failures.append("FP8 dispatch: logprobs equal those of float32, so nothing was quantised")


if __name__ == "__main__":
    app()
