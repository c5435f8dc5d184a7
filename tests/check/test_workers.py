"""Processes of a check: one that answers, fails, dies or hangs, and that nobody waits for them longer than told."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from uccl_ep_serving.check import faults, workers
from uccl_ep_serving.check.workers import Worker, answers, each, note
from uccl_ep_serving.errors import BootstrapError, PeerTimeout, TransportError


def doubled(value: int) -> int:
    return 2 * value


def fails(where: str) -> None:
    note(where)
    raise TransportError("cuda:0 has failed: CUDA error: an illegal memory access was encountered")


def blames(seconds: float) -> None:
    note("kernel dispatch_recv")
    time.sleep(seconds)
    raise PeerTimeout("nothing came from rank 1", peer=1)


def dies(where: str) -> None:
    note(where)
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def hangs(where: str) -> None:
    note(where)
    time.sleep(600)


@pytest.fixture
def pair() -> Iterator[list[Worker]]:
    ranks = [Worker(), Worker()]
    yield ranks
    for worker in ranks:
        worker.kill()


def given(worker: Worker, task: object, *arguments: object) -> Worker:
    worker.give(task, *arguments)  # type: ignore[arg-type]
    return worker


def test_what_fails_is_told_with_the_kernel_and_the_next_task_is_done(pair: list[Worker]) -> None:
    for worker in pair:
        given(worker, doubled, 21)
    assert [one.value for one in answers(pair, 30.0)] == [42, 42]
    given(pair[0], fails, "kernel finish")
    given(pair[1], doubled, 1)
    failed, good = answers(pair, 30.0)
    assert (good.value, good.fault) == (2, None)
    assert failed.fault is not None
    said = str(failed.fault)
    assert said.startswith("kernel finish: expected no error; found TransportError: cuda:0 has failed")
    assert "Likely cause: a defect of this kernel" in said
    assert "in fails" in failed.fault.trace
    given(pair[0], doubled, 4)
    assert answers(pair[:1], 30.0)[0].value == 8


def test_who_hangs_or_dies_is_named_and_ended(pair: list[Worker]) -> None:
    # both have started
    for worker in pair:
        given(worker, doubled, 1)
    answers(pair, 60.0)
    given(pair[0], hangs, "cudaIpcOpenMemHandle")
    given(pair[1], doubled, 1)
    began = time.monotonic()
    late, good = answers(pair, 1.0)
    assert time.monotonic() - began < 5
    assert good.fault is None
    assert late.fault is not None
    assert str(late.fault).startswith("cudaIpcOpenMemHandle: expected an end within 1 s; found none")
    assert not pair[0].process.is_alive()
    given(pair[1], dies, "kernel advance")
    (died,) = answers(pair[1:], 30.0)
    assert died.fault is not None
    assert str(died.fault).startswith("kernel advance: expected the process goes on; found it was ended by SIGSEGV")
    assert "Xid" in died.fault.step


def test_who_waits_for_a_rank_that_failed_is_not_to_blame(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.5)
    given(pair[0], blames, 0.0)
    given(pair[1], fails, "kernel dispatch_send")
    assert [one.fault is not None and one.fault.blames for one in answers(pair, 30.0)] == [True, False]
    given(pair[0], hangs, "kernel dispatch_recv")
    given(pair[1], fails, "kernel dispatch_send")
    began = time.monotonic()
    assert [one.fault is not None and one.fault.blames for one in answers(pair, 30.0)] == [True, False]
    # a grace of seconds, not the time of the part
    assert time.monotonic() - began < 10


def test_tasks_are_shared_out_and_end_in_time() -> None:
    before = {child.pid for child in psutil.Process().children()}
    tasks = [(doubled, 1), (hangs, "kernel finish"), (fails, "kernel route"), (doubled, 2), (dies, "kernel advance")]
    began = time.monotonic()
    # the start of a process counts: it takes seconds on a busy machine
    found = each(tasks, 2, 8.0)
    assert time.monotonic() - began < 32
    assert [one.value for one in found] == [2, None, None, 4, None]
    faulty = {one.fault.where: one.fault.cause for one in found if one.fault}
    assert list(faulty) == ["kernel finish", "kernel route", "kernel advance"]
    assert "cold caches" in faulty["kernel finish"]
    assert "Triton's compiler has crashed" in faulty["kernel advance"]
    left = {child.pid for child in psutil.Process().children()} - before
    assert not [pid for pid in left if "multiprocessing.spawn" in " ".join(psutil.Process(pid).cmdline())]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("CUDA error: out of memory"), "other processes hold the GPU's memory"),
        (MemoryError("Unable to allocate 4.00 MiB"), "ulimit -v"),
        (OSError(errno.EMFILE, "Too many open files"), "the limit on open files"),
        (BootstrapError("rank 1: the store of the 2 ranks failed: reset"), "the other rank, which shows it elsewhere"),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), "EXCLUSIVE_PROCESS"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "torch and this driver"),
        (RuntimeError("CUDA error: misaligned address"), "a defect of this kernel"),
        (OSError("Command '['/usr/bin/gcc', 'main.c']' returned non-zero exit status 1"), "no C compiler"),
        (ValueError("one\ntwo\nthree\nfour\nPassManager::run failed"), "does not compile the kernel"),
        (
            ValueError("no such thing. Likely cause: the moon. Next step: wait"),
            "Likely cause: the moon. Next step: wait",
        ),
        (ValueError("something else"), "Next step: report"),
    ],
)
def test_an_error_is_told_with_its_cause_and_the_next_step(error: Exception, words: str) -> None:
    said = str(faults.of(error, "kernel route"))
    assert said.startswith("kernel route: ")
    assert words in said
    assert "Next step: " in said


def test_a_process_that_had_no_gpu_blames_none() -> None:
    assert "GPU" not in str(faults.died(0, "rank 1", gpu=False))
    assert "GPU" in str(faults.died(0, "rank 1"))
    assert "out of memory" in str(faults.died(-9, "rank 1", gpu=False))
