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
    try:
        from uccl_ep_serving.cli.doctor import report
    except ImportError as error:
        typer.echo(f"doctor: {error}. Next step: pip install uccl_ep_serving, without --no-deps", err=True)
        raise typer.Exit(1) from None

    raise typer.Exit(report.run(as_json=as_json))
