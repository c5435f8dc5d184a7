"""What the open Buffers of this machine's processes answer, checked: for ``top``, ``export`` and ``timeline``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec

from uccl_ep_serving.stats import Reading, Served, read, served

__all__ = ["MISSING", "Counters", "Running", "read_all", "understood", "waiting", "ways"]

#: Of one Buffer, by name.
Counters = Mapping[str, Any]

#: Lists of peers that take no part.
MISSING = ("masked", "lost")
#: Buffers that are asked at once.
_MOST_READERS = 64
#: What a sum of many stays far below, and a time: in seconds since 1970 or microseconds of a process's life.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Waits(msgspec.Struct):
    samples: _Count
    by_peer: dict[str, _Count]
    seconds: _Time


class _Wait(msgspec.Struct):
    peer: Annotated[int, msgspec.Meta(ge=-1, le=1 << 32)]


class Running(msgspec.Struct):
    """A call under way, and for how long."""

    call: str
    seconds: _Time


class _Operation(msgspec.Struct):
    count: _Count
    tokens: _Count
    rows: _Count
    total_us: _Time
    p50_us: _Time
    p99_us: _Time


_Buckets = Annotated[list[_Count], msgspec.Meta(min_length=1, max_length=64)]


class _Told(msgspec.Struct):
    """What is shown of an answer, by whichever command. Root asks processes of any user: they may answer anything."""

    rank: _Count
    world: _Count
    host: str
    pid: _Count
    opened: _Time
    time: _Time
    state: str
    waits: _Waits
    ops: dict[str, _Operation]
    calls: list[tuple[_Count, _Time, str, _Count, _Time]] = []
    why: str = ""
    epoch: _Count = 0
    running: Running | None = None
    waits_for: _Wait | None = None
    masked: list[int] = []
    lost: list[int] = []
    transport_by_peer: dict[str, str] = {}
    durations: dict[str, _Buckets] = {}
    latency: dict[str, _Buckets] = {}
    control_reconnections: _Count = 0
    reconnections: _Count = 0
    bytes_sent: _Count = 0
    bytes_received: _Count = 0
    messages_sent: _Count = 0
    messages_received: _Count = 0
    writes: _Count = 0
    held_back: _Count = 0
    duplicates: _Count = 0
    retries: _Count = 0
    sleeps: _Count = 0
    ring_depth: _Count = 0
    queue_depth: _Count = 0
    writes_in_flight: _Count = 0
    bytes_in_flight: _Count = 0


def understood(reading: Reading | None) -> Reading | None:
    """``reading``, without counters where they are none of a Buffer of this version."""
    if reading is None or reading.counters is None:
        return reading
    try:
        # no infinite numbers, and no half characters, which nobody could write down
        json.dumps(reading.counters, allow_nan=False, ensure_ascii=False).encode()
        msgspec.convert(reading.counters, _Told)
    except (ValueError, RecursionError) as error:
        return Reading(reading.pid, None, strange=str(error))
    return reading


def read_all(pids: Sequence[int] = (), ranks: Sequence[int] = ()) -> dict[Served, Reading]:
    """What every open Buffer answers, of these processes and ranks or of all, all asked at once."""
    there = served()
    with ThreadPoolExecutor(min(max(len(there), 1), _MOST_READERS)) as readers:
        readings = dict(zip(there, map(understood, readers.map(read, there)), strict=True))
    return {
        one: reading
        for one, reading in readings.items()
        if reading is not None
        and (not pids or {one.pid, reading.pid} & set(pids))
        and (not ranks or reading.counters is None or reading.counters.get("rank") in ranks)
    }


def ways(counters: Counters) -> dict[str, int]:
    """How many peers are reached which way, by its name; those that are masked or lost are not counted."""
    missing = {str(rank) for state in MISSING for rank in counters.get(state, ())}
    found = Counter(way for peer, way in counters.get("transport_by_peer", {}).items() if peer not in missing)
    return dict(sorted(found.items()))


def waiting(counters: Counters) -> int:
    """Commands in rings and queues."""
    return int(counters.get("ring_depth", 0) + counters.get("queue_depth", 0))
