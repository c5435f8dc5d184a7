"""Idle proxies of a rank nap in slots of their own, watch each other's rings and wake one another."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.world import World
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.native.calls import futex_wait
from uccl_ep_serving.native.failure import acquired
from uccl_ep_serving.protocol.command import Command
from uccl_ep_serving.protocol.streams import LL_DISPATCH
from uccl_ep_serving.proxy import words
from uccl_ep_serving.proxy.loop import NAP_SLOT, next_nap_slot, others_have_commands, run, wake_others
from uccl_ep_serving.proxy.spin import Cores, bound_by_openmp, choose_spin, own_cores
from uccl_ep_serving.proxy.state import request_stop

PROXIES = 4
MILLISECOND = 1_000_000


def _world() -> World:
    return World(2, 1 << 16, proxies=PROXIES)


class LoopThread:
    """The loop of one proxy in a thread."""

    def __init__(self, state: int) -> None:
        self._state = state
        self._thread = threading.Thread(target=run, args=(state,))
        self._thread.start()

    def stop(self) -> None:
        request_stop(self._state)
        self._thread.join(10)
        assert not self._thread.is_alive()


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
    while acquired(word) == 0:
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


def test_an_idle_proxy_wakes_the_owner_of_commands_that_it_sees_in_its_slot() -> None:
    """The owner may sleep until its own slot, which comes later by one for each proxy in between."""
    world = _world()
    states = world.services[0].states
    wakeup = states[0].word(words.WAKEUP)
    loop = LoopThread(states[0].address)  # its owner's loop does not run: nobody takes the command up
    try:
        deadline = time.monotonic() + 10
        while states[0].counters[words.C_SLEEPS // 8] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert acquired(wakeup) == 0
        (stream,) = (
            stream
            for stream in range(LL_DISPATCH, LL_DISPATCH + PROXIES)
            if world.services[0].ring(stream) == states[1].ring
        )
        world.producer(0, stream).put(Command(rank=1, stream=stream, source=0, target=4096, length=64, last=True))
        while acquired(wakeup) == 0:
            assert time.monotonic() < deadline, "the owner sleeps on"
            time.sleep(0.001)
    finally:
        loop.stop()


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


@pytest.mark.parametrize(
    ("cores", "proxies", "ranks", "named", "nanoseconds"),
    [
        (2, 1, 1, 0, 0),
        (2, 4, 2, 0, 0),
        (4, 1, 1, 0, 10 * MILLISECOND),
        (16, 1, 8, 0, 0),
        (32, 1, 8, 0, 10 * MILLISECOND),
        (192, 4, 8, 0, 10 * MILLISECOND),
        (96, 4, 8, 0, 0),
        (192, 4, 8, 16, 0),
        (192, 4, 8, 32, 10 * MILLISECOND),
    ],
)
def test_proxies_spin_where_there_are_cores_for_them(
    cores: int, proxies: int, ranks: int, named: int, nanoseconds: int
) -> None:
    every = of(range(cores))
    chosen = choose_spin("auto", every, [every] * (ranks - 1), proxies=proxies, named_cores=named)
    assert chosen.nanoseconds == nanoseconds
    assert chosen.reason.startswith("10 ms" if nanoseconds else "off")


def of(cpus: range, **quotas: float) -> Cores:
    return Cores(frozenset(cpus), quotas)


@pytest.mark.parametrize(
    ("mine", "others", "named", "words"),
    [
        # ranks that are bound to their own cores: numactl, SLURM, a cpuset each
        (of(range(4)), [of(range(4, 8)), of(range(8, 12))], 0, "10 ms: 4 cores for the 1 proxy on them"),
        (of(range(4)), [of(range(3, 8)), of(range(8, 12))], 0, "off: 4 cores for the 2 proxies on them"),
        (of(range(3)), [of(range(3, 64))], 0, "off: 3 cores for the 1 proxy on them"),
        # named cores are dealt to all ranks of a host, wherever they are bound
        (of(range(4)), [of(range(4, 8))], 1, "off: 2 proxies share the 1 cores"),
        (of(range(4)), [of(range(4, 8))], 2, "10 ms: 4 cores"),
        (of(range(8)), [of(range(8))], 1, "off: 2 proxies share the 1 cores"),
        # a quota is shared by who is in its cgroup, also on other cores, and by nobody else
        (of(range(8), pod=7), [of(range(8, 16), pod=7)], 0, "off: 7 cores for the 2 proxies on them"),
        (of(range(8), pod=4), [of(range(8, 16), other=4)], 0, "10 ms: 4 cores for the 1 proxy on them"),
        (of(range(8), pod=4, node=6), [of(range(8, 16), other=4, node=6)], 0, "off: 6 cores for the 2 proxies on them"),
        (of(range(64), pod=4), [of(range(64), other=4)], 0, "10 ms: 4 cores for the 1 proxy on them"),
    ],
)
def test_only_proxies_that_share_cores_count(mine: Cores, others: list[Cores], named: int, words: str) -> None:
    assert choose_spin("auto", mine, others, proxies=1, named_cores=named).reason.startswith(words)


def test_who_says_how_long_to_spin_is_obeyed() -> None:
    few, many = of(range(1)), of(range(512))
    assert choose_spin("2.5", few, [few] * 7, proxies=4).nanoseconds == 2_500_000
    assert choose_spin("off", many, proxies=1).nanoseconds == 0
    assert Settings.from_environment({"UCCL_EP_PROXY_SPIN": "0"}).proxy_spin == "off"
    for wrong in ("-1", "yes", "nan"):
        with pytest.raises(ConfigError, match="auto, off or"):
            Settings.from_environment({"UCCL_EP_PROXY_SPIN": wrong})


@pytest.mark.parametrize(
    ("own", "files", "quotas"),
    [
        ("0::/a/b", {}, []),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, []),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "300000 100000"}, [2, 3]),
        ("0::/a/b", {"cpu.max": "50000 100000"}, [0.5]),
        # as containerd names the cgroups of a pod under systemd
        ("0::/pod.slice:cri:1f", {"pod.slice:cri:1f/cpu.max": "250000 100000"}, [2.5]),
        (
            "5:memory:/x\n4:cpu,cpuacct:/x",
            {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"},
            [1],
        ),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, []),
    ],
)
def test_the_quota_of_a_container_counts(own: str, files: dict[str, str], quotas: list[float], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own + "\n")
    found = own_cores(tmp_path, tmp_path / "own")
    assert found.cpus == os.sched_getaffinity(0)
    assert sorted(found.quotas.values()) == quotas
    if "a/cpu.max" in files:
        # another container of the same pod, whose own view starts at its pod
        (tmp_path / "own").write_text("0::/\n")
        (pod,) = own_cores(tmp_path / "a", tmp_path / "own").quotas
        assert pod in found.quotas


def test_a_spinning_proxy_does_not_sleep_until_its_time_is_over() -> None:
    world = _world()
    (state, *_) = world.services[0].states
    state.header[words.SPIN // 8] = 300 * MILLISECOND
    loop = LoopThread(state.address)
    try:
        time.sleep(0.15)
        assert state.counters[words.C_SLEEPS // 8] == 0
        deadline = time.monotonic() + 20
        while state.counters[words.C_SLEEPS // 8] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        loop.stop()


@pytest.mark.parametrize(
    ("cores", "environment", "said"),
    [
        ({3}, {"OMP_PROC_BIND": "true"}, "core 3 alone, .* OMP_PROC_BIND=true, .* UCCL_EP_PROXY_CPUS"),
        ({3}, {"GOMP_CPU_AFFINITY": "0-7"}, "GOMP_CPU_AFFINITY=0-7"),
        ({3}, {"OMP_PROC_BIND": "false"}, "^$"),
        ({3}, {}, "^$"),
        ({3, 4}, {"OMP_PROC_BIND": "close"}, "^$"),
    ],
)
def test_a_core_to_which_openmp_has_bound_the_proxies(cores: set[int], environment: dict[str, str], said: str) -> None:
    assert re.search(said, bound_by_openmp(Cores(frozenset(cores)), environment))
