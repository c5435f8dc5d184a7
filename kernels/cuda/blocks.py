"""What the host, the proxies and the kernels share, as a header for CUDA C: ``blocks.cuh``.

    C_*      byte offset of a word of the kernel context
    W_*      byte offset of a word of the normal-mode state     N_*  index of one of its tables
    PIPE_*   of ``protocol.pipe``     ERROR_*  byte offset of a word of a report

and names as they are in ``protocol``. It is made from their declarations, so that each number stands in one place.
"""

from __future__ import annotations

from types import ModuleType

from ...protocol import context, message, pipe, streams
from ..blocks import normal_device

__all__ = ["header"]

#: Prefix, where names are declared, what an offset of 1 is there.
_NAMES: tuple[tuple[str, ModuleType, int, tuple[str, ...]], ...] = (
    (
        "C_",
        context,
        8,
        ("RANK", "RANKS", "PEER_WINDOW", "LANDING", "MASK", "ERROR", "VERDICT", "REPORT", "LIMIT"),
    ),
    ("", context, 8, ("ERROR_CODE", "ERROR_PEER", "ERROR_STREAM", "ERROR_ARRIVED", "ERROR_EXPECTED")),
    ("", context, 1, ("FAILURE_PEER_TIMEOUT", "FAILURE_PROTOCOL")),
    ("W_", normal_device, 8, ("NUMBER", "PIPE_WORDS", "OPENED", "ENDED")),
    ("", normal_device, 1, ("STATE_WORDS",)),
    ("PIPE_", pipe, 1, ("ARRIVED", "FREED", "EVERYTHING", "STEP")),
    ("", pipe, 1, ("STAMP_SHIFT",)),
    ("", streams, 1, ("NORMAL_CHANNELS", "NORMAL_DISPATCH", "NORMAL_COMBINE")),
    ("", message, 1, ("DTYPE_BF16", "DTYPE_F16", "DTYPE_F32")),
)


def header() -> str:
    """Its text."""
    lines = ["#pragma once"]
    for prefix, module, unit, names in _NAMES:
        lines += [f"constexpr int {prefix}{name} = {unit * getattr(module, name)};" for name in names]
    lines += [f"constexpr int N_{name} = {index};" for index, name in enumerate(normal_device.TABLES)]
    return "\n".join(lines) + "\n"
