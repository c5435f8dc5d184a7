"""Which address of this host other hosts connect to, and why.

In this order: ``UCCL_EP_SOCKET_IFNAME``; the route towards the host of the process group's own store, which every rank
has reached already; ``GLOO_SOCKET_IFNAME``; ``NCCL_SOCKET_IFNAME``; the route towards ``MASTER_ADDR``. The last resort
is a guess from what sysfs says of the interfaces. Neither a route nor the guess takes an interface whose packets stay
in this host (``docker0``, ``cni0``, ``cilium_host``, ``kube-ipvs0``), whatever its name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import psutil

from ..config import Settings
from ..errors import ConfigError

__all__ = ["Address", "Interface", "InterfaceFilter", "Kind", "choose_address", "interfaces", "is_loopback"]

_SYSFS = Path("/sys")
_LOOPBACK = "127.0.0.1"
#: Tunnels by DEVTYPE of uevent, some of which lie on a device; and by hardware type (if_arp.h): ppp, ipip, ip6tnl, sit,
#: gre, ip6gre, none (xfrm).
_TUNNELS = frozenset(("vxlan", "geneve", "wireguard"))
_TUNNEL_TYPES = frozenset(("512", "768", "769", "776", "778", "823", "65534"))
#: IFF_LOOPBACK, IFF_NOARP (a dummy, ifb).
_LOOPBACK_FLAG, _NO_ARP = 0x8, 0x80
#: Interfaces stand on one another at most so deep: macvlan, bridge, VLAN, bond, NIC; and some more.
_DEPTH = 8
#: Addresses for documentation (RFC 5737, RFC 3849), which no host has, so the route there is the default route.
_ELSEWHERE = ("203.0.113.1", "2001:db8:ffff::1")


class Kind(IntEnum):
    """What stands behind an interface; the smaller, the more likely it leads to the other hosts."""

    DEVICE = 0  # a device, or made of devices: a bond, a VLAN, a bridge with a NIC among its ports
    UNKNOWN = 1  # sysfs does not show it
    FAR_END = 2  # its other end is elsewhere: what a pod has, a port of Open vSwitch
    ROUTED = 3  # lo or a dummy with the host's own address, to which a routing protocol leads other hosts
    TUNNEL = 4  # tun, vxlan, wireguard
    INSIDE = 5  # packets stay in this host: a bridge of containers, a pair of veth, a dummy, loopback


_GUESSES = {
    Kind.DEVICE: "the first on a network device",
    Kind.UNKNOWN: "sysfs does not show what it is",
    Kind.FAR_END: "the first whose other end is elsewhere",
    Kind.ROUTED: "no device has an address",
    Kind.TUNNEL: "only tunnels lead out of this host",
}


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up.

    Attributes:
        addresses: that other interfaces reach (none link-local), IPv4 first.
    """

    name: str
    kind: Kind
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """The choice.

    Attributes:
        address: numeric.
        reason: interface, and what decided, in words.
        guessed: nothing that the user or the launcher has said decided.
        ignored: variables that were set and say nothing here, in words.
        overruled: a variable that was set and asks for another interface than the route, in words with the next step;
            "" where there is none.
    """

    address: str
    reason: str
    guessed: bool = False
    ignored: tuple[str, ...] = ()
    overruled: str = ""

    def __str__(self) -> str:
        return f"{self.address} ({self.reason})"


@dataclass(frozen=True, slots=True)
class InterfaceFilter:
    """A list of interfaces in the syntax of ``NCCL_SOCKET_IFNAME``: prefixes; ``=`` exact names; ``^`` all others.

    Attributes:
        exact: names are exact also without ``=``, as gloo has it.
    """

    text: str
    variable: str
    exact: bool = False

    @property
    def excludes(self) -> bool:
        """Whether it names the interfaces that are not to be used."""
        return self.text.startswith("^")

    @property
    def _names(self) -> list[str]:
        return [name for part in self.text.lstrip("^").lstrip("=").split(",") if (name := part.strip())]

    def _matches(self, name: str, pattern: str) -> bool:
        exact = self.exact or self.text.lstrip("^").startswith("=")
        return name == pattern if exact else name.startswith(pattern)

    def choose(self, found: Sequence[Interface]) -> list[Interface]:
        """The interfaces of ``found`` (likeliest first) that it asks for, in the order of the list."""
        if self.excludes:
            return [
                one
                for one in found
                if one.kind != Kind.INSIDE and not any(self._matches(one.name, name) for name in self._names)
            ]
        chosen: dict[Interface, None] = {}
        for name in self._names:
            matching = [one for one in found if self._matches(one.name, name)]
            # a whole name before names that begin so
            chosen.update(dict.fromkeys(sorted(matching, key=lambda one: one.name != name)))
        return list(chosen)


