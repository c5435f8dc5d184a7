"""The prepared process: everything is imported and loaded in it once, and each trial is a fork of it, within a time."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from tests.chaos.records import Outcome
from tests.chaos.trials import Trial

__all__ = ["Prepared", "TrialHung", "die_with_parent"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Seconds in which the prepared process is ready: it may compile everything first.
_READY = 400.0


class TrialHung(Exception):
    """A trial outlived its time, or its supervisor died: everything of it was killed."""


def die_with_parent() -> None:
    """Have the kernel kill this process with the one that started it, whatever ends that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prepare() -> None:
    """Import and load what a rank uses. Nothing of it may leave a thread: that would be missing after a fork."""
    import torch

    import tests.chaos.supervisor  # noqa: F401
    from uccl_ep_serving.kernels.select import cpu_groups
    from uccl_ep_serving.native import compiler  # noqa: F401
    from uccl_ep_serving.native.groups import load
    from uccl_ep_serving.proxy.service import proxy_groups

    torch.set_num_threads(1)
    load(*cpu_groups(), *proxy_groups("auto"))
    # torch looks at the processor once, in files: a rank without descriptors would draw other random numbers
    torch.randn(1024).to(torch.bfloat16)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the prepared process has {threads} threads, and a fork would lack all but one")


def _serve(connection: Connection) -> None:
    """Run each trial that comes in a fork of its own; answers its Outcome, or a text."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # what a supervisor that dies leaves behind becomes a child of this process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        _prepare()
    except Exception:
        connection.send(traceback.format_exc())
        return
    connection.send("")
    with contextlib.suppress(EOFError):
        while True:
            trial, seconds = connection.recv()
            connection.send(_run_forked(trial, seconds))


def _run_forked(trial: Trial, seconds: float) -> Outcome | str:
    from tests.chaos.supervisor import run_trial

    ours, theirs = Pipe(duplex=False)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            die_with_parent()
            ours.close()
            try:
                theirs.send(run_trial(trial))
            except Exception:
                theirs.send(traceback.format_exc())
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    answer: Outcome | str = f"not over after {seconds:.0f} s"
    if ours.poll(seconds):
        try:
            answer = ours.recv()
        except EOFError:
            answer = "the supervisor died"
    ours.close()
    # the session, or a leader that has not begun it; none is waited for yet, so the number belongs to nobody else
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return answer


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that begin in here have no threads of NumPy's and torch's own."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Prepared:
    """A process that runs trials, one after another; ends with the block."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: Any = context.Process(target=_serve, args=(theirs,), name="chaos")
        with _one_thread():
            self._process.start()
        theirs.close()
        if not self._connection.poll(_READY):
            self.close()
            raise TrialHung(f"no prepared process after {_READY:.0f} s")
        if why := self._connection.recv():
            self.close()
            raise TrialHung(why)

    def run(self, trial: Trial, seconds: float) -> Outcome:
        """How ``trial`` ended. Raises TrialHung after ``seconds``, and when it could not be run."""
        self._connection.send((trial, seconds))
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise TrialHung(answer)
        assert isinstance(answer, Outcome)
        return answer

    def close(self) -> None:
        """End the process, with all that it has started."""
        self._connection.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5.0)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
