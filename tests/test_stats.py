"""The live counters of a process: their socket, and what it does when the name or the descriptors are gone."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from uccl_ep_serving.stats import LiveServer, OperationLog, query


def test_the_live_counters_take_another_name_and_ignore_who_holds_theirs() -> None:
    first = LiveServer(dict)
    number = int(first.name.rpartition(".")[2])
    first.close()
    taken = f"{first.name.rpartition('.')[0]}.{number + 1}"
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen();"
        "print(flush=True); sys.stdin.read()"
    )
    squatter = subprocess.Popen([sys.executable, "-c", code, taken], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert squatter.stdout is not None
        squatter.stdout.readline()
        server = LiveServer(lambda: {"number": 1})
        try:
            assert server.name != taken
            assert query(os.getpid(), timeout=1.0) == [{"number": 1}]
        finally:
            server.close()
    finally:
        squatter.kill()
        squatter.communicate()


def test_the_live_counters_outlast_a_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def out_of_descriptors(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", out_of_descriptors)
    server = LiveServer(lambda: {"number": 3})
    try:
        assert query(os.getpid(), timeout=5.0) == [{"number": 3}]
        assert "not served for a second: [Errno 24]" in caplog.text
    finally:
        server.close()


def test_live_counters_answer_only_while_open() -> None:
    log = OperationLog()
    for duration in range(1, 101):
        log.record("ll_dispatch", 3, 2, duration * 1000, expert_rows=5)
    server = LiveServer(lambda: {"ops": log.snapshot()})
    other = LiveServer(lambda: {"number": 2})
    try:
        first, second = query(os.getpid())
        ops = first["ops"]["ll_dispatch"]
        assert (ops["count"], ops["tokens"], ops["rows"], ops["expert_rows"]) == (100, 300, 200, 500)
        assert ops["p50_us"] == pytest.approx(50.5)
        assert ops["p99_us"] == pytest.approx(99.0, abs=0.2)
        assert second == {"number": 2}
    finally:
        server.close()
        other.close()
    assert query(os.getpid()) == []
