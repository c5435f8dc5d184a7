"""What every rank does between two steps: all know who could not, and no deadline of an operation runs meanwhile.

Compiling: one rank's cache may be cold where the others' are warm. All ranks are in the same step just before; then
each compiles (or finds that it need not), and the others wait for it: longer than for an answer, because a compiler is
at work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ..control_plane.steps import Steps
from ..errors import UcclEpError, in_words

__all__ = ["compile_together", "do_together"]

_log = logging.getLogger("uccl_ep_serving")

#: Name of the step at the end, and how long a rank waits for the others in it. Cold, all of a GPU's kernels of both
#: modes take a minute of a core (benchmarks/RESULTS.md); several ranks share the cores.
COMPILING, _COMPILE_SECONDS = "compiling", 600.0
#: Most bytes of a reason that the others are told.
_MOST_REASON = 4000


def compile_together(steps: Steps, compile: Callable[[], object]) -> str:
    """:func:`do_together` for compiling, which the others wait ten minutes for."""
    return do_together(steps, compile, COMPILING, "compile or load its kernels", _COMPILE_SECONDS)


def do_together(steps: Steps, do: Callable[[], object], step: str, what: str, timeout: float | None = None) -> str:
    """Call ``do`` on every rank and wait until all have. Collective, right after another step.

    Args:
        step: name of the step at the end.
        what: is done, as in "could not ...".
        timeout: seconds that the others are waited for, None = as for any step.

    Returns:
        Which ranks failed and why, the same on every rank; empty when none did.

    Raises:
        PeerError: a rank is gone, or was not ready within ``timeout``.
    """
    reason = ""
    try:
        do()
    except BaseException as error:  # of any kind, Ctrl-C as well: the others wait, and are told
        reason = in_words(error)
        if not isinstance(error, Exception):
            with contextlib.suppress(UcclEpError):  # they may be at it still, or elsewhere: nobody waits for them
                steps.gather(step, reason.encode()[:_MOST_REASON], timeout=0.0)
            raise
        _log.exception("this rank could not %s", what)
    answers = steps.gather(step, reason.encode()[:_MOST_REASON], timeout=timeout)
    failed = [(rank, payload.decode(errors="replace")) for rank, (payload, _) in enumerate(answers) if payload]
    return "; ".join(f"rank {rank} could not {what}: {words}" for rank, words in failed)
