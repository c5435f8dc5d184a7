"""The live counters of a process: their socket, and what it does when the name or the descriptors are gone."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.support.source_tree import ROOT
from uccl_ep_serving.stats import LiveServer, OperationLog, Reading, Served, query, read, served


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
            assert query(os.getpid(), timeout=0.3) == [{"number": 1}]
        finally:
            server.close()
    finally:
        squatter.kill()
        squatter.communicate()


def test_the_live_counters_are_served_without_a_free_descriptor() -> None:
    code = """
import os, resource, sys
from uccl_ep_serving.stats import LiveServer, OperationLog
log = OperationLog()
log.record("ll_dispatch", 3, 2, 7000)
server = LiveServer(log.snapshot)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    served = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert served.stdout is not None
        pid = int(served.stdout.readline())
        for _ in range(3):
            (counters,) = query(pid, timeout=20.0)
            assert counters["ll_dispatch"]["p50_us"] == 7.0
    finally:
        served.communicate()


def test_who_does_not_answer_is_told_from_who_has_none() -> None:
    release = threading.Event()

    def stuck() -> dict[str, Any]:
        release.wait(20.0)
        return {"number": 1}

    server = LiveServer(stuck)
    try:
        (one,) = [one for one in served() if one.pid == os.getpid()]
        assert read(one, timeout=0.1) == Reading(os.getpid(), None)
        with pytest.raises(TimeoutError, match="does not say its live counters"):
            query(os.getpid(), timeout=0.1)
        release.set()
        assert read(one, timeout=5.0) == Reading(os.getpid(), {"number": 1})
    finally:
        release.set()
        server.close()
    assert read(one) is None


@pytest.mark.parametrize(
    ("answer", "found"),
    [(b"[" * 100_000, "nothing"), (b"[1]", "nothing"), (b"{", "nothing"), (b"x" * (1 << 20), "silent")],
    ids=["nested", "a list", "cut off", "without an end"],
)
def test_what_answers_as_no_buffer_does_costs_nobody(answer: bytes, found: str) -> None:
    """Root asks the processes of every user."""
    name = Served(os.getuid(), os.getpid(), 10**9)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name.name)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(answer)
                while found == "silent":
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        assert read(name, timeout=0.3) == (None if found == "nothing" else Reading(os.getpid(), None))
        assert time.monotonic() - begun < 2.0
        thread.join(10.0)


def test_names_of_others_are_any_bytes_and_nobody_plays_a_buffer_of_another_process() -> None:
    with contextlib.ExitStack() as sockets:

        def bind(name: bytes) -> socket.socket:
            one = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            one.bind(b"\0" + name)
            one.listen(0)
            return one

        bind(b"\xff\xfe" + os.urandom(4))
        bind(f"uccl_ep.{os.getuid()}.{10**30}.0".encode())
        other = Served(os.getuid(), 1, 10**9)  # whose process has no such socket
        listener = bind(other.name.encode())
        assert other in served()
        waiting = [sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(3)]
        for one in waiting:  # until nobody is let in any more, so that nothing says who listens
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(listener.getsockname())
        assert read(other, timeout=0.2) is None


def test_a_reader_that_goes_early_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    server = LiveServer(lambda: {"words": "x" * (1 << 22)})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as reader:
            reader.connect("\0" + server.name)
        assert len(query(os.getpid(), timeout=5.0)[0]["words"]) == 1 << 22
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
    finally:
        server.close()


def test_the_live_counters_outlast_a_failed_accept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.ENOBUFS, "No buffer space available")]
    accept = socket.socket.accept

    def out_of_buffers(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", out_of_buffers)
    server = LiveServer(lambda: {"number": 3})
    try:
        assert query(os.getpid(), timeout=5.0) == [{"number": 3}]
        assert "not served for a second: [Errno 105]" in caplog.text
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
        assert ops["p50_us"] == pytest.approx(50.5, abs=0.5)
        assert ops["p99_us"] == pytest.approx(99.0, abs=0.2)
        assert second == {"number": 2}
    finally:
        server.close()
        other.close()
    assert query(os.getpid()) == []


def test_each_duration_is_in_the_bucket_that_it_is_shorter_than() -> None:
    log = OperationLog()
    microseconds = [0, 1, 2, 3, 4, 1023, 1024, 10**9]
    for one in microseconds:
        log.record("ll_combine", 1, 0, one * 1000 + 999)
    assert list(log.durations()) == ["ll_combine"]
    buckets = log.durations()["ll_combine"]
    assert {bucket: count for bucket, count in enumerate(buckets) if count} == {
        0: 1,
        1: 1,
        2: 2,
        3: 1,
        10: 1,
        11: 1,
        25: 1,
    }
    assert len(buckets) == 26
