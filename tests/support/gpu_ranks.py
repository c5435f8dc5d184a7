"""Rank processes on a GPU, new ones after a failure: a fault of a kernel is the end of the process's context, and a
test that comes later is not to fail for an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.ranks import Ranks


class GpuRanks(Ranks):
    """A pool of rank processes whose next call finds new ones when one has failed."""

    def run(self, size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 90.0) -> list[Any]:
        """See :meth:`Ranks.run`."""
        try:
            return super().run(size, body, *arguments, timeout=timeout)
        except BaseException:
            # also those whose kernels still wait for the one that failed
            for process, _ in self._workers:
                process.kill()
            self.close()
            raise
