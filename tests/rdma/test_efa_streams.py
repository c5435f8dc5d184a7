"""Random worlds on SRD in memory: proxies over the EFA data path lose nothing, repeat nothing, publish nothing early.

The network delivers and completes in seeded random order and lands payloads again; an example that hypothesis finds can
be replayed exactly.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.provider.provider_srd_library import SrdNetwork
from tests.support.srd_world import SrdWorld
from tests.support.world import SLOT, Link, all_to_all, attach, drive
from uccl_ep_serving.errors import PeerLost
from uccl_ep_serving.protocol.context import ERROR_CODE, ERROR_PEER, FAILURE_PEER_LOST
from uccl_ep_serving.protocol.streams import LL_COMBINE, LL_DISPATCH, MAX_CHANNELS
from uccl_ep_serving.proxy.transport.verbs import codes


@st.composite
def worlds(draw: st.DrawFn, least: int = 2, most: int = 4) -> tuple[SrdWorld, list[Link]]:
    """``least`` .. ``most`` ranks with all-to-all streams, on devices of any depth, with and without receives."""
    ranks = draw(st.integers(least, most))
    network = SrdNetwork(
        ranks,
        rails=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
        repeat=draw(st.sampled_from([0.0, 0.3, 0.8])),
        pace=draw(st.sampled_from([1, 4, 64])),
    )
    network.efa.sends = draw(st.sampled_from([2, 7, 256]))
    network.efa.max_write = draw(st.sampled_from([64, 4096]))
    if draw(st.booleans()):
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
    proxies = draw(st.integers(1, 3))
    channels = draw(st.integers(proxies, max(proxies, 6 // ranks)))
    streams = [phase + channel for phase in (LL_DISPATCH, LL_COMBINE + MAX_CHANNELS) for channel in range(channels)]
    sizes = draw(st.lists(st.integers(0, SLOT // 16).map(lambda units: units * 16), min_size=1, max_size=4))
    slots, parts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    span = (slots + 1) * SLOT
    window = -(-2 * ranks * len(streams) * span // 4096) * 4096
    world = SrdWorld(
        network,
        window,
        proxies=proxies,
        channels=channels,
        writes_in_flight=draw(st.sampled_from([2, 16, 4096])),
        ring_slots=draw(st.sampled_from([2, 256])),
    )
    return world, all_to_all(world, streams, span, window, sizes, parts=parts, slots=slots)


@given(world_and_links=worlds())
def test_everything_arrives_once_and_never_early(world_and_links: tuple[SrdWorld, list[Link]]) -> None:
    world, links = world_and_links
    assert drive(world, links), f"stuck: {[link for link in links if not link.done][:3]}"
    for link in links:
        assert world.arrived(link.receiver, link.sender, link.stream) == len(link.sizes)
    world.close()


@given(world_and_links=worlds(least=3), after=st.integers(0, 60))
def test_a_dead_host_is_named_and_the_others_go_on(world_and_links: tuple[SrdWorld, list[Link]], after: int) -> None:
    world, links = world_and_links
    survivors = [link for link in links if 1 not in (link.sender, link.receiver)]
    watch = attach(world, [link for link in links if link not in survivors])
    world.run(lambda: False, after)
    # Those with a write under way to it; whoever is silent learns of it from the control connections.
    told = world.network.senders_to(1)
    world.kill(1)
    assert drive(world, survivors), "the loss of rank 1 stops the others"
    world.watchers.remove(watch)
    assert world.run(lambda: all(world.errors[rank][ERROR_CODE] for rank in told), 2000), "somebody was not told"
    for rank in told:
        assert tuple(world.errors[rank][: ERROR_PEER + 1]) == (FAILURE_PEER_LOST, 1)
        with pytest.raises(PeerLost, match=r"rank 1 is gone \(efa, .*EFA code 13: the peer stopped answering"):
            world.services[rank].check()
    world.close()


def test_a_send_slot_used_before_completion_is_noticed() -> None:
    """The harness itself: a kernel that does not wait for ``completed`` corrupts data, and the checks see it."""
    world = SrdWorld(SrdNetwork(2, seed=3, repeat=0.9, pace=2), 1 << 16)
    link = Link(world, 0, 1, LL_DISPATCH, 0, 1 << 15, [SLOT] * 60, slots=2, wait_completed=False)
    with pytest.raises(AssertionError, match="published early, lost or overwritten"):
        drive(world, [link])
