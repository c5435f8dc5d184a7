"""``uccl-ep export``: what a scrape of the live counters says, and that the documentation names what is there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.alone import Alone
from tests.support.bodies import round_trip
from tests.support.source_tree import ROOT
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.cli import export
from uccl_ep_serving.data_plane.standing import STATES
from uccl_ep_serving.stats import Reading, Served

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "uccl_ep_serving.cli.main", "export", "--port", "0", "--address", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as exporter:
        assert exporter.stdout is not None
        yield exporter.stdout.readline().strip()
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(10.0) == 0


def scraped(url: str) -> Samples:
    """Samples of this process, by name and by the labels besides pid and buffer."""
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("pid") == str(os.getpid()) and labels.pop("buffer"):
                found[sample.name, frozenset(labels.items())] = sample.value
    return found


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"rank": "0", **labels}.items())


def test_a_scrape_says_what_a_buffer_does(url: str) -> None:
    buffer = Buffer(Alone())  # type: ignore[arg-type]
    for step in range(3):
        round_trip(buffer, step)
    found = scraped(url)
    assert found[key("uccl_ep_up")] == 1
    assert {state: found[key("uccl_ep_state", state=state)] for state in STATES} == {
        state: state == "ok" for state in STATES
    }
    assert found[key("uccl_ep_operations_total", operation="ll_dispatch")] == 3
    assert found[key("uccl_ep_operation_tokens_total", operation="ll_combine")] == 24
    assert found[key("uccl_ep_operation_seconds_sum", operation="ll_combine")] > 0
    assert found[key("uccl_ep_operation_seconds_count", operation="ll_combine")] == 3
    assert found[key("uccl_ep_operation_seconds_bucket", operation="ll_combine", le="16.777216")] == 3
    assert found[key("uccl_ep_operation_seconds_bucket", operation="ll_combine", le="4e-06")] == 0
    assert found[key("uccl_ep_reconnections_total", connection="proxy")] == 0
    assert found[key("uccl_ep_operation_latest_seconds", operation="ll_dispatch", quantile="0.5")] > 0
    assert found[key("uccl_ep_wait_seconds")] == 0
    assert found[key("uccl_ep_epoch")] == buffer.stats()["epoch"]
    names = {metric.scraped for metric in export.METRICS}
    # alone a rank has peers of no kind, waits for none and writes to none
    missing = {"uccl_ep_waiting_samples_total", "uccl_ep_proxy_write_seconds"}
    assert names - {name.removesuffix("_bucket") for name, _ in found} == missing
    buffer.destroy()
    until = time.monotonic() + 10.0
    while scraped(url):  # an answer is good for a second
        assert time.monotonic() < until
        time.sleep(0.2)


def test_one_that_does_not_answer_is_down_under_the_rank_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Served(0, 7, 2)
    counters = {
        **{"rank": 3, "state": "ok", "epoch": 0, "opened": 1.0},
        **{"ops": {}, "waits": {"samples": 1, "by_peer": {"1": 1}, "seconds": 0.0}},
    }
    readings = {one: Reading(7, counters)}
    monkeypatch.setattr(export, "read_all", lambda: readings)
    buffers = export.Buffers()
    up, *others = buffers.collect()
    assert [(sample.labels, sample.value) for sample in up.samples] == [({"pid": "7", "buffer": "2", "rank": "3"}, 1)]
    assert any(family.samples for family in others)
    readings[one] = Reading(7, None)
    up, *others = buffers.collect()
    assert [(sample.labels, sample.value) for sample in up.samples] == [({"pid": "7", "buffer": "2", "rank": "3"}, 0)]
    assert not any(family.samples for family in others)


def test_buckets_of_a_histogram_are_cumulative_and_in_seconds() -> None:
    counters = {"latency": {"0": [1, *[0] * 10, 2, *[0] * 28], "7": [*[0] * 11, 1, *[0] * 27, 4]}}
    (metric,) = (metric for metric in export.METRICS if metric.name == "uccl_ep_proxy_write_seconds")
    ((labels, value),) = metric.samples(counters)
    assert isinstance(value, export.Distribution)
    found = dict(value.buckets)
    assert (labels, value.total) == ((), None)
    # what is shorter than 4 us is in the first: of 2 ns and of 4,096
    assert list(found)[:2] == ["4.096e-06", "8.192e-06"]
    assert set(found.values()) == {4, 8}
    assert found["+Inf"] == 8
    assert list(found)[-2] == "34.3597384"


def test_a_port_that_is_taken_is_named() -> None:
    code = (
        "import socket, subprocess, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "sys.exit(subprocess.call([sys.executable, '-m', 'uccl_ep_serving.cli.main', 'export', '--address', "
        "'127.0.0.1', '--port', str(s.getsockname()[1])]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"export: cannot listen on 127\.0\.0\.1:\d+: Address already in use\n", done.stderr)


def test_a_client_that_has_gone_leaves_no_trace_in_the_log() -> None:
    told = []
    for error in (ConnectionResetError(), BrokenPipeError(), ValueError()):
        try:
            raise error
        except Exception:
            export._report(lambda request, client: told.append((request, client)), 1, 2)
    assert told == [(1, 2)]


def test_metrics_that_the_documentation_names_are_there() -> None:
    known = {"uccl_ep_up", *(metric.scraped for metric in export.METRICS)}
    known.add("uccl_ep_operation_seconds_bucket")
    page = (ROOT / "docs/operating.md").read_text()
    named = set(re.findall(r"\buccl_ep_\w+", page)) - {"uccl_ep_serving"}
    assert named == known
