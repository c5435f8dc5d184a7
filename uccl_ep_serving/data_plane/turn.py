"""One call of a Buffer at a time: what two of them would share is refused, by name, before anything moves.

Counters, slots and the blocks that kernels read are a Buffer's own, and a CPU kernel waits without the interpreter's
lock: a second call would change them under the first. Threads may take turns, as an engine's two micro-batches do.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch._C._dynamo.eval_frame as frames

from ..errors import ConfigError

__all__ = ["HasTurn", "Turn", "if_free", "in_turn"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


#: Between two looks whether a brief call has ended.
_PAUSE_SECONDS = 20e-6


class _Holder(NamedTuple):
    """The call that runs: its name, the ident of its thread, and since when, a ``time.monotonic()`` instant.

    Attributes:
        brief: other threads wait for its end, which is bounded, instead of being refused.
    """

    call: str
    thread: int
    since: float
    brief: bool = False


class Turn:
    """Whose call of a Buffer runs."""

    __slots__ = ("_holders", "_is_wanted")

    def __init__(self) -> None:
        #: Under key 0 the one that runs. A single operation of a dict takes the turn and says whose it is: no signal
        #: handler and no other thread comes between the two.
        self._holders: dict[int, _Holder] = {}
        #: A call waits for the end of a brief one: no other begins before.
        self._is_wanted = False

    def take(self, call: str) -> None:
        """Begin ``call``. Raises ConfigError while another one runs."""
        try:
            while (holder := self._try(call)) is not None:
                # its end is waited for while its thread is in it: not after a fork, nor where an interruption kept it
                # from giving the turn back
                runs = holder.brief and _runs_below(sys._current_frames().get(holder.thread))
                if not runs or holder.thread == threading.get_ident():
                    raise _refusal(call, holder)
                self._is_wanted = True
                time.sleep(_PAUSE_SECONDS)
        finally:
            self._is_wanted = False

    def take_if_free(self, call: str) -> bool:
        """Begin ``call``, for whose end calls of other threads wait; False while another one runs, or waits for the end
        of such a one."""
        return not self._is_wanted and self._try(call, brief=True) is None

    def _try(self, call: str, brief: bool = False) -> _Holder | None:
        """Begin ``call`` unless another one runs, which is returned."""
        mine = _Holder(call, threading.get_ident(), time.monotonic(), brief)
        holder = self._holders.setdefault(0, mine)
        if holder is mine:
            return None
        if holder.thread == mine.thread and not _runs_below(sys._getframe(3)):
            self._holders[0] = mine  # a signal handler raised in this thread before the call could begin
            return None
        return holder

    @property
    def running(self) -> tuple[str, float] | None:
        """The call that runs and its seconds so far, None while none does. Any thread."""
        holder = self._holders.get(0)
        return None if holder is None else (holder.call, time.monotonic() - holder.since)

    def give(self) -> None:
        """The call has ended."""
        self._holders.pop(0, None)


def _refusal(call: str, holder: _Holder) -> ConfigError:
    if holder.thread == threading.get_ident():
        who = "the same thread, which a signal handler, a finalizer or a callback has interrupted"
    else:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        who = f"thread {names.get(holder.thread, holder.thread)}"
    return ConfigError(
        f"{call}: this Buffer is in {holder.call} of {who}. Nothing has moved. Next step: one call of a Buffer at a "
        "time (a lock around the calls of several threads, or a Buffer for each)"
    )


def _runs_below(frame: FrameType | None) -> bool:
    """Whether ``frame`` or one that has called it is of a call that holds a turn."""
    while frame is not None:
        if frame.f_code in _CODES:
            return True
        frame = frame.f_back
    return False


class HasTurn(Protocol):
    """What :func:`in_turn` needs of the object whose method it is put on."""

    @property
    def _turn(self) -> Turn:
        """Of the Buffer."""


_S = TypeVar("_S", bound=HasTurn)
#: Of the wrappers that hold a turn while their methods run.
_CODES: set[CodeType] = set()


def in_turn(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """``method``, which raises ConfigError while another call of the same Buffer runs."""
    name = method.__name__

    def taking_turns(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        turn = self._turn
        turn.take(name)
        try:
            return method(self, *args, **kwargs)
        finally:
            turn.give()

    _wrap(taking_turns, method)
    return taking_turns


def if_free(method: Callable[[_S], None]) -> Callable[[_S], bool]:
    """``method``, which is left out while another call of the same Buffer runs; says whether it was made.

    Calls of other threads wait for its end, which must be bounded.
    """
    name = method.__name__.lstrip("_")

    def where_free(self: _S, /) -> bool:
        turn = self._turn
        if not turn.take_if_free(name):
            return False
        try:
            method(self)
        finally:
            turn.give()
        return True

    _wrap(where_free, method)
    return where_free


def _wrap(call: Any, method: Any) -> None:
    """``call`` stands for ``method``, and holds a turn while that runs."""
    _CODES.add(call.__code__)
    functools.update_wrapper(call, method)
    _break_graphs(call)


def _break_graphs(call: Any) -> None:
    """Have torch.compile break the graph at ``call``, and trace nothing below it: kernels are given addresses.

    What ``torch.compiler.disable`` does, which imports torch._dynamo, 1.7 s, into processes that compile nothing.
    """
    call._torchdynamo_disable = True  # where a caller is traced
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(call.__code__, frames._FrameExecStrategy(skip, skip))  # where it is called
