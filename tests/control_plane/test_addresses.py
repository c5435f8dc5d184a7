"""Where a rank listens for other hosts: what decides, in which order, and what is never taken."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.support.namespaces import run, two_namespaces
from tests.support.sysfs_tree import Network, build, network
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane import addresses
from uccl_ep_serving.control_plane.addresses import InterfaceFilter, Kind, choose_address
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import ConfigError

#: A host of a cluster: NICs, and before them in the alphabet what containers, tunnels and virtual machines bring.
HOST = """
-                   net lo          addr=127.0.0.1,::1 flags=0x9
-                   net br-1f0c     addr=172.18.0.1 bridge=vethab
-                   net cali0       addr=169.254.1.1 iflink=99
-                   net cilium_host addr=10.0.2.7 iflink=5
-                   net cilium_net  addr=fe80::5%cilium_net iflink=4
-                   net cni0        addr=10.244.0.1 bridge=vethab
-                   net docker0     addr=172.17.0.1 bridge=
-                   net dummy0      addr=10.9.9.9 flags=0x82
pci0000:00/00:05.0  net ens5        addr=10.0.0.11,2001:db8:1::11 default=yes
pci0000:00/00:06.0  net ens6        addr=10.0.1.11
-                   net flannel.1   addr=10.244.0.0 below=ens5 devtype=vxlan
-                   net tailscale0  addr=100.64.0.1 tun=yes
-                   net tunl0       addr=10.5.0.1 iflink=0 type=768
-                   net vethab      addr=fe80::7%vethab iflink=77
-                   net virbr0      addr=192.168.122.1 bridge=
-                   net wg0         addr=10.6.0.1 devtype=wireguard
"""

#: A pod: one end of a veth pair whose other end is the host's.
POD = """
-                   net eth0        addr=10.244.3.4 iflink=12 default=yes
-                   net lo          addr=127.0.0.1 flags=0x9
"""

#: A node of OpenShift: Open vSwitch has the NIC, and its own port the address.
SWITCHED = """
-                   net br-ex       addr=10.0.0.6 default=yes
pci0000:00/00:01.0  net ens1
-                   net lo          addr=127.0.0.1 flags=0x9
-                   net ovn-k8s-mp0 addr=10.128.0.2
"""

#: A host of virtual machines: its NICs are ports of a bond, and that of the bridge that holds the address.
BRIDGED = """
-                   net bond0       below=ens1,ens2 devtype=bond
-                   net br0         addr=10.0.0.5 bridge=bond0.100,vnet0 default=yes
-                   net bond0.100   below=bond0 devtype=vlan
pci0000:00/00:01.0  net ens1
pci0000:00/00:02.0  net ens2
-                   net vnet0       tun=yes
-                   net docker0     addr=172.17.0.1 bridge=
"""


#: A pod of Cilium on netkit, whose ends know no ARP.
NETKIT = POD.replace("iflink=12", "iflink=12 flags=0x1083")

#: A container of LXC: a VLAN and a bond on pairs, and a bridge on the end of one.
LAYERED = """
-                   net bond0       addr=10.7.0.2 below=eth0,eth1 devtype=bond
-                   net br0         addr=10.9.0.2 bridge=eth2 default=yes
-                   net eth0        iflink=12
-                   net eth1        iflink=14
-                   net eth1.100    addr=10.8.0.2 below=eth1 devtype=vlan
-                   net eth2        iflink=16
-                   net dummy0      flags=0x82
-                   net dummy0.7    addr=10.6.0.2 below=dummy0 devtype=vlan
"""

#: A host whose NICs have link-local addresses only: its own, which BGP tells the others, is on lo, and an anycast one.
BY_BGP = """
-                   net docker0     addr=172.17.0.1 bridge=
pci0000:00/00:01.0  net ens1        addr=fe80::1%ens1
-                   net lo          addr=127.0.0.1,10.0.0.100,10.0.0.11,::1 flags=0x9
-                   net vxlan.cali  addr=10.244.0.0 devtype=vxlan
"""


@pytest.fixture
def host(tmp_path: Path) -> Network:
    return _network(HOST, tmp_path)


def _network(text: str, root: Path) -> Network:
    build(text, root)
    return network(text, root)


def chosen(found: Network, store_host: str = "", **settings: str) -> tuple[str, str]:
    """Address and interface."""
    choice = choose_address(Settings(**settings), store_host, found.interfaces, found.route)  # type: ignore[arg-type]
    return choice.address, choice.reason.partition(",")[0].partition(":")[0]


def test_every_kind_of_interface(host: Network) -> None:
    assert {one.name: one.kind.name for one in host.interfaces} == {
        "lo": "INSIDE",
        "br-1f0c": "INSIDE",
        "cilium_host": "INSIDE",
        "cni0": "INSIDE",
        "docker0": "INSIDE",
        "dummy0": "INSIDE",
        "ens5": "DEVICE",
        "ens6": "DEVICE",
        "flannel.1": "TUNNEL",
        "tailscale0": "TUNNEL",
        "tunl0": "TUNNEL",
        "virbr0": "INSIDE",
        "wg0": "TUNNEL",
    }


def test_a_bridge_with_a_nic_among_its_ports_leads_out(tmp_path: Path) -> None:
    found = _network(BRIDGED, tmp_path)
    assert {one.name: one.kind for one in found.interfaces} == {"br0": Kind.DEVICE, "docker0": Kind.INSIDE}
    assert chosen(found) == ("10.0.0.5", "br0")


def test_what_sysfs_does_not_show_is_unknown(tmp_path: Path) -> None:
    """In some sandboxes there is no /sys."""
    (found,) = addresses.interfaces(tmp_path, {"eth0": ["10.0.0.3"]})
    assert found.kind == Kind.UNKNOWN


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (NETKIT, {"eth0": Kind.FAR_END, "lo": Kind.INSIDE}),
        (LAYERED, {"bond0": Kind.FAR_END, "br0": Kind.INSIDE, "eth1.100": Kind.FAR_END, "dummy0.7": Kind.INSIDE}),
        ("- net macvlan0 addr=10.5.0.6 below=br0\n" + BRIDGED, {"macvlan0": Kind.DEVICE}),
        ("- net br0 addr=10.7.0.1 bridge=vxlan5\n- net vxlan5 devtype=vxlan", {"br0": Kind.TUNNEL}),
        ("- net ppp0 addr=10.7.0.1 type=512 flags=0x10d1", {"ppp0": Kind.TUNNEL}),
        ("- net ipsec0 addr=10.7.0.1 type=65534 iflink=7 flags=0xc1", {"ipsec0": Kind.TUNNEL}),
    ],
)
def test_interfaces_that_stand_on_others(tmp_path: Path, text: str, kinds: dict[str, Kind]) -> None:
    found = {one.name: one.kind for one in _network(text, tmp_path).interfaces}
    assert kinds.items() <= found.items(), found


def test_a_node_with_many_pods_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end of a pair is compared with all interfaces: not by reading all of them again for each."""
    pods = [f"veth{number}" for number in range(12)]
    lines = [f"- net {name} iflink={1000 + number}" for number, name in enumerate(pods)]
    build("\n".join([f"- net cni0 addr=10.244.0.1 bridge={','.join(pods)}", *lines]), tmp_path)
    reads = []
    read = addresses._read
    monkeypatch.setattr(addresses, "_read", lambda path: reads.append(path) or read(path))  # type: ignore[func-returns-value]
    (found,) = addresses.interfaces(tmp_path, {"cni0": ["10.244.0.1"]})
    assert found.kind == Kind.INSIDE
    assert len(reads) < 10 * len(pods)


