"""``uccl-ep demo-vllm``: vLLM serves tiny models through this backend on two CPU ranks, and proves the answers.

For each model three servers run one after another, each as a user would start it with ``vllm serve``: one rank without
expert parallelism, which is the reference, then two data-parallel ranks with expert parallelism in each of the two
modes. All must give the same greedy answers in float32. Each rank plays a node of its own, so every remote token goes
through rings, proxies and a transport.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.client import Answer, Client
from uccl_ep_serving.demo.run import (
    Run,
    Transport,
    as_nodes,
    check_equal,
    check_traffic,
    explain,
    serve_and_leave_nothing,
)
from uccl_ep_serving.demo.server import DemoServer
from uccl_ep_serving.demo.vllm_launch import MODELS, VllmLaunch

__all__ = ["app", "demo"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REFERENCE = "one rank without expert parallelism"


class Model(StrEnum):
    """What is served."""

    QWEN = "qwen3-moe"
    DEEPSEEK = "deepseek-v3"
    BOTH = "both"


class Mode(StrEnum):
    """The part of the backend's name after ``uccl_ep_``."""

    HIGH_THROUGHPUT = "high_throughput"
    LOW_LATENCY = "low_latency"
    BOTH = "both"


@app.command()
def demo(
    model: Annotated[Model, typer.Option(help="Which model.")] = Model.BOTH,
    mode: Annotated[Mode, typer.Option(help="Which mode of the backend.")] = Mode.BOTH,
    transport: Annotated[Transport, typer.Option(help="How the ranks' proxies reach each other.")] = Transport.SHM,
    proxies: Annotated[int, typer.Option(min=1, max=16, help="Proxy threads of each rank.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the last server up and print how to use it.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port of the last server; 0: a free one.")] = 0,
    reference: Annotated[bool, typer.Option(help="Compare with one rank.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds a server may take to start.")] = 300.0,
) -> None:
    """Serve tiny random models with vLLM through uccl_ep on two data-parallel CPU ranks, and check the answers.

    Exit status 0 when every check holds, 1 when one does not, 130 after Ctrl-C. Nothing is downloaded. Nothing is left
    behind, except for the server of --keep, and the servers' logs after a failure (the demo says where they are).
    """
    models = [name for name in MODELS if model in (Model.BOTH, name)]
    modes = [one for one in (Mode.HIGH_THROUGHPUT, Mode.LOW_LATENCY) if mode in (Mode.BOTH, one)]
    ours = VllmLaunch(model=models[0], backend="uccl_ep", environment=as_nodes(transport, proxies))

    def passes(run: Run) -> None:
        run.compile(transport)
        for name in models:
            expected = _reference(run, name) if reference else []
            for one in modes:
                last = (name, one) == (models[-1], modes[-1])
                launch = replace(ours, model=name, backend=f"uccl_ep_{one.value}")
                _pass(run, launch, expected, keep=keep and last, port=port if last else 0)

    serve_and_leave_nothing("vllm", "vLLM", "demo-vllm", port, timeout, passes)


def _reference(run: Run, name: str) -> list[Answer]:
    """Write the checkpoint and ask one rank."""
    kind = MODELS[name]
    write_checkpoint(run.directory / name, model=kind.shape)
    run.console.print(f"checkpoint: {kind.title}, {kind.words}, random weights", highlight=False)
    with DemoServer(VllmLaunch(model=name, backend=""), run.directory, f"{name}-reference") as server:
        run.wait(server, f"{kind.title}: {_REFERENCE}")
        return run.talk(Client(server.url, name), kind.at_once)


def _pass(run: Run, launch: VllmLaunch, expected: list[Answer], *, keep: bool, port: int) -> None:
    """One server of ours; checks that fail are added to ``run.failures``."""
    kind = MODELS[launch.model]
    write_checkpoint(run.directory / launch.model, model=kind.shape)
    with DemoServer(launch, run.directory, f"{launch.model}-{launch.backend}", port=port) as server:
        run.wait(server, f"{kind.title}: --all2all-backend {launch.backend}")
        answers = run.talk(Client(server.url, launch.model), kind.at_once)
        check_traffic(run, server.settled_traffic())
        check_equal(run, expected, answers, _REFERENCE)
        if keep:
            run.kept = True  # first: from here on the directory is the server's
            server.detach()
            explain(run, server, launch.model)


if __name__ == "__main__":
    app()
