"""``uccl-ep check``: try what serving needs, before a server starts."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_GROUPS = ("probe", "first")


@app.command()
def check(
    gpu: Annotated[bool, typer.Option("--gpu", help="Check the GPUs that this process sees.")] = False,
    only: Annotated[
        str, typer.Option(help="probe: the calls of the driver; first: one operation of each mode. Keeps no record.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=10, help="That all parts may take together.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check, in two minutes at most, that this machine's GPUs run what uccl_ep needs, and keep a record of it.

    The calls of the driver one by one (pinned and device memory, memory that two processes share, waiting kernels,
    graphs), then a small dispatch and combine of each mode between two ranks over each path, verified value by value.
    Engines start on a GPU whose check is on record, for this driver, Triton and version; they run it themselves where
    it is missing.

    Exit status 0 when everything has passed and the record is kept, 1 when not, 2 when there was nothing to check.
    """
    if not gpu:
        typer.echo("check: say what to check. Next step: uccl-ep check --gpu", err=True)
        raise typer.Exit(2)
    if only and only not in _GROUPS:
        typer.echo(f"check: --only {only} is none of {', '.join(_GROUPS)}", err=True)
        raise typer.Exit(2)
    try:
        from uccl_ep_serving.check import report
    except ImportError as error:
        typer.echo(f"check: {error}. Next step: uccl-ep doctor says what GPU tensors need", err=True)
        raise typer.Exit(1) from None

    raise typer.Exit(report.run((only,) if only else _GROUPS, seconds, as_json))
