"""Copies past the caches: for more bytes than they hold, written for somebody who reads them much later.

A plain store first fetches the line it writes to. For a destination that will have left the caches before it is read,
that is a third of the traffic, and it pushes out what is still needed. A non-temporal store writes the whole line.

x86 gives non-temporal stores no order: a release store that follows may become visible before them. So every batch of
:func:`stream` ends with :func:`stream_fence`, before anything is published, and whoever calls :func:`stream` owes it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from typing import Any

from llvmlite import ir

from .atomics import call_void, copy
from .jit import compiled, intrinsic

__all__ = ["last_cache_bytes", "stream", "stream_fence"]

#: Bytes stored at once. Whole lines, or the core would read what it overwrites after all; 64 on every x86 and on most
#: aarch64, where longer ones are two of them.
_LINE = 64
_LINE_VALUES = ir.VectorType(ir.IntType(64), _LINE // 8)

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Where sysfs shows no cache: a common size.
_CACHE_BYTES = 32 << 20


@intrinsic("void(int64, int64)")
def _stream_line(builder: Any, target: Any, source: Any) -> None:
    """Copy a line to ``target``, a multiple of its size, past the caches. ``source`` may lie anywhere."""
    pointer = _LINE_VALUES.as_pointer()
    values = builder.load(builder.inttoptr(source, pointer), align=1)
    store = builder.store(values, builder.inttoptr(target, pointer), align=_LINE)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


@intrinsic("void()")
def stream_fence(builder: Any) -> None:
    """Order every :func:`stream` before it against every store after it.

    x86: ``sfence``, because its release stores are plain ones and those do not wait for non-temporal stores. On aarch64
    "non-temporal" (``stnp``) is a hint about caches only: the release store that publishes orders it like any other
    store. Elsewhere LLVM makes plain stores of them. There a release fence keeps the compiler's order.
    """
    if "x86" in builder.module.triple:
        call_void(builder, "llvm.x86.sse.sfence")
    else:
        builder.fence("release")


@compiled
def stream(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` between addresses that do not overlap, whole lines of the target past the caches.

    Nothing of it may be published before :func:`stream_fence`. Rows, window offsets and tensors are multiples of 16
    bytes, not of a line: what lies before the first and after the last whole line is copied as usual.
    """
    head = min(-target & (_LINE - 1), nbytes)
    if head != 0:
        copy(target, source, head)
    lines = (nbytes - head) & -_LINE
    to, of = target + head, source + head
    for at in range(0, lines, _LINE):
        _stream_line(to + at, of + at)
    tail = nbytes - head - lines
    if tail != 0:
        copy(to + lines, of + lines, tail)


@functools.cache
def last_cache_bytes() -> int:
    """Bytes of the last cache before memory, as sysfs says of the first core; 32 MiB where it says nothing."""
    sizes = []
    # also listing them fails where this process has no descriptor left
    with contextlib.suppress(OSError):
        for path in _CACHES.glob("index*/size"):
            with contextlib.suppress(OSError):
                if found := re.fullmatch(r"(\d+)K", path.read_text().strip()):
                    sizes.append(int(found[1]) << 10)
    return max(sizes, default=_CACHE_BYTES)
