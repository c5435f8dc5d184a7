"""Builds a sysfs tree from a few lines of text, so that a machine fits on one screen.

    node 0 cpus 0-47,96-143
    pci0000:00/00:01.1/01:00.0/02:01.0/09:00.0  nic bnxt_re0 driver=bnxt_en numa=0 rate=400 link=Ethernet
    pci0000:00/00:01.1/01:00.0/02:00.0/05:00.0  gpu amd numa=0
    -                                           nic rxe0 rate=10 link=Ethernet
    pci0000:00/00:03.0                          net eth0 addr=10.0.0.11 default=yes
    -                                           net docker0 addr=172.17.0.1 bridge=veth1
    -                                           net veth1 iflink=7
    gpus H200 major=9 ordering=200 peers=yes direct=dma-buf

A PCI device stands with all the bridges above it (in a domain inside another, those of both); ``-`` is no PCI device.
``state=DOWN`` makes a port inactive. A network interface is of its own ``ifindex`` (the line's number) unless it has
``iflink=``, the index of its other end; ``below=`` names what it lies on, ``bridge=`` the ports of a bridge,
``devtype=`` its kind, ``type=`` its hardware, ``flags=`` what net/if.h names so. ``gpus`` says what sysfs does not: the
model, its major compute capability, how it orders the writes of NICs (``cudaDevAttrGPUDirectRDMAWritesOrdering``),
whether GPUs of a host reach each other, and how NICs reach their memory. ``net=eth2`` names the network interface of a
line ``nic``.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from uccl_ep_serving.control_plane.addresses import Interface, interfaces
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
    for words in _lines(text):
        if words[0] == "gpus":
            continue
        if words[0] == "node":
            _write(root / f"devices/system/node/node{words[1]}/cpulist", words[3])
            continue
        path, kind, name, *rest = words
        options = dict(word.split("=") for word in rest)
        device = root / "devices/virtual" if path == "-" else _pci_device(root, path)
        if path != "-" and ("numa" in options or not (device / "numa_node").exists()):
            _write(device / "numa_node", options.get("numa", "-1"))
        if kind == "net":
            _interface(root, device, name, options, software=path == "-")
        elif kind == "gpu":
            vendor, pci_class = _VENDORS[name]
            _write(device / "vendor", f"{vendor:#06x}")
            _write(device / "class", f"{pci_class:#08x}")
        else:
            _nic(root, device, name, options, software=path == "-")


def facts(text: str) -> dict[str, str]:
    """What the line ``gpus`` of ``text`` says, with the model as "name"."""
    (line,) = [words for words in _lines(text) if words[0] == "gpus"]
    return {"name": line[1], **dict(word.split("=") for word in line[2:])}


@dataclass(frozen=True)
class Network:
    """What a machine's interfaces are, and how its kernel would route."""

    interfaces: list[Interface]
    default: str

    def route(self, host: str) -> str:
        """The address from which it sends to ``host``: that of the interface whose /24 or /64 it is in, else that of
        the default route."""
        target = ipaddress.ip_address(host)
        length = 24 if target.version == 4 else 64
        net = ipaddress.ip_network(f"{target}/{length}", strict=False)
        near = [text for one in self.interfaces for text in one.addresses if ipaddress.ip_address(text) in net]
        return near[0] if near else self.default


def network(text: str, root: Path) -> Network:
    """The interfaces of the tree that ``text`` describes, which stands below ``root``."""
    addresses, default = {}, ""
    for words in _lines(text):
        if "net" in words[1:2]:
            options = dict(word.split("=") for word in words[3:])
            addresses[words[2]] = [one for one in options.get("addr", "").split(",") if one]
            default = addresses[words[2]][0] if "default" in options else default
    return Network(interfaces(root, addresses), default)


def _lines(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.partition("#")[0].split())]


def _interface(root: Path, device: Path, name: str, options: dict[str, str], *, software: bool) -> None:
    entry = device / "net" / name
    index = len(list((root / "class/net").iterdir())) + 1 if (root / "class/net").exists() else 1
    _write(entry / "ifindex", str(index))
    _write(entry / "iflink", options.get("iflink", str(index)))
    _write(entry / "type", options.get("type", "1"))
    _write(entry / "flags", options.get("flags", "0x1003"))
    _write(entry / "uevent", f"DEVTYPE={options['devtype']}" if "devtype" in options else f"INTERFACE={name}")
    if "tun" in options:
        _write(entry / "tun_flags", "0x1002")
    if "bridge" in options:
        _write(entry / "bridge/stp_state", "0")
    (root / "class/net").mkdir(parents=True, exist_ok=True)
    _link(root / "class/net" / name, entry)
    for below in filter(None, [*options.get("below", "").split(","), *options.get("bridge", "").split(",")]):
        # as the kernel does, to where the other stands; it may be a line further down
        (entry / f"lower_{below}").symlink_to(root / "class/net" / below)
    if not software:
        _link(entry / "device", device)


def _pci_device(root: Path, path: str) -> Path:
    host, *addresses = path.split("/")
    device = root / "devices" / host
    for address in addresses:
        if address.startswith("pci"):  # the root of a domain inside this one: no device
            device /= address
            continue
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
