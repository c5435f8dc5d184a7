"""How many channels there are, and that the streams of ranks that write to each other then use every NIC alike."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.combinations import diagonal
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.rails import choose_channels, deal
from uccl_ep_serving.proxy.transport.nic.words import rail_of, stripe_table

NODE = 8
#: Chunks, all of one length, that a rank sends to a peer in normal mode.
CHUNKS = 48


def carried(rank: int, peers: range, rails: int, proxies: int, channels: int) -> Counter[int]:
    """Chunks of ``rank`` to ``peers`` by NIC."""
    stripes, found = stripe_table(proxies), Counter(dict.fromkeys(range(rails), 0))
    for peer in peers:
        for chunk in range(CHUNKS):
            channel = chunk % channels
            driven = deal(tuple(range(rails)), channel % proxies, proxies)
            # the stripe of a stream is that of its channel; 8 is the first stream of low latency
            found[driven[rail_of(int(stripes[8 + channel]), rank, peer, len(driven))]] += 1
    return found


@pytest.mark.parametrize(("nodes", "rails", "proxies"), diagonal((2, 4, 8), (1, 2, 4), (1, 2, 3)))
def test_the_ranks_that_a_rank_meets_between_nodes_load_its_nics_alike(nodes: int, rails: int, proxies: int) -> None:
    ranks = nodes * NODE
    channels = choose_channels(Settings(proxies=proxies), rails).count
    for rank in range(ranks):
        # rows cross once to each node: to the ranks at the same place of the others; else to all of them
        for peers in (range(rank % NODE, ranks, NODE), range(ranks)):
            far = [peer for peer in peers if peer // NODE != rank // NODE]
            load = Counter[int]()
            for peer in far:
                load += carried(rank, range(peer, peer + 1), rails, proxies, channels)
            assert set(load) == set(range(rails)), f"rank {rank}: idle NICs, {load}"
            if proxies <= rails and rails % proxies == 0:
                assert len(set(load.values())) == 1, f"rank {rank}: {load}"


@pytest.mark.parametrize(
    ("settings", "rails", "count", "warned"),
    [
        (Settings(), 0, 1, False),
        (Settings(), 1, 1, False),
        (Settings(), 2, 2, False),
        (Settings(), 4, 4, False),
        (Settings(), 32, 16, False),
        (Settings(proxies=3), 2, 3, False),
        (Settings(proxies=2), 4, 4, False),
        (Settings(channels=1), 2, 1, True),
        (Settings(channels=1), 1, 1, False),
        (Settings(channels=1, proxies=2), 2, 2, False),
        (Settings(channels=8), 2, 8, False),
    ],
)
def test_channels_follow_rails_unless_they_were_set(settings: Settings, rails: int, count: int, warned: bool) -> None:
    chosen = choose_channels(settings, rails)
    assert (chosen.count, bool(chosen.warning)) == (count, warned)
    assert chosen.reason
