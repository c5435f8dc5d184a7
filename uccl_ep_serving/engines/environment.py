"""The launcher's settings, carried to workers that do not inherit its environment: those of Ray.

vLLM gives Ray's workers variables of some prefixes, ours not among them; SGLang gives them none. Both engines pickle
their configuration to each worker, and a guard of ours rides on it: the record that it carries is :func:`launch`'s, and
unpickling it calls :func:`adopt` before anything in the worker reads a setting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from uccl_ep_serving.config import deciding

__all__ = ["adopt", "launch"]

_log = logging.getLogger("uccl_ep_serving")


def launch() -> dict[str, str]:
    """The record: what decides in this process, the launcher."""
    return deciding()


def adopt(record: Mapping[str, str]) -> None:
    """Set the variables of ``record`` that this process has not; what a worker's own environment sets stays, because a
    node may have other NICs than the launcher's."""
    missing = {name: value for name, value in record.items() if name not in os.environ}
    os.environ.update(missing)
    if missing:
        words = ", ".join(f"{name}={value}" for name, value in missing.items())
        _log.info("uccl_ep: this worker has from the launcher's environment: %s", words)
    for name, value in record.items():
        if (own := os.environ[name]) != value:
            message = "uccl_ep: %s=%s in this worker and %s where the engine was launched: the worker's own holds"
            _log.warning(message, name, own, value)
