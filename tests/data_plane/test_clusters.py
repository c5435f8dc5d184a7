"""What known clusters choose: the golden table, and what must hold of it whatever is decided."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from tests.support import clusters
from tests.support.clusters import CLUSTERS, GOLDEN, Cluster
from tests.support.sysfs_tree import MACHINES, build, facts, network
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.addresses import Kind, choose_address


def test_the_golden_table_is_what_is_chosen() -> None:
    assert GOLDEN.read_text() == "\n".join(clusters.pages()) + "\n", "run make docs, and look at what has changed"


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda one: one.machine)
def test_no_cluster_tells_others_an_address_of_containers(cluster: Cluster, tmp_path: Path) -> None:
    """With a store, and by guessing."""
    text = (MACHINES / f"{cluster.machine}.txt").read_text()
    build(text, tmp_path)
    found = network(text, tmp_path)
    inside = {one for face in found.interfaces if face.kind == Kind.INSIDE for one in face.addresses}
    assert any(not ipaddress.ip_address(one).is_loopback for one in inside), "there is one to avoid"
    for store in (cluster.store, ""):
        address = choose_address(Settings(), store, found.interfaces, found.route).address
        assert address not in inside or (store == "127.0.0.1" and address == store)


@pytest.mark.parametrize("cluster", [one for one in CLUSTERS if one.nodes > 1], ids=lambda one: one.machine)
def test_nodes_with_nics_use_them(cluster: Cluster) -> None:
    chosen = clusters.choices(cluster)
    assert chosen["transport"].what in ("direct / efa", "direct / roce")
    assert not chosen["rails per GPU"].what.startswith("0")


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda one: one.machine)
def test_windows_lie_on_gpus_where_kernels_and_nics_reach_them(cluster: Cluster) -> None:
    told = facts((MACHINES / f"{cluster.machine}.txt").read_text())
    alone = cluster.nodes == 1
    reached = alone or (told["peers"] == "yes" and told["direct"] != "no")
    assert (clusters.choices(cluster)["window"].what == "device") == reached
