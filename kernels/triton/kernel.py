"""Functions that are launched, under names by which a profile of an engine shows them as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import triton

PREFIX = "uccl_ep_"


def kernel(do_not_specialize: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for a function that the host launches: NAME is uccl_ep_NAME in profiles and in compiled code."""

    def compiled(function: Callable[..., Any]) -> Any:
        name = PREFIX + function.__name__
        return triton.jit(repr=lambda _specialization: name, do_not_specialize=list(do_not_specialize))(function)

    return compiled