def test_an_address_with_a_label_is_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(text: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET, address=text)

    monkeypatch.setattr(addresses.psutil, "net_if_stats", lambda: {"ens5": SimpleNamespace(isup=True)})
    labelled = {"ens5": [address("10.0.0.11")], "ens5:1": [address("10.0.7.11")], "ens6": [address("10.0.1.11")]}
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: labelled)
    assert addresses._addresses() == {"ens5": ["10.0.0.11", "10.0.7.11"]}


class _Routed:
    """A socket of a host with routes of both families."""

    def __init__(self, family: int, kind: int) -> None:
        self.target = ""

    def __enter__(self) -> _Routed:
        return self

    def __exit__(self, *arguments: object) -> None:
        pass

    def connect(self, target: tuple[str, int]) -> None:
        self.target = target[0]
        if self.target == "no route":
            raise OSError

    def getsockname(self) -> tuple[str, int]:
        return self.target if self.target.startswith("127.") else self.target + "1", 5


class TestOrder:
    """Each source in turn is what decides once those before it are gone."""

    everything = {  # noqa: RUF012
        "socket_ifname": "ens6",
        "gloo_socket_ifname": "wg0",
        "nccl_socket_ifname": "=tailscale0",
        "master_address": "10.0.1.1",
    }

    @pytest.mark.parametrize(
        ("gone", "store", "answer"),
        [
            ((), "10.0.0.1", ("10.0.1.11", "ens6")),
            (("socket_ifname",), "10.0.0.1", ("10.0.0.11", "ens5")),
            (("socket_ifname",), "", ("10.6.0.1", "wg0")),
            (("socket_ifname", "gloo_socket_ifname"), "", ("100.64.0.1", "tailscale0")),
            (("socket_ifname", "gloo_socket_ifname", "nccl_socket_ifname"), "", ("10.0.1.11", "ens6")),
            (tuple(everything), "", ("10.0.0.11", "ens5")),
        ],
    )
    def test_one_after_the_other(
        self, host: Network, gone: tuple[str, ...], store: str, answer: tuple[str, str]
    ) -> None:
        left = {name: text for name, text in self.everything.items() if name not in gone}
        assert chosen(host, store, **left) == answer

    def test_only_a_guess_is_called_one(self, host: Network) -> None:
        guess = choose_address(Settings(), "", host.interfaces, host.route)
        assert guess.guessed
        assert guess.reason == "ens5, a guess: it has the default route"
        told = choose_address(Settings(), "10.0.0.1", host.interfaces, host.route)
        assert not told.guessed
        assert told.reason == "ens5, the route to 10.0.0.1, host of the process group's store"

    def test_a_store_over_ipv6_gives_an_address_of_ipv6(self, host: Network) -> None:
        assert chosen(host, "2001:db8:1::1") == ("2001:db8:1::11", "ens5")

    def test_a_store_over_both_families_gives_an_address_of_ipv4(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def resolve(*targets: tuple[socket.AddressFamily, str]) -> None:
            answer = [(family, socket.SOCK_DGRAM, 17, "", (text, 9)) for family, text in targets]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **keywords: answer)

        monkeypatch.setattr(addresses.socket, "socket", _Routed)
        resolve((socket.AF_INET6, "2001:db8:1::1"), (socket.AF_INET, "10.0.0.1"))
        assert addresses._route("node0") == "10.0.0.11"
        resolve((socket.AF_INET, "no route"), (socket.AF_INET6, "2001:db8:1::1"))
        assert addresses._route("node0") == "2001:db8:1::11"
        resolve((socket.AF_INET, "127.0.1.1"), (socket.AF_INET6, "2001:db8:1::1"))
        assert addresses._route("node0") == "2001:db8:1::11"

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            (
                {"gloo_socket_ifname": "ens6", "nccl_socket_ifname": "wg"},
                "GLOO_SOCKET_IFNAME=ens6 asks for ens6 10.0.1.11",
            ),
            ({"nccl_socket_ifname": "wg"}, "NCCL_SOCKET_IFNAME=wg asks for wg0 10.6.0.1"),
            ({"gloo_socket_ifname": "ens5", "nccl_socket_ifname": "wg"}, ""),
            ({"gloo_socket_ifname": "missing", "nccl_socket_ifname": "^docker,lo"}, ""),
            ({"gloo_socket_ifname": "ens6", "socket_ifname": "ens5"}, ""),
        ],
    )
    def test_a_variable_that_the_route_overrules_is_named_with_both(
        self, host: Network, settings: dict[str, str], words: str
    ) -> None:
        choice = choose_address(Settings(**settings), "10.0.0.1", host.interfaces, host.route)  # type: ignore[arg-type]
        assert choice.address == "10.0.0.11"
        if words:
            words += ", but the choice is 10.0.0.11 (ens5, the route to 10.0.0.1, host of the process group's store)."
            name = words.split()[3]
            words += f" If that is the wrong one, set UCCL_EP_SOCKET_IFNAME={name}"
        assert choice.overruled == words

    def test_nothing_is_overruled_on_loopback(self, host: Network) -> None:
        settings = Settings(gloo_socket_ifname="ens6")
        assert choose_address(settings, "::1", host.interfaces, lambda target: "::1").overruled == ""

    def test_a_variable_that_names_nothing_is_passed_over_and_said(self, host: Network) -> None:
        choice = choose_address(Settings(gloo_socket_ifname="ib0"), "", host.interfaces, host.route)
        assert choice.address == "10.0.0.11"
        assert choice.ignored == ("GLOO_SOCKET_IFNAME=ib0 names no interface that is up and has an address",)

    def test_ours_that_names_nothing_is_refused(self, host: Network) -> None:
        with pytest.raises(ConfigError, match=r"UCCL_EP_SOCKET_IFNAME='ib0': no such interface.*there are .*ens5 10"):
            chosen(host, socket_ifname="ib0")


