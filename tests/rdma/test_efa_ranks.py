"""Whole ranks over EFA devices in memory: selection, rails, both modes with data checked, what is said without NICs."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.rdma.conftest import BOTH_WAYS
from tests.support import ll_cases, normal_cases
from tests.support.combinations import first_of
from tests.support.nic_ranks import efa_nics, install, run_ranks
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.mesh import ControlMesh
from uccl_ep_serving.data_plane.runtime import Runtime
from uccl_ep_serving.data_plane.topology import Topology
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.proxy.transport.verbs import codes

FORCED = Settings(transport="efa", direct=False, timeout=30.0, heap_bytes=8 << 20, round_bytes=1 << 20)


pytestmark = pytest.mark.usefixtures("receiving")


@pytest.mark.parametrize(("ranks", "rails", "proxies"), [(2, 1, 1), (3, 4, 1), (3, 4, 2), (2, 1, 3)])
def test_low_latency(ranks: int, rails: int, proxies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = SrdNetwork(ranks, rails, seed=ranks, repeat=0.3, pace=8)
    settings = replace(FORCED, proxies=proxies, channels=4)
    cases = [ll_cases.Case(ranks=ranks, experts=12, counts=(8, 3, 0), seed=seed) for seed in range(4)]
    inputs = [case.inputs() for case in cases]

    def body(runtime: Any) -> str:
        low_latency = LowLatency(runtime)
        for case, given in zip(cases, inputs, strict=True):
            combined = ll_cases.run_rank(case, low_latency, runtime.rank, given)
            ll_cases.check_combined(case, given, runtime.rank, combined)
        return str(runtime.stats()["transport_by_peer"])

    with install(network, monkeypatch, efa_nics(rails)) as here:
        for ways in run_ranks(network, here, settings, body):
            assert set(re.findall(r"': '(\w+)'", ways)) == {"efa"}


@BOTH_WAYS
def test_normal_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    network = SrdNetwork(3, 2, seed=5, repeat=0.3, pace=32)
    network.efa.max_write = 2048
    case = normal_cases.Case((60, 0, 33), experts=12).inputs()

    def body(runtime: Any) -> Any:
        return normal_cases.round_trip(Normal(runtime), case, runtime.rank)

    with install(network, monkeypatch, efa_nics(2)) as here:
        normal_cases.check(case, run_ranks(network, here, replace(FORCED, channels=2), body))


@pytest.mark.parametrize(
    ("ranks", "node_ranks", "rails", "proxies"), first_of((4, 2, 2, 1), (4, 2, 4, 1), (8, 2, 2, 1), (4, 1, 3, 2))
)
def test_every_nic_carries_its_part(
    ranks: int, node_ranks: int, rails: int, proxies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows cross once to a node, a rank has one peer on each other node: r and r + node_ranks, whose sum is
    even."""
    network = SrdNetwork(ranks, ranks * rails, seed=3, pace=64)
    settings = replace(FORCED, direct=True, node_ranks=node_ranks, proxies=proxies)
    channels: set[int] = set()
    case = normal_cases.Case((220,) * ranks, hidden=2048, experts=4 * ranks, lost=0.0).inputs()

    def body(runtime: Runtime) -> Any:
        assert runtime.node_ranks == node_ranks
        channels.add(runtime.channels)
        return normal_cases.round_trip(Normal(runtime), case, runtime.rank)

    with install(network, monkeypatch, efa_nics(ranks * rails)) as here:
        normal_cases.check(case, run_ranks(network, here, settings, body))
    for rank in range(ranks):
        carried = network.bytes_of(rank)[rank * rails : (rank + 1) * rails]
        assert min(carried) > 0.75 * max(carried), f"rank {rank}: {carried} bytes by NIC"
    assert channels == {rails}


def test_channels_that_were_set_are_kept_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = SrdNetwork(2, rails=4)
    with install(network, monkeypatch, efa_nics(4)) as here:
        assert run_ranks(network, here, replace(FORCED, channels=1), lambda runtime: runtime.channels) == [1, 1]
    assert "UCCL_EP_CHANNELS=1 leaves 1 of the 2 NICs of a rank idle" in caplog.text


def test_nics_that_are_not_used_are_a_warning_and_those_asked_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with an rdma-core that is too old, between ranks that map nothing of each other."""
    network = SrdNetwork(2)
    network.efa.capabilities, network.efa.release = codes.EFA_CAP_RDMA_READ, 44
    monkeypatch.setattr(ControlMesh, "local_peers", frozenset())
    settings = replace(FORCED, transport="auto")
    with install(network, monkeypatch, efa_nics(1)) as here:
        ways = run_ranks(network, here, settings, lambda runtime: runtime.stats()["transport_by_peer"])
        assert ways == [{"1": "tcp"}, {"0": "tcp"}]
        (warning,) = [one for one in caplog.messages if one.startswith("rank 0 reaches ranks 1 over tcp")]
        assert "not efa: this rank: efa0 offers no RDMA write to rdma-core 44, which is installed here" in warning
        assert "or set UCCL_EP_TRANSPORT=tcp where it is meant" in warning
        with pytest.raises(ConfigError, match=r"UCCL_EP_NICS asks for NICs .*efa0 offers no RDMA write.*names efa0"):
            run_ranks(network, here, replace(settings, nics="efa0"), lambda runtime: None)
        with pytest.raises(
            ConfigError,
            match=r"UCCL_EP_NICS==efa7 names efa7 \(no such device or port\); RDMA devices of this machine: efa0\.",
        ):
            run_ranks(network, here, replace(settings, nics="=efa7"), lambda runtime: None)


def test_without_nics_the_demand_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    network = SrdNetwork(2)
    with (
        install(network, monkeypatch, Topology()) as here,
        pytest.raises(ConfigError, match="efa cannot reach a peer: this rank: no device"),
    ):
        run_ranks(network, here, FORCED, lambda runtime: None)


def test_a_nic_that_cannot_write_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    network = SrdNetwork(2)
    network.efa.capabilities = codes.EFA_CAP_RDMA_READ
    with (
        install(network, monkeypatch, efa_nics(1)) as here,
        pytest.raises(ConfigError, match=r"efa cannot reach a peer: this rank: efa0 offers no RDMA write"),
    ):
        run_ranks(network, here, FORCED, lambda runtime: None)


def test_neighbours_stay_direct_though_there_are_nics(monkeypatch: pytest.MonkeyPatch) -> None:
    network = SrdNetwork(2)
    settings = replace(FORCED, transport="auto", direct=True)
    with install(network, monkeypatch, efa_nics(1)) as here:
        ways = run_ranks(network, here, settings, lambda runtime: runtime.stats()["transport_by_peer"])
    assert ways == [{"1": "direct"}, {"0": "direct"}]


def test_ranks_with_cores_of_their_own_spin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Three ranks of a host: two share four cores, and the NIC of the third is on a NUMA node of its own."""
    cores = [frozenset(range(4)), frozenset(range(4)), frozenset(range(12))]
    nodes = {0: frozenset(range(4)), 1: frozenset(range(8, 12))}
    network = SrdNetwork(3, 1, seed=1)
    caplog.set_level("INFO")
    with install(network, monkeypatch, lambda rank: replace(efa_nics(1, numa=int(rank == 2)), cpus=nodes)) as here:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[here.rank])
        found = run_ranks(network, here, FORCED, lambda runtime: runtime.stats()["proxy_spin_us"])
    assert found == [0, 0, 10_000]
    assert caplog.text.count("spin off: 4 cores for the 2 proxies on them") == 2
    assert "spin 10 ms: 4 cores for the 1 proxy on them" in caplog.text
