"""``uccl-ep compare-serving``: the same server line with one backend after another, loaded by the engine's own client.

Exit status: 0, 1 when a server could not be measured or answers otherwise than the others, 2 for wrong options.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.cli.console import wide_console
from uccl_ep_serving.compare.directory import (
    begin_anew,
    finished,
    missing_starts,
    open_directory,
    read_json,
    read_starts,
    start_file,
    write_json,
)
from uccl_ep_serving.compare.serving.engines import ENGINES, engine_of
from uccl_ep_serving.compare.serving.plan import Load, ServingPlan
from uccl_ep_serving.errors import ConfigError, UcclEpError

__all__ = ["DEMO_LOAD", "app", "run_starts"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DEMO_LOAD = Load(requests=32, at_once=8, input_tokens=64, output_tokens=64)
"""Of the demo's servers, which hold few tokens."""

#: Seconds between two lines about the same step where there is no terminal.
_TELL_SECONDS = 30.0


class _Teller:
    """What is being done: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, plan: ServingPlan) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._plan = plan
        self._start, self._step, self._told = 0, "", 0.0
        if self._status:
            self._status.start()

    def begin(self, number: int) -> None:
        self._start = number

    def __call__(self, text: str) -> None:
        line = f"start {self._start} of {self._plan.starts}: {text}"
        if self._status:
            self._status.update(line.replace("[", r"\["))
            return
        step = text.split(",")[0]
        if step != self._step or time.monotonic() - self._told > _TELL_SECONDS:
            self._step, self._told = step, time.monotonic()
            print(f"compare-serving: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._status:
            self._status.stop()


def run_starts(plan: ServingPlan, directory: Path, timeout: float) -> None:
    """Make the missing starts of ``plan``, one after another. Raises ServerFailed, ConfigError."""
    # where only the report of a finished comparison is wanted, nothing of the engines is needed
    from uccl_ep_serving.compare.serving.run import measure_start
    from uccl_ep_serving.demo.remains import sweep

    with open_directory(directory, plan, describe()):
        missing = missing_starts(directory, plan)
        if not missing:
            return
        sweep()
        told = _Teller(plan)
        skipped: dict[str, str] = {}
        for path in (start_file(directory, number) for number in range(1, plan.starts + 1) if number not in missing):
            skipped |= read_json(path)["skipped"]
        try:
            for number in missing:
                told.begin(number)
                start = measure_start(plan, number, directory, skipped, timeout, told)
                skipped = start["skipped"]
                write_json(start_file(directory, number), start)
        finally:
            told.close()


def _report(plan: ServingPlan, directory: Path) -> bool:
    """Write and print what the starts say; whether every server was measured. Raises ConfigError."""
    from uccl_ep_serving.compare.serving.report import page_of, write_reports
    from uccl_ep_serving.compare.serving.results import assemble, given

    result = assemble(plan, read_starts(directory, plan, given))
    files = write_reports(result, directory)
    wide_console(170).print(page_of(result).console(), highlight=False)
    typer.echo(f"\n{files[0]}; beside it: {', '.join(path.name for path in files[1:])}, logs, clients")
    if result["skipped"]:
        skipped = ", ".join(result["skipped"])
        typer.echo(f"compare-serving: {skipped} was not measured. {begin_anew(directory)}", err=True)
    return not result["wrong"] and not result["skipped"]


def _extras(texts: list[str]) -> dict[str, str]:
    """``NAME: WORDS`` of each. Raises ConfigError."""
    found = {}
    for text in texts:
        name, colon, words = text.partition(":")
        if not colon or not words.strip():
            raise ConfigError(f"--with {text!r}: write 'BACKEND: NAME=VALUE ... --option ...'")
        found[name.strip()] = words.strip()
    return found


def _words(client: str) -> tuple[str, ...]:
    """As a shell reads them. Raises ConfigError."""
    try:
        return tuple(shlex.split(client))
    except ValueError as error:
        raise ConfigError(f"--client {client!r}: {error}") from None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _engine(engine: str, demo: str, line: list[str]) -> str:
    if demo and line:
        raise ConfigError("--demo takes no server line")
    if not demo and not line:
        raise ConfigError(
            "no server line: uccl-ep compare-serving --backends uccl_ep,none -- sglang serve --model-path MODEL; "
            "or --demo sglang, the tiny model on two CPU ranks"
        )
    name = demo or engine or engine_of(line)
    if name not in ENGINES:
        raise ConfigError(f"no engine {name}; there are {', '.join(ENGINES)}")
    if not _installed(name):
        raise ConfigError(f"{name} is not installed beside this command: its client is needed")
    return name


@app.command()
# the arguments are the options of the command
def compare_serving(
    line: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: the command that starts a server. Its backend is replaced or added, a port added where it "
            "has none. {backend} and {port} in it stand for them instead: then it is used as it stands otherwise.",
            show_default=False,
        ),
    ] = None,
    backends: Annotated[
        str,
        typer.Option(
            help="By commas, as the engine calls them, the one in question first. Default: uccl_ep beside the engine's "
            "own collectives. One named twice is measured twice: NAME and NAME#2."
        ),
    ] = "",
    extras: Annotated[
        list[str] | None,
        typer.Option("--with", help="What one backend gets beside the line: 'BACKEND: NAME=VALUE ... --option ...'."),
    ] = None,
    demo: Annotated[str, typer.Option(help="sglang or vllm: the demo's tiny model on two CPU ranks, no line.")] = "",
    engine: Annotated[str, typer.Option(help="sglang or vllm, where the line does not say.")] = "",
    url: Annotated[str, typer.Option(help="Where the server answers, when a launcher starts it elsewhere.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Name or path, where the line does not show the model.")] = "",
    starts: Annotated[int, typer.Option(help="How often every server is started anew.")] = 3,
    rounds: Annotated[int, typer.Option(help="Loads of each server, after one to warm it up.")] = 3,
    requests: Annotated[int, typer.Option(help="Requests of a round.", show_default="256, demo 32")] = 0,
    at_once: Annotated[int, typer.Option(help="In flight, without --rate.", show_default="64, demo 8")] = 0,
    rate: Annotated[float, typer.Option(help="Requests per second; 0: as fast as those in flight allow.")] = 0.0,
    input_tokens: Annotated[int, typer.Option(help="Of each request.", show_default="512, demo 64")] = 0,
    output_tokens: Annotated[int, typer.Option(help="Of each request.", show_default="128, demo 64")] = 0,
    client: Annotated[str, typer.Option(help="More arguments for the engine's client, in one string.")] = "",
    logprob_bound: Annotated[
        float,
        typer.Option(help="Most that logprobs of greedy answers may differ on average where texts are not the same."),
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    profile_steps: Annotated[
        int, typer.Option(help="Steps that the engine's profiler records after the first start's rounds; 0 for none.")
    ] = 32,
    output: Annotated[
        str,
        typer.Option(
            help="Directory of starts, logs and reports; the same command goes on there. Default: one per plan."
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for a server to be ready, and for a round.")] = 1800.0,
) -> None:
    """Say which backend serves faster: output tokens/s, time to first token, time per token, and how sure that is.

    Servers are started one after another with the same line but for the backend, several times, and loaded by the
    engine's own client. One whose greedy answers are not those of the others has no figures.
    """
    try:
        name = _engine(engine, demo, line or [])
        base = DEMO_LOAD if demo else Load()
        given = {
            "requests": requests,
            "at_once": at_once,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
        }
        load = replace(base, rate=rate, client=_words(client), **{k: v for k, v in given.items() if v})
        plan = ServingPlan(
            engine=name,
            line=tuple(line or ()),
            backends=tuple(one.strip() for one in backends.split(",") if one.strip()) or ENGINES[name].default,
            extras=_extras(extras or []),
            starts=starts,
            rounds=rounds,
            load=load,
            bound=logprob_bound,
            url=url.rstrip("/"),
            tokenizer=tokenizer,
            seed=seed,
            profiled_steps=profile_steps,
        )
        directory = Path(output or f"uccl-ep-serving-{plan.digest}")
        if said := finished(directory, plan):
            typer.echo(f"compare-serving: {said}", err=True)
        run_starts(plan, directory, timeout)
        good = _report(plan, directory)
    except ConfigError as error:
        typer.echo(f"compare-serving: {str(error).removeprefix('compare: ')}", err=True)
        raise typer.Exit(2) from None
    except UcclEpError as error:
        typer.echo(f"compare-serving: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("compare-serving: interrupted; finished starts are kept, the same command goes on", err=True)
        raise typer.Exit(130) from None
    if not good:
        raise typer.Exit(1)
