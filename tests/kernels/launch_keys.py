"""The key under which Triton keeps what it compiles for a launch: ``python launch_keys.py`` on CUDA, without a GPU.

Reads launches, a JSON list of (module, kernel, arguments, constants, warps, fused), and prints a JSON list of keys. A
process of its own because Triton must not be the interpreter here; PYTHONPATH chooses the version of Triton, whose own
code makes the key.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@functools.cache
def binder_of(module: str, name: str) -> Callable[..., Any]:
    """What a launch of a kernel binds its arguments with."""
    kernel = getattr(importlib.import_module(module), name)
    bind: Callable[..., Any] = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    return bind


def key(module: str, name: str, arguments: list[int], constants: dict[str, Any], warps: int, fused: bool) -> str:
    """As ``triton.JITFunction.run`` makes it."""
    bind = binder_of(module, name)
    # a shape, of which the key needs no more than that it tells one from another
    constants = {each: tuple(one.items()) if isinstance(one, dict) else one for each, one in constants.items()}
    _, specialization, options = bind(*arguments, **constants, num_warps=warps, enable_fp_fusion=fused)
    return f"{name} {compute_cache_key({}, specialization, options)}"


if __name__ == "__main__":
    print(json.dumps([key(*launch) for launch in json.load(sys.stdin)]))