def is_loopback(address: str) -> bool:
    """Whether ``address``, or this name of a host, leads to the host itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _unusable(address: str) -> bool:
    """Whether no other host could connect to ``address``, for reasons other than loopback."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_link_local or parsed.is_unspecified


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _ends(net: Path) -> dict[str, str]:
    """By index of each interface in ``net``, the index of what it is a link to: itself, or the other end of a pair."""
    try:
        return {_read(one / "ifindex"): _read(one / "iflink") for one in net.iterdir()}
    except OSError:
        return {}


def _devtype(entry: Path) -> str:
    """DEVTYPE of an interface in sysfs."""
    return dict(line.partition("=")[::2] for line in _read(entry / "uevent").splitlines()).get("DEVTYPE", "")


def _kind(net: Path, name: str, ends: Mapping[str, str], depth: int = _DEPTH) -> Kind:
    """What stands behind ``name`` in ``net``, the directory class/net of sysfs. ``ends``: of :func:`_ends`."""
    entry = net / name
    if not entry.exists() or depth == 0:
        return Kind.UNKNOWN
    if (entry / "device").exists():
        return Kind.DEVICE
    if _devtype(entry) in _TUNNELS or _read(entry / "type") in _TUNNEL_TYPES or (entry / "tun_flags").exists():
        return Kind.TUNNEL
    below = [link.name.removeprefix("lower_") for link in entry.glob("lower_*")]
    kinds = {_kind(net, one, ends, depth - 1) for one in below}
    if (entry / "bridge").exists():
        if Kind.DEVICE in kinds:
            return Kind.DEVICE
        # a network over a tunnel, as in EVPN; other ports are ends of containers and of virtual machines
        return Kind.TUNNEL if any(_devtype(net / one) in _TUNNELS for one in below) else Kind.INSIDE
    if kinds:  # a bond, a VLAN, macvlan
        return min(kinds)
    own, other = _read(entry / "ifindex"), _read(entry / "iflink")
    if own != other:
        # a pair of veth with both ends here, as cilium_host and cilium_net. What a pod has of netkit and of ipvlan
        # knows no ARP either, so the flag says nothing of these.
        return Kind.INSIDE if ends.get(other) == own else Kind.FAR_END
    flags = int(_read(entry / "flags") or "0", 16)
    return Kind.INSIDE if flags & (_LOOPBACK_FLAG | _NO_ARP) else Kind.FAR_END


def interfaces(sysfs: Path = _SYSFS, addresses: Mapping[str, Sequence[str]] | None = None) -> list[Interface]:
    """The interfaces of this network namespace that are up and have an address, by name.

    Args:
        addresses: by name of the interfaces that are up; None = ask the system.
    """
    found = []
    net = sysfs / "class/net"
    ends = _ends(net)
    for name, texts in sorted((_addresses() if addresses is None else addresses).items()):
        if usable := [text for text in texts if not _unusable(text)]:
            usable.sort(key=lambda text: (is_loopback(text), ":" in text))
            found.append(Interface(name, _kind(net, name, ends), tuple(usable)))
    return found


