"""Steps of a row exchange on a device that the host launches beyond those that it works out.

A step between nodes that does not wait for its rail peers (``normal_node_step``: PATIENCE) moves less than the host
counts on. What is left then goes through one program of one warp, ``finish``: about a hundredfold slower. Kernels count
such steps, and the host launches as many more from then on. A step that has nothing to do costs a kernel or two.
"""

from __future__ import annotations

__all__ = ["SpareSteps"]

#: After so many operations that needed no more, one step less is launched.
_QUIET = 64


class SpareSteps:
    """Of the dispatches, or of the combines, of one epoch."""

    def __init__(self) -> None:
        self._missed = 0
        self._spare = 0
        self._quiet = 0

    def of(self, steps: int, missed: int) -> int:
        """How many to launch beside ``steps`` in the next operation, at most as many again.

        Args:
            missed: steps that kernels have counted so far, over all operations. The host may be several ahead of them.
        """
        if missed > self._missed:
            self._spare, self._quiet = self._spare + missed - self._missed, 0
        elif self._spare:
            self._quiet += 1
            if self._quiet == _QUIET:
                self._spare, self._quiet = self._spare - 1, 0
        self._missed = missed
        self._spare = min(self._spare, steps)
        return self._spare
