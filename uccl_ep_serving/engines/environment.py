"""The launcher's settings, carried to workers that do not inherit its environment: those of Ray.

vLLM gives Ray's workers variables of some prefixes, ours not among them; SGLang gives them none. Both engines pickle
their configuration to each worker, and a guard of ours rides on it: the record that it carries is :func:`launch`'s, and
unpickling it calls :func:`adopt` before anything in the worker reads a setting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from uccl_ep_serving.config import KEY_VARIABLE, deciding
from uccl_ep_serving.control_plane.secret import fingerprint, key_of_environment
from uccl_ep_serving.errors import ConfigError

__all__ = ["adopt", "launch"]

#: Of a record, which is no variable: the fingerprint of the key in ``UCCL_EP_SECRET``.
_KEY = "fingerprint of the key"

_log = logging.getLogger("uccl_ep_serving")


def launch() -> dict[str, str]:
    """The record: what decides in this process, the launcher, and whether there is a key: not the key itself."""
    key = key_of_environment()
    return deciding() if key is None else {**deciding(), _KEY: fingerprint(key)}


def adopt(record: Mapping[str, str]) -> None:
    """Set the variables of ``record`` that this process has not; what a worker's own environment sets stays, because a
    node may have other NICs than the launcher's.

    Raises:
        ConfigError: the launcher has a key in its environment, and this process has not that one.
    """
    wanted = record.get(_KEY)
    if wanted is not None and fingerprint(key_of_environment() or b"") != wanted:
        raise ConfigError(
            f"the engine was launched with {KEY_VARIABLE}, and this worker has "
            f"{'none' if key_of_environment() is None else 'another one'}: it is sent to no worker. "
            "Next step: UCCL_EP_SECRET_FILE with a file on every node, or that variable in the workers' environment"
        )
    record = {name: value for name, value in record.items() if name != _KEY}
    missing = {name: value for name, value in record.items() if name not in os.environ}
    os.environ.update(missing)
    if missing:
        words = ", ".join(f"{name}={value}" for name, value in missing.items())
        _log.info("uccl_ep: this worker has from the launcher's environment: %s", words)
    for name, value in record.items():
        if (own := os.environ[name]) != value:
            message = "uccl_ep: %s=%s in this worker and %s where the engine was launched: the worker's own holds"
            _log.warning(message, name, own, value)