class TestLastResort:
    def test_nothing_whose_packets_stay_in_the_host_is_taken(self, tmp_path: Path) -> None:
        """Whatever the names: without devices and tunnels there is loopback left."""
        leading_out = (" ens", "tun", "wg0", "flannel", "tailscale")
        text = "\n".join(line for line in HOST.splitlines() if not any(name in line for name in leading_out))
        found = _network(text, tmp_path)
        choice = choose_address(Settings(), "", found.interfaces, found.route)
        assert choice.address == "127.0.0.1"
        assert choice.reason == (
            "loopback: packets of br-1f0c, cilium_host, cni0, docker0, dummy0, virbr0 stay in this host"
        )

    def test_a_pod_takes_its_end_of_the_pair(self, tmp_path: Path) -> None:
        found = _network(POD, tmp_path)
        assert [one.kind for one in found.interfaces] == [Kind.FAR_END, Kind.INSIDE]
        assert chosen(found) == ("10.244.3.4", "eth0")

    def test_a_port_of_a_software_switch_with_the_default_route(self, tmp_path: Path) -> None:
        assert chosen(_network(SWITCHED, tmp_path)) == ("10.0.0.6", "br-ex")

    def test_a_laptop_without_a_network_takes_loopback(self, tmp_path: Path) -> None:
        found = _network("- net lo addr=127.0.0.1,::1 flags=0x9", tmp_path)
        choice = choose_address(Settings(), "", found.interfaces, found.route)
        assert str(choice) == "127.0.0.1 (loopback: no other network is up)"
        assert not choice.guessed
        assert choose_address(Settings(), "", [], lambda host: "").address == "127.0.0.1"

    def test_a_device_goes_before_a_default_route_through_a_tunnel(self, host: Network) -> None:
        vpn = dataclasses.replace(host, default="100.64.0.1")
        assert chosen(vpn) == ("10.0.0.11", "ens5")


