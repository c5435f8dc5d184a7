"""Random worlds on the fake transport: whatever it does, nothing is lost, nothing twice, nothing early.

The production loop runs, one step at a time in one thread, so an example found by hypothesis can be replayed exactly.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.world import SLOT, Link, World, all_to_all, attach, drive
from uccl_ep_serving.errors import PeerLost
from uccl_ep_serving.protocol.context import ERROR_CODE, ERROR_PEER, FAILURE_PEER_LOST
from uccl_ep_serving.protocol.streams import LL_COMBINE, LL_DISPATCH, MAX_CHANNELS
from uccl_ep_serving.proxy.transport.fake import Adversary

_PROBABILITY = st.sampled_from([0.0, 0.1, 0.3, 0.5])
#: What a wire may do that loses nothing.
_HARMLESS = dict.fromkeys(("reorder", "delay", "duplicate", "linger", "busy"), _PROBABILITY)


@st.composite
def _worlds(draw: st.DrawFn, adversaries: st.SearchStrategy[Adversary], ranks: int = 8) -> tuple[World, list[Link]]:
    """A world of 2..``ranks`` ranks with all-to-all streams on some channels of two phases."""
    ranks = draw(st.integers(2, ranks))
    proxies = draw(st.integers(1, 3))
    # At most about a hundred streams in all: the checks are in Python.
    channels = draw(st.integers(proxies, max(proxies, 12 // ranks)))
    # A few quanta, caps and rings, down to the smallest that can work.
    quantum = draw(st.sampled_from([48, 128, 4096]))
    peer_cap = draw(st.sampled_from([16, 1024, 1 << 20]))
    streams = [phase + channel for phase in (LL_DISPATCH, LL_COMBINE + MAX_CHANNELS) for channel in range(channels)]
    sizes = draw(st.lists(st.integers(0, SLOT // 16).map(lambda units: units * 16), min_size=1, max_size=4))
    slots = draw(st.integers(1, 3))
    parts = draw(st.integers(1, 3))
    span = (slots + 1) * SLOT
    links_per_rank = ranks * len(streams)
    window = -(-2 * links_per_rank * span // 4096) * 4096
    world = World(
        ranks,
        window,
        seed=draw(st.integers(0, 2**32 - 1)),
        adversary=draw(adversaries),
        proxies=proxies,
        channels=channels,
        quantum=quantum,
        peer_bytes_in_flight=peer_cap,
        bytes_in_flight=2 * peer_cap,
        writes_in_flight=draw(st.sampled_from([2, 16, 4096])),
        ring_slots=draw(st.sampled_from([2, 16, 256])),
        fabric_options={"depth": draw(st.sampled_from([2, 7, 256])), "proves_source": draw(st.booleans())},
    )
    return world, all_to_all(world, streams, span, window, sizes, parts=parts, slots=slots)


#: A world takes longer than most examples.
_few = settings(max_examples=settings.default.max_examples * 2 // 5)

_RECOVERABLE = st.builds(Adversary, **_HARMLESS)


@_few
@given(world_and_links=_worlds(_RECOVERABLE))
def test_disorder_delay_and_repeats_recover(world_and_links: tuple[World, list[Link]]) -> None:
    """Every message arrives once, whole, and never before its bytes."""
    world, links = world_and_links
    assert drive(world, links), f"stuck: {[link for link in links if not link.done][:3]}"
    # Late repeats, if any, must change nothing.
    for _ in range(20):
        world.step()
    for link in links:
        assert world.arrived(link.receiver, link.sender, link.stream) == len(link.sizes)
    for service in world.services:
        service.check()
        assert service.drain(0.0)
        total = service.counters()["total"]
        assert total["writes"] == total["writes_completed"]
        assert total["bytes_in_flight"] == total["queue_depth"] == total["ring_depth"] == 0
    sent = sum(service.counters()["total"]["bytes_sent"] for service in world.services)
    received = sum(service.counters()["total"]["bytes_received"] for service in world.services)
    assert sent == received == sum(sum(link.sizes) for link in links)


@_few
@given(
    world_and_links=_worlds(
        st.builds(
            Adversary,
            **_HARMLESS,
            drop=st.sampled_from([0.02, 0.3]),
        )
    )
)
def test_a_dropped_write_ends_in_peer_lost(world_and_links: tuple[World, list[Link]]) -> None:
    """Both ends are told by name within a bounded number of steps, and nothing is published early meanwhile."""
    world, links = world_and_links
    attach(world, links)

    def lost() -> list[int]:
        return [rank for rank in range(world.ranks) if world.errors[rank][ERROR_CODE]]

    assert world.run(lambda: bool(lost()) or all(link.finished for link in links)), "stuck without an error"
    for _ in range(300):
        world.step()
    for rank in lost():
        assert world.errors[rank][ERROR_CODE] == FAILURE_PEER_LOST
        with pytest.raises(PeerLost, match="is gone") as caught:
            world.services[rank].check()
        assert caught.value.peer != rank
        assert f"rank {caught.value.peer} is gone" in str(caught.value)
        # Parting is mutual: the peer does not wait for what will never come.
        assert world.errors[caught.value.peer][ERROR_CODE] == FAILURE_PEER_LOST


@_few
@given(
    world_and_links=_worlds(
        st.builds(
            Adversary,
            **_HARMLESS,
            kill=st.just(1),
            kill_after=st.integers(1, 30),
        )
    )
)
def test_a_killed_rank_is_named_by_everybody(world_and_links: tuple[World, list[Link]]) -> None:
    """The others get PeerLost of rank 1, their kernels are released, and they go on among themselves."""
    world, links = world_and_links
    survivors = [link for link in links if 1 not in (link.sender, link.receiver)]
    others = [link for link in links if 1 in (link.sender, link.receiver)]

    attach(world, others)
    assert drive(world, survivors), "the loss of rank 1 stops the others"
    if world.fabric.alive(1):
        return
    told = [rank for rank in range(world.ranks) if rank != 1]
    assert world.run(lambda: all(world.errors[rank][ERROR_CODE] for rank in told), 2000), "somebody was not told"
    for rank in told:
        assert tuple(world.errors[rank][: ERROR_PEER + 1]) == (FAILURE_PEER_LOST, 1)
        with pytest.raises(PeerLost, match="rank 1 is gone") as caught:
            world.services[rank].check()
        assert caught.value.peer == 1
    # Nobody waits for a slot whose message went to the dead rank.
    assert world.run(
        lambda: all(world.completed(k.sender, 1, k.stream) == k.sent for k in others if k.receiver == 1), 2000
    )


@_few
@given(
    world_and_links=_worlds(
        st.builds(Adversary, reorder=_PROBABILITY, duplicate=_PROBABILITY, lose=st.sampled_from([0.05, 0.5])), ranks=3
    )
)
def test_a_silently_lost_write_is_never_covered(world_and_links: tuple[World, list[Link]]) -> None:
    """No transport may do this; if one did, the receiver would wait (until its deadline) and not compute garbage."""
    world, links = world_and_links
    if not drive(world, links, 400):
        stuck = [link for link in links if not link.done]
        states = [entry for service in world.services for entry in service.counters()["streams"]]
        assert stuck
        assert any(entry["held_back"] or entry["writes_posted"] for entry in states)


def test_a_send_slot_used_before_completion_is_noticed() -> None:
    """The harness itself: a kernel that does not wait for ``completed`` corrupts data, and the checks see it."""
    world = World(2, 1 << 16, 3, Adversary(duplicate=0.6, linger=0.7, reorder=0.3))
    link = Link(world, 0, 1, LL_DISPATCH, 0, 1 << 15, [SLOT] * 60, slots=2, wait_completed=False)
    with pytest.raises(AssertionError, match="published early, lost or overwritten"):
        drive(world, [link])
