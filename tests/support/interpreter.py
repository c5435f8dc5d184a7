"""Triton's interpreter: kernels for devices run in Python, in a process that serves nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["interpret"]


class _Kept:
    """What was patched stays so."""

    def restore(self) -> None:
        """Nothing."""


def interpret() -> None:
    """Have Triton interpret kernels in this process, in which nobody may have imported it otherwise.

    Triton patches its language anew at each call of a function of a kernel, and searches all of it for that: three
    quarters of a run. It is done once for each module that such functions stand in, and for good.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    if patch.__module__ == __name__:
        return
    patched: set[str] = set()

    def patch_once(function: Any) -> _Kept:
        if (module := function.__globals__["__name__"]) not in patched:
            patch(function)
            patched.add(module)
        return _Kept()

    interpreter._patch_lang = patch_once
