"""Memory order where x86 hides a missing one: what the compiler was told, read from the code it made."""

from __future__ import annotations

import re
from typing import Any, cast

from numba import njit

from uccl_ep_serving.proxy.control import request_forget


def test_a_request_to_forget_is_visible_before_its_number() -> None:
    """The loop that sees the number and not the request would never look at the request again."""
    function: Any = njit(cast(Any, request_forget).py_func)
    function.compile("void(int64, int64, int64)")
    (code,) = function.inspect_llvm().values()
    add = re.search(r"atomicrmw add .*", code)
    assert add is not None
    assert "acq_rel" in add[0] or "release" in add[0]
