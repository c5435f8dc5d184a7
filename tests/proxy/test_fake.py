"""The fake transport keeps the transport contract, with and without an adversary, and does what it threatens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.contract import Group, OpenGroup, Traffic, TransportContract
from uccl_ep_serving.errors import BootstrapError, ConfigError
from uccl_ep_serving.proxy.transport.base import ARRIVED, DOWN, FAULT, SENT
from uccl_ep_serving.proxy.transport.fake import Adversary, FakeFabric


def open_fabric(ranks: int, window_bytes: int, adversary: Adversary, **options: int) -> tuple[FakeFabric, Group]:
    """A connected group on a new fabric."""
    fabric = FakeFabric(ranks, window_bytes, seed=7, adversary=adversary, **options)
    windows = [np.zeros(window_bytes, np.uint8) for _ in range(ranks)]
    endpoints = [fabric.endpoint(rank) for rank in range(ranks)]
    for rank in range(ranks):
        fabric.register_window(rank, windows[rank].ctypes.data)
    for rank in range(ranks):
        addresses = [None if peer == rank else endpoints[peer].address() for peer in range(ranks)]
        endpoints[rank].connect(addresses, time.monotonic() + 1)
    return fabric, Group(endpoints, windows, fabric.kill)


class TestFakeContract(TransportContract):
    """The contract on a polite network."""

    adversary = Adversary()

    @pytest.fixture
    def open_group(self) -> OpenGroup:
        @contextlib.contextmanager
        def open_group(ranks: int, window_bytes: int) -> Iterator[Group]:
            _, group = open_fabric(ranks, window_bytes, self.adversary, in_sequence=self.adversary == Adversary())
            yield group
            for endpoint in group.endpoints:
                endpoint.close()

        return open_group


class TestFakeContractWithAnAdversary(TestFakeContract):
    """The contract while writes are reordered, delayed, repeated and refused."""

    adversary = Adversary(reorder=0.3, delay=0.2, duplicate=0.3, busy=0.2)


def test_it_reorders_and_repeats() -> None:
    _, group = open_fabric(2, 1 << 16, Adversary(reorder=0.5, duplicate=0.5))
    traffic = Traffic(group)
    for number in range(200):
        traffic.add(0, 1, source=number * 64, target=number * 64, nbytes=64)
    traffic.run()
    order = [number for _, number in traffic.order]
    assert order != sorted(order)
    assert any(write.arrivals > 1 for write in traffic.writes)
    assert not group.endpoints[0].capabilities.in_sequence


def test_a_repeat_carries_the_bytes_of_its_time() -> None:
    """Until SENT the payload may land again with what the source holds then: the danger that completion guards."""
    _, group = open_fabric(2, 4096, Adversary(duplicate=0.9))
    traffic = Traffic(group)
    traffic.add(0, 1, source=0, target=0, nbytes=64)
    assert traffic.try_post(0)
    seen = False
    while not seen:
        seen = any(event.kind == ARRIVED for event in traffic.ports[1].poll())
    group.windows[0][:64] = 99
    for _ in range(100):
        traffic.ports[1].poll()
    assert (group.windows[1][:64] == 99).all()


def test_nothing_is_repeated_after_sent() -> None:
    _, group = open_fabric(2, 4096, Adversary(duplicate=0.5))
    traffic = Traffic(group)
    traffic.add(0, 1, source=0, target=0, nbytes=64)
    assert traffic.try_post(0)
    for _ in range(1000):
        traffic.ports[1].poll()
        if any(event.kind == SENT for event in traffic.ports[0].poll()):
            break
    else:
        pytest.fail("never SENT")
    group.windows[0][:64] = 99
    assert sum(event.kind == ARRIVED for _ in range(100) for event in traffic.ports[1].poll()) <= 1
    assert not (group.windows[1][:64] == 99).any()


def test_sent_is_held_back_of_some_and_says_until_when_a_source_is_read() -> None:
    fabric, group = open_fabric(2, 4096, Adversary())
    traffic = Traffic(group)
    for number, nbytes in enumerate((64, 128)):
        traffic.add(0, 1, source=nbytes, target=0, nbytes=nbytes)
        assert traffic.try_post(number)
    start = group.windows[0].ctypes.data
    assert {(address - start, nbytes) for _, address, nbytes in fabric.sources()} == {(64, 64), (128, 128)}
    arrived = 0
    while arrived < 2:
        arrived += sum(event.kind == ARRIVED for event in traffic.ports[1].poll())
    fabric.hold(lambda nbytes: nbytes == 64, back=True)
    assert sum(event.kind == SENT for _ in range(50) for event in traffic.ports[0].poll()) == 1
    assert [nbytes for _, _, nbytes in fabric.sources()] == [64]
    fabric.hold(lambda nbytes: nbytes == 64, back=False)
    assert [event.kind for event in traffic.ports[0].poll()] == [SENT]
    assert fabric.sources() == set()


def test_a_dropped_write_is_told_and_a_lost_one_is_not() -> None:
    for adversary, expected in ((Adversary(drop=1.0), [DOWN]), (Adversary(lose=1.0), [SENT])):
        _, group = open_fabric(2, 4096, adversary)
        traffic = Traffic(group)
        traffic.add(0, 1, source=0, target=0, nbytes=64)
        assert traffic.try_post(0)
        assert [event.kind for _ in range(50) for event in traffic.ports[0].poll()] == expected
        assert [event for _ in range(50) for event in traffic.ports[1].poll()] == []


def test_a_rank_is_killed_after_its_writes() -> None:
    fabric, group = open_fabric(3, 4096, Adversary(kill=1, kill_after=2))
    traffic = Traffic(group)
    for _ in range(3):
        traffic.add(1, 0, source=0, target=0, nbytes=64)
    assert traffic.try_post(0)
    assert fabric.alive(1)
    assert traffic.try_post(1)
    assert not fabric.alive(1)
    assert not traffic.try_post(2)
    kinds = {(rank, event.kind, event.peer) for rank in (0, 2) for event in traffic.ports[rank].poll()}
    assert {(0, DOWN, 1), (2, DOWN, 1)} <= kinds


def test_the_same_seed_gives_the_same_run() -> None:
    def history() -> list[tuple[int, int]]:
        _, group = open_fabric(3, 1 << 16, Adversary(reorder=0.4, delay=0.2, duplicate=0.3))
        traffic = Traffic(group)
        for number in range(60):
            traffic.add(number % 3, (number + 1) % 3, source=number * 64, target=number * 64, nbytes=64)
        traffic.run()
        return traffic.order

    assert history() == history()


def test_forged_events_are_delivered() -> None:
    fabric, group = open_fabric(2, 4096, Adversary())
    fabric.endpoint(0).inject(FAULT, 0, 1, 2)
    assert [tuple(event) for event in Traffic(group).ports[0].poll()] == [(FAULT, 0, 1, 2)]


@pytest.mark.parametrize("wrong", [{"reorder": 1.0}, {"delay": -0.1}, {"drop": 1.5}])
def test_impossible_adversaries_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Adversary(**wrong)


def test_an_address_of_another_kind_is_refused() -> None:
    fabric = FakeFabric(2, 4096)
    with pytest.raises(BootstrapError, match="no fake address of rank 1"):
        fabric.endpoint(0).connect([None, b"tcp:127.0.0.1:1"], time.monotonic() + 1)
    with pytest.raises(ConfigError, match="no endpoint"):
        fabric.endpoint(2)