class TestOneHost:
    @pytest.mark.parametrize("store", ["127.0.0.1", "localhost", "::1"])
    def test_a_store_on_loopback_means_one_host(self, host: Network, store: str) -> None:
        choice = choose_address(Settings(), store, host.interfaces, lambda target: "127.0.0.1")
        assert choice.address == "127.0.0.1"
        assert not choice.guessed

    def test_a_host_whose_own_name_is_loopback_here_says_nothing(self, host: Network) -> None:
        """Debian's /etc/hosts maps it to 127.0.1.1."""

        def route(target: str) -> str:
            return "127.0.0.1" if target == "node0" else host.route(target)

        for settings, store in ((Settings(), "node0"), (Settings(master_address="node0"), "")):
            assert choose_address(settings, store, host.interfaces, route).address == "10.0.0.11"


class TestVirtual:
    """Addresses that every node has for itself, and hosts whose own is where virtual ones are."""

    @pytest.mark.parametrize("flags", ["", "0x82"], ids=["down", "up"])
    def test_a_service_of_kubernetes_does_not_decide(self, tmp_path: Path, flags: str) -> None:
        """IPVS: kube-ipvs0 has the addresses of all services, on each node; it is down, as the kernel routes anyway."""
        held = f"\n- net kube-ipvs0 addr=10.96.0.5 flags={flags}" if flags else ""
        found = _network(HOST + held, tmp_path)

        def route(target: str) -> str:
            return "10.96.0.5" if target == "master" else found.route(target)

        for settings, store in ((Settings(), "master"), (Settings(master_address="master"), "")):
            choice = choose_address(settings, store, found.interfaces, route)
            assert choice.address == "10.0.0.11"
            assert choice.guessed
        settings = Settings(gloo_socket_ifname="ens6")
        assert choose_address(settings, "master", found.interfaces, route).address == "10.0.1.11"

    @pytest.mark.parametrize("store", ["172.17.0.2", "10.0.2.9", "10.9.9.1"])
    def test_a_route_that_stays_in_the_host_does_not_decide(self, host: Network, store: str) -> None:
        """To a container of docker0, a pod of cilium_host, something behind a dummy."""
        assert chosen(host, store, gloo_socket_ifname="ens6") == ("10.0.1.11", "ens6")

    def test_a_host_with_its_address_on_lo_has_no_other(self, tmp_path: Path) -> None:
        found = dataclasses.replace(_network(BY_BGP, tmp_path), default="10.0.0.11")
        assert chosen(found, "10.3.3.3") == ("10.0.0.11", "lo")
        assert chosen(found, "10.3.3.3", gloo_socket_ifname="lo") == ("10.0.0.11", "lo")
        guess = choose_address(Settings(), "", found.interfaces, found.route)
        assert str(guess) == "10.0.0.11 (lo, a guess: it has the default route)"

        def at_the_anycast_address(target: str) -> str:
            return "10.0.0.100" if target == "anycast" else found.route(target)

        choice = choose_address(Settings(), "anycast", found.interfaces, at_the_anycast_address)
        assert (choice.address, choice.guessed) == ("10.0.0.11", True)

    def test_nor_without_a_default_route(self, tmp_path: Path) -> None:
        found = _network(BY_BGP.replace("10.0.0.100,", ""), tmp_path)
        guess = choose_address(Settings(), "", found.interfaces, lambda target: "")
        assert str(guess) == "10.0.0.11 (lo, a guess: no device has an address)"

    def test_a_dummy_may_have_it_too(self, tmp_path: Path) -> None:
        found = _network(BY_BGP + "- net dummy0 addr=10.0.0.12 flags=0x82 default=yes", tmp_path)
        assert chosen(found, "10.3.3.3") == ("10.0.0.12", "dummy0")

    def test_a_virtual_address_on_lo_is_never_guessed(self, tmp_path: Path) -> None:
        """As the servers behind a balancer of layer 4 have it, each the same."""
        text = HOST.replace("addr=127.0.0.1,::1", "addr=127.0.0.1,10.7.7.7,::1")
        found = _network(text, tmp_path)
        assert chosen(found) == ("10.0.0.11", "ens5")
        assert chosen(found, "10.7.7.7") == ("10.0.0.11", "ens5")
        assert chosen(dataclasses.replace(found, default=""), "") == ("10.0.0.11", "ens5")

    def test_of_two_on_a_device_the_default_routes_is_its_own(self, tmp_path: Path) -> None:
        text = HOST.replace("addr=10.0.0.11,", "addr=10.0.0.50,10.0.0.11,")
        found = dataclasses.replace(_network(text, tmp_path), default="10.0.0.11")
        assert chosen(found) == ("10.0.0.11", "ens5")
        assert chosen(found, socket_ifname="ens5") == ("10.0.0.11", "ens5")
        # without a route of IPv4 to everywhere
        over6 = dataclasses.replace(found, default="2001:db8:1::11")
        assert chosen(over6, socket_ifname="ens5") == ("10.0.0.50", "ens5")


