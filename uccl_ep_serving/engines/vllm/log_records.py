"""Our log records go where vLLM's go: it configures the logger ``vllm`` only, and INFO of any other is dropped."""

from __future__ import annotations

import logging

__all__ = ["log_through_vllm"]


class _ThroughVllm(logging.Handler):
    """Hands records to vLLM's logger, whose level and handlers, and later changes of them, then hold for ours."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)


def log_through_vllm() -> None:
    """Send what the package logs in this process through vLLM's logger. Idempotent.

    A logger ``uccl_ep_serving`` that somebody has given a level or handlers, as ``VLLM_LOGGING_CONFIG_PATH`` can, stays
    as it is.
    """
    ours = logging.getLogger("uccl_ep_serving")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.addHandler(_ThroughVllm())
    ours.setLevel(logging.DEBUG)  # vLLM's level decides
    ours.propagate = False  # or the root logger's handlers, if any, would show each record again
