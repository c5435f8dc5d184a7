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
from typing import Any
from unittest import mock

import numpy as np

from tests.support.sysfs_tree import MACHINES, Network, build, facts, network
from uccl_ep_serving.check.machine import Machine
from uccl_ep_serving.check.stamp import COMMAND, Record, State
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.addresses import choose_address
from uccl_ep_serving.data_plane.gpu_direct import Gpu, GpuReach, NicWrites, cuda_writes, of_rank, probe, settle
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.data_plane.nodes import equal_nodes
from uccl_ep_serving.data_plane.rails import choose_channels
from uccl_ep_serving.data_plane.topology import Nic, Topology
from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.gpu.context import GpuContext
from uccl_ep_serving.gpu.memory import HipMemory
from uccl_ep_serving.proxy.spin import Cores, choose_spin
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
    """NICs that can all be opened, and reach GPU memory as the facts say."""

    direct = "no"

    def _probe(self, transport: str, nic: Nic) -> str:
        return "usable"

    def reach_gpu(self, transport: str, nic: Nic, start: int, nbytes: int, export: Any) -> str:
        if self.direct == "no":
            raise TransportError("no peer-memory module, and the GPU exports no dma-buf", device=nic.name)
        return self.direct


class _Node:
    """One machine of a cluster; the others are like it."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        text = (MACHINES / f"{cluster.machine}.txt").read_text()
        build(text, root)
        self.settings = Settings.from_environment({})
        self.topology: Topology = Topology.read(root)
        self.network: Network = network(text, root)
        self.facts = facts(text)
        self.cores = frozenset(cpu for cpus in self.topology.cpus.values() for cpu in cpus)
        self.gpus = len(self.topology.gpus)
        self.ranks = self.gpus * cluster.nodes
        self.nics = [
            _Nics(self.settings, place=place, local_ranks=self.gpus, gpu=gpu.address, topology=self.topology)
            for place, gpu in enumerate(self.topology.gpus)
        ]
        for nics in self.nics:
            nics.direct = self.facts["direct"]

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
    """How long idle proxies of the first rank keep polling, where ranks may use all of a node's cores."""
    settings, ways = node.settings, [node.far] if node.far else []
    with mock.patch("os.sched_getaffinity", return_value=node.cores):
        mine, *others = (Cores(nics.proxy_cpus(ways)) for nics in node.nics)
    found = choose_spin(settings.proxy_spin, mine, others, proxies=settings.proxies)
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


class _Memory:
    """A GPU's memory, of which nothing is used: what it is asked before, it knows from the facts."""

    def __init__(self, facts: dict[str, str]) -> None:
        self._facts = facts

    def nic_writes(self) -> NicWrites:
        """What the driver of this vendor makes of its attributes."""
        if "major" not in self._facts:
            return HipMemory.nic_writes(HipMemory.__new__(HipMemory))
        ordering, major = (int(self._facts[name]) for name in ("ordering", "major"))
        return cuda_writes("cuda:0", ordering=ordering, major=major, coherent=False, flushes=True)

    def allocate(self, nbytes: int) -> int:
        return 0

    def free(self, address: int) -> None: ...

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        raise AssertionError("a NIC that reaches it is stood in for")


class _Context(GpuContext):
    """Places windows as a rank does; what would share them succeeds where GPUs of a host reach each other."""

    def __init__(self, node: _Node, reach: GpuReach) -> None:
        ranks = range(node.ranks)
        direct = [
            [peer for peer in ranks if peer != rank and node.choice(rank, peer).transport == DIRECT] for rank in ranks
        ]
        self._runtime = mock.Mock(
            gpu_reach=reach,
            settings=node.settings,
            far_apart=bool(node.far),
            rank=0,
            ranks=node.ranks,
            node_ranks=equal_nodes(direct),
            mask=np.zeros(node.ranks, np.int32),
        )
        self._peers, self._space = node.facts["peers"] == "yes", None
        self.said = ""

    def _share(self, near_only: bool) -> Any:
        if not self._peers and self._runtime.gpu_reach.pairs:
            raise TransportError("GPUs of a host have no access to each other", device="cuda:0")
        return "near" if near_only else "all"

    def _say(self, why: str) -> None:
        self.said = why

    def placed(self) -> str:
        """Where they lie, in words; from then on :attr:`crossed` knows."""
        where: Any = self._place_windows()
        self._space, self._epoch = mock.Mock(on_device=where == "all"), self._runtime.epoch
        return {"all": "device", "near": "host, device in a node", None: "host"}[where]


def reach(node: _Node) -> tuple[GpuReach, NicWrites]:
    """What all ranks come to, and what a NIC's write takes."""
    offers, writes = probe(node.nics[0], node.nics[0].offers, Gpu(lambda: _Memory(node.facts)))
    routes = {peer: node.choice(0, peer).transport for peer in range(1, node.ranks)}
    return settle({0: of_rank(node.settings, Gpu(lambda: _Memory(node.facts)), routes, offers, writes)}), writes


def window(node: _Node) -> Chosen:
    """Where windows lie."""
    found, writes = reach(node)
    context = _Context(node, found)
    placed = context.placed()
    if placed != "device":
        return Chosen(placed, context.said)
    if node.far in NIC_TRANSPORTS:
        return Chosen(placed, f"NICs reach it by {node.facts['direct']}; {writes.words}")
    return Chosen(placed, "no rank is on another host")


def hierarchy(node: _Node) -> Chosen:
    """Whether a row of normal mode crosses once to each node."""
    found, writes = reach(node)
    context = _Context(node, found)
    context.placed()
    if crossed := context.crossed:
        return Chosen("on", f"equal nodes of {crossed} ranks")
    if not node.far:
        return Chosen("off", "one node")
    return Chosen("off", "no equal nodes" if found.across else writes.words.rpartition("; ")[2])


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
            "window": window(node),
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
