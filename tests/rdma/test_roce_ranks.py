"""Whole ranks over RoCE NICs in memory: both modes over two NICs each, and a rank that dies while others connect."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.support import ll_cases, normal_cases
from tests.support.nic_ranks import efa_nics, install, roce_nics, run_ranks
from tests.support.provider.provider_library import MemoryNetwork
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.mesh import ControlMesh
from uccl_ep_serving.data_plane.runtime import Runtime
from uccl_ep_serving.errors import Evicted, PeerLost, TransportError, UcclEpError
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.native.jit import c_function
from uccl_ep_serving.proxy.transport.nic import roce_words as rc
from uccl_ep_serving.proxy.transport.nic import words
from uccl_ep_serving.proxy.transport.nic.efa import EfaEndpoint
from uccl_ep_serving.proxy.transport.nic.roce import RoceEndpoint
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.objects import AddressHandle, QueuePair

FORCED = Settings(transport="roce", direct=False, timeout=30.0, heap_bytes=8 << 20, round_bytes=1 << 20)


@pytest.mark.parametrize(("rails", "proxies", "qps"), [(2, 1, 1), (3, 2, 2)])
def test_both_modes_over_several_nics(rails: int, proxies: int, qps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # the ranks of a host share its NICs
    network = MemoryNetwork(3, seed=rails, rails=3 * rails, delay=0.2, half=0.2)
    settings = replace(FORCED, proxies=proxies, nic_qps=qps)
    cases = [ll_cases.Case(ranks=3, experts=12, counts=(8, 3, 0), seed=seed) for seed in range(3)]
    inputs = [case.inputs() for case in cases]
    normal = normal_cases.Case((60, 0, 33), experts=12).inputs()

    def body(runtime: Runtime) -> Any:
        assert runtime.channels == rails
        low_latency = LowLatency(runtime)  # type: ignore[arg-type]
        for case, given in zip(cases, inputs, strict=True):
            combined = ll_cases.run_rank(case, low_latency, runtime.rank, given)
            ll_cases.check_combined(case, given, runtime.rank, combined)
        received = normal_cases.round_trip(Normal(runtime), normal, runtime.rank)
        assert set(re.findall(r"': '(\w+)'", str(runtime.stats()["transport_by_peer"]))) == {"roce"}
        assert runtime._watch.plane is not None
        used = [
            row[0].state.links[:, rc.IMMEDIATES].reshape(3, -1, qps).sum(axis=(0, 2))  # type: ignore[attr-defined]
            for row in runtime._watch.plane.endpoints
        ]
        assert all((one > 0).all() for one in used), f"a NIC was idle: {used}"
        return received

    with install(network, monkeypatch, lambda rank: roce_nics(network, rank), "roce") as here:
        normal_cases.check(normal, run_ranks(network, here, settings, body))


def test_a_failed_queue_pair_ends_the_pair_by_name_and_a_new_group_is_built_in_the_same_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = MemoryNetwork(2, rails=2)
    case = ll_cases.Case(ranks=2, experts=8, counts=(8, 8))
    given = case.inputs()
    met = threading.Barrier(2)

    def run(runtime: Runtime) -> None:
        combined = ll_cases.run_rank(case, LowLatency(runtime), runtime.rank, given)  # type: ignore[arg-type]
        ll_cases.check_combined(case, given, runtime.rank, combined)

    def run_often(runtime: Runtime) -> None:
        for _ in range(1000):
            run(runtime)

    def fails(runtime: Runtime) -> str:
        run(runtime)
        met.wait(30)
        if runtime.rank == 0:
            for qp in network.queue_pairs(0):
                # a few writes from now: the proxies post meanwhile
                network.fail(qp, network.posted(qp) + 4, codes.RETRY_EXC_ERR)
        met.wait(30)
        with pytest.raises(Evicted if runtime.rank else PeerLost) as caught:
            run_often(runtime)
        assert runtime.rank or caught.value.peers == (1,)  # type: ignore[attr-defined]
        return str(caught.value)

    with install(network, monkeypatch, lambda rank: roce_nics(network, rank), "roce") as here:
        zero, one = run_ranks(network, here, FORCED, fails)
        # the device, its queue pair, the status in words and its usual cause, of that end whose NIC noticed first; of
        # the two ends the higher one is lost
        start = r"low-latency [a-z ]+, rank 0: rank 1 is gone \(.*roce, mem[01]r[01] port 1, GID 1.*queue"
        assert re.match(start, zero), zero
        assert re.search(r"work completion status 12, transport retry counter exceeded: no acknowledgement", zero), zero
        assert re.search(r"ranks \[0\] have gone on without it \(.*roce, mem[01]r[01].*status 12", one), one
        run_ranks(network, here, FORCED, run)


def test_who_hears_of_a_failed_queue_pair_from_another_rank_is_told_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue pairs between ranks 0 and 1 fail; rank 2 has none that do, and is told of both."""
    network = MemoryNetwork(3)
    case = ll_cases.Case(ranks=3, experts=12, counts=(8, 8, 8))
    given = case.inputs()
    met = threading.Barrier(3)

    def fails(runtime: Runtime) -> str:
        low_latency = LowLatency(runtime)  # type: ignore[arg-type]

        def run_often() -> None:
            for _ in range(1000):
                ll_cases.run_rank(case, low_latency, runtime.rank, given)

        ll_cases.run_rank(case, low_latency, runtime.rank, given)
        met.wait(30)
        if runtime.rank == 0:
            for qp in network.queue_pairs(0)[:1]:
                network.fail(qp, network.posted(qp) + 4, codes.RETRY_EXC_ERR)
        met.wait(30)
        with pytest.raises(Evicted if runtime.rank == 1 else PeerLost) as caught:
            run_often()
        # whoever closes its Buffer before the others have heard is lost to them as well
        met.wait(30)
        assert runtime.rank == 1 or caught.value.peers == (1,)  # type: ignore[attr-defined]
        return str(caught.value)

    with install(network, monkeypatch, lambda rank: roce_nics(network, rank), "roce") as here:
        zero, one, two = run_ranks(network, here, FORCED, fails)
    for text in (zero, one, two):
        assert re.search(
            r"roce, mem[01] port 1, .* work completion status 12, transport retry counter exceeded", text
        ), text


