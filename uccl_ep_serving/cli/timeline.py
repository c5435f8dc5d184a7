"""``uccl-ep timeline``: the calls of all ranks of this host beside one another, for Perfetto or chrome://tracing.

Events are those of Chrome's trace event format, one JSON array of them: arrays of several hosts may be joined. Instants
are microseconds since 1970, by the clock of each host.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from uccl_ep_serving.cli.readings import Counters, read_all, waiting
from uccl_ep_serving.proxy.transport.select import DIRECT
from uccl_ep_serving.stats import Reading, Served

__all__ = ["Call", "Sample", "Track", "app", "events_of", "run", "write"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Event = dict[str, Any]

#: Seconds between two readings. A Buffer tells its latest 256 calls (stats.py), and a reading takes it a millisecond.
_INTERVAL = 0.05
#: Of an answer: the whole of it, twenty times a second, fills memory.
_SHOWN = (
    *("host", "pid", "rank", "world", "time", "state", "why", "epoch", "running", "waits_for"),
    *("bytes_sent", "bytes_received", "bytes_in_flight", "ring_depth", "queue_depth"),
)
#: Lines of a rank.
_CALLS, _WAITS, _STATES, _BESIDE = range(1, 5)
_LINES = {_CALLS: "calls", _WAITS: "waits for", _STATES: "state", _BESIDE: "calls beside others"}


class Call(NamedTuple):
    """A dispatch or a combine: which one of its Buffer, when it ended (seconds since 1970), its name, its tokens, and
    seconds inside it, of both parts where it has a recv hook."""

    number: int
    ended: float
    operation: str
    tokens: int
    seconds: float


class Sample(NamedTuple):
    """What was found at one look.

    Attributes:
        time: seconds since 1970, of the Buffer that answered, or of this process.
        counters: of what it answered :data:`_SHOWN`, None for nothing.
    """

    time: float
    counters: Counters | None


@dataclass
class Track:
    """What was found of one Buffer.

    Attributes:
        samples: in order.
        calls: by number, in order.
        proxied: whether peers are reached through proxies.
    """

    samples: list[Sample] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)
    proxied: bool = False

    def add(self, reading: Reading) -> None:
        """Another look."""
        counters = reading.counters
        if counters is None:
            self.samples.append(Sample(time.time(), None))
            return
        self.proxied |= any(way != DIRECT for way in counters.get("transport_by_peer", {}).values())
        self.samples.append(Sample(counters["time"], {name: counters[name] for name in _SHOWN if name in counters}))
        # of a Buffer of an earlier version nothing is told
        self.calls.update((call.number, call) for call in map(Call._make, counters.get("calls", ())))

    @property
    def missed(self) -> int:
        """Calls that ended between two looks and were told at none."""
        return max(self.calls) - min(self.calls) + 1 - len(self.calls) if self.calls else 0


def _named(counters: Counters, number: int) -> tuple[int, list[Event]]:
    """A number that no other Buffer has, of whichever host, and the events that give it and its lines names."""
    where = f"{counters['host']}, pid {counters['pid']}"
    #: Perfetto takes 32 bits, signed.
    key = zlib.crc32(f"{where}, {number}, {counters['rank']} of {counters['world']}".encode()) >> 1
    names = [
        ("process_name", 0, {"name": f"rank {counters['rank']} of {counters['world']} ({where})"}),
        ("process_sort_index", 0, {"sort_index": counters["rank"]}),
        *(("thread_name", line, {"name": name}) for line, name in _LINES.items()),
    ]
    return key, [{"ph": "M", "pid": key, "tid": line, "name": name, "args": args} for name, line, args in names]


def _calls(key: int, calls: Iterable[Call]) -> Iterator[Event]:
    """Each call as one span that ends where it ended, on a line of its own where another one is under way."""
    ends: list[float] = []
    for _, ended, operation, tokens, inside in sorted(calls, key=lambda call: call.ended - call.seconds):
        begun = ended - inside
        line = next((index for index, end in enumerate(ends) if end <= begun), len(ends))
        ends[line : line + 1] = [ended]
        yield _span(key, _BESIDE + line - 1 if line else _CALLS, operation, begun, ended, {"tokens": tokens})


def _span(key: int, line: int, name: str, since: float, until: float, args: Mapping[str, Any]) -> Event:
    times = {"ts": round(since * 1e6, 1), "dur": round((until - since) * 1e6, 1)}
    return {"ph": "X", "pid": key, "tid": line, "name": name, **times, "args": dict(args)}


def events_of(track: Track, number: int = 0) -> list[Event]:
    """All events of a Buffer that has answered at least once; else none.

    Args:
        number: of the Buffer in its process.
    """
    told = [sample.counters for sample in track.samples if sample.counters is not None]
    if not told:
        return []
    key, events = _named(told[-1], number)
    events += _calls(key, track.calls.values())
    if running := told[-1].get("running"):
        begun, until = told[-1]["time"] - running["seconds"], track.samples[-1].time
        events.append(_span(key, _CALLS, f"{running['call']}, under way", begun, until, {}))
    events += _spans(key, _WAITS, [(sample.time, *_wait(sample.counters)) for sample in track.samples])
    events += _spans(key, _STATES, [(sample.time, *_state(sample.counters)) for sample in track.samples])
    if track.proxied:
        events += _proxied(key, told)
    return events


def _wait(counters: Counters | None) -> tuple[str, dict[str, Any]]:
    """For whom a rank waits, "" for nobody."""
    wait = None if counters is None else counters.get("waits_for")
    return ("", {}) if wait is None else (f"rank {wait['peer']}", wait)


def _state(counters: Counters | None) -> tuple[str, dict[str, Any]]:
    if counters is None:
        return "silent", {}
    why = counters.get("why")
    return f"{counters['state']}, epoch {counters.get('epoch', 0)}", {"why": why} if why else {}


def _spans(key: int, line: int, found: Sequence[tuple[float, str, dict[str, Any]]]) -> Iterator[Event]:
    """One for each name that was found, from the first look with it to the first with another, or the last."""
    since = 0
    for index, (instant, name, _) in enumerate(found):
        if name != found[since][1] or index == len(found) - 1:
            start, spanned, args = found[since]
            if spanned:
                yield _span(key, line, spanned, start, instant, args)
            since = index


def _proxied(key: int, told: Sequence[Counters]) -> Iterator[Event]:
    """Rates and levels of what goes through proxies."""
    for before, now in pairwise(told):
        begin, end = before["time"], now["time"]
        if end <= begin:
            continue
        rates = {
            name: max(now.get(what, 0) - before.get(what, 0), 0) / (end - begin) / 1e6
            for name, what in (("sent", "bytes_sent"), ("received", "bytes_received"))
        }
        levels = {"bytes in flight": now.get("bytes_in_flight", 0), "waiting commands": waiting(now)}
        counted = {"MB/s": rates, **{name: {name: level} for name, level in levels.items()}}
        for name, args in counted.items():
            yield {"ph": "C", "pid": key, "tid": 0, "name": name, "ts": round(end * 1e6, 1), "args": args}


@app.command()
def command(
    file: Annotated[Path, typer.Argument(help="To write.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to look; Ctrl-C ends it earlier.")] = 5.0,
    pid: Annotated[list[int] | None, typer.Option(help="Only of this process; may be given several times.")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only of this EP rank; may be given several times.")] = None,
) -> None:
    """Write what the ranks of this machine call, and for whom they wait, as a trace for ui.perfetto.dev.

    Exit status 1 when there is no open Buffer, or the file cannot be written.
    """
    raise typer.Exit(run(file, seconds, pid or [], rank or []))


def run(file: Path, seconds: float, pids: Sequence[int], ranks: Sequence[int]) -> int:
    """Look for so long, and write. Returns the exit status, as the command says."""
    tracks: dict[Served, Track] = {}
    with contextlib.suppress(KeyboardInterrupt):
        _look(tracks, time.monotonic() + seconds, pids, ranks)
    found = [(one.number, track) for one, track in tracks.items()]
    if not any(sample.counters for _, track in found for sample in track.samples):
        typer.echo("timeline: no open Buffer of this user in this network namespace has answered", err=True)
        return 1
    if not write(file, found):
        return 1
    calls, missed = (sum(counts) for counts in zip(*((len(one.calls), one.missed) for _, one in found), strict=True))
    left = f"; {missed} more came too fast to be told" if missed else ""
    typer.echo(f"{file}: {calls} calls of {len(found)} Buffers{left}. Open it in https://ui.perfetto.dev")
    return 0


def write(file: Path, found: Iterable[tuple[int, Track]]) -> bool:
    """Write the events of Buffers, each with its number in its process, and say what stands in the way.

    Returns:
        Whether the file is there.
    """
    events = [event for number, track in found for event in events_of(track, number)]
    try:
        file.write_text(json.dumps(events))
    except OSError as error:
        typer.echo(f"timeline: {file}: {error.strerror or error}", err=True)
        return False
    return True


def _look(tracks: dict[Served, Track], until: float, pids: Sequence[int], ranks: Sequence[int]) -> None:
    while (now := time.monotonic()) < until:
        for one, reading in read_all(pids, ranks).items():
            tracks.setdefault(one, Track()).add(reading)
        time.sleep(max(min(now + _INTERVAL, until) - time.monotonic(), 0.0))
