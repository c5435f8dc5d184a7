"""``uccl-ep doctor``: what this machine can do for expert parallelism, and what to do about what it cannot."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what this machine can do: engines, GPUs, NICs, transports, limits, settings, and what to do next.

    Exit status 0 when the package is usable here, 1 when a problem stands in the way.
    """
    from uccl_ep_serving.cli.doctor import report

    raise typer.Exit(report.run(as_json=as_json))
