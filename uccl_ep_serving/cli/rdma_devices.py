"""RDMA devices as sysfs describes them: no library is needed and no device is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["INFINIBAND", "Nic", "find_nics"]

INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device as sysfs describes it.

    Attributes:
        name: device name, for example ``rdmap0s6`` or ``mlx5_0``.
        driver: kernel driver bound to it (``efa``, ``mlx5_core``, ``bnxt_en``, …), "" for a virtual device.
        link: ``link_layer`` of its first port: ``Ethernet``, ``InfiniBand`` or ``Unspecified`` (EFA).
        active: whether a port is active.
        rate: rate of the first port as the kernel words it.
        numa: NUMA node, -1 when unknown.
    """

    name: str
    driver: str
    link: str
    active: bool
    rate: str
    numa: int

    @property
    def is_efa(self) -> bool:
        """Whether the device speaks SRD (AWS EFA)."""
        return self.driver == "efa"


def _read(path: Path, default: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return default


def find_nics(root: Path = INFINIBAND) -> list[Nic]:
    """RDMA devices under ``root``, sorted by name; an empty list where the kernel has none."""
    if not root.is_dir():
        return []
    nics = []
    for device in sorted(root.iterdir()):
        driver = device / "device" / "driver"
        ports = sorted((device / "ports").iterdir()) if (device / "ports").is_dir() else []
        nics.append(
            Nic(
                name=device.name,
                driver=driver.resolve().name if driver.exists() else "",
                link=_read(ports[0] / "link_layer") if ports else "",
                # the kernel writes "4: ACTIVE"
                active=any(_read(port / "state").endswith("ACTIVE") for port in ports),
                rate=_read(ports[0] / "rate") if ports else "",
                numa=int(_read(device / "device" / "numa_node", "-1")),
            )
        )
    return nics
