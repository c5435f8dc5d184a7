"""One process whose Triton is the interpreter: that is decided when Triton is imported, so not in the test's own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from tests.support.interpreter import interpret

__all__ = ["interpreted"]


def _run(body: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    interpret()
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
