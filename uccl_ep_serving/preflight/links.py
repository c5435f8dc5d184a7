"""How the GPUs of a node reach each other: what kernels that write their peers' memory go over."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["links_of"]

NVLINK, PEER, NONE, SELF = "NVLink", "peer access", "none", "itself"


def links_of(device: torch.device | None) -> tuple[str, ...]:
    """From the GPU ``device`` to each one that this process sees, in their order; () without a GPU."""
    if device is None or device.type != "cuda":
        return ()
    count, index = torch.cuda.device_count(), device.index or 0
    return tuple(SELF if other == index else _link(index, other) for other in range(count))


def _link(one: int, other: int) -> str:
    if not torch.cuda.can_device_access_peer(one, other):
        return NONE
    return NVLINK if torch.version.hip is None and _nvlink(one, other) else PEER


def _nvlink(one: int, other: int) -> bool:
    """What the driver's management library says; False where its bindings (nvidia-ml-py) are not installed."""
    with contextlib.suppress(Exception):  # the bindings raise an error of their own for each refusal
        import pynvml

        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByPciBusId(_address(index)) for index in (one, other)]
            return bool(pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0)
        finally:
            pynvml.nvmlShutdown()
    return False


def _address(index: int) -> str:
    found: Any = torch.cuda.get_device_properties(index)
    return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