class TestList:
    @pytest.mark.parametrize(
        ("text", "exact", "names"),
        [
            ("ens", False, ["ens5", "ens6"]),
            ("=ens", False, []),
            ("=ens6,ens5", False, ["ens6", "ens5"]),
            ("wg,ens6", False, ["wg0", "ens6"]),
            ("ens6", True, ["ens6"]),
            ("ens", True, []),
            ("ens6,ens5", True, ["ens6", "ens5"]),
            ("docker0", False, ["docker0"]),
            ("^ens5,tailscale,tunl,wg,flannel", False, ["ens6"]),
            ("^=ens", False, ["ens5", "ens6", "flannel.1", "tailscale0", "tunl0", "wg0"]),
        ],
    )
    def test_the_syntax_of_nccl_and_of_gloo(self, host: Network, text: str, exact: bool, names: list[str]) -> None:
        found = InterfaceFilter(text, "NCCL_SOCKET_IFNAME", exact).choose(host.interfaces)
        assert [one.name for one in found] == names

    def test_a_whole_name_goes_before_a_prefix(self, tmp_path: Path) -> None:
        text = "pci0000:00/00:01.0 net eth10 addr=10.0.0.10\npci0000:00/00:02.0 net eth1 addr=10.0.0.1"
        assert chosen(_network(text, tmp_path), socket_ifname="eth1") == ("10.0.0.1", "eth1")

    def test_what_is_left_by_an_exclusion_is_a_guess_unless_it_is_one(self, host: Network) -> None:
        def guessed(text: str) -> bool:
            return choose_address(Settings(nccl_socket_ifname=text), "", host.interfaces, host.route).guessed

        assert guessed("^docker,lo")
        assert not guessed("^ens5,tailscale,tunl,wg,flannel")


