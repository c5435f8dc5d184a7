"""Ranks as real processes, kept between tests: each call runs a function on the first ``n`` of them.

A fork server that has imported torch and the package hands out processes in milliseconds; ranks meet through a TCPStore
of their own, one prefix per call.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from tests.support.fork_server import ensure_fork_server
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

_context = multiprocessing.get_context("forkserver")
_PRELOAD = ["torch", "torch.distributed", "uccl_ep_serving.buffer"]
_calls = itertools.count()


#: Errors that tell of another rank, which may have raised what explains them.
_BLAMES = frozenset(("PeerTimeout", "PeerLost"))


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""

    def __init__(self, rank: int, kind: str, text: str) -> None:
        super().__init__(f"rank {rank} raised {kind}:\n{text}")
        self.rank = rank
        self.kind = kind


def _work(connection: Connection, rank: int, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    while True:
        try:
            name, size, body, arguments = connection.recv()
        except EOFError:
            return
        gc.collect()  # a body's `pytest.raises(...) as caught` is a cycle, and would count as left by the next one
        try:
            result = (True, body(StoreExchange(store, rank, size, name), *arguments))
        except BaseException as error:
            result = (False, (type(error).__name__, traceback.format_exc()))
        connection.send(result)


class Ranks:
    """A pool of rank processes."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[Any, Connection]] = []
        self._working: set[Connection] = set()

    def _grow(self, size: int) -> None:
        if len(self._workers) < size:
            ensure_fork_server(_PRELOAD)
        while len(self._workers) < size:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(theirs, len(self._workers), self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def start(self, size: int, body: Callable[..., Any], *arguments: Any) -> None:
        """Run ``body(exchange, *arguments)`` on ranks 0..size-1 without waiting."""
        self._grow(size)
        name = f"call{next(_calls)}"
        for _, connection in self._workers[:size]:
            connection.send((name, size, body, arguments))
            self._working.add(connection)

    def finish(self, ranks: list[int], timeout: float = 90.0) -> dict[int, tuple[bool, Any]]:
        """(succeeded, result or (exception name, traceback)) of each of ``ranks``. Fails when one does not answer."""
        pending = {self._workers[rank][1]: rank for rank in ranks}
        results: dict[int, tuple[bool, Any]] = {}
        while pending:
            ready = wait(list(pending), timeout)
            assert ready, f"ranks {sorted(pending.values())} did not answer within {timeout} s"
            for connection in ready:
                rank = pending.pop(connection)
                self._working.discard(connection)
                try:
                    results[rank] = connection.recv()
                except EOFError:
                    results[rank] = (False, ("ProcessDied", ""))
        return results

    def run(self, size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 90.0) -> list[Any]:
        """Results by rank. Raises RankFailed for the first rank that raised: if it can, one that blames no peer."""
        self.start(size, body, *arguments)
        results = self.finish(list(range(size)), timeout)
        failed = [rank for rank in range(size) if not results[rank][0]]
        if failed:
            first = min(failed, key=lambda rank: results[rank][1][0] in _BLAMES)
            raise RankFailed(first, *results[first][1])
        return [results[rank][1] for rank in range(size)]

    def pid(self, rank: int) -> int:
        return int(self._workers[rank][0].pid)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def close(self) -> None:
        """End every rank: those that are still in a body (a silent one, say) are killed."""
        for process, connection in self._workers:
            if connection in self._working:
                process.kill()
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        self._working.clear()
        self._workers.clear()
