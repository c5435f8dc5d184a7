"""Production proxies over ``roce`` on in-memory NICs: flow control by the NIC's limit, failures in words."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.memory_endpoints import open_endpoints
from tests.support.provider import provider_network as net
from tests.support.provider.provider_library import MemoryNetwork
from tests.support.world import RingProducer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import PeerLost
from uccl_ep_serving.protocol.command import Command
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.proxy import words
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.nic import roce_words as rc
from uccl_ep_serving.proxy.transport.verbs import codes

WINDOW = 4 << 20


class Pair:
    """Two ranks, or more, with a service each, stepped in one thread."""

    def __init__(self, network: MemoryNetwork, group, endpoints, settings: Settings) -> None:
        self.network, self.windows = network, group.windows
        ranks = len(endpoints)
        self.errors = [np.zeros(ERROR_WORDS, np.int64) for _ in range(ranks)]
        self.services = [
            ProxyService(
                rank=rank,
                ranks=ranks,
                window=group.windows[rank].ctypes.data,
                window_bytes=len(group.windows[rank]),
                settings=settings,
                error=self.errors[rank].ctypes.data,
                endpoints=[[endpoints[rank]]],
                route=[-1 if peer == rank else 0 for peer in range(ranks)],
            )
            for rank in range(ranks)
        ]
        self.producer = RingProducer(self.services[0], 8)

    def send(self, nbytes: int) -> None:
        self.producer.put(Command(rank=1, stream=8, source=0, target=0, length=nbytes, last=True))

    def step(self, *ranks: int) -> None:
        for rank in ranks:
            assert self.services[rank].step() >= 0

    @property
    def load(self) -> int:
        """Bytes that the sender has in flight."""
        return self.services[0].states[0].word(words.LOAD) & words.LOAD_BYTES


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    settings, network = Settings(**getattr(request, "param", {})), MemoryNetwork(2, delay=0.9)
    with open_endpoints(network, 2, WINDOW, settings=settings) as (group, endpoints):
        yield Pair(network, group, endpoints, settings)


@pytest.mark.parametrize("pair", [{"nic_bytes_in_flight": 256 << 10}], indirect=True)
def test_no_more_is_in_flight_than_the_nic_is_given(pair: Pair) -> None:
    """A message of 4 MiB goes in writes of a quarter of the limit, half of it at most to one peer."""
    pair.windows[0][:] = np.arange(WINDOW, dtype=np.uint32).view(np.uint8)[:WINDOW]
    pair.send(WINDOW)
    most, deadline = 0, time.monotonic() + 30
    while pair.services[1].states[0].arrived[0, 8] < 1:
        pair.step(0)
        most = max(most, pair.load)
        pair.step(1)
        assert time.monotonic() < deadline
    assert most == 128 << 10
    assert pair.network.word(net.IMMEDIATES) == WINDOW // (64 << 10)
    assert np.array_equal(pair.windows[0], pair.windows[1])


def test_nor_to_many_peers_with_nothing_in_flight_to_any() -> None:
    """The proxy lets one write go to each of them; the NIC of each rank is its only one."""
    ranks, settings = 16, Settings(nic_bytes_in_flight=256 << 10)
    network = MemoryNetwork(ranks, delay=0.9)
    with open_endpoints(network, ranks, 1 << 20, settings=settings) as (group, endpoints):
        pair = Pair(network, group, endpoints, settings)
        for peer in range(1, ranks):
            pair.producer.put(Command(rank=peer, stream=8, source=0, target=0, length=64 << 10, last=True))
        most, deadline = 0, time.monotonic() + 30
        while not all(service.states[0].arrived[0, 8] for service in pair.services[1:]):
            pair.step(0)
            load = int(endpoints[0].state.rails[0, rc.LOAD])
            assert load == pair.load
            most = max(most, load)
            pair.step(*range(1, ranks))
            assert time.monotonic() < deadline
        assert most == 256 << 10


def test_a_failed_connection_is_the_loss_of_its_peer_with_the_cause(pair: Pair) -> None:
    pair.network.fail(pair.network.queue_pairs(0)[0], 1, codes.RETRY_EXC_ERR)
    for _ in range(3):
        pair.send(4096)
    deadline = time.monotonic() + 10
    while not pair.errors[0].any():
        pair.step(0, 1)
        assert time.monotonic() < deadline
    with pytest.raises(
        PeerLost, match=r"rank 1 is gone \(roce, mem0 .*status 12.*Thor-2.*Connection timed out"
    ) as caught:
        pair.services[0].check()
    assert caught.value.peer == 1
    # Everything of ours counts as completed, nothing of it as arrived that had not.
    assert pair.services[0].states[0].completed[1, 8] == 3
    while not pair.errors[1].any():
        pair.step(1)
        assert time.monotonic() < deadline
    assert pair.services[1].states[0].arrived[0, 8] == 1
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        pair.services[1].check()


def test_a_busy_nic_does_not_stop_the_others_of_a_peer() -> None:
    settings, network = Settings(), MemoryNetwork(2, rails=2)
    with open_endpoints(network, 2, WINDOW, settings=settings) as (group, endpoints):
        pair = Pair(network, group, endpoints, settings)
        # streams 8 and 9 of rank 0 go over rails 1 and 0: the first in the list finds no room on its rail
        rails, links = endpoints[0].state.rails, endpoints[0].state.links
        limit = int(rails[1, rc.BYTE_LIMIT])
        rails[1, rc.BYTE_LIMIT] = rails[1, rc.LOAD] = 1
        for stream in (8, 9):
            producer = RingProducer(pair.services[0], stream)
            for _ in range(40):
                producer.put(Command(rank=1, stream=stream, source=0, target=0, length=64, last=True))
        for _ in range(12):
            pair.step(0, 1)
        assert list(links[2:4, rc.IMMEDIATES]) == [40, 0]
        # and what waited goes on
        rails[1, rc.BYTE_LIMIT], rails[1, rc.LOAD] = limit, 0
        for _ in range(12):
            pair.step(0, 1)
        assert list(links[2:4, rc.IMMEDIATES]) == [40, 40]
