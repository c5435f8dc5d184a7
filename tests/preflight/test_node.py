"""The ranks of a node as processes: how long one that is through waits for those that are not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import msgspec
import pytest

from uccl_ep_serving.preflight import node
from uccl_ep_serving.preflight.facts import Facts
from uccl_ep_serving.preflight.job import Finding, Job
from uccl_ep_serving.preflight.node import run_node
from uccl_ep_serving.preflight.outcome import Line, News, Outcome

FACTS = Facts(0, "host-a", {}, {}, "10.0.0.1", "eth0", 1500)
JOBS = [Job(2, 0, 1, local, "", 0, 60.0) for local in range(2)]
#: What a rank says that has met the others, and one that has not.
MET, ALONE = Outcome([Finding("shm", "rank 0", said="right")], [FACTS]), Outcome([Finding("meeting", "rank 0")])


def scripts(monkeypatch: pytest.MonkeyPatch, *each: tuple[float, Outcome | None], begins: str = "") -> None:
    """Ranks that say what they have found after so many seconds; None: they never end.

    With ``begins`` each says at once that this part begins, and the first one what has been found before.
    """

    def start(job: Job, words: IO[bytes]) -> subprocess.Popen[bytes]:
        seconds, outcome = each[job.local]
        lines = [Line(begins, None if job.local else MET)] if begins else []
        first = "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)
        last = "" if outcome is None else msgspec.json.encode(Line(end=outcome)).decode()
        wait = 600 if outcome is None else seconds
        code = f"import time; print({first!r}, end='', flush=True); time.sleep({wait}); print({last!r})"
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=words, bufsize=0)

    monkeypatch.setattr(node, "_start", start)


def test_who_has_not_met_the_others_is_not_waited_for_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_GRACE_SECONDS", 0.3)
    scripts(monkeypatch, (0.0, ALONE), (0.0, None))
    begun = time.monotonic()
    outcome = run_node(JOBS, lambda words: None)
    assert time.monotonic() - begun < 30
    assert [one.where for one in outcome.findings if one.fault] == ["local rank 1 of node 0"]


@pytest.mark.parametrize("ends", ["is killed", "hangs"])
def test_a_rank_that_somebody_has_killed_does_not_hang(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, say: its end is told, and the others are not waited for to the end."""
    monkeypatch.setattr(node, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(node, "_START_SECONDS", 30.0 if ends == "is killed" else 0.5)
    killed = "import os; os.kill(os.getpid(), 9)"

    def start(job: Job, words: IO[bytes]) -> subprocess.Popen[bytes]:
        code = killed if job.local and ends == "is killed" else "import time; time.sleep(600)"
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=words, bufsize=0)

    monkeypatch.setattr(node, "_start", start)
    begun = time.monotonic()
    jobs = [msgspec.structs.replace(job, seconds=0.5) for job in JOBS]
    said = {one.where: str(one.fault) for one in run_node(jobs, lambda words: None).findings}
    assert time.monotonic() - begun < 20
    assert "in the part: start of the rank" in said["local rank 0 of node 0"]
    assert ("was ended by SIGKILL" in said["local rank 1 of node 0"]) == (ends == "is killed")


