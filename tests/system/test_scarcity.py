"""A machine that has no descriptor, or no thread, left: a named error on every rank in time, and nothing stays behind.

The ranks are threads of one process, so that one limit meets them all, each at another of its steps.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.bodies import round_trip, settings
from tests.support.ranks import Ranks
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane import bootstrap
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import BootstrapError, ConfigError, PeerError, TransportError, UcclEpError

#: What ranks may say when a resource is missing here or there.
_NAMED = (BootstrapError, PeerError, TransportError)


class _Threads:
    """An exchange among threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.rank, self.size = rank, len(board)
        self._barrier, self._board = barrier, board

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._board[self.rank] = payload
        self._barrier.wait(20)
        result = list(self._board)
        self._barrier.wait(20)
        return result


def _use(ranks: int, chosen: Settings) -> list[BaseException | None]:
    """Open, use and close a Buffer on every rank; what each raised."""
    barrier, board = threading.Barrier(ranks), [b""] * ranks
    raised: list[BaseException | None] = [None] * ranks

    def body(rank: int) -> None:
        try:
            buffer = Buffer(_Threads(rank, barrier, board), settings=chosen)
            try:
                round_trip(buffer)
            finally:
                buffer.destroy()
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), raised
    return raised


def _population() -> tuple[int, int]:
    """(threads, descriptors) of this process, once what is unreachable is gone."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")) - 1


def _sweep(ranks: int, overrides: dict[str, Any], scarce: Callable[[int], Any]) -> tuple[int, list[str]]:
    """Use Buffers under ``scarce(0)``, ``scarce(1)``, … until one works; (how many failed, what was wrong)."""
    logging.disable(logging.CRITICAL)
    chosen = settings(**{"timeout": 2.0, "connect_timeout": 2.0, "heap_bytes": 1 << 20, **overrides})
    assert _use(ranks, chosen) == [None] * ranks
    before, wrong = _population(), []
    for step in range(60):
        with scarce(step):
            raised = _use(ranks, chosen)
        if raised == [None] * ranks:
            logging.disable(logging.NOTSET)
            return step, wrong
        wrong += [f"{step}: {error!r}" for error in raised if error is not None and not isinstance(error, _NAMED)]
        raised.clear()
        deadline = time.monotonic() + 2
        while (after := _population()) != before and time.monotonic() < deadline:
            time.sleep(0.02)
        if after != before:
            wrong.append(f"{step}: (threads, descriptors) were {before}, are {after}")
            before = after
    raise AssertionError(f"never enough: {wrong}")


@contextmanager
def _descriptors(number: int) -> Iterator[None]:
    """``number`` descriptors are left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_population()[1] + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """The ``number + 1``-th thread of ours is refused, as by a limit of the container."""
    start, lock, begun = threading.Thread.start, threading.Lock(), 0

    def refuse(thread: threading.Thread) -> None:
        nonlocal begun
        if thread.name.startswith("uccl-ep"):
            with lock:
                begun += 1
                if begun == number + 1:
                    raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def few_descriptors(exchange: StoreExchange, ranks: int, overrides: dict[str, Any]) -> tuple[int, list[str]]:
    return _sweep(ranks, overrides, _descriptors)


def few_threads(exchange: StoreExchange, ranks: int, overrides: dict[str, Any]) -> tuple[int, list[str]]:
    return _sweep(ranks, overrides, _threads)


def test_a_rank_alone_without_descriptors(ranks: Ranks) -> None:
    ((failed, wrong),) = ranks.run(1, few_descriptors, 1, {})
    assert wrong == []
    assert failed >= 5


@pytest.mark.long
@pytest.mark.parametrize("path", ["direct", "shm", "tcp"])
def test_two_ranks_without_descriptors(ranks: Ranks, path: str) -> None:
    overrides = {} if path == "direct" else {"direct": False, "transport": path}
    ((failed, wrong),) = ranks.run(1, few_descriptors, 2, overrides, timeout=300.0)
    assert wrong == []
    assert failed >= 12


def test_two_ranks_without_threads(ranks: Ranks) -> None:
    ((failed, wrong),) = ranks.run(1, few_threads, 2, {"direct": False, "transport": "shm"})
    assert wrong == []
    # control, proxy and counters of each, and the proxies of the window that serves low latency
    assert failed == 8


def no_gpu(exchange: StoreExchange) -> str:
    before = _population()
    with pytest.raises(ConfigError, match="torch finds no GPU") as caught:
        Buffer(exchange, settings=settings(device="cuda"))
    text = str(caught.value)
    del caught
    assert _population() == before
    return text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named_before_anything_starts(ranks: Ranks) -> None:
    assert all("UCCL_EP_DEVICE=cuda" in text for text in ranks.run(2, no_gpu))


def half_a_buffer(exchange: StoreExchange) -> str:
    """On rank 1 what lies above the runtime cannot be made."""
    from uccl_ep_serving import buffer as module

    before, whole = _population(), module.cpu_backend
    started = time.monotonic()
    if exchange.rank == 1:
        module.cpu_backend = lambda runtime: 1 / 0  # type: ignore[assignment,return-value]
    try:
        with pytest.raises((UcclEpError, ZeroDivisionError)) as caught:
            round_trip(Buffer(exchange, settings=settings()))
    finally:
        module.cpu_backend = whole
    name = caught.typename
    del caught
    assert time.monotonic() - started < 10.0  # not by the deadline
    assert exchange.rank == 0 or _population() == before
    return name


def test_a_buffer_that_is_not_finished_is_closed(mortal_ranks: Ranks) -> None:
    assert mortal_ranks.run(2, half_a_buffer)[1] == "ZeroDivisionError"


def test_a_rank_without_descriptors_still_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot tell the others that it does not start has them wait for the launcher's timeout."""

    def nothing_opens(*arguments: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    said: list[bytes] = []

    class Exchange:
        rank, size = 0, 1

        def all_gather(self, payload: bytes) -> list[bytes]:
            said.append(payload)
            return [payload]

    monkeypatch.setattr("builtins.open", nothing_opens)
    monkeypatch.setattr("io.open", nothing_opens)
    with pytest.raises(OSError, match="Too many"), bootstrap.refusing(Exchange()):
        raise OSError(24, "Too many open files")
    assert b"Too many open files" in said[0]
