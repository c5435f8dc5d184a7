"""One trial: its ranks are forked from this process, the fault hits, and what each has recorded is collected."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch.distributed as dist

from tests.chaos.attacks import Strangers
from tests.chaos.processes import die_with_parent
from tests.chaos.rank import live
from tests.chaos.records import Board, Outcome, Record
from tests.chaos.trials import TIMEOUT, Trial
from tests.support.remains import left

__all__ = ["SECONDS", "run_trial"]

#: Seconds that ranks may take to their first good operations.
_START = 15.0
#: Seconds after the fault (or its last part) in which all must have ended: the ranks wait six deadlines for each other
#: before a first operation.
_END = 6 * TIMEOUT + 6.0
#: Seconds of any trial.
SECONDS = _START + _END + 5.0
#: Operations that all have to end after the fault, alike, and how many more they run until the last of them is due.
_AFTER, _MARGIN = 4, 20
#: Seconds after which a fault that shows in nothing is taken for harmless.
_SETTLE = 0.4
_TICK = 0.002


class _Ranks:
    """The processes of the ranks."""

    def __init__(self, trial: Trial, board: Board, directory: Path) -> None:
        self.pids: list[int] = []
        self.orders: list[Connection] = []
        self.results: list[Connection] = []
        self.records: dict[int, Record] = {}
        self.alive: set[int] = set(range(trial.ranks))
        for rank in range(trial.ranks):
            orders, told = Pipe(duplex=False)
            results, answer = Pipe(duplex=False)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _be(trial, rank, board, orders, answer, directory)
            for one in (orders, answer):
                one.close()
            self.pids.append(pid)
            self.orders.append(told)
            self.results.append(results)

    def look(self, seconds: float = _TICK) -> None:
        """Take the records that have come, and note who has died."""
        pending = {self.results[rank]: rank for rank in self.alive - self.records.keys()}
        for one in wait(list(pending), seconds) if pending else ():
            rank = pending[one]  # type: ignore[index]
            try:
                self.records[rank] = one.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self.alive.discard(rank)

    def reap(self) -> dict[int, int]:
        """End all; the exit status of each, negative for a signal."""
        found = {}
        for rank, pid in enumerate(self.pids):
            if rank not in self.records:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            found[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return found


def _be(trial: Trial, rank: int, board: Board, orders: Connection, answer: Connection, directory: Path) -> None:
    """A rank's process, from the fork on. Does not return."""
    status = 1
    try:
        die_with_parent()
        answer.send(live(trial, rank, board, orders, directory))
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_trial(trial: Trial) -> Outcome:
    """Run ``trial`` in this process, which leads a session of its own and has no other thread yet."""
    with tempfile.TemporaryDirectory(prefix="uccl-ep-chaos-") as place, (Path(place) / "log").open("w+") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        board = Board(trial.ranks)
        ranks = _Ranks(trial, board, Path(place))
        seconds = datetime.timedelta(seconds=SECONDS)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
        strangers = Strangers(ranks.pids, trial.seed) if trial.kind == "flood" else None
        outcome = Outcome([])
        for orders in ranks.orders:
            orders.send(store.port)
        conduct = _Conduct(trial, board, ranks, strangers)
        try:
            conduct.run()
        finally:
            if strangers is not None:
                outcome.strangers = strangers.count
                strangers.leave()
            statuses = ranks.reap()
        outcome.records = [
            ranks.records.get(rank) or _silent(trial, rank, board, statuses[rank]) for rank in range(trial.ranks)
        ]
        outcome.fault_at, outcome.last_at = board.struck
        outcome.left = _left(ranks.pids, [rank for rank, one in statuses.items() if one and rank in ranks.records])
        log.seek(0)
        outcome.log = log.read()[-6000:]
        return outcome


