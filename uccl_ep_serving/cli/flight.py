"""``uccl-ep flight``: what the ranks of a group wrote when they could not go on, beside one another.

Each file is of one rank (:mod:`uccl_ep_serving.data_plane.flight_recorder`) and was written when that rank first knew,
so that counts of two ranks may differ by what happened in between.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.cli.console import plain, wide_console
from uccl_ep_serving.cli.readings import Running
from uccl_ep_serving.cli.timeline import Call, Sample, Track, write
from uccl_ep_serving.data_plane.flight_recorder import SUFFIX
from uccl_ep_serving.protocol.command import MAX_RANKS

__all__ = ["Flight", "Record", "app", "findings", "read"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = ("rank", "epoch", "host", "pid", "state", "operation", "running", "waits for", "main thread")
_MAIN = "MainThread"
#: Streams that are told one by one.
_MOST_STREAMS = 16


class Wait(msgspec.Struct):
    """For whom a rank waited (control_plane/reports.py)."""

    peer: int
    phase: str = ""
    channel: int = -1
    arrived: int = -1
    expected: int = -1


class Stream(msgspec.Struct):
    """Messages of one stream between a rank and a peer, as the rank counts them (proxy/stats.py)."""

    peer: int
    stream: int
    name: str
    enqueued: int
    posted: int
    completed: int
    arrived: int
    held_back: int


#: Seconds since 1970 of which a calendar knows, and a rank.
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]


class Stats(msgspec.Struct):
    """What is shown of a rank's counters."""

    rank: _Rank
    world: _Rank
    host: str
    pid: int
    time: _Time
    state: str
    epoch: int
    begun: int
    why: str = ""
    running: Running | None = None
    waits_for: Wait | None = None
    streams: list[Stream] = []


class Record(msgspec.Struct):
    """The file of one rank.

    Attributes:
        stats: its counters.
        calls: its latest operations: number of each, when it ended, its name, its tokens, its seconds.
        threads: by the name of each Python thread, where it stood, innermost first.
        error: what an operation raised, "" where none did.
    """

    stats: Stats
    calls: list[tuple[int, _Time, str, int, float]]
    threads: dict[str, list[str]]
    error: str = ""


class Flight(NamedTuple):
    """The records of one group.

    Attributes:
        group: its name.
        time: of its latest record, in seconds since 1970.
        records: by rank, of its latest epoch.
        unreadable: files that are none, each with the reason.
    """

    group: str
    time: float
    records: dict[int, Record]
    unreadable: list[str]


def read(place: Path) -> list[Flight]:
    """The groups whose records lie in directory ``place``, latest first."""
    flights: dict[str, Flight] = {}
    for path in sorted(place.glob(f"[!.]*{SUFFIX}")):
        group = path.name.partition("-")[0]
        flight = flights.get(group, Flight(group, 0.0, {}, []))
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            flight.unreadable.append(f"{path.name}: {error}")
            when = path.lstat().st_mtime
        else:
            when = record.stats.time
            before = flight.records.get(record.stats.rank)
            if before is None or before.stats.epoch < record.stats.epoch:
                flight.records[record.stats.rank] = record
        flights[group] = flight._replace(time=max(flight.time, when))
    return sorted(flights.values(), key=lambda flight: flight.time, reverse=True)


def findings(records: Mapping[int, Record]) -> Iterator[str]:
    """What the records of a group say together, most telling first."""
    stats = {rank: record.stats for rank, record in sorted(records.items())}
    waiting = defaultdict(list)
    for rank, one in stats.items():
        if one.waits_for is not None:
            waiting[one.waits_for.peer].append(rank)
    for peer, who in sorted(waiting.items(), key=lambda item: len(item[1]), reverse=True):
        yield f"{_ranks(who)} waited for rank {peer}{_stands(peer, records)}"
    if missing := sorted(set(range(max((one.world for one in stats.values()), default=0))) - set(stats)):
        yield (
            f"{_ranks(missing)} left no record: its process was killed or hung as a whole, its host is gone, or its "
            "directory is not among these"
        )
    begun = defaultdict(list)
    for rank, one in stats.items():
        begun[one.epoch, one.begun].append(rank)
    if len(begun) > 1:
        yield "operations begun differ: " + "; ".join(
            f"{number} in epoch {epoch} on {_ranks(who)}" for (epoch, number), who in sorted(begun.items())
        )
    under_way = list(_under_way(stats))
    yield from under_way[:_MOST_STREAMS]
    if len(under_way) > _MOST_STREAMS:
        yield f"{len(under_way) - _MOST_STREAMS} more streams have messages under way"


def _stands(peer: int, records: Mapping[int, Record]) -> str:
    """What ``peer`` itself did, in words."""
    record = records.get(peer)
    if record is None:
        return ""
    stats = record.stats
    if stats.waits_for is not None:
        return f", which waited for rank {stats.waits_for.peer}"
    doing = f"in {stats.running.call}" if stats.running is not None else "in no call of ours"
    return f", which waited for nobody: {doing}, at {_place(record)}"


def _place(record: Record) -> str:
    """Where the main thread stood."""
    stack = record.threads.get(_MAIN, [])
    return stack[0] if stack else "an unknown place"


