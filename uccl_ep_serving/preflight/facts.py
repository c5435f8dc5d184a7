"""What each rank is and has, and where ranks that should be alike are not: told before anything is connected."""

from __future__ import annotations

import ipaddress
import platform
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib import metadata

import msgspec
import numpy as np
import psutil

from ..config import Settings
from ..control_plane.addresses import choose_address
from ..data_plane.nics import HostNics, gpu_address
from ..errors import ConfigError
from ..protocol.message import FORMAT_VERSION
from ..proxy.transport.select import NIC_TRANSPORTS
from .job import Finding, Place, failed
from .names import Names, gather_names, unreachable

__all__ = ["Facts", "Rail", "compare", "gather_facts"]

#: Of a copy in memory, to compare what is measured with.
_COPY_BYTES, _COPIES = 1 << 20, 64


class Rail(msgspec.Struct, frozen=True):
    """A NIC of a rank.

    Attributes:
        transport: that drives it.
        gbps: Gbit/s, 0.0 where the system does not say.
        mtu: path MTU of its port, bytes; 0 where that says nothing (EFA).
        alone: value of UCCL_EP_NICS that asks for its port in use, and for nothing else.
        network: of its address, "" where it has none that says so.
        said: what it is and which of its addresses is used.
    """

    transport: str
    name: str
    gbps: float
    mtu: int = 0
    alone: str = ""
    network: str = ""
    said: str = ""


class Facts(msgspec.Struct, frozen=True):
    """What a rank tells the others.

    Attributes:
        versions: of the package, its formats and what it stands on, by name; the first two must be the same.
        agreed: settings that must be the same.
        address, interface, mtu: where it listens, why there, and the MTU of that interface (0: not known).
        rails: its NICs, those that work.
        left_out: NICs that it does not use though it might, and why.
        names: addresses that an engine's own groups would take.
        gpu: name of its GPU, "" without one.
        links: to each GPU of its node: "NVLink", "peer access", "none"; () without one.
        copies: 1e9 bytes per second of a copy in memory.
    """

    node: int
    host: str
    versions: dict[str, str]
    agreed: dict[str, str]
    address: str
    interface: str
    mtu: int
    rails: tuple[Rail, ...] = ()
    left_out: tuple[str, ...] = ()
    names: Names = Names("", "")
    gpu: str = ""
    links: tuple[str, ...] = ()
    copies: float = 0.0


def gather_facts(place: Place, settings: Settings, store_host: str, gpu: str, links: tuple[str, ...]) -> Facts:
    """Those of this rank. Raises ConfigError for settings that say nothing here."""
    chosen = choose_address(settings, store_host)
    nics = HostNics(settings, place=place.local, local_ranks=place.locals, gpu=gpu_address() if gpu else "")
    rails, left_out = [], []
    for transport in NIC_TRANSPORTS:
        offer = nics.offers[transport]
        for nic in nics.rails[transport].nics if offer.nics else ():
            mtu, address, said = nics.port_facts(transport, nic)
            network = network_of(address, nic.name)
            rails.append(Rail(transport, nic.name, nic.gbps, mtu, nics.alone(nic), network, said))
        left_out += [*offer.broken, *([offer.reason] if offer.present and not offer.nics and offer.unused else [])]
        if offer.asked:
            raise ConfigError(f"{offer.asked} asks for NICs that cannot be used: {offer.reason}")
    name, mtu = _interface(chosen.address)
    return Facts(
        place.node,
        socket.gethostname(),
        {
            "uccl_ep_serving": metadata.version("uccl_ep_serving"),
            "wire formats": str(FORMAT_VERSION),
            "Python": platform.python_version(),
            "torch": metadata.version("torch"),
        },
        {name: repr(value) for name, value in settings.agreed().items()},
        chosen.address,
        name,
        mtu,
        tuple(rails),
        tuple(dict.fromkeys(left_out)),
        gather_names(settings.gloo_socket_ifname),
        gpu,
        links,
        _copies() if place.local == 0 else 0.0,
    )


def _interface(address: str) -> tuple[str, int]:
    """Name and MTU of the interface with this address."""
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name, stats[name].mtu if name in stats else 0
    return "", 0


