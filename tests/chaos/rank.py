"""One rank of a trial: it works until the fault, leaves out whom the error names, goes on, and records what it saw."""

from __future__ import annotations

import datetime
import functools
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch.distributed as dist

from tests.chaos import attacks
from tests.chaos.records import Board, Loss, Record
from tests.chaos.trials import Trial
from tests.chaos.work import Work
from tests.support import bodies
from tests.support.remains import left
from tests.support.source_tree import ROOT
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane import mesh
from uccl_ep_serving.control_plane.bootstrap import Introduction, StoreExchange
from uccl_ep_serving.errors import BootstrapError, ConfigError, Evicted, UcclEpError

__all__ = ["live"]

#: Seconds that a rank waits for another one's card.
_STORE_SECONDS = 4.0
#: Seconds that a rank which is done waits for the others to be.
_CLOSING = 4.0
#: More ranks than that cannot be lost one after another.
_MOST_LOSSES = 8


class _Left(Exception):
    """This rank leaves, as its fault asks."""


def live(trial: Trial, rank: int, board: Board, orders: Connection, directory: Path) -> Record:
    """Take part in ``trial``; ``orders`` says where the store is, and then what this rank is to do to itself."""
    record = Record(rank)
    try:
        _start(trial, rank, directory)
        port = orders.recv()
        seconds = datetime.timedelta(seconds=_STORE_SECONDS)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
        buffer = Buffer(StoreExchange(store, rank, trial.ranks, "chaos"), settings=bodies.settings(**trial.settings))
    except (UcclEpError, OSError, MemoryError, RuntimeError) as error:
        record.end = "refused" if isinstance(error, UcclEpError) or trial.kind == "limit" else "raised"
        record.losses.append(_loss(error))
        record.words = _trace(3) if record.end == "raised" else ""
        return record
    helper = _Helper(trial, rank, board, orders)
    try:
        if trial.kind != "limit":
            helper.start()
        _work(trial, buffer, board, record, helper)
        buffer.destroy()
    except _Left:
        record.end = "left"
        if trial.form == "exit":
            return record
        buffer.destroy()
    except AssertionError as error:
        record.end = "wrong"
        record.words = f"{error} {_trace(2)}"
    except Exception:
        record.end, record.words = "raised", _trace(4)
    del buffer
    record.left = _held()
    return record


def _start(trial: Trial, rank: int, directory: Path) -> None:
    """What a rank starts with, where that is the fault."""
    if trial.kind == "cache":
        place = directory / ("shared" if trial.form == "shared" else f"rank{rank}")
        place.mkdir(exist_ok=True)
        attacks.spoil_cache(trial.form, place, trial.seed)
    if trial.kind == "cut wire":
        mesh.meet = functools.partial(_apart, mesh.meet)  # type: ignore[assignment]
    if trial.kind == "flood" and rank in trial.victims:
        # so long the others listen, and strangers fill their queues
        time.sleep(trial.pause)
    if trial.kind == "limit" and rank in trial.victims:
        attacks.limit(trial.form, trial.share)


def _apart(
    meet: Callable[..., object], rank: int, ranks: int, listeners: object, known: Introduction, seconds: float
) -> object:
    """``links.meet`` as if each rank were on a host of its own: control connections are TCP, which can be cut."""
    cards = tuple(msgspec.structs.replace(card, host=str(card.rank)) for card in known.cards)
    return meet(rank, ranks, listeners, Introduction(cards, known.secret), seconds)


def _work(trial: Trial, buffer: Buffer, board: Board, record: Record, helper: _Helper) -> None:
    work, masked, number = Work(trial.mode, trial.ranks), frozenset[int](), 0
    rank = buffer.rank
    while not board.ends(masked, number):
        if helper.leaves:
            raise _Left
        board.show(rank, Board.REBUILDING if masked and not number else Board.WORKING, masked, number)
        try:
            check = work.operation(buffer, number, masked)
        except UcclEpError as error:
            loss = _loss(error)
            record.losses.append(loss)
            if _left_out(error):
                record.end = "left out"
                return
            named = frozenset(loss.peers) - masked - {rank, -1}
            if not named or isinstance(error, ConfigError | BootstrapError) or len(record.losses) > _MOST_LOSSES:
                record.end = "failed"
                return
            for peer in sorted(named):
                buffer.low_latency_update_mask_buffer(peer, True)
            masked |= named
            record.masked, record.good, record.good_at, number = masked, 0, 0.0, 0
            continue
        ended = time.monotonic()
        try:
            check()
        except (OSError, MemoryError, RuntimeError):
            if trial.kind != "limit":
                raise
            # the oracle, not an operation, has no room
            record.end = "failed"
            return
        record.good += 1
        record.good_at = record.good_at or ended
        number += 1
    record.end = "finished"
    # who closes ends the operation of one that is still in the last
    board.show(rank, Board.DONE, masked, number)
    deadline = time.monotonic() + _CLOSING
    while not board.closes and time.monotonic() < deadline:
        time.sleep(0.002)


def _loss(error: BaseException) -> Loss:
    peers = getattr(error, "peers", ())
    return Loss(type(error).__name__, getattr(error, "peer", -1), peers, str(error), time.monotonic())


def _trace(frames: int) -> str:
    """The last frames of what was raised, without where the repository lies."""
    return traceback.format_exc(limit=-frames).replace(f"{ROOT}/", "")


def _left_out(error: UcclEpError) -> bool:
    """Whether the others go on without this rank, which must stop."""
    return isinstance(error, Evicted)


def _held() -> str:
    """What this process still holds of a Buffer that was destroyed, in words."""
    gc.collect()
    found = [f"{kind}: {', '.join(sorted(names))}" for kind, names in left([os.getpid()], 1.0).items()]
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("uccl-ep"):
            found.append(f"thread {name}")
    return "; ".join(found)


class _Helper(threading.Thread):
    """Does to this rank what the supervisor orders, at the moment of the order: to connections, while it works.

    Attributes:
        leaves: the host is to leave before its next operation.
    """

    def __init__(self, trial: Trial, rank: int, board: Board, orders: Connection) -> None:
        super().__init__(name="chaos", daemon=True)
        self._trial, self._rank, self._board, self._orders = trial, rank, board, orders
        self.leaves = False

    def run(self) -> None:
        try:
            pid: int = self._orders.recv()
        except (EOFError, OSError):
            return
        trial = self._trial
        what, _, where = trial.kind.partition(" ")
        if what == "leave":
            self._board.strike()
            self.leaves = True
            return
        try:
            if trial.kind == "cut data twice":
                attacks.cut_again(pid, trial.form, trial.pause)
            elif what == "cut":
                attacks.cut(pid, where != "control", trial.form, trial.share)
            else:
                attacks.garble(pid, where != "control", trial.form, trial.share, trial.seed)
        except (OSError, LookupError) as error:
            print(f"chaos: rank {self._rank} cannot {trial.kind}: {error}", flush=True)
            return
        self._board.strike()