def _under_way(stats: Mapping[int, Stats]) -> Iterator[str]:
    """Messages that a rank has sent over proxies and that its peer has not counted."""
    arrived = {(stream.peer, rank, stream.stream): stream for rank, one in stats.items() for stream in one.streams}
    for rank, one in stats.items():
        for sent in one.streams:
            if sent.peer not in stats or stats[sent.peer].epoch != one.epoch:
                continue
            seen = arrived.get((rank, sent.peer, sent.stream))
            came, held = (seen.arrived, seen.held_back) if seen is not None else (0, 0)
            if sent.enqueued > came:
                yield (
                    f"rank {rank} -> rank {sent.peer}, {sent.name}: {sent.enqueued} messages, of which {sent.posted} "
                    f"were posted, {sent.completed} completed, and {came} arrived without a gap ({held} writes behind "
                    f"one): {_fault(sent, held)}"
                )


def _fault(sent: Stream, held: int) -> str:
    """Where the first of the missing messages is."""
    if sent.posted < sent.enqueued:
        return "the sender's transport is busy, or waits for credits of the receiver"
    if sent.completed < sent.posted:
        return "in the network, or the receiver takes nothing"
    return "the receiver's proxy, or what comes before a gap is under way" if held else "the receiver's proxy"


def _ranks(which: Iterable[int]) -> str:
    names = [str(rank) for rank in which]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"


def _track(record: Record) -> tuple[int, Track]:
    """For a timeline, of a Buffer whose number in its process nobody wrote."""
    stats = msgspec.to_builtins(record.stats)
    return 0, Track([Sample(record.stats.time, stats)], {call[0]: Call(*call) for call in record.calls})


def _table(flight: Flight) -> Table:
    when = datetime.fromtimestamp(flight.time).astimezone().isoformat(" ", "seconds")
    table = Table(*_COLUMNS, title=f"group {flight.group}, {when}", title_justify="left")
    for rank, record in sorted(flight.records.items()):
        one = record.stats
        running = f"{one.running.call}, {one.running.seconds:.1f} s" if one.running is not None else ""
        wait = one.waits_for
        counts = f" ({wait.arrived} of {wait.expected})" if wait is not None and wait.arrived >= 0 else ""
        waits = f"rank {wait.peer}, {wait.phase}{counts}" if wait is not None else ""
        cells = (rank, one.epoch, one.host, one.pid, one.state, one.begun, running, waits, _place(record))
        table.add_row(*(Text(plain(str(cell))) for cell in cells))
    return table


def _lines(rank: int, record: Record) -> Iterator[str]:
    """The latest calls of a rank, and its threads."""
    for _, ended, operation, tokens, seconds in record.calls:
        when = datetime.fromtimestamp(ended).isoformat(" ", "milliseconds")
        yield f"rank {rank}, {when}: {operation} of {tokens} tokens, {seconds * 1e3:.1f} ms, ended"
    for thread, stack in record.threads.items():
        yield f"rank {rank}, thread {thread}, innermost first:"
        yield from (f"    {frame}" for frame in stack)


@app.command()
def command(
    directory: Annotated[Path, typer.Argument(help="What UCCL_EP_FLIGHT_RECORDER named, of all hosts together.")],
    group: Annotated[str, typer.Option(help="Name of a group; without one, that of the latest failure.")] = "",
    rank: Annotated[list[int] | None, typer.Option(help="Show its latest calls and all its threads as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings for machines.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the latest calls of all ranks to this file, a trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Read what ranks wrote when they could not go on: who waited for whom, in which operation, and where each stood.

    Exit status 1 when there is no record, or the timeline cannot be written.
    """
    raise typer.Exit(run(directory, group, rank or [], as_json, timeline))


def run(place: Path, group: str, ranks: Sequence[int], as_json: bool, timeline: Path | None = None) -> int:
    """Print one group's records. Returns the exit status, as the command says."""
    flights, console = read(place), wide_console()
    wanted = [flight for flight in flights if not group or flight.group == group]
    shown = wanted[0] if wanted else Flight(group, 0.0, {}, [])
    others = [flight.group for flight in flights if flight is not shown]
    said_of_others = [f"other groups, latest first: {', '.join(others)} (--group)"] if others else []
    if timeline is not None and shown.records and not write(timeline, map(_track, shown.records.values())):
        return 1

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            console.print(Text(plain(line)), soft_wrap=True)

    unreadable = [words for flight in wanted for words in flight.unreadable]
    said = [*findings(shown.records), *(f"not readable: {words}" for words in unreadable)]
    if as_json:
        ranks_found = {str(rank): msgspec.to_builtins(record) for rank, record in sorted(shown.records.items())}
        print(json.dumps({"group": shown.group, "findings": said, "ranks": ranks_found}, indent=1))
        return 0 if shown.records else 1
    if not shown.records:
        which = f" of group {group}" if group else ""
        step = f"start the job with UCCL_EP_FLIGHT_RECORDER={place}"
        if unreadable:
            step = "copy the records again, whole, and read them with the version of this package that wrote them"
        elif not place.is_dir():
            step = "name the directory that UCCL_EP_FLIGHT_RECORDER named"
        say([*said, f"no record{which} in {place}. Next step: {step}", *said_of_others])
        return 1
    console.print(_table(shown))
    say(said)
    for rank, record in sorted(shown.records.items()):
        if words := record.error or record.stats.why:
            say([f"rank {rank}, {record.stats.state}: {words}"])
        if rank in ranks:
            say(_lines(rank, record))
    say(said_of_others)
    return 0