def _addresses() -> dict[str, list[str]]:
    """IP addresses of the interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found: dict[str, list[str]] = {}
    for label, entries in psutil.net_if_addrs().items():
        # an address may carry a label, eth0:1, which is no name of an interface
        if (name := label.partition(":")[0]) in up:
            found.setdefault(name, []).extend(one.address for one in entries if one.family in families)
    return found


def _route(host: str) -> str:
    """The address from which this host would send to ``host``; "" where there is no route or no such name.

    IPv4 where both lead there: a route over IPv6 may come of an announcement alone, and whether the store was reached
    over it is not known, because torch falls back to IPv4.
    """
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    found = ""
    for family, _, _, _, target in sorted(targets, key=lambda one: one[0] == socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not _unusable(address) and (not found or is_loopback(found)):
            found = address
    return found


def _towards(host: str, what: str, found: Sequence[Interface], route: Callable[[str], str]) -> Address | None:
    """The address on the route towards ``host``; None where that says nothing of how other hosts reach this one."""
    address = route(host) if host else ""
    if not address:
        return None
    holder = next((one for one in found if address in one.addresses), None)
    if is_loopback(address):
        # Debian's /etc/hosts maps a host's own name to 127.0.1.1: on that host the route then leads to loopback, where
        # no other host gets. A host given as loopback means one host.
        leads_out = is_loopback(host)
    elif holder is None or holder.kind == Kind.INSIDE:
        # Every node has the virtual addresses of a cluster's services on kube-ipvs0, which is down, or on lo: the route
        # towards one of them does not leave the node.
        leads_out = False
    else:
        leads_out = holder.kind != Kind.ROUTED or address == holder.addresses[0]
    return Address(address, f"{holder.name if holder else 'loopback'}, {what}") if leads_out else None


def _by_route(found: Sequence[Interface], default: str) -> list[Interface]:
    """``found`` with what ``default``, from which this host sends to everywhere, says of it.

    An interface's address is the default route's, not a virtual one beside it. Hosts routed by BGP have their address
    on lo or a dummy: it is told from a virtual one by being the default route's, or by being all there is.
    """
    alone = all(one.kind > Kind.ROUTED for one in found)
    result = []
    for one in found:
        first, kind = one.addresses[0], one.kind
        # IPv4 stays first on a device, as in _route
        if default in one.addresses and (kind == Kind.INSIDE or (":" in default) == (":" in first)):
            first = default
        local = any(map(is_loopback, one.addresses))
        if kind == Kind.INSIDE and not is_loopback(first) and (first == default or (alone and local)):
            kind = Kind.ROUTED
        addresses = sorted(one.addresses, key=lambda text, first=first: text != first)  # type: ignore[misc]
        result.append(replace(one, kind=kind, addresses=tuple(addresses)))
    return result


def _listed(wanted: InterfaceFilter, found: Sequence[Interface]) -> Address | None:
    """What a variable asks for; None where there is no such interface."""
    chosen = wanted.choose(found)
    if not chosen:
        return None
    guessed = wanted.excludes and len(chosen) > 1
    words = f"{chosen[0].name}, {wanted.variable}={wanted.text}"
    return Address(chosen[0].addresses[0], f"{words}, the likeliest that it leaves" if guessed else words, guessed)


def choose_address(
    settings: Settings,
    store_host: str = "",
    found: Sequence[Interface] | None = None,
    route: Callable[[str], str] = _route,
) -> Address:
    """Where this rank listens for ranks on other hosts.

    Args:
        settings: ``UCCL_EP_SOCKET_IFNAME`` and the variables of gloo, NCCL and the launcher.
        store_host: host of the TCPStore under the process group, "" where there is none.
        found: interfaces of this host; None = look.
        route: (host) -> address from which this host sends there, "" without a route.

    Raises:
        ConfigError: ``UCCL_EP_SOCKET_IFNAME`` names no interface that is up and has an address.
    """
    found = interfaces() if found is None else found
    default = next((address for one in _ELSEWHERE if (address := route(one)) and not is_loopback(address)), "")
    found = _by_route(found, default)
    likeliest = sorted(found, key=lambda one: (one.kind > Kind.ROUTED, default not in one.addresses, one.kind))
    if settings.socket_ifname:
        wanted = InterfaceFilter(settings.socket_ifname, "UCCL_EP_SOCKET_IFNAME")
        if (chosen := _listed(wanted, likeliest)) is None:
            there = ", ".join(f"{one.name} {one.addresses[0]}" for one in found) or "none"
            raise ConfigError(
                f"UCCL_EP_SOCKET_IFNAME={settings.socket_ifname!r}: no such interface is up and has an address that "
                f"other hosts could reach; there are {there}"
            )
        return chosen
    variables = [
        InterfaceFilter(text, variable, exact)
        for variable, text, exact in (
            ("GLOO_SOCKET_IFNAME", settings.gloo_socket_ifname, True),
            ("NCCL_SOCKET_IFNAME", settings.nccl_socket_ifname, False),
        )
        if text
    ]
    if chosen := _towards(store_host, f"the route to {store_host}, host of the process group's store", found, route):
        return replace(chosen, overruled=_overruled(chosen, variables, likeliest))
    ignored: list[str] = []
    for wanted in variables:
        if chosen := _listed(wanted, likeliest):
            return replace(chosen, ignored=tuple(ignored))
        ignored.append(f"{wanted.variable}={wanted.text} names no interface that is up and has an address")
    master = settings.master_address
    if chosen := _towards(master, f"the route to MASTER_ADDR={master}", found, route):
        return replace(chosen, ignored=tuple(ignored))
    return _guess(likeliest, default, tuple(ignored))


def _overruled(chosen: Address, variables: Sequence[InterfaceFilter], likeliest: Sequence[Interface]) -> str:
    """The first of ``variables`` that asks for interfaces, where that of ``chosen`` is not among them, in words."""
    asked = next(((one, listed) for one in variables if (listed := one.choose(likeliest))), None)
    if asked is None or is_loopback(chosen.address):
        return ""
    variable, (first, *others) = asked
    if any(chosen.address in one.addresses for one in (first, *others)):
        return ""
    return (
        f"{variable.variable}={variable.text} asks for {first.name} {first.addresses[0]}, but the choice is {chosen}. "
        f"If that is the wrong one, set UCCL_EP_SOCKET_IFNAME={first.name}"
    )


def _guess(likeliest: Sequence[Interface], default: str, ignored: tuple[str, ...]) -> Address:
    """The last resort; loopback where no interface leads out of this host. ``default``: on the default route."""
    inside = []
    for one in likeliest:
        if is_loopback(one.addresses[0]):
            continue
        if one.kind == Kind.INSIDE:
            inside.append(one.name)
            continue
        how = "it has the default route" if default in one.addresses else _GUESSES[one.kind]
        return Address(one.addresses[0], f"{one.name}, a guess: {how}", True, ignored)
    local = next((address for one in likeliest for address in one.addresses if is_loopback(address)), _LOOPBACK)
    why = f"packets of {', '.join(inside)} stay in this host" if inside else "no other network is up"
    return Address(local, f"loopback: {why}", ignored=ignored)
