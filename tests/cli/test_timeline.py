"""``uccl-ep timeline``: the events of a trace, and that open Buffers are in it."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.alone import Alone
from tests.support.bodies import round_trip
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.cli import timeline
from uccl_ep_serving.cli.timeline import Call, Sample, Track, events_of
from uccl_ep_serving.stats import Reading, Served

CALL = [7, 10.5, "ll_dispatch", 8, 0.25]


def counters(time: float, **changes: Any) -> dict[str, Any]:
    return {
        "rank": 1,
        "world": 4,
        "host": "node1",
        "pid": 7,
        "time": time,
        "state": "ok",
        "why": "",
        "epoch": 0,
        "running": None,
        "waits_for": None,
        "transport_by_peer": {"0": "direct", "2": "tcp"},
        "calls": [CALL],
        "bytes_sent": int(time * 3e6),
        "bytes_in_flight": 4,
        "ring_depth": 2,
        "queue_depth": 3,
        **changes,
    }


def track(*answers: dict[str, Any] | None) -> Track:
    found = Track()
    for answer in answers:
        found.add(Reading(7, answer))
    return found


def of_line(events: list[dict[str, Any]], line: int) -> list[tuple[str, float, float]]:
    """Spans of a line: name, begin and length in seconds."""
    return [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X" and e["tid"] == line]


def test_a_call_is_told_once_and_begins_where_it_began() -> None:
    other = [8, 11.0, "ll_combine", 8, 0.125]
    events = events_of(track(counters(11.0), counters(12.0, calls=[CALL, other])))
    assert of_line(events, 1) == [("ll_dispatch", 10.25, 0.25), ("ll_combine", 10.875, 0.125)]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 1 of 4 (node1, pid 7)"}


def test_calls_that_overlap_have_lines_of_their_own() -> None:
    """Of two batches, or of threads: spans of one line lie behind or inside one another."""
    calls = [[number, 10.0 + number, "ll_dispatch", 8, 2.5] for number in range(4)]
    events = events_of(track(counters(20.0, calls=calls)))
    assert [len(of_line(events, line)) for line in (1, 4, 5)] == [2, 1, 1]
    for line in (1, 4, 5):
        assert all(begin + length <= later for (_, begin, length), (_, later, _) in pairwise(of_line(events, line)))


def test_what_came_too_fast_is_counted() -> None:
    found = track(counters(1.0), None, counters(2.0, calls=[[9, 11.0, "ll_combine", 8, 0.1]]))
    assert found.missed == 1
    assert len(found.calls) == 2
    assert track(counters(1.0, calls=[])).missed == 0
    earlier = counters(1.0)
    del earlier["calls"]
    assert track(earlier).missed == 0


def test_a_call_under_way_is_there() -> None:
    events = events_of(track(counters(20.0, running={"call": "low_latency_combine", "seconds": 5.0})))
    assert of_line(events, 1)[-1] == ("low_latency_combine, under way", 15.0, 5.0)


def test_a_call_under_way_lasts_while_its_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline.time, "time", lambda: 25.0)
    events = events_of(track(counters(20.0, running={"call": "dispatch", "seconds": 5.0}), None))
    assert of_line(events, 1)[-1] == ("dispatch, under way", 15.0, 10.0)


def test_waits_and_states_last_until_there_is_another() -> None:
    wait = {"peer": 2, "phase": "low-latency combine recv", "channel": 0, "arrived": 3, "expected": 4}
    looks = [{}, {"waits_for": wait}, {"waits_for": wait}, {"waits_for": {**wait, "peer": 3}}, {}]
    events = events_of(track(*(counters(float(instant), **look) for instant, look in enumerate(looks))))
    assert of_line(events, 2) == [("rank 2", 1.0, 2.0), ("rank 3", 3.0, 1.0)]
    assert next(event["args"] for event in events if event["name"] == "rank 2") == wait
    assert of_line(events, 3) == [("ok, epoch 0", 0.0, 4.0)]
    lost = counters(5.0, state="lost", why="rank 2 has died", epoch=1)
    events = events_of(track(counters(4.0), lost, {**lost, "time": 6.0}))
    assert of_line(events, 3) == [("ok, epoch 0", 4.0, 1.0), ("lost, epoch 1", 5.0, 1.0)]
    assert events[-1]["ph"] == "C"
    assert next(event["args"] for event in events if event["name"] == "lost, epoch 1") == {"why": "rank 2 has died"}


def test_one_that_is_silent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline.time, "time", lambda: 3.0)
    events = events_of(track(counters(1.0), None, counters(5.0)))
    assert of_line(events, 3) == [("ok, epoch 0", 1.0, 2.0), ("silent", 3.0, 2.0)]
    assert events_of(track(None)) == []


def test_rates_are_of_what_proxies_move() -> None:
    events = events_of(track(counters(1.0), counters(3.0)))
    counted = {event["name"]: (event["ts"], event["args"]) for event in events if event["ph"] == "C"}
    assert counted == {
        "MB/s": (3e6, {"sent": 3.0, "received": 0.0}),
        "bytes in flight": (3e6, {"bytes in flight": 4}),
        "waiting commands": (3e6, {"waiting commands": 5}),
    }
    direct = {"transport_by_peer": {"0": "direct"}}
    assert not [e for e in events_of(track(counters(1.0, **direct), counters(2.0, **direct))) if e["ph"] == "C"]


def test_no_two_buffers_have_one_number() -> None:
    """Of one process or of two hosts; and a file of one run has the same as a file of the next."""
    one = Track([Sample(1.0, counters(1.0))], {7: Call(*CALL)})
    elsewhere = Track([Sample(1.0, counters(1.0, host="node2"))])
    numbers = {events_of(found, number)[0]["pid"] for found in (one, elsewhere) for number in (0, 1)}
    assert len(numbers) == 4
    assert numbers == {events_of(found, number)[0]["pid"] for found in (one, elsewhere) for number in (0, 1)}
    assert all(0 <= number < 1 << 31 for number in numbers)


def test_an_open_buffer_is_in_it(tmp_path: Path) -> None:
    buffer = Buffer(Alone())  # type: ignore[arg-type]
    for step in range(3):
        round_trip(buffer, step)
    file = tmp_path / "trace.json"
    done = CliRunner().invoke(timeline.app, [str(file), "--seconds", "0.2", "--pid", str(os.getpid())])
    assert done.exit_code == 0, done.output
    assert "calls of 1 Buffers" in done.output
    buffer.destroy()
    events = json.loads(file.read_text())
    assert [name for name, _, _ in of_line(events, 1)] == ["ll_dispatch", "ll_combine"] * 3
    assert all(begin + length <= later for (_, begin, length), (_, later, _) in pairwise(of_line(events, 1)))


@pytest.mark.parametrize("answer", [None, counters(1.0)])
def test_without_a_buffer_or_a_place_nothing_is_written(
    answer: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeline, "read_all", lambda *which: {Served(0, 7, 0): Reading(7, answer)})
    file = tmp_path / "nowhere" / "trace.json"
    assert timeline.run(file, 0.1, [], []) == 1
    assert capsys.readouterr().err.strip() == (
        "timeline: no open Buffer of this user in this network namespace has answered"
        if answer is None
        else f"timeline: {file}: No such file or directory"
    )
