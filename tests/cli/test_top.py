"""``uccl-ep top``: rates between two readings of the live counters, of the processes that serve any."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from uccl_ep_serving.cli import top
from uccl_ep_serving.cli.main import app
from uccl_ep_serving.cli.readings import understood
from uccl_ep_serving.stats import LiveServer, Reading, Served, served

ONE = Served(0, 7, 0)


def counters(factor: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "rank": 1,
        "world": 4,
        "host": "here",
        "pid": 7,
        "opened": 1000.0,
        "time": 1002.0,
        "calls": [],
        "state": "ok",
        "why": "",
        "running": None,
        "waits_for": None,
        "waits": {"samples": 100 * factor, "by_peer": {}, "seconds": 0.0},
        "masked": [],
        "lost": [],
        "transport_by_peer": {"0": "direct", "2": "shm", "3": "shm"},
        "bytes_sent": 3_000_000 * factor,
        "bytes_received": 5_000_000 * factor,
        "messages_sent": 40 * factor,
        "ring_depth": 3,
        "queue_depth": 4,
        "writes_in_flight": 5,
        "ops": {
            "ll_dispatch": {
                "count": 100 * factor,
                "tokens": 6400 * factor,
                "rows": 12000 * factor,
                "total_us": 9000.0,
                "p50_us": 80.0,
                "p99_us": 200.0,
            },
            "ll_combine": {"count": 0, "tokens": 0, "rows": 0, "total_us": 0.0, "p50_us": 0.0, "p99_us": 0.0},
        },
        **changes,
    }


Given = dict[str, Any] | None


def shown(now: Given, before: Given = None, begun: Given = None) -> list[Any]:
    """The picture of one Buffer that answers ``now``, two seconds after ``before``."""
    earlier = {ONE: Reading(7, before)} if before else {}
    first = {ONE: Reading(7, begun)} if begun else None
    return top.picture({ONE: Reading(7, now)}, earlier, 2.0, first)


def cells(table: Any) -> list[list[str]]:
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_rates_are_differences() -> None:
    buffers, operations = shown(counters(3), counters(1))
    assert cells(buffers) == [["7", "1 of 4", "ok", "1 direct; 2 shm", "3.0", "5.0", "40", "7", "5", ""]]
    assert cells(operations) == [["7", "1 of 4", "ll_dispatch", "100", "6,400", "12,000", "80", "200"]]


@pytest.mark.parametrize("before", [None, counters(5, opened=999.0)])
def test_what_was_not_there_before_counts_from_its_start(before: Given) -> None:
    (row,) = cells(shown(counters(1), before)[0])
    assert row[6] == "20"


def test_rates_go_on_over_an_epoch() -> None:
    (row,) = cells(shown(counters(3, epoch=2), counters(1, epoch=1))[0])
    assert row[6] == "40"


def test_who_is_missing_is_said_and_counts_as_no_peer() -> None:
    buffers, _, trouble = shown(counters(masked=[3], lost=[0, 2], state="lost", why="rank 2: its process ended"))
    (row,) = cells(buffers)
    assert row[2:4] == ["lost", "masked 3; lost 0, 2"]
    assert str(trouble) == "rank 1, process 7: lost: rank 2: its process ended"


def test_a_rank_whose_windows_are_built_is_not_alone() -> None:
    building = {"rank": 0, "world": 3, "opened": 1.0, "state": "rebuilding", "ops": {}}
    assert cells(shown(building)[0])[0][2:4] == ["rebuilding", "-"]


def test_a_buffer_without_peers_or_proxies_has_a_line() -> None:
    alone = {"rank": 0, "world": 1, "opened": 1.0, "transport_by_peer": {}, "ops": {}}
    buffers, operations = shown(alone)
    assert cells(buffers) == [["7", "0 of 1", "ok", "alone", *"-----", ""]]
    assert cells(operations) == []


def test_what_kernels_write_themselves_is_not_said_to_be_nothing() -> None:
    """Proxies have counted 0 there, whatever moved: what is known of it are tokens and rows."""
    silent = dict.fromkeys(("bytes_sent", "bytes_received", "messages_sent", "ring_depth"), 0)
    direct = counters(1, transport_by_peer={"0": "direct", "2": "direct"}, **silent)
    buffers, operations = shown(direct)
    assert cells(buffers)[0][4:9] == ["-"] * 5
    assert cells(operations)[0][4:6] == ["3,200", "6,000"]
    one_over_tcp = {**direct, "transport_by_peer": {"0": "direct", "2": "tcp"}}
    assert cells(shown(one_over_tcp)[0])[0][4:7] == ["0.0", "0.0", "0"]


def test_rows_that_the_host_does_not_know_are_left_out() -> None:
    on_a_gpu = {"ll_dispatch": {"count": 4, "tokens": 512, "rows": 0, "p50_us": 9.0, "p99_us": 10.0}}
    operations = shown(counters(1, ops=on_a_gpu))[1]
    assert cells(operations)[0][2:] == ["ll_dispatch", "2", "256", "-", "9", "10"]
    assert "on a GPU the host's part alone" in operations.caption
    assert "through proxies" in operations.caption


def test_an_operation_that_is_not_called_has_no_line_where_pictures_follow() -> None:
    """Its percentiles may be hours old."""
    assert cells(shown(counters(2), counters(2), counters(1))[1]) == []
    assert cells(shown(counters(2), counters(2))[1])[0][3] == "0"


def test_a_straggler_is_named_by_those_that_wait_for_it() -> None:
    begun, now = (
        {"samples": count, "by_peer": {"0": 5, "3": most}, "seconds": 0.2} for count, most in ((100, 50), (120, 68))
    )
    (row,) = cells(shown(counters(2, waits=now), counters(1), counters(1, waits=begun))[0])
    assert row[9] == "rank 3 (90%)"
    (row,) = cells(shown(counters(2, waits=now))[0])
    assert row[9] == "rank 3 (57%)"
    pending = {"peer": 0, "phase": "low-latency combine", "channel": 1, "arrived": 0, "expected": 1}
    (row,) = cells(shown(counters(2, waits_for=pending, waits={**now, "seconds": 4.2}))[0])
    assert row[9] == "rank 0, for 4 s"


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {"rank": "1"},
        counters(ops={"ll_dispatch": 3}),
        counters(waits={}),
        counters(bytes_sent="much"),
        counters(calls=[1]),
        counters(latency={"0": []}),
        counters(latency={"0": [0] * 65}),
        counters(writes=10**400),
        counters(state="\ud800"),
        counters(time=float("nan")),
        counters(calls=[[0, 1e308, "ll_dispatch", 1, 1.0]]),
    ],
)
def test_answers_of_no_buffer_are_none(strange: dict[str, Any]) -> None:
    found = understood(Reading(7, strange))
    assert found is not None
    assert found[:2] == (7, None)
    buffers, _, trouble = top.picture({ONE: found}, {}, 2.0)
    assert cells(buffers)[0][:3] == ["7", "-", "strange"]
    assert f"none of this version's: {found.strange}. Next step" in str(trouble)
    assert understood(Reading(7, counters())) == Reading(7, counters())


def test_a_terminal_obeys_nothing_of_an_answer() -> None:
    *_, trouble = shown(counters(state="lost", why="\x1b]0;owned\x07rank 2"))
    assert str(trouble) == "rank 1, process 7: lost: ?]0;owned?rank 2"
    operation = counters()["ops"]["ll_dispatch"]
    text = io.StringIO()
    answer = counters(ops={"[/x]\x1b[31m": operation}, transport_by_peer={"0": "\x1b]0;owned\x07[red]tcp"})
    Console(file=text, width=200).print(*shown(answer))
    assert "[/x]?[31m" in text.getvalue()
    assert "1 ?]0;owned?[red]tcp" in text.getvalue()
    assert not {"\x1b", "\x07"} & set(text.getvalue())


def test_a_process_that_does_not_answer_is_shown_and_looked_at() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        for stop, words in ((False, "py-spy dump --pid"), (True, "its process is stopped. Next step: kill -CONT")):
            if stop:
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            buffers, _, trouble = top.picture({ONE: Reading(process.pid, None)}, {}, 1.0)
            assert cells(buffers)[0][:3] == [str(process.pid), "-", "silent"]
            assert f"process {process.pid}: it does not answer" in str(trouble)
            assert f"{words} " in str(trouble)
        process.kill()


def test_open_buffers_are_found_and_shown() -> None:
    server = LiveServer(lambda: counters(1))
    try:
        assert os.getpid() in [one.pid for one in served()]
        shown = CliRunner().invoke(
            app, ["top", "--once", "--interval", "0.1", "--pid", str(os.getpid())], env={"COLUMNS": "200"}
        )
        assert shown.exit_code == 0
        assert "1 direct; 2 shm" in shown.output
        narrow = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1"], env={"COLUMNS": "80"})
        assert "ll_dispatch" in narrow.output
        plain = CliRunner().invoke(app, ["top", "--json", "--pid", str(os.getpid())])
        # as they are, but for the latest calls
        assert json.loads(plain.output) == [{name: one for name, one in counters(1).items() if name != "calls"}]
    finally:
        server.close()
    assert os.getpid() not in [one.pid for one in served()]


def test_nothing_to_show_is_said_and_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: there is nothing whose rates an interval would show."""
    monkeypatch.setattr(top.time, "sleep", lambda seconds: pytest.fail("it waits for nothing"))
    gone = CliRunner().invoke(app, ["top", "--once", "--pid", "999999999"])
    assert gone.exit_code == 1
    assert "no open Buffer" in gone.output
    assert "is of process 999999999" in gone.output


def test_it_shows_something_early_and_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    monkeypatch.setattr(top, "wide_console", lambda: Console(file=open(os.devnull, "w"), force_terminal=True))  # noqa: SIM115
    assert top.run([999999999], [], 4.0, once=False, as_json=False) == 0
    assert pauses[0] < 0.5
    assert pauses[1:] == [4.0, 4.0]