def _silent(trial: Trial, rank: int, board: Board, status: int) -> Record:
    """The record of a rank that has sent none, and whose process ended with ``status``."""
    stage, masked, number = board.of(rank)
    end = "working" if status == -signal.SIGKILL else "died"
    if rank in trial.victims and trial.kind.startswith(("kill", "stop", "flood")):
        end = "killed"
    words = f"{f'operation {number}' if stage else 'opening its Buffer'}, exit status {status}"
    return Record(rank, end, masked=masked, good=number, words=words)


def _left(pids: list[int], failed: list[int]) -> str:
    found = [f"{kind}: {', '.join(sorted(names))}" for kind, names in left(pids, 1.0).items()]
    found += [str(path) for path in Path("/dev/shm").glob("uccl_ep*")]
    found += [f"rank {rank} ended badly" for rank in failed]
    return "; ".join(found)


class _Conduct:
    """The course of a trial: wait for work, strike, wait for the end."""

    def __init__(self, trial: Trial, board: Board, ranks: _Ranks, strangers: Strangers | None) -> None:
        self._trial, self._board, self._ranks, self._strangers = trial, board, ranks, strangers

    def run(self) -> None:
        trial = self._trial
        if trial.kind in ("cache", "limit"):
            self._board.strike()
        elif trial.kind == "kill in constructor":
            self._pause(trial.delay)
            self._kill(trial.victims[0])
        else:
            working = self._until(lambda: all(self._number(rank) >= 3 for rank in self._working), _START)
            if not working or len(self._working) < trial.ranks:
                return
            self._pause(trial.delay)
            self._strike()
        self._finish()

    @property
    def _working(self) -> set[int]:
        """Ranks that have neither died, nor been stopped for good, nor ended."""
        trial, ranks = self._trial, self._ranks
        stopped = set(trial.victims) if trial.kind == "stop" and self._board.struck[0] else set()
        return ranks.alive - ranks.records.keys() - stopped

    def _number(self, rank: int) -> int:
        return self._board.of(rank)[2]

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            if self._strangers is not None:
                self._strangers.come()
            self._ranks.look(_TICK if self._strangers is None else 0.0)
        return True

    def _pause(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    def _kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        self._board.strike()
        for rank in ranks:
            os.kill(self._ranks.pids[rank], number)

    def _strike(self) -> None:
        trial, board, ranks = self._trial, self._board, self._ranks
        first = trial.victims[0]
        if trial.kind in ("kill", "kill two", "flood"):
            self._kill(*trial.victims)
        elif trial.kind == "kill in rebuild":
            self._kill(first)
            self._until(lambda: any(board.of(rank)[0] == Board.REBUILDING for rank in self._working), _END)
            self._pause(trial.pause)
            self._kill(trial.victims[1])
        elif trial.kind == "stop":
            self._kill(first, number=signal.SIGSTOP)
        elif trial.kind in ("wake", "pause"):
            self._kill(first, number=signal.SIGSTOP)
            self._pause(trial.pause)
            os.kill(ranks.pids[first], signal.SIGCONT)
        else:
            ranks.orders[first].send(ranks.pids[trial.peer] if trial.peer >= 0 else 0)
            self._until(lambda: board.struck[0] > 0, 5.0)

    def _finish(self) -> None:
        """Have the ranks that work end alike, once they have gone on alike for some operations."""
        board, began = self._board, time.monotonic()
        before = {rank: board.of(rank) for rank in self._working}
        told: frozenset[int] | None = None

        def over() -> bool:
            nonlocal told
            working = self._working
            if not working:
                return True
            states = {rank: board.of(rank) for rank in working}
            if all(stage == Board.DONE for stage, _, _ in states.values()):
                board.close()
            (masked, *others) = {state[1] for state in states.values()}
            if others or masked == told or time.monotonic() < began + _SETTLE:
                return False
            since = {rank: (before[rank][2] if before[rank][1] == masked else 0) for rank in working}
            if all(state[2] >= since[rank] + _AFTER for rank, state in states.items()):
                board.end(masked, max(state[2] for state in states.values()) + _MARGIN)
                told = masked
            return False

        self._until(over, _END)
