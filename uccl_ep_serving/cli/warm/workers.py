"""Processes that do tasks: a compiler that crashes takes one task with it, and is named."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import psutil

from uccl_ep_serving.cli.warm.tasks import Outcome, Task
from uccl_ep_serving.native.background import die_with_parent
from uccl_ep_serving.proxy import cgroup

__all__ = ["Result", "most_jobs", "results"]

#: More than one that compiles all kernels for sm_90 takes (measured: 632 MiB).
_WORKER_MEMORY = 1 << 30
#: Of a task: a hundred times the longest on one of two cores (all of the CPU's code: 18 s of a core). An image is built
#: in silence, so that a compiler which hangs would hang it for ever.
_MOST_SECONDS = 1800.0


class Result(NamedTuple):
    """What became of a task.

    Attributes:
        outcome: what it returned, None when it failed.
        cause: of its failure, in words.
        seconds: that it took.
    """

    task: Task
    outcome: Outcome | None
    cause: str
    seconds: float


def most_jobs() -> int:
    """Processes that this machine, and the cgroup of this one, have cores and memory for."""
    cores = min([len(os.sched_getaffinity(0)), *cgroup.quotas().values()])
    free, left = psutil.virtual_memory().available, cgroup.memory_left()
    memory = free if left is None else min(free, left)
    return max(int(min(cores, memory / _WORKER_MEMORY)), 1)


class _Worker:
    """A process and what it does at present."""

    def __init__(self) -> None:
        # a fresh interpreter: what this process has imported, and its threads, are not for a compiler
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self._started = 0.0

    def give(self, task: Task) -> None:
        self.task, self._started = task, time.monotonic()
        # a process that is gone shows when its result is read
        with contextlib.suppress(OSError):
            self.pipe.send(task)

    @property
    def left(self) -> float:
        """Seconds that its task still has."""
        return self._started + _MOST_SECONDS - time.monotonic()

    def result(self) -> Result:
        """Of the task that it was given, once its pipe is readable, an answer or the end of the process; or once its
        time is over, which ends the process."""
        assert self.task is not None
        if not self.pipe.poll():
            self.kill()
            task, self.task = self.task, None
            cause = f"it took more than {_MOST_SECONDS:.0f} s, and the process that compiled it was ended"
            return Result(task, None, cause, time.monotonic() - self._started)
        task, self.task = self.task, None
        try:
            outcome, cause = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            outcome, cause = None, _end(self.process.exitcode)
        return Result(task, outcome, cause, time.monotonic() - self._started)

    def kill(self) -> None:
        """End it and the compilers that it has started, which nothing else would end."""
        compilers: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            process.suspend()  # it starts no other one meanwhile
            compilers = process.children(recursive=True)
        self.process.kill()
        self.process.join()
        for one in compilers:
            with contextlib.suppress(psutil.Error):
                one.kill()


def results(tasks: deque[Task], jobs: int, begun: Callable[[Task], None]) -> Iterator[Result]:
    """Do ``tasks`` in at most ``jobs`` processes, in order; what each came to, as they end.

    Args:
        tasks: taken away as they begin; what a task finds to do is appended.
        begun: called with each.
    """
    workers: list[_Worker] = []
    try:
        while True:
            while tasks:
                worker = next((one for one in workers if one.task is None), None)
                if worker is None:
                    if len(workers) == jobs:
                        break
                    try:
                        worker = _Worker()
                    except OSError as error:  # those that are there do it
                        if workers:
                            jobs = len(workers)
                            break
                        step = "raise the limit of processes (ulimit -u, or the container's)"
                        begun(task := tasks.popleft())
                        yield Result(task, None, f"no process can begin: {error.strerror}; {step}", 0.0)
                        continue
                    workers.append(worker)
                task = tasks.popleft()
                begun(task)
                worker.give(task)
            busy = {worker.pipe: worker for worker in workers if worker.task is not None}
            if not busy:
                return
            ready = wait(list(busy), max(min(worker.left for worker in busy.values()), 0.0))
            for pipe, worker in busy.items():
                if pipe not in ready and worker.left > 0:
                    continue
                result = worker.result()
                if result.outcome is None and not worker.process.is_alive():
                    workers.remove(worker)
                yield result
                tasks += () if result.outcome is None else result.outcome.tasks
    finally:
        for worker in workers:
            worker.kill()


def _serve(pipe: Connection, parent: int) -> None:
    """Body of a process: do what comes, until the parent goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    # where it is refused, the pipe's end ends this process after its task
    with contextlib.suppress(OSError):
        die_with_parent(parent)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task: Task = pipe.recv()
            try:
                answer: tuple[Outcome | None, str] = task.work(*task.arguments), ""
            except Exception as error:
                answer = None, f"{type(error).__name__}: {error}".strip()
            pipe.send(answer)


def _end(status: int | None) -> str:
    """How a process ended, in words."""
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"the process that compiled it was ended by {signal.Signals(-status).name}"
    return f"the process that compiled it ended with status {status}"
