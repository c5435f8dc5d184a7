"""Devices that an engine may run this backend on: asked in the launcher, so nothing is imported or initialised."""

from __future__ import annotations

from uccl_ep_serving.errors import ConfigError

__all__ = ["SERVED", "check_device"]

SERVED = ("cpu",)
"""Types of devices (``torch.device.type``) for which this version has kernels of both modes."""


def check_device(device: str, option: str, demo: str) -> None:
    """Refuse a device without kernels.

    Args:
        device: for example ``"cuda"`` or ``"cuda:0"``.
        option: the engine's option that asked for the backend, with its value, for the message.
        demo: command that shows a run on CPU.

    Raises:
        ConfigError: this version has no kernels for ``device``.
    """
    if device.partition(":")[0] not in SERVED:
        raise ConfigError(
            f"{option}: this version of uccl_ep_serving has no kernels for {device} tensors, only for "
            f"{', '.join(SERVED)}. Start with another {option.split()[0]}, or see `{demo}` for a run on CPU."
        )
