"""Idle proxies of a rank nap in slots of their own, watch each other's rings and wake one another."""

from __future__ import annotations

import threading
import time

import numpy as np

from tests.support.world import World
from uccl_ep_serving.native.calls import futex_wait
from uccl_ep_serving.protocol.command import Command
from uccl_ep_serving.protocol.streams import LL_DISPATCH
from uccl_ep_serving.proxy import words
from uccl_ep_serving.proxy.loop import NAP_SLOT, next_nap_slot, others_have_commands, wake_others
from uccl_ep_serving.proxy.state import read

PROXIES = 4


def _world() -> World:
    return World(2, 1 << 16, proxies=PROXIES)


def test_every_nap_slot_is_that_of_one_proxy() -> None:
    now = 12_345_678_901_234
    slots = sorted(next_nap_slot(now, proxy, PROXIES) for proxy in range(PROXIES))
    assert slots[0] > now
    assert slots[0] <= now + NAP_SLOT
    assert np.diff(slots).tolist() == [NAP_SLOT] * (PROXIES - 1)
    assert next_nap_slot(slots[0], 0, 1) == next_nap_slot(slots[0] - 1, 0, 1) + (
        NAP_SLOT if slots[0] % NAP_SLOT == 0 else 0
    )


def test_a_proxy_sees_the_commands_of_the_others_and_not_its_own() -> None:
    world = _world()
    states = world.services[0].states
    assert not any(others_have_commands(state.address) for state in states)
    world.producer(0, LL_DISPATCH + 2).put(
        Command(rank=1, stream=LL_DISPATCH + 2, source=0, target=4096, length=64, last=True)
    )
    owner = next(state.proxy for state in states if state.ring == world.services[0].ring(LL_DISPATCH + 2))
    assert [others_have_commands(state.address) for state in states] == [proxy != owner for proxy in range(PROXIES)]


def test_a_wakeup_ends_a_sleep_and_one_before_it_prevents_it() -> None:
    world = _world()
    state = world.services[0].states[0]
    word = state.word(words.WAKEUP)
    assert {one.word(words.WAKEUP) for one in world.services[0].states} == {word}
    threading.Timer(0.2, wake_others, (state.address,)).start()
    started = time.monotonic()
    while read(word) == 0:
        futex_wait(word, 0, time.monotonic_ns() + 30_000_000_000)
    # it was woken before: the value is not the one that was heard
    futex_wait(word, 0, time.monotonic_ns() + 30_000_000_000)
    assert time.monotonic() - started < 20


def test_a_sleep_ends_at_its_instant() -> None:
    wakeup = np.zeros(1, np.int64)
    until = time.monotonic_ns() + 50_000_000
    while time.monotonic_ns() < until:
        futex_wait(wakeup.ctypes.data, 0, until)
    assert time.monotonic_ns() - until < 5_000_000_000


def test_idle_proxies_wake_seldom_and_still_work() -> None:
    """Four idle proxies wake no more often than a lone one, and every one of them takes up its commands."""
    world = _world()
    service = world.services[0]
    for one in world.services:
        one.start()
    try:
        time.sleep(0.3)
        before = sum(int(state.counters[words.C_SLEEPS // 8]) for state in service.states)
        started = time.monotonic()
        time.sleep(1.0)
        sleeps = sum(int(state.counters[words.C_SLEEPS // 8]) for state in service.states) - before
        assert sleeps <= 1.3 * (time.monotonic() - started) * 1e9 / NAP_SLOT
        for channel in range(PROXIES):
            stream = LL_DISPATCH + channel
            world.producer(0, stream).put(Command(rank=1, stream=stream, source=0, target=4096, length=64, last=True))
            deadline = time.monotonic() + 10
            while world.completed(0, 1, stream) == 0:
                assert time.monotonic() < deadline, f"channel {channel} was not taken up"
                time.sleep(0.001)
            # back to rest: the next one meets sleeping proxies
            time.sleep(0.1)
    finally:
        for one in world.services:
            one.stop(time.monotonic() + 5)
