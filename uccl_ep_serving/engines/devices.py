"""Devices that an engine may run this backend on: asked in the launcher, which initialises nothing for it."""

from __future__ import annotations

import logging

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError

__all__ = ["CHECKED", "SERVED", "check_device"]

_log = logging.getLogger("uccl_ep_serving")

SERVED = ("cpu",)
"""Types of devices (``torch.device.type``) that every machine serves alike."""

CHECKED = ("cuda",)
"""Those on which each machine must show first that the kernels run: ``uccl-ep check --gpu``. ROCm is "cuda" as well."""

#: Devices for which the check was found passed in this process.
_passed: set[str] = set()


def check_device(device: str, option: str, demo: str) -> None:
    """Refuse a device without kernels, and a GPU without a check on record that fits this machine and has passed.

    Where there is no record the check is run here, in a process of its own: two minutes at most, once on a host.
    ``UCCL_EP_DEVICE`` with the name of the device skips it.

    Args:
        device: for example ``"cuda"`` or ``"cuda:0"``.
        option: the engine's option that asked for the backend, with its value, for the message.
        demo: command that shows a run on CPU.

    Raises:
        ConfigError: this version has no kernels for ``device``; or its check has failed, or could not be run.
    """
    kind = device.partition(":")[0]
    if kind in SERVED or kind in _passed:
        return
    elsewhere = f"start with another {option.split()[0]}, or see `{demo}` for a run on CPU"
    if kind not in CHECKED:
        raise ConfigError(
            f"{option}: this version of uccl_ep_serving has no kernels for {device} tensors, only for "
            f"{', '.join(SERVED + CHECKED)}. Next step: {elsewhere}"
        )
    settings = Settings.from_environment()
    if settings.device == kind:
        _log.warning(
            "%s: UCCL_EP_DEVICE=%s skips the check of GPUs (`uccl-ep check --gpu`): compare what the server answers",
            option,
            kind,
        )
        return
    if why := _why_not(settings.gpu_check):
        raise ConfigError(f"{option}: {why}; or {elsewhere}")
    _passed.add(kind)


def _why_not(may_check: bool) -> str:
    """Why the GPUs of this machine may not be used, with the next step; "" where they may."""
    # imported here: whoever does not ask for a GPU pays nothing
    from uccl_ep_serving.check.gate import SECONDS, checked
    from uccl_ep_serving.check.machine import present
    from uccl_ep_serving.check.stamp import COMMAND, State, look

    again = f"Next step: `{COMMAND}` on this machine ({SECONDS:.0f} s at most), then start again"
    try:
        machine = present()
    except RuntimeError as error:
        return f"{error}. {again}"
    if not machine.gpus:
        return f"no GPU is visible to this process, so that nothing shows that this machine's run the kernels. {again}"
    record = look(machine)
    if record.state is State.UNKNOWN:
        if not may_check:
            return f"{record.why}, and UCCL_EP_GPU_CHECK=0 lets no engine run it. {again}"
        record = checked(machine)
    if record.state is not State.PASSED:
        return f"{record.why.rstrip('.')}. {again}"
    _log.info("uccl_ep: %s", record.why)
    return ""
