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
    """Set the variables of ``record`` that this process has not; what a worker's own environment sets stays."""
    missing = {name: value for name, value in record.items() if name not in os.environ}
    own = {name: os.environ[name] for name, value in record.items() if os.environ.get(name, value) != value}
    for where, variables in (("from the launcher's environment", missing), ("not the launcher's, but its own", own)):
        if variables:
            _log.info("uccl_ep: this worker has %s: %s", where, ", ".join(f"{n}={v}" for n, v in variables.items()))
    os.environ.update(missing)