def network_of(address: str, _nic: str) -> str:
    """The network of a NIC's address, as the interface that has it says; "" for an address of no interface."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if address and one.address == address and one.netmask:
                # of IPv6 the mask is written as an address as well, which no network is made of
                length = int(ipaddress.ip_address(one.netmask)).bit_count()
                return str(ipaddress.ip_interface(f"{address}/{length}").network)
    return ""


def _copies() -> float:
    source, target = (np.ones(_COPY_BYTES, np.uint8) for _ in range(2))
    target[:] = source
    begun = time.perf_counter()
    for _ in range(_COPIES):
        target[:] = source
    return _COPIES * _COPY_BYTES / (time.perf_counter() - begun) / 1e9


def compare(known: Sequence[Facts]) -> Iterator[Finding]:
    """Where ranks differ, each kind once for a node: with a fault where that stands in the way of a job."""
    first = known[0]
    seen = set()
    for rank, facts in enumerate(known):
        for name, value in facts.versions.items():
            if value != first.versions[name] and (name, facts.node) not in seen:
                seen.add((name, facts.node))
                yield _other_version(name, first, facts)
        for name, value in facts.agreed.items():
            if value != first.agreed.get(name) and (name, facts.node) not in seen:
                seen.add((name, facts.node))
                yield failed(
                    "settings",
                    f"rank {rank} on node {facts.node}",
                    expected=f"{name} = {first.agreed.get(name)}, as on rank 0",
                    found=f"{value}",
                    cause="the launcher gives nodes different environments",
                    step=f"the same {name} on all ranks",
                )
        for words in facts.left_out:
            if (words, facts.node) not in seen:
                seen.add((words, facts.node))
                yield _left_out(facts, words)
    yield from _networks(known)
    yield from _rails(known)


def _left_out(facts: Facts, words: str) -> Finding:
    """A NIC that does not work: worth a note while others do."""
    where = f"node {facts.node}"
    if facts.rails:
        return Finding("NICs", where, note=f"left out: {words}")
    step = "correct that (UCCL_EP_NIC_GID_INDEX unset takes the GID that NCCL would; uccl-ep doctor says more)"
    step += ", or UCCL_EP_TRANSPORT=tcp where no NIC is meant"
    cause = "the NIC, its address or its driver is not set up"
    return failed("NICs", where, expected="NICs that are there can be used", found=words, cause=cause, step=step)


def _other_version(name: str, first: Facts, facts: Facts) -> Finding:
    words = f"{name} {facts.versions[name]}, and {first.versions[name]} on node {first.node}"
    if name not in ("uccl_ep_serving", "wire formats"):
        return Finding("versions", f"node {facts.node}", note=f"{words}. Next step: one image for all nodes")
    return failed(
        "versions",
        f"node {facts.node} ({facts.host})",
        expected=f"{name} {first.versions[name]}, as on node {first.node}",
        found=facts.versions[name],
        cause="different versions on the nodes",
        step=f"pip install uccl_ep_serving=={first.versions['uccl_ep_serving']} there, or one image for all nodes",
    )


def _networks(known: Sequence[Facts]) -> Iterator[Finding]:
    """What stands between nodes: addresses that do not leave one, MTUs of the interfaces that tcp uses."""
    of_node = {facts.node: facts for facts in reversed(known)}
    if len(of_node) > 1:
        for node, facts in sorted(of_node.items()):
            where = f"node {node} ({facts.host})"
            yield from unreachable(facts.names, where, facts.host, facts.address, facts.interface)
    mtus = {facts.mtu for facts in of_node.values() if facts.mtu}
    if len(mtus) > 1:
        words = ", ".join(f"node {node}: {facts.interface} {facts.mtu}" for node, facts in sorted(of_node.items()))
        step = f"ip link set dev INTERFACE mtu {max(mtus)} on all nodes and on the switch"
        yield Finding("MTU", "interfaces", note=f"MTU mismatch: {words}. Next step: {step}")


def _rails(known: Sequence[Facts]) -> Iterator[Finding]:
    """How many NICs ranks have, their MTUs, and whether rail i is on one network everywhere."""
    counts = Counter(len(facts.rails) for facts in known)
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        for rank, facts in enumerate(known):
            if len(facts.rails) != usual:
                there = ", ".join(rail.name for rail in facts.rails) or "none"
                words = f"{len(facts.rails)} NICs ({there}), other ranks have {usual}: both ends use what they share"
                step = "uccl-ep doctor on that node says what became of each NIC"
                yield Finding("NICs", f"rank {rank} on node {facts.node}", note=f"{words}. Next step: {step}")
    by_rail: dict[int, dict[int, Rail]] = defaultdict(dict)
    for facts in reversed(known):
        for index, rail in enumerate(facts.rails):
            by_rail[index][facts.node] = rail
    for index, rails in sorted(by_rail.items()):
        mtus = {rail.mtu for rail in rails.values() if rail.mtu}
        if len(mtus) > 1:
            words = ", ".join(f"node {node}: {rail.name} {rail.mtu}" for node, rail in sorted(rails.items()))
            step = "the same MTU for the interface of each NIC, and at least that on the switch"
            yield Finding("MTU", f"rail {index}", note=f"MTU mismatch: {words}; {min(mtus)} is used. Next step: {step}")
    if swapped := swapped_rails(known):
        yield Finding("NICs", "rails", note=swapped)


def swapped_rails(known: Sequence[Facts]) -> str:
    """In words, that nodes have the same networks on their rails in another order; "" where they do not."""
    orders = {facts.node: tuple(rail.network for rail in facts.rails) for facts in reversed(known)}
    first = orders[min(orders)]
    for node, order in sorted(orders.items()):
        if order != first and sorted(order) == sorted(first) and len(set(order)) == len(order) and all(order):
            at = next(index for index, pair in enumerate(zip(first, order, strict=True)) if pair[0] != pair[1])
            return (
                f"swapped rails: rail {at} of node {min(orders)} is on {first[at]}, of node {node} on {order[at]}. "
                "Next step: swap the cables, or the addresses, of that node's NICs, so that rail i is on one network "
                "everywhere"
            )
    return ""
