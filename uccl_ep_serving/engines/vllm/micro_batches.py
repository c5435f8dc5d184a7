"""Failures under dual-batch overlap: when one micro-batch of a step fails the others end too, and the step says why.

vLLM's micro-batches are threads that hand control to each other (``v1/worker/ubatching.py``). One that fails wakes the
next and is gone. The next goes on to its own next hand-over, waits there for a thread that no longer exists, and the
step waits for it. If no hand-over is left, the step ends: in an error that says nothing of the first, or (V1) with the
rows of the other micro-batch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from uccl_ep_serving.engines.vllm.hooks import mark
from uccl_ep_serving.errors import UcclEpError, in_words

__all__ = ["first_error", "handing_over", "leaving"]

#: On the event that wakes the next micro-batch: why the one that set it has ended. vLLM makes new events for each step,
#: so no later step can find it.
_WHY = "_uccl_ep_why"

#: The first error of a micro-batch since :func:`first_error` was asked last.
_first: list[BaseException] = []


def first_error() -> BaseException | None:
    """What a micro-batch has failed with first, once: the next answer is about what follows."""
    found = _first[0] if _first else None
    _first.clear()
    return found


def handing_over(original: Callable[[Any], None]) -> Any:
    """``UBatchContext._cpu_yield``, which raises where nobody is left to hand control back."""

    @functools.wraps(original)
    def hand_over(self: Any) -> None:
        _end_with_the_others(self)
        original(self)
        _end_with_the_others(self)

    return mark(hand_over)


def _end_with_the_others(context: Any) -> None:
    why = getattr(context.cpu_wait_event, _WHY, None)
    if why is not None:
        raise UcclEpError(
            f"uccl_ep: micro-batch {context.id} ends because another one of its step has failed: {in_words(why)}"
        ) from why


def leaving(original: Callable[..., Any]) -> Any:
    """``UBatchContext.__exit__``, which notes an error, and wakes the next micro-batch even if a recv hook raises."""

    @functools.wraps(original)
    def leave(self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        if exc_val is not None:
            _note(self, exc_val)
            self.recv_hook = None  # the rows it waits for are for a micro-batch that ends as well
        try:
            return original(self, exc_type, exc_val, exc_tb)
        except BaseException as error:
            _note(self, error)
            self.cpu_signal_event.set()
            raise

    return mark(leave)


def _note(context: Any, error: BaseException) -> None:
    why = getattr(context.cpu_wait_event, _WHY, error)  # of the first that failed, where this one ends because of it
    setattr(context.cpu_signal_event, _WHY, why)
    if not _first:
        _first.append(why)
