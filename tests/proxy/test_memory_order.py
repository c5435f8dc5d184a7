"""Memory order where x86 hides a missing one: what the compiler was told, read from the code it made."""

from __future__ import annotations

import re
from typing import Any

import pytest

from uccl_ep_serving.native import atomics
from uccl_ep_serving.native.compiler import optimised
from uccl_ep_serving.native.jit import c_function
from uccl_ep_serving.proxy.state import request_forget


def test_a_request_to_forget_is_visible_before_its_number() -> None:
    """The loop that sees the number and not the request would never look at the request again."""
    code = str(optimised({"entry": request_forget}))
    add = re.search(r"atomicrmw add .*", code)
    assert add is not None
    assert "acq_rel" in add[0] or "release" in add[0]


@pytest.mark.parametrize(
    ("name", "arguments", "pattern"),
    [
        ("load64", 1, r"load atomic i64.* acquire"),
        ("store64", 2, r"store atomic i64.* release"),
        ("peek", 1, r"load atomic i64.* monotonic"),
        ("poke", 2, r"store atomic i64.* monotonic"),
        ("compare_exchange", 3, r"cmpxchg .*acq_rel"),
    ],
)
def test_flags_are_released_and_acquired(name: str, arguments: int, pattern: str) -> None:
    """Counts, rings and the sticky error rest on these five."""
    operation = getattr(atomics, name)
    names = ", ".join("abc"[:arguments])
    scope: dict[str, Any] = {"operation": operation}
    exec(f"def call({names}):\n    return operation({names})\n", scope)
    result = "void" if name in ("store64", "poke") else "int64"
    function = c_function(f"{result}({', '.join(['int64'] * arguments)})")(scope["call"])
    code = str(optimised({"entry": function}))
    assert re.search(pattern, code), code
