"""What is read from sysfs: paths, distances, rates, cores; on machines that were described in public."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.sysfs_tree import build, machine, topology
from uccl_ep_serving.data_plane.topology import Distance, Nic, Topology, parse_cpus

#: Machine, GPUs, usable NICs, distance of GPU 0 to its nearest NIC, Gb/s of that NIC.
MACHINES = [
    ("p4d", 8, 4, Distance.ROOT, 100),
    ("p5", 8, 32, Distance.SWITCH, 100),
    ("p5en", 8, 16, Distance.SWITCH, 200),
    ("p6-b200", 8, 10, Distance.ROOT, 400),
    ("mi300x-thor2", 8, 9, Distance.SWITCHES, 400),
    ("dgx-h100", 8, 11, Distance.SWITCH, 400),
    ("l4-pcie", 8, 1, Distance.NUMA, 100),
    ("nvlink-pairs", 8, 5, Distance.SWITCH, 400),
    ("laptop", 1, 1, Distance.UNKNOWN, 2.5),
]


@pytest.mark.parametrize(("name", "gpus", "active", "nearest", "gbps"), MACHINES)
def test_machines(name: str, gpus: int, active: int, nearest: Distance, gbps: float, tmp_path: Path) -> None:
    found = machine(name, tmp_path)
    assert len(found.gpus) == gpus
    assert sum(nic.active for nic in found.nics) == active
    best = min(found.nics, key=lambda nic: found.distance(found.gpus[0], nic))
    assert found.distance(found.gpus[0], best) == nearest
    assert best.gbps == gbps
    assert [gpu.address for gpu in found.gpus] == sorted(gpu.address for gpu in found.gpus)


def test_every_field_of_a_nic(tmp_path: Path) -> None:
    found = machine("mi300x-thor2", tmp_path)
    path = ("pci0000:00", "0000:00:01.1", "0000:01:00.0", "0000:02:01.0", "0000:09:00.0")
    nic = Nic("bnxt_re0", "bnxt_en", "Ethernet", True, 400.0, 0, "0000:09:00.0", path, (1,))
    assert found.nics[0] == nic
    assert (nic.transport, nic.is_efa, nic.is_software) == ("roce", False, False)
    assert found.gpu("0000:05:00.0") == found.gpus[0]
    assert found.gpus[0].vendor == "AMD"
    assert found.gpu("0000:09:00.0") is None


def test_every_distance(tmp_path: Path) -> None:
    found = topology(
        """
        node 0 cpus 0-3
        pci0000:00/00:01.0/01:00.0/02:00.0/03:00.0 gpu nvidia numa=0
        pci0000:00/00:01.0/01:00.0/02:01.0/04:00.0 nic same_switch driver=mlx5_core numa=0 rate=400 link=Ethernet
        pci0000:00/00:01.0/01:00.0/02:02.0/05:00.0/06:00.0/07:00.0 nic below driver=a numa=0 rate=400 link=Ethernet
        pci0000:00/00:02.0/08:00.0 nic same_bridge driver=mlx5_core numa=0 rate=400 link=Ethernet
        pci0000:40/40:01.0/41:00.0 nic same_node driver=mlx5_core numa=0 rate=400 link=Ethernet
        pci0000:80/80:01.0/81:00.0 nic other_node driver=mlx5_core numa=1 rate=400 link=Ethernet
        pci0000:c0/c0:01.0/c1:00.0 nic no_node driver=mlx5_core rate=400 link=Ethernet
        -                          nic software rate=10 link=Ethernet
        """,
        tmp_path,
    )
    distances = {nic.name: found.distance(found.gpus[0], nic).name for nic in found.nics}
    assert distances == {
        "same_switch": "SWITCH",
        "below": "SWITCHES",
        "same_bridge": "ROOT",
        "same_node": "NUMA",
        "other_node": "SYSTEM",
        "no_node": "UNKNOWN",
        "software": "UNKNOWN",
    }
    for nic in found.nics:
        assert found.distance(nic, found.gpus[0]) == found.distance(found.gpus[0], nic)


def test_a_domain_inside_another(tmp_path: Path) -> None:
    """Behind Intel's VMD a second host bridge stands in the path: it is no device, what is below it is."""
    behind = "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0"
    found = topology(
        f"""
        {behind}:06.0/10000:e1:00.0 nic behind driver=mlx5_core numa=0 rate=400 link=Ethernet
        {behind}:07.0/10000:e2:00.0 gpu nvidia numa=0
        pci0000:00/0000:00:01.0/0000:01:00.0 nic beside driver=mlx5_core numa=0 rate=400 link=Ethernet
        """,
        tmp_path,
    )
    nics = {nic.name: nic for nic in found.nics}
    assert nics["behind"].path == ("pci0000:00", "0000:00:0e.0", "10000:e0:06.0", "10000:e1:00.0")
    assert found.distance(found.gpus[0], nics["behind"]) < found.distance(found.gpus[0], nics["beside"])


def test_a_tree_without_anything(tmp_path: Path) -> None:
    assert Topology.read(tmp_path / "nowhere") == Topology()


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    build("pci0000:00/00:01.0/01:00.0 nic odd driver=mlx5_core numa=x rate=fast link=Ethernet", tmp_path)
    (port,) = (tmp_path / "class/infiniband/odd/ports").iterdir()
    (port / "state").unlink()
    (port / "link_layer").write_bytes(b"\xff\xfe")
    (found,) = Topology.read(tmp_path).nics
    assert (found.active, found.gbps, found.numa, found.link, found.ports) == (False, 0.0, -1, "", ())


def test_cores_of_a_nic_are_those_this_process_may_use(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    found = topology(
        f"""
        node 0 cpus {mine[0]},4000-4095
        node 1 cpus 4096
        pci0000:00/00:01.0/01:00.0 nic here driver=efa numa=0 rate=100 link=Unknown
        pci0000:80/80:01.0/81:00.0 nic there driver=efa numa=1 rate=100 link=Unknown
        pci0000:c0/c0:01.0/c1:00.0 nic somewhere driver=efa rate=100 link=Unknown
        """,
        tmp_path,
    )
    assert [found.near_cpus(nic) for nic in found.nics] == [{mine[0]}, frozenset(), frozenset()]


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,5", {0, 1, 2, 5}), ("7", {7}), ("", set()), ("x-3,4", {4}), ("3-1", set())],
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
