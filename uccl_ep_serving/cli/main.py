"""Entry point of the ``uccl-ep`` command.

Each command is a program of its own, whose module is imported when it is called: ``uccl-ep --help`` needs neither torch
nor an engine.
"""

from __future__ import annotations

import importlib
import io
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = ["app"]

app = typer.Typer(
    name="uccl-ep",
    help="MoE all-to-all for SGLang and vLLM: run a demo of either, measure, look at this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_COMMANDS = {
    "demo": ("demo", "Serve a tiny DeepSeek-V3 with SGLang through uccl_ep, on CPU ranks."),
    "demo-vllm": ("demo_vllm", "Serve a tiny Qwen3-MoE and DeepSeek-V3 with vLLM through uccl_ep, on CPU ranks."),
    "run": (
        "run",
        "Run a module of an engine, as `python -m` would, with this package's plugin loaded first: for tools that "
        "do not load plugins themselves.",
    ),
    "bench": ("bench", "Measure dispatch and combine beside gloo, MPI, NCCL or DeepEP; every sample is verified."),
    "compare": (
        "compare",
        "Say whether one backend is faster than others for given traffic, by how much, and how sure that is.",
    ),
    "compare-serving": (
        "compare_serving",
        "Start the same server with one backend after another, load it with the engine's client, say which is faster.",
    ),
    "doctor": (
        "doctor",
        "Say what this machine can do: engines, GPUs, NICs, transports, limits, settings, and what to do next.",
    ),
    "check": (
        "check",
        "Try what a job needs, on one node or several: ways, NICs, GPUs, ports; say what stands in the way.",
    ),
    "warm": ("warm", "Compile everything for this machine, or for a named GPU, ahead: for images and cold pods."),
    "top": (
        "top",
        "Show what the open Buffers of this machine's processes are doing: rates, queues, p50 and p99 of operations.",
    ),
    "timeline": (
        "timeline",
        "Write what the ranks of this machine call, and for whom they wait, as a trace for ui.perfetto.dev.",
    ),
    "flight": (
        "flight",
        "Read what ranks wrote when they could not go on (UCCL_EP_FLIGHT_RECORDER): who waited for whom, and where.",
    ),
    "export": ("export", "Serve the live counters of this machine's open Buffers to Prometheus."),
    "plan": (
        "plan",
        "Say what window each rank would need for given shapes, the most that a low-latency operation sends, and how "
        "many programs (SMs) a normal-mode operation takes on a GPU.",
    ),
}
"""By name: the module of this package, and what the list of commands says."""


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


class _PassedOn(TyperCommand):
    """Everything after the word goes to the command's own program as it is, ``--help`` and ``--`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return args


def _add(name: str, module: str, summary: str) -> None:
    @app.command(name, cls=_PassedOn, short_help=summary)
    def command(context: typer.Context) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # None where who started this has closed it
                stream.reconfigure(errors="replace")  # a terminal of ASCII shows a question mark, and no traceback
        program = importlib.import_module(f"uccl_ep_serving.cli.{module}").app
        program(args=context.args, prog_name=f"uccl-ep {name}")


for _name, (_module, _summary) in _COMMANDS.items():
    _add(_name, _module, _summary)


if __name__ == "__main__":
    app()
