"""Turns of a row exchange on a device that the host launches beyond those that it works out.

A turn between nodes that does not wait for its rail peers (``normal_node_step``: PATIENCE) moves less than the host
counts on. What is left then goes through one program of one warp, ``finish``: about a hundredfold slower. Kernels count
such turns, and the host launches as many more from then on. A turn that has nothing to do costs a kernel or two.
"""

from __future__ import annotations

__all__ = ["SpareTurns"]

#: After so many operations that needed no more, one turn less is launched.
_QUIET = 64


class SpareTurns:
    """Of the dispatches, or of the combines, of one epoch."""

    def __init__(self) -> None:
        self._late = 0
        self._spare = 0
        self._quiet = 0

    def of(self, turns: int, late: int) -> int:
        """How many to launch beside ``turns`` in the next operation, at most as many again.

        Args:
            late: turns that kernels have counted so far, over all operations. The host may be several ahead of them.
        """
        if late > self._late:
            self._spare, self._quiet = self._spare + late - self._late, 0
        elif self._spare:
            self._quiet += 1
            if self._quiet == _QUIET:
                self._spare, self._quiet = self._spare - 1, 0
        self._late = late
        self._spare = min(self._spare, turns)
        return self._spare
