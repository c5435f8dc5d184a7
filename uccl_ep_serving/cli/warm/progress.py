"""Compile what is missing and say so: a progress bar on a terminal, else a line for each piece."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from uccl_ep_serving.cli.doctor.findings import size
from uccl_ep_serving.cli.warm.tasks import Kernels, Outcome, Task, all_groups, gpu_task, group_tasks
from uccl_ep_serving.cli.warm.workers import most_jobs, results
from uccl_ep_serving.config import cache_wanted
from uccl_ep_serving.native.cache import cache_directory, lies_elsewhere
from uccl_ep_serving.native.groups import Group

__all__ = ["run"]


def run(
    gpus: Sequence[str],
    kernels: Kernels,
    jobs: int = 0,
    groups: Callable[[], list[Group]] = all_groups,
    console: Console | None = None,
) -> int:
    """Compile what is not in the cache. Returns the exit status: 1 when something does not compile or cannot be kept.

    Args:
        gpus: names of GPUs to compile for; "" = this machine's.
        jobs: processes, 0 for as many as there are cores and memory for.
        groups: what is compiled for the CPU, an importable function.
    """
    started = time.monotonic()
    directory, wanted = cache_directory(), cache_wanted()
    known = group_tasks(groups)
    tasks = deque(task for task, outcome in known.items() if outcome is None)
    if tasks and lies_elsewhere(directory, wanted):
        step = "make it writable for this user, or unset it"
        typer.echo(f"warm: UCCL_EP_CACHE_DIR={wanted} cannot be written. Next step: {step}", err=True)
        return 1
    tasks += [gpu_task(gpu, kernels) for gpu in gpus]
    by_kind: dict[str, list[Outcome | None]] = defaultdict(list)
    for task, outcome in known.items():
        if outcome is not None:
            by_kind[task.kind].append(outcome)
    failed: list[str] = []
    with _Shown(console or Console(), tasks) as shown:
        for result in results(tasks, jobs or most_jobs(), shown.begin):
            shown.end(result.task, result.outcome, result.seconds)
            if result.outcome is None:
                failed.append(f"{result.task.name}: {result.cause}")
            elif result.outcome.remark:
                shown.say(result.outcome.remark)
            if result.task.kind:
                by_kind[result.task.kind].append(result.outcome)
    for line in failed:
        typer.echo(f"warm: not compiled: {line}", err=True)
    seconds = time.monotonic() - started
    for kind, outcomes in by_kind.items():
        print(_summary(kind, outcomes, seconds))
    return 1 if failed else 0


def _summary(kind: str, outcomes: Sequence[Outcome | None], seconds: float) -> str:
    kept = [one for one in outcomes if one is not None]
    compiled = sum(not one.was_there for one in kept)
    if compiled == 0 and len(kept) == len(outcomes):
        begin = f"everything is there: {len(kept)} {kind}"
    else:
        there = f", {len(kept) - compiled} were there" if len(kept) > compiled else ""
        begin = f"compiled {compiled} of {len(outcomes)} {kind} in {seconds:.1f} s{there}"
    where = f"; {size(sum(one.nbytes for one in kept))} in {kept[0].place}" if kept else ""
    return begin + where


class _Shown(contextlib.AbstractContextManager["_Shown"]):
    """What is being done, on the console.

    Args:
        tasks: to do; those that have begun are no longer among them.
    """

    def __init__(self, console: Console, tasks: deque[Task]) -> None:
        self._console, self._tasks = console, tasks
        self._busy: list[str] = []
        self._done = 0
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._line = self._bar.add_task("", total=len(tasks))

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, task: Task) -> None:
        self._busy.append(task.name)
        self._update()

    def end(self, task: Task, outcome: Outcome | None, seconds: float) -> None:
        self._busy.remove(task.name)
        self._done += 1
        self._update(() if outcome is None else outcome.tasks)
        if not self._console.is_terminal and task.kind:
            became = "not compiled" if outcome is None else "there" if outcome.was_there else "compiled"
            self.say(f"{task.name}: {became}, {seconds:.1f} s")

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _update(self, more: Sequence[Task] = ()) -> None:
        total = self._done + len(self._busy) + len(self._tasks) + len(more)
        self._bar.update(self._line, completed=self._done, total=total, description=", ".join(self._busy))
