"""Clusters of which the hardware is known: what two nodes of each would choose, and why.

The facts stand in ``machines/``. Everything that is decided is decided by the functions that ranks call; only what
needs a device is stood in for: a NIC that is opened is found usable.

``python -m tests.support.clusters`` writes what they choose today to ``tests/data_plane/clusters.md``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from tests.support.sysfs_tree import MACHINES, Network, build, facts, network
from uccl_ep_serving.check.machine import Machine
from uccl_ep_serving.check.stamp import COMMAND, Record, State
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.addresses import choose_address
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.data_plane.nodes import crossed_once, equal_nodes
from uccl_ep_serving.data_plane.rails import choose_channels
from uccl_ep_serving.data_plane.topology import Nic, Topology, parse_cpus
from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.proxy.spin import choose_spin
from uccl_ep_serving.proxy.transport.select import DIRECT, NIC_TRANSPORTS, Choice, choose

GOLDEN = Path(__file__).parents[1] / "data_plane" / "clusters.md"


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines, with a rank on each GPU. ``store``: host of the process group's TCPStore."""

    title: str
    machine: str
    nodes: int = 2
    store: str = ""


CLUSTERS = (
    Cluster("AWS p5 (H100, EFA)", "p5", store="10.1.0.10"),
    Cluster("AWS p5en (H200, EFA)", "p5en", store="10.1.0.10"),
    Cluster("AWS p6-b200 (B200, EFA)", "p6-b200", store="10.1.0.10"),
    Cluster("MI300X, Broadcom Thor-2", "mi300x-thor2", store="10.2.0.10"),
    Cluster("DGX H100, ConnectX-7", "dgx-h100", store="10.3.0.10"),
    Cluster("L4 (PCIe), one NIC", "l4-pcie", store="10.4.0.10"),
    Cluster("H200 NVL, NVLink pairs", "nvlink-pairs", store="10.5.0.10"),
    Cluster("laptop", "laptop", nodes=1, store="127.0.0.1"),
)


@dataclass(frozen=True)
class Chosen:
    """What was chosen, in a word or two for a table, and why."""

    what: str
    why: str


class _Nics(HostNics):
    """NICs that can all be opened."""

    def _probe(self, transport: str, nic: Nic) -> str:
        return "usable"


class _Node:
    """One machine of a cluster; the others are like it."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        text = (MACHINES / f"{cluster.machine}.txt").read_text()
        build(text, root)
        self.settings = Settings.from_environment({})
        self.topology: Topology = Topology.read(root)
        self.network: Network = network(text, root)
        self.facts = facts(text)
        self.cores = sum(
            len(parse_cpus(words[3])) for words in map(str.split, text.splitlines()) if words[:1] == ["node"]
        )
        self.gpus = len(self.topology.gpus)
        self.ranks = self.gpus * cluster.nodes
        self.nics = [
            _Nics(self.settings, place=place, local_ranks=self.gpus, gpu=gpu.address, topology=self.topology)
            for place, gpu in enumerate(self.topology.gpus)
        ]

    def choice(self, rank: int, peer: int) -> Choice:
        """The way from one rank to another."""
        near = rank // self.gpus == peer // self.gpus
        mine, theirs = (self.nics[one % self.gpus].offers for one in (rank, peer))
        return choose(self.settings, mapped=near, same_host=near, mine=mine, theirs=theirs)

    @property
    def far(self) -> str:
        """The transport to the other nodes; "" where there are none."""
        return self.choice(0, self.gpus).transport if self.ranks > self.gpus else ""


def transport(node: _Node) -> Chosen:
    """Within a node, and to the other nodes."""
    ways = [node.choice(0, 1)] if node.gpus > 1 else []
    ways += [node.choice(0, node.gpus)] if node.far else []
    if not ways:
        return Chosen("none", "there is one rank")
    return Chosen(" / ".join(way.transport for way in ways), "; ".join(way.reason for way in ways))


def rails(node: _Node) -> Chosen:
    """The NICs of a GPU."""
    if node.far not in NIC_TRANSPORTS:
        return Chosen("none", "no NIC is used")
    found = [nics.rails[node.far] for nics in node.nics]
    first = ", ".join(nic.name for nic in found[0].nics)
    (nic, *_) = found[0].nics
    used = {nic.name for one in found for nic in one.nics}
    counts = {len(one.nics) for one in found}
    reasons = {verdict.nic.name: verdict.reason for verdict in found[0].verdicts}
    where = node.topology.distance(node.topology.gpus[0], nic).name.lower()
    words = f"GPU 0: {first}, {reasons[nic.name].partition(' (')[2].rstrip(')') or 'its own'}, at distance {where}"
    left = {name: why for name, why in reasons.items() if name not in used}
    words += "".join(f"; not {name}: {why}" for name, why in left.items())
    return Chosen(f"{'/'.join(map(str, sorted(counts)))} x {nic.gbps:g} Gb/s", f"{words}; {len(used)} in use on a node")


def channels(node: _Node) -> Chosen:
    """Channels that messages are striped over."""
    shared = len(node.nics[0].rails[node.far].nics) if node.far in NIC_TRANSPORTS else 0
    found = choose_channels(node.settings, shared)
    return Chosen(str(found.count), found.reason)


def spin(node: _Node) -> Chosen:
    """How long idle proxies keep polling, with all of a node's cores."""
    settings = node.settings
    found = choose_spin(settings.proxy_spin, cores=node.cores, proxies=settings.proxies, local_ranks=node.gpus)
    return Chosen("on" if found.nanoseconds else "off", found.reason)


