"""``uccl-ep flight``: what the records of a group say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from uccl_ep_serving.cli.flight import findings, read
from uccl_ep_serving.cli.main import app
from uccl_ep_serving.data_plane.flight_recorder import SUFFIX

GROUP = "0badcafe"


def stream(peer: int, sent: tuple[int, int, int] = (0, 0, 0), arrived: int = 0, held_back: int = 0) -> dict[str, Any]:
    """Messages of stream 5 to and from ``peer``: enqueued, posted, completed."""
    enqueued, posted, completed = sent
    counts = {"enqueued": enqueued, "posted": posted, "completed": completed, "arrived": arrived}
    return {"peer": peer, "stream": 5, "name": "combine 0", **counts, "held_back": held_back, "writes_posted": 7}


def wait(peer: int) -> dict[str, Any]:
    return {"peer": peer, "phase": "low-latency combine recv", "channel": 0, "arrived": 3, "expected": 4}


def write(place: Path, rank: int, *, epoch: int = 0, group: str = GROUP, error: str = "", **stats: Any) -> Path:
    """The record of one rank of four, which has begun seven operations."""
    counters = {
        "rank": rank,
        "world": 4,
        "host": f"node{rank}",
        "pid": 100 + rank,
        "time": 1000.0 + rank,
        "state": "lost",
        "why": "rank 3: its process ended",
        "epoch": epoch,
        "begun": 7,
        "running": {"call": "low_latency_combine", "seconds": 9.5},
        "waits_for": None,
        "streams": [],
        "bytes_sent": 4,
        **stats,
    }
    document = {
        "stats": counters,
        "calls": [[41, 990.0, "ll_dispatch", 8, 0.001]],
        "threads": {"MainThread": ["model.py:7 forward", "run.py:1 <module>"], "uccl-ep live": ["stats.py:3 _serve"]},
        "error": error,
    }
    path = place / f"{group}-epoch{epoch}-rank{rank}{SUFFIX}"
    path.write_text(json.dumps(document))
    return path


def said(place: Path) -> list[str]:
    return list(findings(read(place)[0].records))


def flight(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["flight", *arguments], env={"COLUMNS": "200"})


def test_the_rank_at_the_end_of_the_chain_is_told_with_where_it_stood(tmp_path: Path) -> None:
    for rank, peer in ((0, 2), (1, 2), (2, 3)):
        write(tmp_path, rank, waits_for=wait(peer))
    write(tmp_path, 3, running=None)
    assert said(tmp_path) == [
        "ranks 0, 1 waited for rank 2, which waited for rank 3",
        "rank 2 waited for rank 3, which waited for nobody: in no call of ours, at model.py:7 forward",
    ]


def test_a_rank_without_a_record_is_told(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, waits_for=wait(3))
    first, second = said(tmp_path)
    assert first == "ranks 0, 1 waited for rank 3"
    assert second.startswith("ranks 2, 3 left no record: ")


def test_ranks_in_other_operations_and_epochs_are_told(tmp_path: Path) -> None:
    for rank, epoch, begun in ((0, 1, 7), (1, 1, 8), (2, 0, 9), (3, 1, 7)):
        write(tmp_path, rank, epoch=epoch, begun=begun)
    assert said(tmp_path) == [
        "operations begun differ: 9 in epoch 0 on rank 2; 7 in epoch 1 on ranks 0, 3; 8 in epoch 1 on rank 1"
    ]


@pytest.mark.parametrize(
    ("sent", "arrived", "held_back", "fault"),
    [
        ((9, 9, 9), 9, 0, ""),
        ((9, 8, 8), 8, 0, "the sender's transport is busy, or waits for credits of the receiver"),
        ((9, 9, 8), 8, 0, "in the network, or the receiver takes nothing"),
        ((9, 9, 9), 8, 2, "the receiver's proxy, or what comes before a gap is under way"),
        ((9, 9, 9), 8, 0, "the receiver's proxy"),
    ],
)
def test_a_message_that_has_not_arrived_is_told_with_whose_fault_it_is(
    tmp_path: Path, sent: tuple[int, int, int], arrived: int, held_back: int, fault: str
) -> None:
    for rank in (0, 3):
        write(tmp_path, rank)
    write(tmp_path, 1, streams=[stream(2, sent)])
    write(tmp_path, 2, streams=[stream(1, arrived=arrived, held_back=held_back)])
    enqueued, posted, completed = sent
    assert said(tmp_path) == [
        f"rank 1 -> rank 2, combine 0: {enqueued} messages, of which {posted} were posted, {completed} completed, and "
        f"{arrived} arrived without a gap ({held_back} writes behind one): {fault}"
    ] * bool(fault)


def test_counts_of_other_epochs_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path, 1, streams=[stream(2, (9, 9, 9))])
    write(tmp_path, 2, epoch=1, streams=[stream(1, arrived=1)])
    assert not any("->" in words for words in said(tmp_path))


def test_many_streams_are_counted(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, streams=[{**stream((rank + 1) % 4, (2, 1, 1)), "stream": number} for number in range(8)])
    *shown, last = said(tmp_path)
    assert len(shown) == 16
    assert last == "16 more streams have messages under way"


def test_the_latest_epoch_of_a_rank_and_the_latest_group_are_shown(tmp_path: Path) -> None:
    write(tmp_path, 0, error="PeerTimeout: old")
    write(tmp_path, 0, epoch=3, error="PeerTimeout: rank 3 is silent")
    write(tmp_path, 0, group="01d", time=5.0, error="PeerTimeout: another day")
    (tmp_path / f".half{SUFFIX}").write_text("{")  # under way when its process was killed
    shown = flight(str(tmp_path))
    assert shown.exit_code == 0
    assert "rank 0, lost: PeerTimeout: rank 3 is silent" in shown.output
    assert "old" not in shown.output
    assert "other groups, latest first: 01d (--group)" in shown.output
    assert "another day" in flight(str(tmp_path), "--group", "01d").output


def test_a_record_that_is_none_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    path.write_text(path.read_text()[:100])
    write(tmp_path, 0, why="\x1b[31mred")
    shown = flight(str(tmp_path))
    assert shown.exit_code == 0
    assert f"not readable: {path.name}: " in shown.output
    assert "rank 0, lost: ?[31mred" in shown.output


def test_the_latest_failure_is_shown_also_where_nobody_can_read_it(tmp_path: Path) -> None:
    write(tmp_path, 0, time=3000.0)
    write(tmp_path, 0, group="1ater", time=100.0)
    write(tmp_path, 1, group="1ater", time=5000.0, epoch=2)
    assert [flight.group for flight in read(tmp_path)] == ["1ater", GROUP]
    cut = write(tmp_path, 0, group="1ast")
    cut.write_text("{")
    shown = flight(str(tmp_path))
    assert shown.exit_code == 1
    assert f"not readable: {cut.name}: " in shown.output
    assert "Next step: copy the records again" in shown.output
    assert f"other groups, latest first: 1ater, {GROUP} (--group)" in shown.output
    assert "name the directory" in flight(str(cut)).output


@pytest.mark.parametrize(
    ("right", "wrong"),
    [('"time": 1001.0', '"time": 1e300'), ('"world": 4', '"world": 1099511627776'), ('"rank": 1', '"rank": -1')],
)
def test_figures_that_no_rank_writes_make_a_record_none(tmp_path: Path, right: str, wrong: str) -> None:
    path = write(tmp_path, 1)
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    assert "not readable" in flight(str(tmp_path)).output


def test_a_rank_is_shown_whole_where_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 0)
    assert "thread uccl-ep live" not in flight(str(tmp_path)).output
    whole = flight(str(tmp_path), "--rank", "0").output
    assert "rank 0, thread uccl-ep live, innermost first:\n    stats.py:3 _serve" in whole
    assert "ll_dispatch of 8 tokens, 1.0 ms, ended" in whole


def test_machines_get_all_of_it(tmp_path: Path) -> None:
    write(tmp_path, 2, waits_for=wait(1))
    document = json.loads(flight(str(tmp_path), "--json").output)
    assert document["group"] == GROUP
    assert document["findings"] == said(tmp_path)
    assert document["ranks"]["2"]["stats"]["waits_for"] == wait(1)


def test_a_directory_without_records_says_what_to_do(tmp_path: Path) -> None:
    shown = flight(str(tmp_path))
    assert shown.exit_code == 1
    assert f"Next step: start the job with UCCL_EP_FLIGHT_RECORDER={tmp_path}" in shown.output.replace("\n", "")
    assert flight(str(tmp_path), "--json").exit_code == 1


def test_the_calls_of_all_ranks_become_a_timeline(tmp_path: Path) -> None:
    write(tmp_path, 1, waits_for=wait(3))
    write(tmp_path, 2)
    file = tmp_path / "timeline.json"
    assert flight(str(tmp_path), "--timeline", str(file)).exit_code == 0
    events = json.loads(file.read_text())
    calls = sorted((event["ts"], event["name"]) for event in events if event["ph"] == "X" and event["tid"] == 1)
    under_way = [(991.5e6, "low_latency_combine, under way"), (992.5e6, "low_latency_combine, under way")]
    assert calls == [(989.999e6, "ll_dispatch"), (989.999e6, "ll_dispatch"), *under_way]
    assert [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 2] == ["rank 3"]
    assert flight(str(tmp_path), "--timeline", str(tmp_path / "nowhere" / "x.json")).exit_code == 1
