"""Entry point of the ``uccl-ep`` command.

Each command imports its own module when it is called: ``uccl-ep --help`` needs neither torch nor an engine.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

app = typer.Typer(
    name="uccl-ep",
    help="MoE all-to-all for SGLang and vLLM: run a demo of either, measure, look at this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"uccl_ep_serving {metadata.version('uccl_ep_serving')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# the options are the demo's own: everything after the word goes to it, --help included
@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Serve a tiny DeepSeek-V3 with SGLang through uccl_ep, on CPU ranks.",
)
def demo(context: typer.Context) -> None:
    """Serve a tiny DeepSeek-V3 with SGLang through uccl_ep, on CPU ranks."""
    from uccl_ep_serving.cli import demo as command

    command.app(args=context.args, prog_name="uccl-ep demo")


@app.command(
    name="demo-vllm",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Serve a tiny Qwen3-MoE and DeepSeek-V3 with vLLM through uccl_ep, on CPU ranks.",
)
def demo_vllm(context: typer.Context) -> None:
    """Serve a tiny Qwen3-MoE and DeepSeek-V3 with vLLM through uccl_ep, on CPU ranks."""
    from uccl_ep_serving.cli import demo_vllm as command

    command.app(args=context.args, prog_name="uccl-ep demo-vllm")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Measure dispatch and combine beside gloo, MPI, NCCL or DeepEP; every sample is verified.",
)
def bench(context: typer.Context) -> None:
    """Measure dispatch and combine beside gloo, MPI, NCCL or DeepEP; every sample is verified."""
    from uccl_ep_serving.cli import bench as command

    command.app(args=context.args, prog_name="uccl-ep bench")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what this machine can do: engines, GPUs, NICs, transports, limits, settings, and what to do next.

    Exit status 0 when the package is usable here, 1 when a problem stands in the way.
    """
    from uccl_ep_serving.cli.doctor import report as command

    raise typer.Exit(command.run(as_json=as_json))


@app.command()
def top(
    pid: Annotated[list[int] | None, typer.Option(help="Only of this process; may be given several times.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counters once, as they are.")] = False,
) -> None:
    """Show what the open Buffers of this machine's processes are doing: rates, queues, p50 and p99 of operations."""
    from uccl_ep_serving.cli import top as command

    raise typer.Exit(command.run(pid or [], interval, once, as_json))


@app.command()
def plan(
    ranks: Annotated[int, typer.Option(help="EP ranks.")],
    experts: Annotated[int, typer.Option(help="Experts, a multiple of the ranks.")],
    hidden: Annotated[int, typer.Option(help="Values per token.")] = 7168,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    tokens: Annotated[int, typer.Option(help="Most tokens of a low-latency dispatch; 0: normal mode only.")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or f32: of the tensors given.")] = "bf16",
    batch: Annotated[int, typer.Option(min=1, help="Tokens of a rank in a normal-mode dispatch.")] = 4096,
    node_ranks: Annotated[int, typer.Option(min=0, help="Ranks of a host; 0: all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what window each rank would need for given shapes, the most that a low-latency operation sends, and how many
    programs (SMs) a normal-mode operation takes on a GPU.

    The settings are those of the environment (UCCL_EP_*). Nothing is allocated.
    """
    from uccl_ep_serving.cli import plan as command
    from uccl_ep_serving.errors import ConfigError

    try:
        command.run(ranks, tokens, hidden, experts, topk, dtype, batch, node_ranks, as_json)
    except ConfigError as error:
        typer.echo(f"plan: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
