"""``uccl-ep compare``: whether one backend is faster than others for given traffic, by a method that can say no.

Stand-alone it starts its ranks itself, several times; under torchrun or mpirun each process is one rank, and each
launch makes the next start. Exit status: 0, 1 when data was wrong or a start failed, 2 for wrong options.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from uccl_ep_serving.bench.card import TRACE, Card
from uccl_ep_serving.bench.launch import RankFailed, launched_by, prepare_rank
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.cli.console import wide_console
from uccl_ep_serving.cli.ranks import run_as_rank, start_ranks
from uccl_ep_serving.compare.directory import (
    begin_anew,
    finished,
    missing_starts,
    open_directory,
    read_starts,
    start_file,
    write_json,
)
from uccl_ep_serving.compare.names import BACKENDS
from uccl_ep_serving.compare.plan import Plan, given
from uccl_ep_serving.errors import ConfigError, UcclEpError

__all__ = ["app", "rank_main", "run_standalone"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Bar:
    """The rounds of all starts on a terminal, a line per start elsewhere.

    Drawn between samples by the thread that measures: a thread of its own would run beside them.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        console = Console(stderr=True)
        self._before = (number - 1) * plan.card.iterations
        self._number, self._starts = number, plan.starts
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task("", total=plan.starts * plan.card.iterations)
            self._bar.start()
        else:
            print(f"compare: start {number} of {plan.starts}", file=sys.stderr, flush=True)

    def __call__(self, done: int, what: str) -> None:
        if self._bar is not None:
            text = f"start {self._number} of {self._starts}: {what}"
            self._bar.update(self._task, completed=self._before + done, description=text, refresh=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _run_rank(plan: Plan, number: int, directory: Path, timeout: float) -> None:
    """One rank of start ``number``, in this process, of the group that the environment describes."""
    # after the ranks exist: the parent of a stand-alone run needs no torch
    import torch.distributed as dist

    from uccl_ep_serving.compare.run import measure_start

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    bar, held = None, contextlib.ExitStack()
    try:
        number = number or _next_start(plan, directory, held)
        if not number:
            return
        bar = _Bar(plan, number) if dist.get_rank() == 0 else None
        result = measure_start(plan, number, bar or (lambda done, what: None))
        if result is not None:
            write_json(start_file(directory, number), result)
    finally:
        if bar:
            bar.close()
        held.close()
        dist.destroy_process_group()


def _next_start(plan: Plan, directory: Path, held: contextlib.ExitStack) -> int:
    """The first start that rank 0 misses in its directory, which ``held`` keeps for it; 0 when it has all. Collective.
    Raises ConfigError."""
    import torch.distributed as dist

    told: list[Any] = [0]
    if dist.get_rank() == 0:
        try:
            held.enter_context(open_directory(directory, plan, describe()))
            told = [next(iter(missing_starts(directory, plan)), 0)]
        except ConfigError as error:
            told = [str(error)]
    dist.broadcast_object_list(told)
    if isinstance(told[0], str):
        raise ConfigError(told[0])
    return int(told[0])


def rank_main(told: str) -> int:
    """Body of a rank that :func:`run_standalone` started; ``told`` is its JSON. Returns the exit status."""

    def run(job: dict[str, Any]) -> None:
        _run_rank(Plan.from_mapping(job["plan"]), job["start"], Path(job["directory"]), job["timeout"])

    return run_as_rank("compare", told, run)


def run_standalone(plan: Plan, directory: Path, timeout: float = 600.0) -> None:
    """Make the missing starts of ``plan`` on this host, one after another. Raises RankFailed, ConfigError."""
    with open_directory(directory, plan, describe()):
        for number in missing_starts(directory, plan):
            job = {"plan": plan.as_dict(), "start": number, "directory": str(directory), "timeout": timeout}
            start_ranks("compare", job, plan.card.ranks, timeout, mpi="mpi" in plan.backends)


def _report(plan: Plan, directory: Path) -> bool:
    """Write and print what the finished starts say; whether every backend's data was right. Raises ConfigError."""
    from uccl_ep_serving.compare.advice import keep
    from uccl_ep_serving.compare.report import page_of, write_reports
    from uccl_ep_serving.compare.results import assemble

    missing = missing_starts(directory, plan)
    if missing:
        done = plan.starts - len(missing)
        typer.echo(f"compare: {done} of {plan.starts} starts are done. Next step: launch the same command again")
        return True
    result = assemble(plan, read_starts(directory, plan, given), directory)
    files = write_reports(result, directory)
    keep(result)
    wide_console(170).print(page_of(result).console(), highlight=False)
    typer.echo(f"\n{files[0]}; beside it: {', '.join(path.name for path in files[1:])}")
    first = plan.backends[0]
    if first not in result["measured"] or not result["verdicts"]:
        why = result["skipped"].get(first) or "nothing else could be measured"
        typer.echo(f"compare: nothing is said of {first}: {why}. {begin_anew(directory)}", err=True)
        return False
    return not result["wrong"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _slowed(text: str) -> dict[str, float]:
    """``BACKEND=5%[,...]``. Raises ConfigError."""
    found = {}
    for part in _names(text):
        name, _, percent = part.partition("=")
        try:
            found[name] = float(percent.removesuffix("%"))
        except ValueError:
            raise ConfigError(f"compare: --inject {part}: write BACKEND=5%") from None
    return found


@app.command()
# the arguments are the options of the command
def compare(
    backends: Annotated[
        str,
        typer.Option(
            help=f"By commas, the one in question first: {', '.join(BACKENDS)}. One named twice is measured twice, "
            "which shows what the method says of equals. Default: all; who cannot run here is named with the reason."
        ),
    ] = "",
    ranks: Annotated[int, typer.Option(help="Ranks to start; under torchrun: must be its number.")] = 0,
    mode: Annotated[str, typer.Option(help="low-latency or normal.")] = "low-latency",
    tokens: Annotated[int, typer.Option(help="Tokens per rank.")] = 128,
    hidden: Annotated[int, typer.Option(help="Values per token.")] = 7168,
    experts: Annotated[int, typer.Option(help="Experts, a multiple of the ranks.")] = 64,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, f32 or fp8.")] = "bf16",
    starts: Annotated[int, typer.Option(help="How often all processes are started anew.")] = 5,
    rounds: Annotated[int, typer.Option(help="Samples of every backend in each start.")] = 40,
    warmup: Annotated[int, typer.Option(help="Rounds before them.")] = 5,
    repeat: Annotated[int, typer.Option(help="Layers without a pause in a sample.")] = 10,
    seed: Annotated[int, typer.Option(help="Of inputs and routing, which each start draws anew.")] = 0,
    route: Annotated[
        str,
        typer.Option(help="Who chooses which experts: uniform, zipf:S (skewed, such as zipf:1.2), trace:FILE[:LAYER]."),
    ] = "uniform",
    output: Annotated[
        str,
        typer.Option(help="Directory of starts and reports; the same command goes on there. Default: one per plan."),
    ] = "",
    timeout: Annotated[float, typer.Option(min=1, max=86400, help="Seconds for one start.")] = 600.0,
    inject: Annotated[str, typer.Option(hidden=True, help="Lengthen a backend's calls: BACKEND=5%.")] = "",
) -> None:
    """Say whether one backend is faster than others for given traffic, by how much, and how sure that is.

    All get the same tokens and routing, and the same span is timed: what a layer waits for, on the slowest rank. Data
    is verified before and after. A direction is claimed only where the 95 % interval excludes equality. Other
    settings are the UCCL_EP_* variables, as everywhere.
    """
    try:
        launcher, rank, size = launched_by(os.environ)
        if launcher and ranks not in (0, size):
            raise ConfigError(f"--ranks {ranks}, but {launcher} started {size}: leave --ranks out")
        chosen = _names(backends) or tuple(name for name in BACKENDS if ":" not in name)
        card = Card(
            name="compare",
            mode=mode,
            ranks=size or ranks or 2,
            tokens=tokens,
            hidden=hidden,
            experts=experts,
            topk=topk,
            dtype=dtype,
            iterations=rounds,
            warmup=warmup,
            repeat=repeat,
            seed=seed,
            route=route,
        )
        plan = Plan(card, chosen, starts, _slowed(inject))
        if not launcher and card.route.startswith(TRACE):
            # before ranks are started; needs torch, as they do
            from uccl_ep_serving.bench.routing import check_trace

            check_trace(card)
    except ConfigError as error:
        typer.echo(f"compare: {str(error).removeprefix('compare: ')}", err=True)
        raise typer.Exit(2) from None
    directory = Path(output or f"uccl-ep-compare-{plan.digest}")
    try:
        if rank == 0 and (said := finished(directory, plan)):
            typer.echo(f"compare: {said}", err=True)
        if launcher:
            prepare_rank(rank, size)
            _run_rank(plan, 0, directory, timeout)
        else:
            run_standalone(plan, directory, timeout)
        if rank == 0 and not _report(plan, directory):
            raise typer.Exit(1)
    except ConfigError as error:
        typer.echo(f"compare: {str(error).removeprefix('compare: ')}", err=True)
        raise typer.Exit(2) from None
    except (UcclEpError, AssertionError, RankFailed) as error:
        typer.echo(f"compare: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("compare: interrupted; finished starts are kept, the same command goes on", err=True)
        raise typer.Exit(130) from None
