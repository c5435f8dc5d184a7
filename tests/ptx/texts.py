"""PTX written by hand: what a test says is the body, around it stands what every kernel has."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tests.ptx.translation.host_code import Kernel


def text(body: str, threads: int = 32, parameters: int = 2) -> str:
    """A kernel ``k`` with 64-bit parameters ``p0``, ...; they stand in ``%rd1``, ... when ``body`` begins.

    Registers: ``%rd1`` to ``%rd19``, ``%r1`` to ``%r19``, ``%p1`` to ``%p9``. ``%r1`` is the thread, ``%r2`` the CTA.
    """
    declared = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    loads = "\n".join(f"ld.param.b64 %rd{n + 1}, [p{n}];" for n in range(parameters))
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k({declared})
.reqntid {threads}
{{
.reg .pred %p<10>;
.reg .b32 %r<20>;
.reg .b64 %rd<20>;
{loads}
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
{body}
ret;
}}
"""


@lru_cache
def kernel(body: str, threads: int = 32, parameters: int = 2, weak: bool = True) -> Kernel:
    return Kernel(text(body, threads, parameters), weak)


def memory(words: int) -> np.ndarray:
    """Zeros, uint64, aligned to 64 bytes."""
    raw = np.zeros(words + 8, np.uint64)
    skipped = (-raw.ctypes.data) % 64 // 8
    return raw[skipped : skipped + words]


def line_of(body: str, instruction: str, threads: int = 32, parameters: int = 2) -> int:
    """The line of the PTX on which the only ``instruction`` stands."""
    (found,) = [n for n, line in enumerate(text(body, threads, parameters).splitlines(), 1) if instruction in line]
    return found
