"""Where a rank listens for other hosts: what decides, in which order, and what is never taken."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

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
