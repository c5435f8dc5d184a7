"""Counters that prove which way data went: of our Buffer, and of the NICs of this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.subjects import Subject
from uccl_ep_serving.buffer import Buffer

__all__ = ["nic_counters", "read_counters"]

_SYSFS = Path("/sys/class/infiniband")
#: Bytes of one unit of a counter: of InfiniBand and RoCE, then of EFA.
_UNITS = {
    "counters/port_xmit_data": 4,
    "hw_counters/tx_bytes": 1,
    "hw_counters/rdma_write_bytes": 1,
    "hw_counters/rdma_read_bytes": 1,
}
_OF_BUFFER = ("bytes_sent", "messages_sent", "writes")


def nic_counters(sysfs: Path = _SYSFS) -> dict[str, float]:
    """Bytes that each NIC has counted so far, by "mlx5_0 port_xmit_data". Empty without NICs."""
    found: dict[str, float] = {}
    for name, unit in _UNITS.items():
        for counter in sorted(sysfs.glob(f"*/ports/*/{name}")):
            try:
                value = int(counter.read_text())
            except (OSError, ValueError):  # one that this device does not have
                continue
            device = counter.parents[3].name
            key = f"{device} {counter.name}"
            found[key] = found.get(key, 0) + value * unit
    return found


def read_counters(subject: Subject) -> dict[str, float]:
    """What has been counted so far: by this rank's Buffer if ``subject`` has one of ours, and by this host's NICs.

    NICs are read by the first rank of a host only, so that sums over ranks count each once. They count the traffic of
    other processes as well.
    """
    found: dict[str, float] = {}
    buffer: Any = getattr(subject, "buffer", None)
    if isinstance(buffer, Buffer):
        stats = buffer.stats()
        found = {name: stats.get(name, 0) for name in _OF_BUFFER}
    return found | (nic_counters() if os.environ.get("LOCAL_RANK", "0") == "0" else {})
