"""``uccl-ep top``: what the Buffers of this machine's processes are doing, from their live counters.

Rates are differences between two readings. A Buffer whose processes belong to another user, or that lies in another
network namespace (a container of its own), cannot be seen.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from uccl_ep_serving.cli.console import wide_console
from uccl_ep_serving.proxy.transport.select import DIRECT
from uccl_ep_serving.stats import query, serving_processes

__all__ = ["app", "read_all", "run", "tables"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Counters = Mapping[str, Any]
#: Which Buffer: its process, and how many that had opened before it and are open still.
Key = tuple[int, int]

_BUFFERS = ("pid", "rank", "peers", "MB/s sent", "messages/s", "writes/s", "received/s", "waiting", "in flight")
_OPERATIONS = ("pid", "rank", "operation", "calls/s", "tokens/s", "rows/s", "p50 us", "p99 us")
#: What proxies count; kernels that write a peer's window themselves count nothing of it.
_PROXIED = ("messages_sent", "writes", "messages_received")
_CAPTION = (
    "MB/s, messages, writes, received, waiting and in flight: of peers that are reached through proxies; - = none is, "
    "kernels write every window themselves. Tokens: given; rows: sent to other ranks, - where the host does not know "
    "them, as in low latency on a GPU; p50 and p99: inside the latest calls, on a GPU the host's part alone."
)
#: Seconds until the first picture, whose rates are over so many: nobody waits a whole interval before anything is seen.
_FIRST_PICTURE = 0.25
_NOTHING = "no open Buffer of this user in this network namespace"


def read_all(pids: Sequence[int] = ()) -> dict[Key, Counters]:
    """Counters of every open Buffer, of these processes or of all. A process that ends meanwhile has none."""
    found: dict[Key, Counters] = {}
    for pid in pids or serving_processes():
        with contextlib.suppress(OSError, ValueError):
            found |= {(pid, number): counters for number, counters in enumerate(query(pid))}
    return found


def _peers(counters: Counters) -> str:
    """How many peers are reached which way, and who is missing."""
    ways: dict[str, int] = {}
    for way in counters.get("transport_by_peer", {}).values():
        ways[way] = ways.get(way, 0) + 1
    words = [f"{count} {way}" for way, count in sorted(ways.items())] or ["alone"]
    words += [f"{state} {', '.join(map(str, ranks))}" for state in ("masked", "lost") if (ranks := counters.get(state))]
    return "; ".join(words)


def _rate(name: str, now: Counters, before: Counters, seconds: float) -> float:
    return float(max(now.get(name, 0) - before.get(name, 0), 0)) / seconds


def _operations(now: Counters, before: Counters, seconds: float) -> Iterator[list[str]]:
    """Of every operation that has been called: rates, and percentiles over its latest calls."""
    for name, one in now.get("ops", {}).items():
        if one["count"]:
            earlier = before.get("ops", {}).get(name, {})
            rates = [f"{_rate('count', one, earlier, seconds):,.0f}"]
            rates += [f"{_rate(what, one, earlier, seconds):,.0f}" if one[what] else "-" for what in ("tokens", "rows")]
            yield [name, *rates, f"{one['p50_us']:,.0f}", f"{one['p99_us']:,.0f}"]


def _proxied(now: Counters, before: Counters, seconds: float) -> Iterator[str]:
    """What goes through proxies: four rates, then what waits and what is in flight now."""
    if all(way == DIRECT for way in now.get("transport_by_peer", {}).values()):
        yield from "-" * (len(_PROXIED) + 3)
        return
    yield f"{_rate('bytes_sent', now, before, seconds) / 1e6:,.1f}"
    for name in _PROXIED:
        yield f"{_rate(name, now, before, seconds):,.0f}"
    yield f"{now.get('ring_depth', 0) + now.get('queue_depth', 0):,}"
    yield f"{now.get('writes_in_flight', 0):,}"


def tables(now: Mapping[Key, Counters], before: Mapping[Key, Counters], seconds: float) -> tuple[Table, Table]:
    """A line for each Buffer of ``now``, and one for each operation that it has been called for.

    Args:
        before: an earlier reading. A Buffer that is not in it, or has another rank there, is counted from its start.
        seconds: between the two.
    """
    buffers = Table(*_BUFFERS, title=f"rates over {seconds:.1f} s", title_justify="left")
    operations = Table(*_OPERATIONS, caption_justify="left")
    for column in buffers.columns[3:] + operations.columns[3:]:
        column.justify = "right"
    for key, counters in now.items():
        earlier = before.get(key, {})
        if any(earlier.get(name) != counters.get(name) for name in ("rank", "world", "epoch")):
            earlier = {}
        who = str(key[0]), f"{counters.get('rank')} of {counters.get('world')}"
        buffers.add_row(*who, _peers(counters), *_proxied(counters, earlier, seconds))
        for one in _operations(counters, earlier, seconds):
            operations.add_row(*who, *one)
    operations.caption = _CAPTION if now else _NOTHING
    return buffers, operations


@app.command()
def command(
    pid: Annotated[list[int] | None, typer.Option(help="Only of this process; may be given several times.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counters once, as they are.")] = False,
) -> None:
    """Show what the open Buffers of this machine's processes are doing: rates, queues, p50 and p99 of operations."""
    raise typer.Exit(run(pid or [], interval, once, as_json))


def run(pids: Sequence[int], interval: float, once: bool, as_json: bool) -> int:
    """Show the counters until Ctrl-C, or once. Returns the exit status: 1 when nothing was there to show once."""
    if as_json:
        found = read_all(pids)
        print(json.dumps(list(found.values()), indent=1))
        return 0 if found else 1
    console = wide_console()
    before, since = read_all(pids), time.monotonic()

    def next_picture(pause: float) -> Group:
        nonlocal before, since
        time.sleep(pause)
        now, instant = read_all(pids), time.monotonic()
        shown = Group(*tables(now, before, instant - since))
        before, since = now, instant
        return shown

    if once and not before:
        console.print(_NOTHING, soft_wrap=True)
        return 1
    if once:
        console.print(next_picture(interval))
        return 0 if before else 1
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        live.update(next_picture(min(interval, _FIRST_PICTURE)), refresh=True)
        while True:
            live.update(next_picture(interval), refresh=True)
    return 0
