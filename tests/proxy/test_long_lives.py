"""Counts that a Buffer reaches after months: nothing wraps where only 11 bits, or one lap bit, travel."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.world import SLOT, Link, World, drive
from uccl_ep_serving.protocol.ring import HEAD, SLOTS, lap_of
from uccl_ep_serving.protocol.ring import TAIL as RING_TAIL
from uccl_ep_serving.protocol.streams import CREDIT, CREDIT_WRITES, LL_DISPATCH
from uccl_ep_serving.proxy import words
from uccl_ep_serving.proxy.sequence import MESSAGES, PREFIX
from uccl_ep_serving.proxy.transport.fake import Adversary


def _words(*offsets: int) -> list[int]:
    """Indices of the words at these byte offsets of a record."""
    return [offset // 8 for offset in offsets]


def _age(world: World, writes: int) -> None:
    """As if every stream of both ranks had carried ``writes`` messages of one write each, all acknowledged."""
    done = _words(words.DONE + PREFIX, words.DONE + MESSAGES)
    seen = _words(words.SEEN + PREFIX, words.SEEN + MESSAGES)
    for rank, service in enumerate(world.services):
        (state,) = service.states
        peer = 1 - rank
        send, receive = state.send[peer], state.receive[peer]
        send[LL_DISPATCH, [*_words(words.NEXT, words.CREDITED, words.ENQUEUED), *done]] = writes
        receive[LL_DISPATCH, [*_words(words.GRANTED), *seen]] = writes
        credits = writes // CREDIT_WRITES
        send[LL_DISPATCH | CREDIT, [*_words(words.NEXT), *done]] = credits
        receive[LL_DISPATCH | CREDIT, seen] = credits
        state.arrived[peer, LL_DISPATCH] = state.completed[peer, LL_DISPATCH] = writes
        state.header[words.TAIL // 8] = writes
        ring = state._ring.view(np.int64)
        ring[[HEAD // 8, RING_TAIL // 8]] = writes
        # what the lap before left behind
        capacity = world.producer(rank, LL_DISPATCH).capacity
        for index in range(writes - capacity, writes):
            slot = SLOTS // 8 + index % capacity * 2
            ring[slot : slot + 2] = lap_of(index, capacity)


@pytest.mark.parametrize("writes", [(1 << 31) - 512, (1 << 32) - 512, (1 << 52) - 512])
def test_streams_go_on_past_large_counts(writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 1 << 16, 7, Adversary(reorder=0.4, duplicate=0.3), ring_slots=64)
    _age(world, writes)
    arrived, completed = world.arrived, world.completed
    monkeypatch.setattr(world, "arrived", lambda *stream: arrived(*stream) - writes)
    monkeypatch.setattr(world, "completed", lambda *stream: completed(*stream) - writes)
    links = [
        Link(world, a, 1 - a, LL_DISPATCH, a * 2048, (1 << 15) + a * 2048, [SLOT, 0, 64] * 400, slots=4)
        for a in range(2)
    ]
    assert drive(world, links, 20_000), f"stuck: {world.services[0].counters()['streams']}"
    for service in world.services:
        service.check()
        total = service.counters()["total"]
        assert total["credits_sent"] > writes // CREDIT_WRITES
