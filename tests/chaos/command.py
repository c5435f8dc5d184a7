"""``make chaos``: seeded faults, one trial a seed; each is judged, and its figures are kept at once.

A run goes on where one of the same commit was interrupted: seeds that have a trial are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.chaos.judge import seconds_to, verdict
from tests.chaos.processes import Prepared, TrialHung
from tests.chaos.records import Outcome
from tests.chaos.supervisor import SECONDS
from tests.chaos.trials import KINDS, PATHS, Trial, draw
from tests.support.kept import Kept
from uccl_ep_serving.bench.machine import describe

__all__ = ["app", "judged"]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "chaos.json"
#: Seconds between lines of progress.
_LINE_SECONDS = 20.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def judged(trial: Trial, outcome: Outcome | str) -> dict[str, Any]:
    """The row of a trial; of one that hung or broke ``outcome`` says so."""
    hung = isinstance(outcome, str)
    raised, good = ([], []) if isinstance(outcome, str) else seconds_to(outcome)
    survivors = [] if isinstance(outcome, str) else [one for one in outcome.records if one.end == "finished"]
    return {
        "seed": trial.seed,
        "kind": trial.kind,
        "form": trial.form,
        "path": trial.path,
        "mode": trial.mode,
        "ranks": trial.ranks,
        "lost": sorted(frozenset().union(*(one.masked for one in survivors))),
        "raise_ms": [round(1e3 * one, 1) for one in raised],
        "good_ms": [round(1e3 * one, 1) for one in good],
        "wrong": [str(outcome)] if hung else verdict(trial, outcome),
    }


def _story(outcome: Outcome) -> str:
    """What each rank went through, a line for each error."""
    lines = []
    for one in outcome.records:
        lines.append(f"rank {one.rank} {one.end}, left out {sorted(one.masked)}")
        for loss in one.losses:
            after = 1e3 * (loss.at - outcome.fault_at)
            lines.append(f"  {after:.0f} ms: {loss.kind} {list(loss.peers)}: {loss.message}")
    return "\n  ".join(lines)


def _wanted(seed: int, trials: int, kinds: list[str], paths: list[str]) -> Iterator[Trial]:
    """So many trials from ``seed`` on, of these kinds and paths; all where none are named."""
    while trials:
        trial = draw(seed)
        seed += 1
        if (not kinds or trial.kind in kinds) and (not paths or trial.path in paths):
            trials -= 1
            yield trial


def _check(what: str, given: list[str], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise typer.BadParameter(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")


@app.command()
def chaos(
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    trials: Annotated[int, typer.Option(min=1, help="Trials, one per seed from --seed on.")] = 1000,
    kind: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(KINDS)}.")] = None,
    path: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(PATHS)}.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no trial after so long.")] = 600.0,
    dry: Annotated[bool, typer.Option("--dry", help="Write nothing, and show what the ranks logged.")] = False,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = RESULTS,
) -> None:
    """Hit groups of 3 to 6 ranks with seeded faults, and judge what the survivors make of it.

    Exit status 1 when a trial did not end as it must; each of those is named with the command that repeats it.
    """
    kinds, paths = kind or [], path or []
    _check("kind", kinds, tuple(KINDS))
    _check("path", paths, PATHS)
    results = Kept(output, "trials", lambda row: row["seed"], describe())
    done = {} if dry else results.rows
    todo = [trial for trial in _wanted(seed, trials, kinds, paths) if trial.seed not in done]
    print(f"chaos: {len(todo)} of {trials} trials to run, from seed {seed} on", flush=True)
    began = said = time.monotonic()
    failed = ran = 0
    with Prepared() as prepared:
        for trial in todo:
            now = time.monotonic()
            if now > began + 60 * minutes:
                print(f"chaos: {minutes:g} minutes are over: run it again to go on", flush=True)
                break
            if now > said + _LINE_SECONDS:
                said = now
                print(f"chaos: {ran} of {len(todo)} in {now - began:.0f} s, {failed} failed", flush=True)
            try:
                outcome: Outcome | str = prepared.run(trial, SECONDS)
            except TrialHung as error:
                outcome = str(error)
            row = judged(trial, outcome)
            ran += 1
            if not dry:
                results.keep(row)
            elif not isinstance(outcome, str):
                print(outcome.log, flush=True)
            if row["wrong"]:
                failed += 1
                words = "\n  ".join([*row["wrong"], *([] if isinstance(outcome, str) else [_story(outcome)])])
                again = f'make chaos ARGS="--dry --trials 1 --seed {trial.seed}"'
                print(f"chaos: FAILED: {trial}\n  {words}\n  again: {again}", flush=True)
    print(f"chaos: {ran - failed} of {ran} trials held", flush=True)
    if failed:
        raise typer.Exit(1)
