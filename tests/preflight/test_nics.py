"""The check over NICs in memory: each rail written over by itself, and each kind of broken set-up told by name."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.nic_ranks import efa_nics, install, roce_nics
from tests.support.provider.provider_library import MemoryNetwork
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.check.faults import Fault
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane import bootstrap
from uccl_ep_serving.kernels.select import cpu_groups
from uccl_ep_serving.native.groups import load
from uccl_ep_serving.preflight import facts, loopback, rank, ways
from uccl_ep_serving.preflight.job import Finding, Job, Place
from uccl_ep_serving.preflight.meeting import Meeting
from uccl_ep_serving.preflight.names import Names
from uccl_ep_serving.preflight.outcome import Outcome
from uccl_ep_serving.preflight.turns import WIRE
from uccl_ep_serving.proxy.service import proxy_groups
from uccl_ep_serving.proxy.transport.verbs import codes

RANKS = 2
#: Every rank plays a node of its own, though all are threads of this process.
DEVICE = torch.device("cpu")
#: A pyverbs that is installed here knows no NICs in memory.
PLAIN: dict[str, Any] = {"verbs": "ctypes"}


@pytest.fixture(autouse=True)
def this_host_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name and its routes are."""
    monkeypatch.setattr(facts, "gather_names", lambda interface: Names("", "10.0.0.1"))


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(RANKS, rails=2)


def check(
    network: Any,
    here: threading.local,
    settings: Callable[[int], Settings] = lambda rank: Settings(**PLAIN),
    device: torch.device | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> Outcome:
    """What every rank comes to, which is the same; ``say`` is told what rank 0 does."""
    load(WIRE, *cpu_groups(), *proxy_groups("auto", ("efa", "roce")))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    outcomes = {rank_: Outcome([]) for rank_ in range(RANKS)}
    failures: list[BaseException] = []

    def work(rank_: int) -> None:
        here.rank = rank_
        place = Place(rank_, RANKS, 0, 1, rank_, RANKS)
        job = Job(RANKS, rank_, 1, 0, "", 0, 60.0, doctor=(Finding("doctor", f"node {rank_}"),))
        try:
            told = say if rank_ == 0 else lambda words: None
            rank.examine(outcomes[rank_], Meeting(store, place), job, lambda: settings(rank_), device, told)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(rank_,)) for rank_ in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@contextlib.contextmanager
def installed(network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.local]:
    with install(network, monkeypatch, lambda rank: roce_nics(network, rank), "roce") as here:
        yield here


def lines(outcome: Outcome, part: str) -> list[Finding]:
    return [one for one in outcome.findings if one.part == part]


def only_fault(outcome: Outcome, part: str) -> Fault:
    """Of the part, the first; no other part has failed."""
    assert {one.part for one in outcome.findings if one.fault} == {part}, outcome.findings
    fault = next(one.fault for one in lines(outcome, part) if one.fault)
    assert fault is not None
    assert fault.step
    return fault


