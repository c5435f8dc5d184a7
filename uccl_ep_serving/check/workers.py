"""Processes that do the parts of a check: one that hangs, or that the driver takes down, takes nothing else with it."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from ..native.background import die_with_parent
from . import faults

__all__ = ["Answer", "Worker", "answers", "each", "note"]

#: Once one rank has failed, how long the others may take to say what they have met.
_GRACE_SECONDS = 3.0
#: The pipe to the process that started this one; in that process itself notes go nowhere.
_pipe: Connection | None = None
_noted = "the start of the process"


def note(where: str) -> None:
    """Say what this process begins: the kernel, or the call of the driver. Should it never end, this names it."""
    global _noted
    _noted = where
    if _pipe is not None:
        _pipe.send((True, where))


@dataclass(frozen=True)
class Answer:
    """What became of a task.

    Attributes:
        value: what it returned.
        fault: why it has failed, None when it has not.
    """

    value: Any = None
    fault: faults.Fault | None = None


class Worker:
    """A fresh interpreter that does one task after the other.

    Args:
        compiles: that is all it does.
    """

    def __init__(self, compiles: bool = False) -> None:
        self._compiles = compiles
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.noted = _noted

    def give(self, task: Callable[..., Any], *arguments: Any) -> None:
        """Begin ``task(*arguments)``, an importable function."""
        # a process that is gone shows when its answer is read
        with contextlib.suppress(OSError):
            self.pipe.send((task, arguments))

    def read(self) -> Answer | None:
        """What its readable pipe holds; None for a note."""
        try:
            is_note, said = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            return Answer(fault=faults.died(self.process.exitcode, self.noted, self._compiles))
        if is_note:
            self.noted = said
            return None
        assert isinstance(said, Answer)
        return said

    def kill(self) -> None:
        """End it, whatever it does. What the driver has not let go of within a second ends later."""
        self.process.kill()
        self.process.join(1.0)
        self.pipe.close()


def answers(workers: Sequence[Worker], seconds: float) -> list[Answer]:
    """What each of ``workers`` answers within ``seconds``; who does not, or whose process is gone, is ended."""
    started = time.monotonic()
    deadline = started + seconds
    found: dict[int, Answer] = {}
    pending = {worker.pipe: place for place, worker in enumerate(workers)}
    while pending:
        for pipe in wait(list(pending), max(deadline - time.monotonic(), 0.0)):
            assert isinstance(pipe, Connection)
            answer = workers[pending[pipe]].read()
            if answer is not None:
                found[pending.pop(pipe)] = answer
                if answer.fault is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() >= deadline:
            failed = any(answer.fault for answer in found.values())
            for place in pending.values():
                fault = faults.late(time.monotonic() - started, workers[place].noted)
                # who has waited for one that failed is not to blame
                found[place] = Answer(fault=replace(fault, blames=failed))
            break
    for place, worker in enumerate(workers):
        if place in pending.values() or not worker.process.is_alive():
            worker.kill()
    return [found[place] for place in range(len(workers))]


def each(tasks: Sequence[tuple[Any, ...]], jobs: int, seconds: float) -> list[Answer]:
    """What each of ``tasks`` comes to, (function, arguments...) that compile, in ``jobs`` processes and ``seconds``."""
    deadline = time.monotonic() + seconds
    found: dict[int, Answer] = {}
    waiting = collections.deque(enumerate(tasks))
    idle: list[Worker] = []
    busy: dict[Any, tuple[Worker, int]] = {}
    try:
        while (waiting or busy) and time.monotonic() < deadline:
            while waiting and len(busy) < jobs:
                place, task = waiting.popleft()
                worker = idle.pop() if idle else Worker(compiles=True)
                worker.give(*task)
                busy[worker.pipe] = worker, place
            for pipe in wait(list(busy), max(deadline - time.monotonic(), 0.0)):
                worker, place = busy[pipe]
                answer = worker.read()
                if answer is not None:
                    found[place] = answer
                    del busy[pipe]
                    idle += [worker] if worker.process.is_alive() else []
    finally:
        for worker in (*idle, *(worker for worker, _ in busy.values())):
            worker.kill()
    noted = {place: worker.noted for worker, place in busy.values()}
    slow = (faults.slow(noted.get(place, "what waited for a free core")) for place in range(len(tasks)))
    return [found.get(place) or Answer(fault=fault) for place, fault in enumerate(slow)]


def _serve(pipe: Connection, parent: int) -> None:
    """Body of a process: do what comes, until the parent goes."""
    global _pipe
    _pipe = pipe
    try:
        die_with_parent(parent)
    except OSError:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    os.dup2(2, 1)  # what libraries print is no part of what the command prints
    with contextlib.suppress(EOFError, OSError):
        while True:
            task, arguments = pipe.recv()
            try:
                answer = Answer(task(*arguments))
            except BaseException as error:  # of any kind: it is what the check is for
                answer = Answer(fault=faults.of(error, _noted))
            pipe.send((False, answer))
