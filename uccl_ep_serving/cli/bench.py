"""``uccl-ep bench``: dispatch and combine, measured beside others in the same run, every sample verified.

Stand-alone it starts its ranks itself; under torchrun or mpirun each process is one rank of the group it finds.
Exit status: 0, 1 when data was wrong or an operation failed, 2 for wrong options.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from uccl_ep_serving.bench.card import PATHS, Card
from uccl_ep_serving.bench.launch import RankFailed, launched_by, prepare_rank
from uccl_ep_serving.bench.report import plot, require_matplotlib, tables
from uccl_ep_serving.cli.console import wide_console
from uccl_ep_serving.cli.ranks import run_as_rank, start_ranks
from uccl_ep_serving.errors import ConfigError, UcclEpError

__all__ = ["app", "rank_main", "run_standalone"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _require_writable(file: Path) -> None:
    """Before anything is measured. Raises ConfigError."""
    place = file if file.exists() else file.parent
    if file.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"{file} cannot be written. Next step: name a file in a directory that exists and is yours")


def _report(result: dict[str, Any], json_file: str, plot_file: str) -> None:
    wide_console().print(tables(result), highlight=False)
    if json_file:
        Path(json_file).write_text(json.dumps(result, indent=1) + "\n")
    if plot_file:
        plot(result, Path(plot_file))


def _run_rank(card: Card, json_file: str, plot_file: str, timeout: float) -> None:
    """One rank, in this process, of the group that the environment describes."""
    # after the ranks exist: the parent of a stand-alone run needs no torch
    import torch.distributed as dist

    from uccl_ep_serving.bench.rank import run_card

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        result = run_card(card)
        if result is not None:
            _report(result, json_file, plot_file)
    finally:
        dist.destroy_process_group()


def rank_main(told: str) -> int:
    """Body of a rank that :func:`run_standalone` started; ``told`` is its JSON. Returns the exit status."""

    def run(job: dict[str, Any]) -> None:
        _run_rank(Card.from_mapping(job["card"]), job["json"], job["plot"], job["timeout"])

    return run_as_rank("bench", told, run)


def run_standalone(card: Card, json_file: str = "", plot_file: str = "", timeout: float = 600.0) -> None:
    """Start the ranks of ``card`` on this host and wait for them. Raises RankFailed."""
    job = {"card": card.as_dict(), "json": json_file, "plot": plot_file, "timeout": timeout}
    start_ranks("bench", job, card.ranks, timeout, mpi="mpi" in card.against)


@app.command()
# the arguments are the options of the command
def bench(
    ranks: Annotated[int, typer.Option(help="Ranks to start; under torchrun: must be its number.")] = 0,
    mode: Annotated[str, typer.Option(help="low-latency or normal.")] = "normal",
    path: Annotated[
        str, typer.Option(help=f"How ranks reach each other, one or several by commas: {', '.join(PATHS)}.")
    ] = "direct",
    tokens: Annotated[int, typer.Option(help="Tokens per rank.")] = 128,
    hidden: Annotated[int, typer.Option(help="Values per token.")] = 7168,
    experts: Annotated[int, typer.Option(help="Experts, a multiple of the ranks.")] = 64,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, f32 or fp8.")] = "bf16",
    weights_at_dispatch: Annotated[
        bool, typer.Option(help="Low latency: router weights travel with the dispatch.")
    ] = True,
    iterations: Annotated[int, typer.Option(help="Measured calls of each phase.")] = 20,
    warmup: Annotated[int, typer.Option(help="Rounds before them.")] = 3,
    repeat: Annotated[int, typer.Option(help="Rounds without a pause per sample; 1: each call starts from rest.")] = 1,
    against: Annotated[str, typer.Option(help="gloo, mpi, nccl, deepep, by commas; empty: none.")] = "gloo",
    seed: Annotated[int, typer.Option(help="Of inputs and routing.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, max=86400, help="Seconds for the whole run.")] = 600.0,
    json_file: Annotated[str, typer.Option("--json", help="Write the result to this file.")] = "",
    plot_file: Annotated[str, typer.Option("--plot", help="Draw the result into this PNG (needs matplotlib).")] = "",
) -> None:
    """Measure dispatch and combine beside others in the same run; every sample is verified.

    Times are those of the slowest rank; ratios come from calls measured right after one another. Other settings are
    the UCCL_EP_* variables, as everywhere.
    """
    try:
        launcher, rank, size = launched_by(os.environ)
        if plot_file:
            require_matplotlib()
        for file in filter(None, (json_file, plot_file)):
            _require_writable(Path(file))
        if launcher and ranks not in (0, size):
            raise ConfigError(f"--ranks {ranks}, but {launcher} started {size}: leave --ranks out")
        card = Card(
            mode=mode,
            paths=_names(path),
            against=_names(against),
            ranks=size or ranks or 2,
            tokens=tokens,
            hidden=hidden,
            experts=experts,
            topk=topk,
            dtype=dtype,
            weights_at_dispatch=weights_at_dispatch,
            iterations=iterations,
            warmup=warmup,
            repeat=repeat,
            seed=seed,
        )
    except ConfigError as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        if launcher:
            prepare_rank(rank, size)
            _run_rank(card, json_file, plot_file, timeout)
        else:
            run_standalone(card, json_file, plot_file, timeout)
    except (UcclEpError, AssertionError, RankFailed) as error:
        typer.echo(f"bench: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("bench: interrupted", err=True)
        raise typer.Exit(130) from None