class TestWorking:
    def test_each_rail_is_written_over_and_compared_with_its_rate(
        self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        assert outcome.passed, [one.fault for one in outcome.findings if one.fault]
        for rail in range(2):
            there, back = lines(outcome, f"roce rail {rail}")
            assert (there.where, back.where) == ("rank 0 -> rank 1", "rank 1 -> rank 0")
            assert there.said.startswith(f"mem0r{rail} -> mem1r{rail}, roce: ")
            assert "of the NIC's 50" in there.said
            # the sizes that docs/check.md promises
            assert " us, 16 B " in there.said
            assert " us, 1 MiB " in there.said
        assert [rail.name for rail in outcome.known[1].rails] == ["mem1r0", "mem1r1"]
        alone = lines(outcome, "NIC to itself")
        assert [one.where for one in alone] == [
            f"mem{rank}r{rail} on node {rank}" for rank in (0, 1) for rail in (0, 1)
        ]
        assert all("0 B " in one.said and ", 8 B " in one.said and ", 1 MiB " in one.said for one in alone)
        assert outcome.routes == [{1: "direct"}, {0: "direct"}]
        assert [one.said for one in lines(outcome, "normal mode")] == ["3 layers of dispatch and combine are right"]
        assert lines(outcome, "doctor")
        assert not +network.objects

    def test_over_efa(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network = SrdNetwork(RANKS, 2)
        with install(network, monkeypatch, efa_nics(2)) as here:
            outcome = check(network, here)
        assert outcome.passed, [one.fault for one in outcome.findings if one.fault]
        assert len(lines(outcome, "efa rail 1")) == 2

    def test_into_memory_of_a_gpu(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank, "MODES", ())
        with installed(network, monkeypatch) as here:
            outcome = check(network, here, device=DEVICE)
        assert outcome.passed, [one.fault for one in outcome.findings if one.fault]
        assert len(lines(outcome, "NIC to itself, GPU memory")) == 4
        there, _ = lines(outcome, "roce rail 1, GPU memory")
        assert there.said.startswith("mem0r1 -> mem1r1, roce: ")


class TestBroken:
    """Set-ups that were broken on purpose, and what names them."""

    def test_a_dead_rail(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        def cut(words: str) -> None:
            # only the NICs of this rail are open then
            if words == "roce rail 1: rank 0 with rank 1":
                network.kill(1)

        with installed(network, monkeypatch) as here:
            outcome = check(network, here, say=cut)
        fault = only_fault(outcome, "roce rail 1")
        assert fault.where.startswith(("rail 1 (mem0r1 -> mem1r1), ", "rail 1 (mem1r1 -> mem0r1), "))
        assert "UCCL_EP_NICS=^mem" in fault.step
        assert all("GB/s" in one.said for one in lines(outcome, "roce rail 0"))

    def test_a_nic_that_writes_something_else(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loopback._End, "take", lambda end, nbytes: bytes(nbytes + 1))
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        fault = only_fault(outcome, "NIC to itself")
        assert (fault.where, fault.expected) == ("a write of 0 bytes", "the bytes that were sent")
        assert "driver" in fault.cause

    def test_a_wrong_gid(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        with installed(network, monkeypatch) as here:
            outcome = check(network, here, lambda rank: Settings(nic_gid_index=7 * rank, **PLAIN))
        fault = only_fault(outcome, "NICs")
        assert fault.where == "node 1"
        assert "mem1r0" in fault.found
        assert "GID" in fault.found
        assert "UCCL_EP_NIC_GID_INDEX" in f"{fault.found} {fault.step}"

    def test_different_mtus(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        network.traits[2].mtu = 5
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        assert outcome.passed
        (mtu,) = lines(outcome, "MTU")
        assert mtu.note.startswith("MTU mismatch: node 0: mem0r0 1024, node 1: mem1r0 4096; 1024 is used. Next step: ")

    def test_swapped_rails(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        networks = {"mem0r0": "10.1.0.0/24", "mem0r1": "10.2.0.0/24", "mem1r0": "10.2.0.0/24", "mem1r1": "10.1.0.0/24"}
        monkeypatch.setattr(facts, "network_of", lambda address, name: networks[name])
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        (swapped,) = [one.note for one in lines(outcome, "NICs")]
        assert swapped.startswith("swapped rails: rail 0 of node 0 is on 10.1.0.0/24, of node 1 on 10.2.0.0/24. Next")

    @pytest.mark.parametrize(
        ("address", "mask", "network_is"),
        [("10.1.0.7", "255.255.0.0", "10.1.0.0/16"), ("fd00::7", "ffff:ffff:ffff:ffff::", "fd00::/64"), ("", "", "")],
    )
    def test_the_network_of_an_address(
        self, address: str, mask: str, network_is: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        there = {"eth0": [SimpleNamespace(address=address, netmask=mask)]}
        monkeypatch.setattr(facts.psutil, "net_if_addrs", lambda: there)
        assert facts.network_of(address, "mem0") == network_is

    def test_memory_that_may_not_be_pinned(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        network.refuse["ibv_reg_mr"] = errno.ENOMEM
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        fault = only_fault(outcome, "NIC to itself")
        assert "ulimit -l" in fault.cause
        assert "memlock" in fault.step

    def test_a_wrong_secret(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = bootstrap.introduce

        def introduce(exchange: Any, *arguments: Any, **named: Any) -> Any:
            found = honest(exchange, *arguments, **named)
            return found if exchange.rank else type(found)(found.cards, bytes(32))

        monkeypatch.setattr("uccl_ep_serving.data_plane.runtime.introduce", introduce)
        monkeypatch.setitem(ways.SETTINGS, "connect_timeout", 1.0)
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        faults = [one.fault for one in lines(outcome, "as a job") if one.fault]
        assert any("secret" in str(fault) for fault in faults), faults

    def test_different_versions(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = facts.gather_facts

        def told(place: Place, *arguments: Any) -> facts.Facts:
            found = honest(place, *arguments)
            versions = {**found.versions, **({"uccl_ep_serving": "0.0.9"} if place.rank else {})}
            return type(found)(
                **{**{name: getattr(found, name) for name in found.__struct_fields__}, "versions": versions}
            )

        monkeypatch.setattr(rank, "gather_facts", told)
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        fault = only_fault(outcome, "versions")
        assert fault.found == "0.0.9"
        assert "pip install uccl_ep_serving==" in fault.step
        assert not lines(outcome, "as a job"), "nothing is connected any more"

    def test_different_settings(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        with installed(network, monkeypatch) as here:
            outcome = check(network, here, lambda rank: Settings(proxies=1 + rank, **PLAIN))
        assert "UCCL_EP_PROXIES = 1, as on rank 0" in only_fault(outcome, "settings").expected

    def test_fewer_nics_on_one_node(self, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        network.traits[3].state = codes.PORT_DOWN
        with installed(network, monkeypatch) as here:
            outcome = check(network, here)
        notes = [one.note for one in lines(outcome, "NICs")]
        assert any(note.startswith("left out: ") and "mem1r1" in note for note in notes), notes


def test_every_field_of_a_fault_survives_the_way_to_the_others() -> None:
    import msgspec

    finding = Finding("p", "w", fault=Fault("a", "b", "c", "d", "e", True, "f"))
    assert msgspec.json.decode(msgspec.json.encode(finding), type=Finding) == finding
    assert dataclasses.asdict(finding.fault)["trace"] == "f"  # type: ignore[arg-type]


def test_a_pyverbs_peer_that_cannot_open_the_nic_is_a_finding(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "makes_verbs_objects", lambda settings: "pyverbs (UCCL_EP_VERBS=auto)")

    def none(*_: object) -> None:
        raise LookupError("no such device")

    monkeypatch.setattr(loopback, "PyverbsPeer", none)
    with installed(network, monkeypatch) as here:
        outcome = check(network, here)
    assert "no such device" in only_fault(outcome, "NIC to itself, pyverbs").found
