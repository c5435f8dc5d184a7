"""Builds a sysfs tree from a few lines of text, so that a machine fits on one screen.

    node 0 cpus 0-47,96-143
    pci0000:00/00:01.1/01:00.0/02:01.0/09:00.0  nic bnxt_re0 driver=bnxt_en numa=0 rate=400 link=Ethernet
    pci0000:00/00:01.1/01:00.0/02:00.0/05:00.0  gpu amd numa=0
    -                                           nic rxe0 rate=10 link=Ethernet

A PCI device stands with all the bridges above it; ``-`` is no PCI device. ``state=DOWN`` makes a port inactive,
``net=eth2`` names a NIC's network interface.
"""

from __future__ import annotations

import os
from pathlib import Path

from uccl_ep_serving.data_plane.topology import Topology

MACHINES = Path(__file__).parent / "machines"

_NIC_VENDORS = {"bnxt_en": 0x14E4, "efa": 0x1D0F, "ionic": 0x1DD8}
_VENDORS = {"nvidia": (0x10DE, 0x030200), "amd": (0x1002, 0x120000), "console": (0x1A03, 0x030000)}


def machine(name: str, root: Path) -> Topology:
    """The topology read from the tree of ``machines/NAME.txt``, built below ``root``."""
    return topology((MACHINES / f"{name}.txt").read_text(), root)


def topology(text: str, root: Path) -> Topology:
    """The topology read from the tree that ``text`` describes, built below ``root``."""
    build(text, root)
    return Topology.read(root)


def build(text: str, root: Path) -> None:
    """Build the tree that ``text`` describes below ``root``."""
    (root / "bus/pci/devices").mkdir(parents=True)
    (root / "class/infiniband").mkdir(parents=True)
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[0] == "node":
            _write(root / f"devices/system/node/node{words[1]}/cpulist", words[3])
            continue
        path, kind, name, *rest = words
        options = dict(word.split("=") for word in rest)
        device = root / "devices/virtual" if path == "-" else _pci_device(root, path)
        if path != "-":
            _write(device / "numa_node", options.get("numa", "-1"))
        if kind == "gpu":
            vendor, pci_class = _VENDORS[name]
            _write(device / "vendor", f"{vendor:#06x}")
            _write(device / "class", f"{pci_class:#08x}")
        else:
            _nic(root, device, name, options, software=path == "-")


def _pci_device(root: Path, path: str) -> Path:
    host, *addresses = path.split("/")
    device = root / "devices" / host
    for address in addresses:
        full = address if address.count(":") == 2 else f"{host[3:7]}:{address}"
        device /= full
        device.mkdir(parents=True, exist_ok=True)
        if not (device / "class").exists():
            _write(device / "class", "0x060400")
            _write(device / "vendor", "0x1000")
            _link(root / "bus/pci/devices" / full, device)
    return device


def _nic(root: Path, device: Path, name: str, options: dict[str, str], *, software: bool) -> None:
    entry = device / "infiniband" / name
    port = entry / "ports" / "1"
    state = options.get("state", "ACTIVE")
    _write(port / "state", {"ACTIVE": "4: ACTIVE", "DOWN": "1: DOWN"}[state])
    _write(port / "rate", f"{options['rate']} Gb/sec (4X NDR)")
    _write(port / "link_layer", options["link"])
    _link(root / "class/infiniband" / name, entry)
    if not software:
        _write(device / "class", "0x020000")
        _write(device / "vendor", f"{_NIC_VENDORS.get(options['driver'], 0x15B3):#06x}")
        if interface := options.get("net"):
            (device / "net" / interface).mkdir(parents=True)
            (root / "class/net").mkdir(parents=True, exist_ok=True)
            _link(root / "class/net" / interface, device / "net" / interface)
        _link(entry / "device", device)
        driver = root / "bus/pci/drivers" / options["driver"]
        driver.mkdir(parents=True, exist_ok=True)
        _link(device / "driver", driver)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink():
        # Relative, as in the real tree: it may be moved.
        link.symlink_to(os.path.relpath(target, link.parent))
