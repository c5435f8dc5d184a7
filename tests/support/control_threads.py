"""Ranks as threads of one process, with the control connections between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.bootstrap import Introduction, introduce
from uccl_ep_serving.control_plane.mesh import ControlMesh


class ThreadExchange:
    """All-gather among threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.rank = rank
        self.size = len(board)
        self._barrier = barrier
        self._board = board

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._board[self.rank] = payload
        self._barrier.wait(30)
        result = list(self._board)
        self._barrier.wait(30)
        return result


def in_threads(size: int, body: Callable[[ThreadExchange], Any]) -> list[Any]:
    """Results by rank; an exception is a result."""
    barrier, board = threading.Barrier(size), [b""] * size
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadExchange(rank, barrier, board))
        except Exception as error:
            results[rank] = error

    # daemons, so that one which hangs does not keep the process that says so
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang"
    return results


def introduced(exchange: ThreadExchange, **overrides: Any) -> tuple[ControlMesh, Introduction]:
    """A mesh that is not connected yet, and what its rank knows of the others."""
    settings = Settings.from_environment({}, **{"connect_timeout": 10.0, **overrides})
    mesh = ControlMesh(exchange.rank, exchange.size, settings)
    known = introduce(exchange, settings, socket_name=mesh.socket_name, address=mesh.address, port=mesh.port, sizes={})
    return mesh, known


def joined(exchange: ThreadExchange, *, tcp: bool = False, **overrides: Any) -> ControlMesh:
    """A connected mesh; ``tcp`` pretends that every rank is on a host of its own."""
    mesh, known = introduced(exchange, **overrides)
    if tcp:
        import msgspec

        cards = tuple(msgspec.structs.replace(card, host=str(card.rank)) for card in known.cards)
        known = Introduction(cards, known.secret)
    mesh.connect(known)
    return mesh