def test_the_host_of_a_store_is_seen_through_prefixes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    assert StoreExchange(dist.PrefixStore("job", store), 0, 1).store_host == "127.0.0.1"
    assert StoreExchange(dist.HashStore(), 0, 1).store_host == ""


#: Prints what is chosen without a store, and with one at the argument.
LOOK = """
import json, sys
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.addresses import choose_address, interfaces

kinds = {one.name: one.kind.name for one in interfaces()}
print(json.dumps([kinds, *(str(choose_address(Settings.from_environment(), host)) for host in ("", *sys.argv[1:]))]))
"""


def test_a_host_with_bridges_and_several_interfaces(tmp_path: Path) -> None:
    """What a kernel shows of them, and how it routes."""
    with two_namespaces() as made:
        name, end = made.names[0], made.ends[0]
        ip = ("ip", "-n", name)
        run(*ip, "link", "set", "lo", "up")
        for bridge, address in (("br-aaa", "172.18.0.1/16"), ("docker0", "172.17.0.1/16")):
            run(*ip, "link", "add", bridge, "type", "bridge")
            run(*ip, "address", "add", address, "dev", bridge)
        # a container's pair, of which one end is a port of the bridge, as long as both are here
        run(*ip, "link", "add", "veth1", "type", "veth", "peer", "aaa0")
        run(*ip, "link", "set", "veth1", "master", "docker0")
        run(*ip, "address", "add", "10.9.0.1/24", "dev", "aaa0")
        for one in ("br-aaa", "docker0", "veth1", "aaa0"):
            run(*ip, "link", "set", one, "up")
        run(*ip, "address", "add", "2001:db8:5::1/64", "dev", end, "nodad")
        command = ["ip", "netns", "exec", name, sys.executable, "-c", LOOK, made.addresses[1], "2001:db8:5::2"]
        output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    kinds, guess, route, route6 = json.loads(output)
    expected = {"lo": "INSIDE", "aaa0": "INSIDE", "docker0": "INSIDE", end: "FAR_END"}
    assert expected.items() <= kinds.items(), kinds
    assert guess == f"{made.addresses[0]} ({end}, a guess: the first whose other end is elsewhere)"
    assert route == f"{made.addresses[0]} ({end}, the route to {made.addresses[1]}, host of the process group's store)"
    assert route6.startswith(f"2001:db8:5::1 ({end}, the route to 2001:db8:5::2")


def test_the_route_to_a_name_that_does_not_exist_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **keywords: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", missing)
    assert addresses._route("nowhere") == ""
