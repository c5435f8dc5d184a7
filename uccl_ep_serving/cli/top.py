"""``uccl-ep top``: what the Buffers of this machine's processes are doing, from their live counters.

Rates are differences between two readings. A Buffer whose processes belong to another user, or that lies in another
network namespace (a container of its own), cannot be seen.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import psutil
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.cli.console import plain, wide_console
from uccl_ep_serving.cli.readings import MISSING, Counters, read_all, waiting, ways
from uccl_ep_serving.data_plane.standing import WELL
from uccl_ep_serving.proxy.transport.select import DIRECT
from uccl_ep_serving.stats import Reading, Served

__all__ = ["app", "is_well", "picture", "run"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_BUFFERS = (
    *("pid", "rank", "state", "peers", "MB/s sent", "MB/s received", "messages/s", "waiting", "in flight"),
    "waits for",
)
_OPERATIONS = ("pid", "rank", "operation", "calls/s", "tokens/s", "rows/s", "p50 us", "p99 us")
_CAPTION = (
    "MB/s, messages, waiting and in flight: of peers that are reached through proxies; - = none is, kernels write "
    "every window. Waits for: the rank that this one was found waiting for most, and in which part of the time; a "
    "straggler waits for nobody, and its own calls are short. Tokens: given; rows: sent to other ranks, - where the "
    "host does not know them, as in low latency on a GPU; p50 and p99: inside the latest calls, on a GPU the host's "
    "part alone. What a captured graph replays is no call."
)
#: The part of the samples from which waiting for one rank is told.
_TELLING = 0.1
#: Seconds until the first picture, whose rates are over so many: nobody waits a whole interval before anything is seen.
_FIRST_PICTURE = 0.25
_NOTHING = "no open Buffer of this user in this network namespace"


def is_well(reading: Reading) -> bool:
    """Whether a Buffer answers and goes on."""
    return reading.counters is not None and reading.counters.get("state", "ok") in WELL


def _silence(pid: int, strange: str) -> tuple[str, str]:
    """The state of a process without counters, and why: what is ``strange`` in its answer, or what the system knows."""
    if strange:
        return "strange", (
            f"its answer is none of this version's: {plain(strange)}. Next step: use the uccl-ep of the environment in "
            f"which it runs (ls -l /proc/{pid}/exe)"
        )
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "silent", "it does not answer"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "silent", f"it does not answer: its process is stopped. Next step: kill -CONT {pid}"
    step = f"Next step: look where it is (py-spy dump --pid {pid})"
    return "silent", f"it does not answer: its process ({status}) holds the interpreter's lock, or gets no core. {step}"


def _peers(counters: Counters) -> str:
    """How many peers are reached which way, and who is missing."""
    words = [f"{count} {way}" for way, count in ways(counters).items()]
    words += [f"{state} {', '.join(map(str, ranks))}" for state in MISSING if (ranks := counters.get(state))]
    return "; ".join(words) or ("alone" if counters.get("world") == 1 else "-")


def _rate(name: str, now: Counters, before: Counters, seconds: float) -> float:
    return float(max(now.get(name, 0) - before.get(name, 0), 0)) / seconds


def _operations(now: Counters, before: Counters, seconds: float, idle: bool) -> Iterator[list[str]]:
    """Of every operation that was called meanwhile, or with ``idle`` ever: rates, and percentiles over its latest
    calls."""
    for name, one in now.get("ops", {}).items():
        earlier = before.get("ops", {}).get(name, {})
        if one["count"] > (0 if idle else earlier.get("count", 0)):
            rates = [f"{_rate('count', one, earlier, seconds):,.0f}"]
            rates += [f"{_rate(what, one, earlier, seconds):,.0f}" if one[what] else "-" for what in ("tokens", "rows")]
            yield [name, *rates, f"{one['p50_us']:,.0f}", f"{one['p99_us']:,.0f}"]


def _proxied(now: Counters, before: Counters, seconds: float) -> Iterator[str]:
    """What goes through proxies: three rates, then what waits and what is in flight now."""
    if all(way == DIRECT for way in now.get("transport_by_peer", {}).values()):
        yield from "-" * 5
        return
    for name in ("bytes_sent", "bytes_received"):
        yield f"{_rate(name, now, before, seconds) / 1e6:,.1f}"
    yield f"{_rate('messages_sent', now, before, seconds):,.0f}"
    yield f"{waiting(now):,}"
    yield f"{now.get('writes_in_flight', 0):,}"


def _waits(now: Counters, before: Counters) -> str:
    """For whom a rank waits, or has been found waiting most since ``before``."""
    waits, pending = now.get("waits", {}), now.get("waits_for")
    if pending and waits["seconds"] > 1:
        return f"rank {pending['peer']}, for {waits['seconds']:.0f} s"
    samples = waits.get("samples", 0) - before.get("waits", {}).get("samples", 0)
    if samples <= 0:
        return ""
    earlier = before.get("waits", {}).get("by_peer", {})
    shares = {peer: (count - earlier.get(peer, 0)) / samples for peer, count in waits["by_peer"].items()}
    peer = max(shares, key=shares.__getitem__, default=None)
    return f"rank {peer} ({shares[peer]:.0%})" if peer is not None and shares[peer] >= _TELLING else ""


def _same(one: Served, counters: Counters, readings: Mapping[Served, Reading]) -> Counters:
    """What the same Buffer answered earlier, {} where it is not in that reading."""
    earlier = readings[one].counters if one in readings else None
    return earlier if earlier is not None and earlier.get("opened") == counters.get("opened") else {}


def picture(
    now: Mapping[Served, Reading],
    before: Mapping[Served, Reading],
    seconds: float,
    begun: Mapping[Served, Reading] | None = None,
) -> list[RenderableType]:
    """A table with a line for each Buffer of ``now``, one with a line for each operation that it was called for, and a
    sentence for each that does not go on.

    Args:
        before: an earlier reading. A Buffer that is not in it is counted from its start.
        seconds: between the two.
        begun: the first reading of several: for whom a rank waits is counted from there, and operations that were not
            called since ``before`` are left out. Without one, all is shown.
    """
    buffers = Table(*_BUFFERS, title=f"rates over {seconds:.1f} s", title_justify="left")
    operations = Table(*_OPERATIONS, caption_justify="left")
    for column in buffers.columns[4:9] + operations.columns[3:]:
        column.justify = "right"
    troubles = []
    for one, (pid, counters, strange) in now.items():
        shown = str(pid or one.pid)
        if counters is None:
            silent, words = _silence(pid, strange)
            buffers.add_row(shown, "-", Text(silent, "red"))
            troubles.append(f"process {shown}: {words}")
            continue
        earlier, first = _same(one, counters, before), _same(one, counters, begun or {})
        who, state = (shown, f"{counters.get('rank')} of {counters.get('world')}"), plain(counters.get("state", "ok"))
        if why := counters.get("why"):
            troubles.append(f"rank {counters.get('rank')}, process {shown}: {state}: {plain(why)}")
        well = is_well(now[one])
        cells = _peers(counters), *_proxied(counters, earlier, seconds), _waits(counters, first)
        buffers.add_row(*who, Text(state, "" if well else "red"), *(Text(plain(cell)) for cell in cells))
        for line in _operations(counters, earlier, seconds, begun is None):
            operations.add_row(*who, *(Text(plain(cell)) for cell in line))
    if now:
        operations.caption = _CAPTION
    return [buffers, operations, *map(Text, troubles)]


@app.command()
def command(
    pid: Annotated[list[int] | None, typer.Option(help="Only of this process; may be given several times.")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only of this EP rank; may be given several times.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counters once, as they are.")] = False,
) -> None:
    """Show what the open Buffers of this machine's processes are doing: rates, queues, p50 and p99 of operations.

    With --once or --json, exit status 1 when there is none, 2 when one does not answer or cannot go on.
    """
    raise typer.Exit(run(pid or [], rank or [], interval, once, as_json))


def run(pids: Sequence[int], ranks: Sequence[int], interval: float, once: bool, as_json: bool) -> int:
    """Show the counters until Ctrl-C, or once. Returns the exit status, as the command says."""
    begun = before = read_all(pids, ranks)
    since = time.monotonic()
    if as_json:
        answers = [
            {name: value for name, value in one.counters.items() if name != "calls"}
            if one.counters
            else dict(zip(("pid", "state", "why"), (one.pid, *_silence(one.pid, one.strange)), strict=True))
            for one in before.values()
        ]
        print(json.dumps(answers, indent=1))
        return _status(before)
    console, nothing = wide_console(), _NOTHING
    if pids or ranks:
        wanted = [*(f"process {pid}" for pid in pids), *(f"rank {rank}" for rank in ranks)]
        nothing = f"{_NOTHING} is of {' or '.join(wanted)}"

    def next_picture(pause: float) -> Group:
        nonlocal before, since
        time.sleep(pause)
        now, instant = read_all(pids, ranks), time.monotonic()
        shown = Group(*picture(now, before, instant - since, None if once else begun), *([] if now else [nothing]))
        before, since = now, instant
        return shown

    if once and not before:
        console.print(nothing, soft_wrap=True)
        return 1
    if once:
        console.print(next_picture(interval))
        return _status(before)
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:  # a file keeps all of them
            while True:
                console.print(next_picture(interval))
                console.file.flush()
        with Live(console=console, auto_refresh=False) as live:
            live.update(next_picture(min(interval, _FIRST_PICTURE)), refresh=True)
            while True:
                live.update(next_picture(interval), refresh=True)
    return 0


def _status(readings: Mapping[Served, Reading]) -> int:
    if not readings:
        return 1
    return 0 if all(map(is_well, readings.values())) else 2
