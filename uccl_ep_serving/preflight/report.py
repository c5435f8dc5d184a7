"""Runs the check for the command line: says what begins, prints what was found, and the verdict."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench.launch import free_port
from .job import Finding, Job, of_torchrun
from .node import run_node
from .outcome import Outcome

__all__ = ["run"]

#: Larger groups get no matrix of paths: it is in the JSON.
_MOST_COLUMNS = 16
#: Of a part; more that are well are one line, and in the JSON.
_MOST_LINES = 24
_WIDTH = 160


def run(
    job: Job,
    environment: Mapping[str, str],
    doctor: Callable[[int], Sequence[Finding]],
    as_json: bool,
    console: Console | None = None,
) -> int:
    """Check, and print what was found; under torchrun, whose process is one rank, rank 0 prints. The exit status.

    Args:
        job: of the first rank of this node; ``locals`` says how many there are.
        doctor: what stands in the way on the node with this number, by itself.
    """
    begun = time.monotonic()
    torchrun = of_torchrun(environment, job.seconds)
    job = torchrun or job

    def say(words: str) -> None:
        if job.local == 0:
            print(f"check: {words}", file=sys.stderr, flush=True)

    if job.local == 0:
        say("this node")
        job = msgspec.structs.replace(job, doctor=tuple(doctor(job.node)))
    if torchrun:
        # imports torch, which who only starts ranks does not need
        from .rank import run as run_rank

        outcome = run_rank(job, lambda words, found: say(words))
    else:
        if job.nodes == 1:
            job = msgspec.structs.replace(job, port=free_port())
        outcome = run_node([msgspec.structs.replace(job, local=local) for local in range(job.locals)], say)
    if job.local == 0:
        if as_json:
            plain = {"passed": outcome.passed, **msgspec.structs.asdict(outcome)}
            print(msgspec.json.format(msgspec.json.encode(plain)).decode())
        else:
            _print(outcome, job, time.monotonic() - begun, console or _console())
    return 0 if outcome.passed else 1


def _console() -> Console:
    """A file or a pipe has no width: lines as long as those of the table."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


def _print(outcome: Outcome, job: Job, seconds: float, console: Console) -> None:
    if outcome.known and job.node == 0:
        console.print(_ranks(outcome))
        if 1 < len(outcome.routes) <= _MOST_COLUMNS:
            console.print(_matrix(outcome))
    console.print(_table(outcome.findings))
    faults = [(one.part, one.fault) for one in outcome.findings if one.fault]
    for part, fault in faults:
        console.print(Text.assemble("\n", (part, "bold"), f": {fault.lines}"), soft_wrap=True)
    notes = sum(bool(one.note) for one in outcome.findings)
    ranks = f"node {job.node}"
    if outcome.known:
        ranks = f"{len(outcome.known)} ranks on {job.nodes} node{'s' * (job.nodes > 1)}"
    failed = f"[red]not ready[/]: {len(faults)} of {len(outcome.findings)} parts failed"
    verdict = failed if faults else "[green]ready[/]"
    more = f", {notes} note{'s' * (notes > 1)}" if notes else ""
    console.print(f"\n{ranks}: {verdict}{more}, in {seconds:.0f} s", soft_wrap=True, highlight=False)


def _ranks(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "node", "host", "address", "GPU", "NICs"):
        table.add_column(name, overflow="fold")
    for rank, one in enumerate(outcome.known):
        nics = ", ".join(f"{rail.name} {rail.gbps:g} Gb/s" for rail in one.rails)
        cells = (
            str(rank),
            str(one.node),
            one.host,
            f"{one.address} ({one.interface})",
            one.gpu or "none",
            nics or "none",
        )
        table.add_row(*map(Text, cells))
    return table


def _matrix(outcome: Outcome) -> Table:
    """How rows get from each rank to each other one, and what the GPUs of a node are linked by."""
    table = Table(box=None, pad_edge=False, title="\npaths of a job", title_justify="left")
    table.add_column("from \\ to")
    for rank in range(len(outcome.routes)):
        table.add_column(str(rank))
    # the index of a GPU in its node is that of the rank among those of the node
    place = [sum(two.node == one.node for two in outcome.known[:rank]) for rank, one in enumerate(outcome.known)]
    for rank, routes in enumerate(outcome.routes):
        cells = []
        for peer in range(len(outcome.routes)):
            link = ""
            if outcome.known[peer].node == outcome.known[rank].node and place[peer] < len(outcome.known[rank].links):
                link = f" ({outcome.known[rank].links[place[peer]]})"
            cells.append("-" if peer == rank else routes.get(peer, "?") + link)
        table.add_row(str(rank), *map(Text, cells))
    return table


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("\npart", "\nbetween", "\nresult", ""):
        table.add_column(name, overflow="fold")
    usual = Counter(one.part for one in findings if not (one.fault or one.note))
    told: set[str] = set()
    for one in findings:
        if usual[one.part] > _MOST_LINES and not (one.fault or one.note):
            if one.part not in told:
                told.add(one.part)
                table.add_row(Text(one.part), f"{usual[one.part]} pairs", "[green]ok[/]", "the figures of each: --json")
            continue
        mark = "[red]FAILED[/]" if one.fault else "[yellow]note[/]" if one.note else "[green]ok[/]"
        words = "; ".join(filter(None, (one.said, one.note)))
        table.add_row(Text(one.part), Text(one.where), mark, Text(words))
    return table
