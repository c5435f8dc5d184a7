"""Devices that an engine may run this backend on: asked in the launcher, so nothing is imported or initialised."""

from __future__ import annotations

import logging

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError

__all__ = ["SERVED", "UNPROVED", "check_device"]

_log = logging.getLogger("uccl_ep_serving")

SERVED = ("cpu",)
"""Types of devices (``torch.device.type``) for which this version has kernels of both modes, proved on hardware."""

UNPROVED = ("cuda",)
"""Those whose kernels have run in Triton's interpreter and compile, but never on a device. ROCm is "cuda" as well."""


def check_device(device: str, option: str, demo: str) -> None:
    """Refuse a device without kernels, and one without proved kernels unless ``UCCL_EP_DEVICE`` names it.

    Args:
        device: for example ``"cuda"`` or ``"cuda:0"``.
        option: the engine's option that asked for the backend, with its value, for the message.
        demo: command that shows a run on CPU.

    Raises:
        ConfigError: this version has no kernels for ``device``, or none that were proved and nobody asked for those.
    """
    kind = device.partition(":")[0]
    if kind in SERVED:
        return
    elsewhere = f"start with another {option.split()[0]}, or see `{demo}` for a run on CPU"
    if kind not in UNPROVED:
        raise ConfigError(
            f"{option}: this version of uccl_ep_serving has no kernels for {device} tensors, only for "
            f"{', '.join(SERVED + UNPROVED)}. Next step: {elsewhere}"
        )
    if Settings.from_environment().device != kind:
        raise ConfigError(
            f"{option}: the kernels of this version for {device} tensors have run in Triton's interpreter and compile, "
            f"but no GPU has run them yet. Next step: `make test-gpu`, then UCCL_EP_DEVICE={kind} to serve with them; "
            f"or {elsewhere}"
        )
    _log.warning("%s: the kernels for %s tensors were never proved on a GPU: compare what it answers", option, device)
