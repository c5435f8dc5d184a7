"""Rows of an expert in low latency: as many as DeepGEMM's masked products take for whole tiles."""

from __future__ import annotations

import math

__all__ = ["whole_tiles"]

#: A product stores tiles of up to so many rows, also those past an expert's last row: into the rows of the next expert.
#: SGLang rounds to it where it lays the rows out itself (kernels/ops/moe/ep_moe_kernels.py:1748).
_TILE_ROWS = 256


def whole_tiles(tokens: int, ranks: int) -> int:
    """Tokens of a rank, at least ``tokens``, of which ``ranks`` give an expert a whole number of tiles."""
    multiple = _TILE_ROWS // math.gcd(_TILE_ROWS, ranks)
    return -(-tokens // multiple) * multiple
