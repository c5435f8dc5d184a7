"""The report: every check, a table or JSON of what they find, and the verdict.

A finding that is a problem carries a next step. Nothing is changed on the machine and no engine is imported: versions
come from metadata, devices from sysfs. NICs that ranks would use are opened for a moment, to ask what they can do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.cli.console import wide_console
from uccl_ep_serving.cli.doctor.container import container
from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.cli.doctor.gpus import gpus
from uccl_ep_serving.cli.doctor.limits import limits
from uccl_ep_serving.cli.doctor.nics import nics
from uccl_ep_serving.cli.doctor.software import engines, environment
from uccl_ep_serving.cli.doctor.transports import transports
from uccl_ep_serving.config import Settings, unknown_variables
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.variables import SETTINGS

__all__ = ["SECTIONS", "run", "settings"]


def settings() -> Iterator[Finding]:
    """Every setting in force and where its value comes from, and what is wrong with the environment."""
    try:
        in_force = Settings.from_environment()
    except ConfigError as error:
        yield Finding("environment", str(error), Status.PROBLEM, "correct or unset the variable")
    else:
        for variable in SETTINGS:
            source = variable.source(os.environ) or "default"
            source = "environment" if source == variable.name else source
            yield Finding(variable.name, f"{getattr(in_force, variable.field)!r} ({source})")
    for name, closest in unknown_variables().items():
        step = f"did you mean {closest}?" if closest else "unset it"
        yield Finding(name, "no such setting: it has no effect", Status.NOTE, step)


SECTIONS: dict[str, Callable[[], Iterator[Finding]]] = {
    "environment": environment,
    "engines": engines,
    "gpus": gpus,
    "nics": nics,
    "transports": transports,
    "limits": limits,
    "container": container,
    "settings": settings,
}


def examine() -> dict[str, list[Finding]]:
    """Run every check; the keys are those of :data:`SECTIONS`, in order. One that fails is a finding."""
    return {title: list(_examined(title, check)) for title, check in SECTIONS.items()}


def _examined(title: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # a machine on which something usual is missing: what else there is to say is said
        found = f"could not be looked at: {type(error).__name__}: {error}"
        yield Finding(title, found, Status.PROBLEM, "give this process what is missing there, or report this line")


def _print(report: dict[str, list[Finding]], console: Console) -> None:
    colours = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, findings in report.items():
        table.add_row(f"[bold]{title}[/bold]")
        for finding in findings:
            mark = f"[{colours[finding.status]}]{finding.status.value:7}[/]"
            table.add_row(mark, Text(finding.name), Text(finding.value))
            if finding.next_step and finding.status is not Status.OK:
                table.add_row("", "", Text(f"next: {finding.next_step}"))
    console.print(table)


def run(*, as_json: bool) -> int:
    """Examine the machine and print the report to standard output.

    Args:
        as_json: print ``{"usable": bool, "sections": {title: [finding, …]}}`` instead of a table.

    Returns:
        0 when nothing stands in the way, else 1.
    """
    report = examine()
    problems = [found for findings in report.values() for found in findings if found.status is Status.PROBLEM]
    if as_json:
        sections = {title: [asdict(found) for found in findings] for title, findings in report.items()}
        print(json.dumps({"usable": not problems, "sections": sections}, indent=2))
        return 1 if problems else 0
    console = wide_console(highlight=False)
    _print(report, console)
    if problems:
        names = ", ".join(found.name for found in problems)
        console.print(Text.assemble("\n", ("not usable", "red"), f": {len(problems)} problem(s): {names}"))
    else:
        console.print("\n[green]usable[/green]")
    return 1 if problems else 0