def test_a_rank_that_has_ended_before_the_first_part_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the parts begins later, and the others wait for that rank all the same."""
    monkeypatch.setattr(node, "_GRACE_SECONDS", 1.5)

    def start(job: Job, words: IO[bytes]) -> subprocess.Popen[bytes]:
        begins = msgspec.json.encode(Line("meeting")).decode()
        code = f"import time; time.sleep(0.5); print({begins!r}, flush=True); time.sleep(600)"
        code = "raise SystemExit(3)" if job.local else code
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=words, bufsize=0)

    monkeypatch.setattr(node, "_start", start)
    begun, told = time.monotonic(), []
    run_node(JOBS, told.append)
    assert told == ["meeting"]
    assert time.monotonic() - begun < 20


def test_what_was_found_before_a_part_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a check counts from the first part, and is no longer than it says."""
    monkeypatch.setattr(node, "_GRACE_SECONDS", 0.3)
    scripts(monkeypatch, (0.0, None), (0.0, None), begins="low-latency mode")
    begun, said = time.monotonic(), []
    outcome = run_node([msgspec.structs.replace(job, seconds=2.0) for job in JOBS], said.append)
    assert 2 < time.monotonic() - begun < 20
    assert said == ["low-latency mode"]
    assert outcome.findings[0] == MET.findings[0]
    assert [one.where for one in outcome.findings if one.fault] == ["local rank 0 of node 0", "local rank 1 of node 0"]
    assert "within 2 s; found none, in the part: low-latency mode" in str(outcome.findings[1].fault)


def test_ranks_that_have_met_may_end_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_GRACE_SECONDS", 0.3)
    late = Outcome([Finding("tcp", "rank 1", said="right")], [FACTS])
    scripts(monkeypatch, (0.0, MET), (2.0, late))
    # the end of the processes has its grace as well
    outcome = run_node(JOBS, lambda words: None)
    assert outcome.passed
    assert {one.part for one in outcome.findings} == {"shm", "tcp"}


def test_a_start_may_take_as_long_as_the_parts_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what a rank that was not ready in time is told to ask for."""
    monkeypatch.setattr(node, "_START_SECONDS", 0.1)
    scripts(monkeypatch, (2.0, MET), (2.0, MET))
    assert run_node([msgspec.structs.replace(job, seconds=60.0) for job in JOBS], lambda words: None).passed


def test_an_outcome_of_megabytes_is_read_in_pieces_of_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its last line may be cut off: by an end in the middle of it."""
    many = Outcome([Finding("shm", f"rank {rank} -> rank 1", said="x" * 1000) for rank in range(4000)], [FACTS])
    reads, read = [], os.read

    def counted(pipe: int, most: int) -> bytes:
        come = read(pipe, most)
        reads.append(len(come))
        return come

    told = tmp_path / "told"
    told.write_bytes(msgspec.json.encode(Line(end=many)) + b'\n{"begins')

    def start(job: Job, words: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["cat", told], stdout=subprocess.PIPE, bufsize=0)

    monkeypatch.setattr(node, "_start", start)
    monkeypatch.setattr(node.os, "read", counted)
    assert run_node(JOBS[:1], lambda words: None) == many
    assert sum(reads) > 4_000_000 > 2000 * len(reads)


def test_each_finding_is_told_once_and_all_of_them_where_the_list_is_another() -> None:
    news, outcome = News(), Outcome([Finding("doctor", "node 1")])
    assert news.of(outcome) == outcome
    assert news.of(outcome) == Outcome([])
    outcome.findings = [Finding("doctor", "node 0"), *outcome.findings]
    outcome.known = [FACTS]
    assert news.of(outcome) == outcome
    for rank in range(3):
        outcome.findings += [Finding("shm", f"rank {rank}")]
        assert news.of(outcome) == Outcome(outcome.findings[-1:])
    outcome.routes = [{1: "shm"}]
    assert news.of(outcome) == Outcome([], routes=[{1: "shm"}])


def test_what_is_told_twice_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_GRACE_SECONDS", 0.3)
    again = Outcome([Finding("doctor", "node 0"), *MET.findings])

    def start(job: Job, words: IO[bytes]) -> subprocess.Popen[bytes]:
        lines = b"".join(msgspec.json.encode(Line("TCP", more)) + b"\n" for more in (MET, again)).decode()
        code = f"print({lines!r}, end='')"
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=words, bufsize=0)

    monkeypatch.setattr(node, "_start", start)
    outcome = run_node(JOBS[:1], lambda words: None)
    assert [one.part for one in outcome.findings] == ["shm", "doctor", "process"]
    assert outcome.known == [FACTS]
