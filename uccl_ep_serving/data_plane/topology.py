"""GPUs, RDMA NICs and NUMA nodes of this machine, and how far they are apart, as sysfs describes them.

Nothing is opened and no library is needed. A PCI device's *path* is the chain of bridges above it, read from where its
sysfs link points (``/sys/devices/pci0000:00/0000:00:01.1/0000:01:00.0/…``); two paths say what lies between two
devices. Virtual machines often show less than there is (all devices on one root bus): then only the NUMA node tells
devices apart, and :mod:`uccl_ep_serving.data_plane.rails` deals NICs out evenly.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

__all__ = ["SYSFS", "Distance", "Gpu", "Nic", "Topology", "entries_of", "number_of", "parse_cpus", "text_of"]

SYSFS = Path("/sys")

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")

#: PCI classes (24 bits: class, subclass, interface) that GPUs have: a display controller 0x03…, or, on AMD Instinct, a
#: processing accelerator 0x1200….
_GPU_CLASSES = (0x03, 0x12)
#: PCI vendors of GPUs: NVIDIA, AMD. Other display controllers are management consoles.
_GPU_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD"}


class Distance(IntEnum):
    """What lies between two PCI devices; smaller is nearer. In brackets NCCL's and ``nvidia-smi topo``'s words."""

    SWITCH = 0  # at most one bridge or switch (PIX)
    SWITCHES = 1  # several switches, below one root port (PXB)
    ROOT = 2  # the root complex, within one host bridge (PHB)
    NUMA = 3  # host bridges of one NUMA node (NODE)
    SYSTEM = 4  # the link between NUMA nodes (SYS)
    UNKNOWN = 5  # one of them is not a PCI device, or its place is not known


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device.

    Attributes:
        name: device name, for example ``rdmap79s0`` or ``bnxt_re0``.
        driver: kernel driver of its PCI device (``efa``, ``mlx5_core``, ``bnxt_en``, …), "" for a software device.
        link: ``link_layer`` of its first port: ``Ethernet``, ``InfiniBand`` or ``Unknown`` (EFA).
        active: a port is active.
        gbps: rate of its fastest active port (of its first port when none is) in Gbit/s, 0.0 when unknown.
        numa: NUMA node, -1 when unknown.
        address: PCI address, "" for a software device.
        path: host bridge and bridges from the root to the device, the device last; () for a software device.
        ports: numbers of its active ports.
    """

    name: str
    driver: str
    link: str
    active: bool
    gbps: float
    numa: int
    address: str = ""
    path: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()

    @property
    def is_efa(self) -> bool:
        """Whether the device speaks SRD (AWS EFA)."""
        return self.driver == "efa"

    @property
    def transport(self) -> str:
        """The transport that drives it: ``efa`` or ``roce``."""
        return "efa" if self.is_efa else "roce"

    @property
    def is_software(self) -> bool:
        """Whether no PCI device is behind it (soft-RoCE, soft-iWARP)."""
        return not self.address


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: PCI address, vendor, NUMA node (-1 when unknown), and its path as in :class:`Nic`."""

    address: str
    vendor: str
    numa: int
    path: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """What :meth:`read` found: GPUs and NICs by PCI address (software NICs last), and the cores of each NUMA node."""

    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    cpus: dict[int, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, sysfs: Path = SYSFS) -> Topology:
        """The machine under ``sysfs``. Never raises: what cannot be read is left out or unknown."""
        gpus = [gpu for device in entries_of(sysfs / "bus/pci/devices") if (gpu := _gpu(device)) is not None]
        nics = [_nic(device) for device in entries_of(sysfs / "class/infiniband")]
        nodes = {}
        for node in entries_of(sysfs / "devices/system/node"):
            if re.fullmatch(r"node\d+", node.name):
                nodes[int(node.name[4:])] = parse_cpus(text_of(node / "cpulist"))
        return cls(
            tuple(sorted(gpus, key=lambda gpu: gpu.address)),
            tuple(sorted(nics, key=lambda nic: (nic.is_software, nic.address, nic.name))),
            nodes,
        )

    def gpu(self, address: str) -> Gpu | None:
        """The GPU at PCI ``address``, or None."""
        return next((gpu for gpu in self.gpus if gpu.address == address.lower()), None)

    def near_cpus(self, nic: Nic) -> frozenset[int]:
        """Cores of the NIC's NUMA node that this process may use; empty when the node or its cores are unknown."""
        return self.cpus.get(nic.numa, frozenset()) & os.sched_getaffinity(0)

    @staticmethod
    def distance(one: Gpu | Nic, other: Gpu | Nic) -> Distance:
        """What lies between two devices."""
        if not one.path or not other.path:
            return Distance.UNKNOWN
        shared = 0
        for a, b in zip(one.path, other.path, strict=False):
            if a != b:
                break
            shared += 1
        if shared == 0:
            if one.numa < 0 or other.numa < 0:
                return Distance.UNKNOWN
            return Distance.NUMA if one.numa == other.numa else Distance.SYSTEM
        if shared == 1:
            return Distance.ROOT
        # A switch is an upstream bridge and one bridge per downstream port: below the last bridge that both have in
        # common, one more on each side is still the same switch (the device itself is one entry of its path).
        below = max(len(one.path), len(other.path)) - shared - 1
        return Distance.SWITCH if below <= 1 else Distance.SWITCHES