@pytest.mark.parametrize("kind", ["roce", "efa"])
def test_a_nic_that_cannot_be_polled_is_named_on_both_sides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of no use for any peer: this rank says which device, and the others hear why it has stopped."""
    network: Any = SrdNetwork(2) if kind == "efa" else MemoryNetwork(2)
    topology: Any = efa_nics(1) if kind == "efa" else lambda rank: roce_nics(network, rank)
    broken = c_function("int32(int64, int32, int64)")(_cannot_be_polled)
    met = threading.Barrier(2)

    def body(runtime: Runtime) -> tuple[str, float]:
        met.wait(30)
        if runtime.rank == 0:
            assert runtime._watch.plane is not None
            endpoint: Any = runtime._watch.plane.endpoints[0][0]
            endpoint._state.rails[0, words.POLL_CQ] = broken.address
        met.wait(30)
        started = time.monotonic()
        with pytest.raises((TransportError, PeerLost)) as caught:
            normal_cases.round_trip(Normal(runtime), normal_cases.Case((8, 8), experts=4).inputs(), runtime.rank)
        assert isinstance(caught.value, PeerLost if runtime.rank else TransportError), caught.value
        text, took = str(caught.value), time.monotonic() - started
        met.wait(30)
        return text, took

    with install(network, monkeypatch, topology, kind) as here:
        (zero, _), (one, took) = run_ranks(network, here, replace(FORCED, transport=kind), body)
    device = "efa0: its driver refused a call with -5" if kind == "efa" else "mem0: its completion queue could not be"
    assert device in zero, zero
    assert "rank 0 is gone" in one
    assert device in one, one
    assert took < 10


@pytest.mark.parametrize("kind", ["roce", "efa"])
def test_a_nic_that_reports_to_be_lost_is_named_long_before_a_deadline(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its completion queue may just stay empty. One of the ranks takes the event: that one's device it is."""
    network: Any = SrdNetwork(2) if kind == "efa" else MemoryNetwork(2)
    topology: Any = efa_nics(1) if kind == "efa" else lambda rank: roce_nics(network, rank)
    met = threading.Barrier(2)

    def body(runtime: Runtime) -> tuple[UcclEpError, float]:
        normal, inputs = Normal(runtime), normal_cases.Case((8, 8), experts=4).inputs()
        normal_cases.round_trip(normal, inputs, runtime.rank)
        met.wait(30)
        if runtime.rank == 0:
            network.events.append(8)
        started = time.monotonic()

        def run_long() -> None:
            while time.monotonic() < started + 20:
                normal_cases.round_trip(normal, inputs, runtime.rank)

        with pytest.raises((TransportError, PeerLost)) as caught:
            run_long()
        took = time.monotonic() - started
        met.wait(30)
        return caught.value, took

    with install(network, monkeypatch, topology, kind) as here:
        found = run_ranks(network, here, replace(FORCED, transport=kind), body)
    assert {type(error) for error, _ in found} == {TransportError, PeerLost}, found
    for error, took in found:
        assert "the device has reported: device fatal error" in str(error)
        assert took < 5
    (lost,) = [rank for rank, (error, _) in enumerate(found) if isinstance(error, TransportError)]
    assert found[1 - lost][0].peer == lost  # type: ignore[attr-defined]


