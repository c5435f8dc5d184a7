"""The sum that a combine makes of a token's rows, in the caller's order, held in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rows(total: tl.tensor, found: tl.tensor, part: tl.tensor, here: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Add values ``part`` [rows, columns] of the rows that are ``here`` [rows], without a branch.

    Returns:
        ``total`` [rows, columns] and ``found`` [rows], how many rows were added, with them.
    """
    # rule: a node sums in float32 and rounds once
    added = total + part
    # the first row is taken as it is: adding it to zero would lose the sign of a zero
    total = tl.where(here[:, None], tl.where((found > 0)[:, None], added, part), total)
    return total, found + here.to(tl.int32)