def parse_cpus(text: str) -> frozenset[int]:
    """Cores of a kernel CPU list such as ``0-47,96-143``; empty for text that is none."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def entries_of(directory: Path) -> list[Path]:
    """What is in a directory, by name; nothing where it cannot be read."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def text_of(path: Path) -> str:
    """A file's text without the white space around it; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def number_of(path: Path, default: int) -> int:
    """The number in a file; ``default`` where there is none."""
    try:
        return int(text_of(path), 0)
    except ValueError:
        return default


def _path_of(device: Path) -> tuple[str, ...]:
    """Host bridge, bridges and device, from where the sysfs link of a PCI device leads. Where a device
    holds a PCI domain of its own (Intel's VMD), the bridges of both, without the second host bridge."""
    parts = device.resolve().parts
    starts = [index for index, part in enumerate(parts) if _ROOT.fullmatch(part)]
    if not starts:
        return ()
    devices = filter(_ADDRESS.fullmatch, parts[starts[0] + 1 :])
    path = (parts[starts[0]], *devices)
    return path if len(path) > 1 else ()


def _gpu(device: Path) -> Gpu | None:
    vendor = number_of(device / "vendor", 0)
    if vendor not in _GPU_VENDORS or number_of(device / "class", 0) >> 16 not in _GPU_CLASSES:
        return None
    return Gpu(device.name, _GPU_VENDORS[vendor], number_of(device / "numa_node", -1), _path_of(device))


def _nic(entry: Path) -> Nic:
    device = entry / "device"
    path = _path_of(device)
    driver = device / "driver"
    ports = [port for port in entries_of(entry / "ports") if port.name.isdigit()]
    # The kernel writes "4: ACTIVE".
    active = [port for port in ports if text_of(port / "state").endswith(" ACTIVE")]
    return Nic(
        name=entry.name,
        driver=driver.resolve().name if driver.exists() else "",
        link=text_of(ports[0] / "link_layer") if ports else "",
        active=bool(active),
        gbps=max((_gbps(port) for port in active or ports[:1]), default=0.0),
        numa=number_of(device / "numa_node", -1),
        address=path[-1] if path else "",
        path=path,
        ports=tuple(int(port.name) for port in active),
    )


def _gbps(port: Path) -> float:
    """Rate of a port: the kernel writes "100 Gb/sec (4X EDR)"."""
    found = re.match(r"([0-9.]+) Gb/sec", text_of(port / "rate"))
    return float(found[1]) if found else 0.0