def _cannot_be_polled(queue: int, room: int, entries: int) -> int:
    return -5


@pytest.mark.parametrize("kind", ["roce", "efa"])
def test_a_rank_that_dies_while_others_connect_is_named_soon(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are at their connections for seconds; rank 2 is gone after the first moment."""
    ranks = 6
    network: Any = SrdNetwork(ranks) if kind == "efa" else MemoryNetwork(ranks)
    topology: Any = efa_nics(1) if kind == "efa" else lambda rank: roce_nics(network, rank)
    endpoint, connection, name = (
        (EfaEndpoint, AddressHandle, "__init__") if kind == "efa" else (RoceEndpoint, QueuePair, "connect")
    )
    connect, make = endpoint.connect, getattr(connection, name)
    died: list[float] = []

    def dying(self: Any, *arguments: Any) -> None:
        if self._rank != 2:
            connect(self, *arguments)
            return
        time.sleep(0.2)
        died.append(time.monotonic())
        raise KeyboardInterrupt

    def slow(self: Any, *arguments: Any, **named: int) -> None:
        make(self, *arguments, **named)
        time.sleep(0.6)

    goodbye = ControlMesh.goodbye
    monkeypatch.setattr(endpoint, "connect", dying)
    monkeypatch.setattr(connection, name, slow)
    monkeypatch.setattr(ControlMesh, "goodbye", lambda mesh, doing: None if mesh.rank == 2 else goodbye(mesh, doing))
    settings = replace(FORCED, transport=kind, connect_timeout=30.0)
    failed: dict[int, BaseException] = {}
    with install(network, monkeypatch, topology, kind) as here:
        run_ranks(network, here, settings, lambda runtime: None, failed)
    seconds = time.monotonic() - died[0]
    others = [failed[rank] for rank in range(ranks) if rank != 2]
    assert all(isinstance(error, PeerLost) for error in others), failed
    assert {2} <= {error.peer for error in others if isinstance(error, PeerLost)}
    assert seconds < 2.5, f"all connections would have taken 3 s, the loss was noticed after {seconds:.1f} s"
