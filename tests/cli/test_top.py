"""``uccl-ep top``: rates between two readings of the live counters, of the processes that serve any."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from uccl_ep_serving.cli import top
from uccl_ep_serving.cli.main import app
from uccl_ep_serving.stats import LiveServer, serving_processes


def counters(factor: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "rank": 1,
        "world": 4,
        "epoch": 2,
        "masked": [],
        "lost": [],
        "transport_by_peer": {"0": "direct", "2": "shm", "3": "shm"},
        "bytes_sent": 3_000_000 * factor,
        "messages_sent": 40 * factor,
        "writes": 60 * factor,
        "messages_received": 50 * factor,
        "ring_depth": 3,
        "queue_depth": 4,
        "writes_in_flight": 5,
        "ops": {
            "ll_dispatch": {
                "count": 100 * factor,
                "tokens": 6400 * factor,
                "rows": 12000 * factor,
                "p50_us": 80.0,
                "p99_us": 200.0,
            },
            "ll_combine": {"count": 0, "tokens": 0, "rows": 0, "p50_us": 0.0, "p99_us": 0.0},
        },
        **changes,
    }


def cells(now: dict[Any, Any], before: dict[Any, Any], which: int = 0) -> list[list[Any]]:
    """Rows of the Buffers, or with 1 of their operations; over two seconds."""
    shown = top.tables(now, before, 2.0)[which]
    return [list(row) for row in zip(*(column.cells for column in shown.columns), strict=True)]


def test_rates_are_differences() -> None:
    readings = {(7, 0): counters(3)}, {(7, 0): counters(1)}
    assert cells(*readings) == [["7", "1 of 4", "1 direct; 2 shm", "3.0", "40", "60", "50", "7", "5"]]
    assert cells(*readings, 1) == [["7", "1 of 4", "ll_dispatch", "100", "6,400", "12,000", "80", "200"]]


@pytest.mark.parametrize("before", [{}, {(7, 0): counters(5, rank=0)}, {(7, 0): counters(5, epoch=1)}])
def test_what_was_not_there_before_counts_from_its_start(before: dict[Any, Any]) -> None:
    (row,) = cells({(7, 0): counters(1)}, before)
    assert row[4] == "20"


def test_who_is_missing_is_said() -> None:
    (row,) = cells({(7, 0): counters(masked=[3], lost=[0, 2])}, {})
    assert row[2] == "1 direct; 2 shm; masked 3; lost 0, 2"


def test_a_buffer_without_peers_or_proxies_has_a_line() -> None:
    alone = {(7, 0): {"rank": 0, "world": 1, "epoch": 0, "transport_by_peer": {}, "ops": {}}}
    assert cells(alone, {}) == [["7", "0 of 1", "alone", *"------"]]
    assert cells(alone, {}, 1) == []


def test_what_kernels_write_themselves_is_not_said_to_be_nothing() -> None:
    """Proxies have counted 0 there, whatever moved: what is known of it are tokens and rows."""
    silent = dict.fromkeys(("bytes_sent", "messages_sent", "writes", "messages_received", "ring_depth"), 0)
    direct = counters(1, transport_by_peer={"0": "direct", "2": "direct"}, **silent)
    (row,) = cells({(7, 0): direct}, {})
    assert row[3:9] == ["-"] * 6
    assert cells({(7, 0): direct}, {}, 1)[0][4:6] == ["3,200", "6,000"]
    one_over_tcp = {**direct, "transport_by_peer": {"0": "direct", "2": "tcp"}}
    (row,) = cells({(7, 0): one_over_tcp}, {})
    assert row[3:7] == ["0.0", "0", "0", "0"]


def test_rows_that_the_host_does_not_know_are_left_out() -> None:
    on_a_gpu = {"ll_dispatch": {"count": 4, "tokens": 512, "rows": 0, "p50_us": 9.0, "p99_us": 10.0}}
    (row,) = cells({(7, 0): counters(1, ops=on_a_gpu)}, {}, 1)
    assert row[2:] == ["ll_dispatch", "2", "256", "-", "9", "10"]
    caption = str(top.tables({(7, 0): counters(1)}, {}, 1.0)[1].caption)
    assert "on a GPU the host's part alone" in caption
    assert "through proxies" in caption


def test_open_buffers_are_found_and_shown() -> None:
    server = LiveServer(lambda: counters(1))
    try:
        assert os.getpid() in serving_processes()
        shown = CliRunner().invoke(
            app, ["top", "--once", "--interval", "0.1", "--pid", str(os.getpid())], env={"COLUMNS": "200"}
        )
        assert shown.exit_code == 0
        assert "1 direct; 2 shm" in shown.output
        narrow = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1"], env={"COLUMNS": "80"})
        assert "ll_dispatch" in narrow.output
        plain = CliRunner().invoke(app, ["top", "--json", "--pid", str(os.getpid())])
        assert json.loads(plain.output) == [counters(1)]
    finally:
        server.close()
    assert os.getpid() not in serving_processes()


def test_nothing_to_show_is_said_and_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: there is nothing whose rates an interval would show."""
    monkeypatch.setattr(top.time, "sleep", lambda seconds: pytest.fail("it waits for nothing"))
    gone = CliRunner().invoke(app, ["top", "--once", "--pid", "999999999"])
    assert gone.exit_code == 1
    assert "no open Buffer" in gone.output


def test_it_shows_something_early_and_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    monkeypatch.setattr(top, "wide_console", lambda: Console(file=open(os.devnull, "w")))  # noqa: SIM115
    assert top.run([999999999], 4.0, once=False, as_json=False) == 0
    assert pauses[0] < 0.5
    assert pauses[1:] == [4.0, 4.0]
