"""Host threads and proxies as actors: one of them, or one warp, has its turn at a time.

A host thread is a Python thread that runs only while it holds the baton. It gives it back where it waits: for its
stream, at a barrier of hosts, for a while, or for a condition. Every wait is for the machine, which is bounded itself.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from tests.ptx.machine.report import HostStuck

#: s, between two looks of a host thread at whether its machine still runs
LOOK = 1.0


class Stopped(BaseException):
    """Ends a host thread of a machine that has stopped; the machine's own error says why."""


class Proxy:
    """An actor that is polled: one call of ``step`` is its turn."""

    def __init__(self, name: str, step: Callable[[], bool]) -> None:
        self.name, self.step = name, step


class _Baton:
    """Given to one thread, which takes it. A lock, because a semaphore of Python's is made of Python."""

    def __init__(self) -> None:
        self._gone = threading.Lock()
        self._gone.acquire()

    def give(self) -> None:
        """Also where it was given, and nobody has taken it."""
        if self._gone.locked():
            self._gone.release()

    def take(self, limit_s: float) -> bool:
        """False where nobody gives it within ``limit_s`` of real time."""
        return self._gone.acquire(timeout=limit_s)


class HostThread:
    """The body of a rank.

    Attributes:
        waits: the condition it waits for, None while it can go on; ``until``: ns, when it goes on regardless; ``what``
            it waits for, for reports.
        error: what its body raised.
    """

    def __init__(self, rank: int, body: Callable[[], object]) -> None:
        self.rank, self.name = rank, f"host thread of rank {rank}"
        self.waits: Callable[[], bool] | None = None
        self.until: float | None = None
        self.what = ""
        self.done = False
        self.error: BaseException | None = None
        self.result: object = None
        self._body = body
        self._go, self._back = _Baton(), _Baton()
        self._stopped = False
        self._runner: threading.Thread | None = None
        self.thread = threading.Thread(target=self._main, name=self.name, daemon=True)

    def _main(self) -> None:
        try:
            self._await_turn()
            self.result = self._body()
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self._back.give()

    # -- in the machine's thread

    def start(self) -> None:
        self._runner = threading.current_thread()
        self.thread.start()

    def can_go_on(self, now_ns: float) -> bool:
        if self.done:
            return False
        if self.waits is None or (self.until is not None and now_ns >= self.until):
            return True
        return self.waits()

    def turn(self, limit_s: float) -> None:
        """Lets it run until it waits. Raises HostStuck where it does not within ``limit_s`` of real time."""
        self.waits = self.until = None
        self._go.give()
        if not self._back.take(limit_s):
            frame = sys._current_frames().get(self.thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else "it has no frame\n"
            raise HostStuck(
                f"the {self.name} has kept its turn for {limit_s} s. Let it wait by the machine instead "
                f"(wait_until, sleep, barrier, launch). It stands at\n{stack}"
            )

    def stop(self) -> None:
        """Ends it where it waits."""
        self._stopped = True
        self._go.give()
        if self.thread.ident is not None:
            self.thread.join(timeout=LOOK)

    # -- in its own thread

    def wait(self, condition: Callable[[], bool], what: str, until_ns: float | None) -> None:
        """Gives the baton back, until ``condition`` holds or the machine's clock has come to ``until_ns``."""
        self.waits, self.until, self.what = condition, until_ns, what
        self._back.give()
        self._await_turn()

    def _await_turn(self) -> None:
        while not self._go.take(LOOK):
            if self._runner is None or not self._runner.is_alive():
                raise Stopped
        if self._stopped:
            raise Stopped
