"""One process whose Triton is the interpreter: that is decided when Triton is imported, so not in the test's own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

__all__ = ["interpreted"]


def _run(body: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        results.send(body(*arguments))
    except BaseException as error:
        results.send(error)


def interpreted(body: Callable[..., Any], *arguments: Any) -> Any:
    """What ``body``, a function of a module, returns there; what it raises."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(body, arguments, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(300), "no answer"
        result = ours.recv()
    finally:
        process.join(10)
        process.kill()
    if isinstance(result, BaseException):
        raise result
    return result
