"""Compiling between two steps of the ranks, so that no deadline of an operation runs meanwhile.

One rank's cache may be cold where the others' are warm. All ranks are in the same step just before; then each compiles
(or finds that it need not), and the others wait for it: longer than for an answer, because a compiler is at work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ..control_plane.steps import Steps
from ..errors import PeerError

__all__ = ["compile_together"]

_log = logging.getLogger("uccl_ep_serving")

#: Name of the step at the end, and how long a rank waits for the others in it. A cold compilation takes 20 s of a core,
#: with Triton's node kernels 60 s; several ranks share the cores.
COMPILING, _COMPILE_SECONDS = "compiling", 600.0
#: Most bytes of a reason that the others are told.
_MOST_REASON = 4000


def compile_together(steps: Steps, compile: Callable[[], object]) -> str:
    """Call ``compile`` on every rank and wait until all have. Collective, right after another step.

    Returns:
        Which ranks failed and why, the same on every rank; empty when none did.

    Raises:
        PeerError: a rank is gone, or has not compiled within ten minutes.
    """
    reason = ""
    try:
        compile()
    except BaseException as error:  # of any kind, Ctrl-C as well: the others wait, and are told
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, Exception):
            with contextlib.suppress(PeerError):  # they may be compiling still: nobody waits for them
                steps.gather(COMPILING, reason.encode()[:_MOST_REASON], timeout=0.0)
            raise
        _log.exception("this rank could not compile")
    answers = steps.gather(COMPILING, reason.encode()[:_MOST_REASON], timeout=_COMPILE_SECONDS)
    failed = [(rank, payload.decode(errors="replace")) for rank, (payload, _) in enumerate(answers) if payload]
    return "; ".join(f"rank {rank} could not compile: {words}" for rank, words in failed)