class _Checks(Exception):
    """The launcher would check the GPUs now."""


def gate() -> Chosen:
    """What a launcher does on such GPUs, by what is on record of them."""
    machine = Machine(("a GPU",), "its driver", "its Triton", "this version", "these kernels")
    outcomes = {}
    for state in State:
        with (
            mock.patch("uccl_ep_serving.check.machine.present", return_value=machine),
            mock.patch("uccl_ep_serving.check.stamp.look", return_value=Record(state, str(state))),
            mock.patch("uccl_ep_serving.check.gate.checked", side_effect=_Checks),
            mock.patch("uccl_ep_serving.engines.devices._passed", set()),
            mock.patch.dict("os.environ", clear=True),
        ):
            try:
                check_device("cuda", "--moe-a2a-backend uccl_ep", "make demo")
                outcomes[state] = "opens"
            except ConfigError:
                outcomes[state] = "refuses"
            except _Checks:
                outcomes[state] = "checks first"
    words = ", ".join(f"{_RECORDS[state]}: the launcher {outcome}" for state, outcome in outcomes.items())
    return Chosen(outcomes[State.UNKNOWN], f"`{COMMAND}`; {words}")


#: What is on record of the GPUs.
_RECORDS = {State.PASSED: "passed", State.FAILED: "failed", State.UNKNOWN: "nothing on record"}


def hierarchy(node: _Node) -> Chosen:
    """Whether a row of normal mode crosses once to each node."""
    direct = [
        [peer for peer in range(node.ranks) if peer != rank and node.choice(rank, peer).transport == DIRECT]
        for rank in range(node.ranks)
    ]
    size = equal_nodes(direct)
    crossed = crossed_once(size, node.ranks, node.settings.hierarchy, masked=False)
    if crossed:
        return Chosen("on", f"equal nodes of {crossed} ranks")
    return Chosen("off", "one node" if size in (1, node.ranks) else "no equal nodes")


def address(node: _Node, store: str) -> Chosen:
    """Where other hosts connect to."""
    choice = choose_address(node.settings, store, node.network.interfaces, node.network.route)
    guess = choose_address(node.settings, "", node.network.interfaces, node.network.route)
    interface, _, why = choice.reason.partition(", ")
    return Chosen(interface, f"{choice.address}, {why}. Without a TCPStore: {guess}")


@cache
def choices(cluster: Cluster) -> dict[str, Chosen]:
    """By what is chosen."""
    with tempfile.TemporaryDirectory() as root:
        node = _Node(cluster, Path(root))
        return {
            "gate": gate(),
            "transport": transport(node),
            "rails per GPU": rails(node),
            "channels": channels(node),
            "spin": spin(node),
            "hierarchy": hierarchy(node),
            "control address": address(node, cluster.store),
        }


def pages() -> Iterator[str]:
    """The lines of the golden file."""
    found = {cluster: choices(cluster) for cluster in CLUSTERS}
    names = list(next(iter(found.values())))
    yield "# What each cluster chooses\n"
    yield "Written by `python -m tests.support.clusters`, and held by a test. Two nodes of each, a rank on each GPU, no"
    yield "`UCCL_EP_` variable set. The facts and their sources: [machines](../support/machines).\n"
    yield f"| cluster | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for cluster, chosen in found.items():
        yield f"| {cluster.title} | {' | '.join(chosen[name].what for name in names)} |"
    for cluster, chosen in found.items():
        yield f"\n## {cluster.title}\n"
        yield "| | chosen | why |\n|---|---|---|"
        for name in names:
            yield f"| {name} | {chosen[name].what} | {chosen[name].why} |"


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(pages()) + "\n")
