"""The proxy service as the runtime uses it: threads, their names and cores, draining, stopping, dying, forking."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from tests.support.source_tree import ROOT, run_python
from tests.support.world import SLOT, Link, World
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, PeerLost, ProtocolError, ProxyDied, TransportError, after_loss
from uccl_ep_serving.protocol.command import HIGH, LOW, Command
from uccl_ep_serving.protocol.context import (
    ERROR_CODE,
    FAILURE_PEER_LOST,
    FAILURE_PROXY_DIED,
    FAILURE_TRANSPORT,
)
from uccl_ep_serving.protocol.ring import lap_of
from uccl_ep_serving.protocol.streams import CREDIT, LL_COMBINE, LL_DISPATCH, STREAMS
from uccl_ep_serving.proxy import stats, words
from uccl_ep_serving.proxy.loop import DIED, LOOP, SLEEP_MOST, STOPPED
from uccl_ep_serving.proxy.sequence import TICKET
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.base import DOWN, SENT
from uccl_ep_serving.variables import LEAST_IN_FLIGHT


def _put(world: World, length: int = 64, *, rank: int = 0, peer: int = 1, stream: int = LL_DISPATCH) -> None:
    world.producer(rank, stream).put(Command(rank=peer, stream=stream, source=0, target=4096, length=length, last=True))


@contextlib.contextmanager
def running(world: World) -> Iterator[World]:
    """The world with all its proxy threads started; stopped at the end whatever happens."""
    try:
        for service in world.services:
            service.start()
        yield world
    finally:
        for service in world.services:
            service.stop(time.monotonic() + 5)


def _until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def test_reconnections_of_all_proxies_are_counted() -> None:
    world = World(2, 1 << 12, proxies=2)
    service = world.services[0]
    assert service.totals()["reconnections"] == 0
    for row, count in zip(service._endpoints, (2, 3), strict=True):
        row[0].reconnections = count  # type: ignore[attr-defined]
    assert [one["reconnections"] for one in service.counters()["proxies"]] == [2, 3]
    assert service.totals()["reconnections"] == 5


def test_threads_carry_messages_both_ways() -> None:
    world = World(2, 1 << 16, proxies=2)
    links = [
        Link(world, a, 1 - a, LL_DISPATCH + channel, channel * 1024, 8192 + channel * 1024, [SLOT, 0, 64] * 40)
        for a in range(2)
        for channel in range(2)
    ]
    with running(world):

        def pump() -> bool:
            for link in links:
                link.produce()
                link.consume()
            return all(link.done for link in links)

        _until(pump, 30)
        for service in world.services:
            assert service.drain(time.monotonic() + 5)
            service.check()
        names = {thread.name for thread in threading.enumerate()}
        assert {f"uccl-ep proxy {rank}.{proxy}" for rank in range(2) for proxy in range(2)} <= names
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("uccl-ep proxy")]
    for service in world.services:
        counters = service.counters()
        assert counters["total"]["messages_sent"] == counters["total"]["messages_received"] == 240
        assert len(counters["proxies"]) == 2
        # What the streams of both proxies did, in all four states.
        for entry in counters["streams"]:
            assert entry["enqueued"] == entry["posted"] == entry["completed"] == entry["arrived"] == 120
            assert entry["writes_applied"] == 0, "fewer writes than one credit covers"


def test_an_idle_proxy_sleeps() -> None:
    """Less than 2% of a core in the long run: here, few iterations in a tenth of a second after half a second idle."""
    world = World(2, 1 << 16)
    with running(world):
        time.sleep(0.5)
        counters = world.services[0].states[0].counters
        before, since = int(counters[0]), time.monotonic_ns()
        time.sleep(0.1)
        iterations, elapsed = int(counters[0]) - before, time.monotonic_ns() - since
        assert iterations <= elapsed / SLEEP_MOST + 2, "more than one iteration per longest sleep"
        _put(world)
        start = time.monotonic()
        _until(lambda: world.arrived(1, 0, LL_DISPATCH) == 1)
        assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("told", [False, True], ids=["near its NICs", "where the setting says"])
def test_the_thread_is_named_and_bound_to_its_cores(told: bool) -> None:
    before = os.sched_getaffinity(0)
    near, said = max(before), min(before)
    world = World(2, 1 << 16, near_cpus=[frozenset({near})], proxy_cpus=(said,) if told else ())
    with running(world):
        _until(lambda: len(_threads_called("uccl-ep 0.0")) == 1)
        (task,) = _threads_called("uccl-ep 0.0")
        _until(lambda: os.sched_getaffinity(task) == {said if told else near})
    assert os.sched_getaffinity(0) == before, "only the proxy is bound"


def _threads_called(name: str) -> list[int]:
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/comm") as file:
            if file.read().strip() == name:
                found.append(int(task))
    return found


def test_a_core_that_a_container_does_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would die before it has done anything."""
    bind, own = os.sched_setaffinity, os.sched_getaffinity(0)

    def allowed(pid: int, cpus: set[int]) -> None:
        if cpus == {0}:
            raise OSError(22, "Invalid argument")
        bind(pid, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", allowed)
    with pytest.raises(ConfigError, match=r"UCCL_EP_PROXY_CPUS names \[0\], where this process may not run"):
        World(2, 1 << 16, proxy_cpus=(0,))
    assert os.sched_getaffinity(0) == own


def test_why_a_thread_has_died_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The operation that waits says where to look."""

    def dies(service: ProxyService, proxy: int) -> None:
        raise ConfigError("no such core")

    monkeypatch.setattr(ProxyService, "_dress_thread", dies)
    with contextlib.suppress(ProxyDied), running(World(2, 1 << 16)):
        _until(lambda: any("proxy thread 0 has died: no such core" in words for words in caplog.messages))


def test_counters_are_read_without_numba() -> None:
    """It is half a second to import, and what it compiles there would be kept nowhere."""
    if not LOOP.cached:
        LOOP.compile()
    code = """
import sys
sys.modules["numba"] = None
import numpy as np
from uccl_ep_serving.native.groups import load
from uccl_ep_serving.proxy import stats
from uccl_ep_serving.proxy.loop import LOOP
load(LOOP)
print(stats.commands_in(np.zeros(64, dtype=np.int64).ctypes.data, 1))
"""
    done = run_python(code, cwd=ROOT)
    assert done.stdout.strip() == "0", done.stderr


def test_an_impossible_core_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="PROXY_CPUS"):
        World(2, 1 << 16, proxy_cpus=(100_000,))


def test_a_dying_thread_is_named_and_releases_everybody() -> None:
    world = World(2, 1 << 16, fault_proxy_after=3)
    with running(world):
        for _ in range(5):
            _put(world)
        _until(lambda: world.errors[0][ERROR_CODE] == FAILURE_PROXY_DIED)
        service = world.services[0]
        assert service.counters()["total"]["commands"] == 3
        with pytest.raises(ProxyDied, match=r"proxy 0 of rank 0 ended.*close the buffer"):
            service.check()
        with pytest.raises(ProxyDied):
            service.drain(time.monotonic() + 5)


def test_an_exception_in_a_thread_reaches_check(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 1 << 16)

    def broken(self: ProxyService, proxy: int) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(ProxyService, "_dress_thread", broken)
    with running(world):
        _until(lambda: world.errors[0][ERROR_CODE] == FAILURE_PROXY_DIED)
        with pytest.raises(ProxyDied, match="no such luck") as caught:
            world.services[0].check()
        assert isinstance(caught.value.__cause__, OSError)


def test_step_reports_the_injected_fault_and_the_stop() -> None:
    world = World(2, 1 << 16, fault_proxy_after=1)
    _put(world)
    assert world.services[0].step() > 0
    assert world.services[0].step() == DIED
    world.services[1].stop(time.monotonic() + 1)
    assert world.services[1].step() == STOPPED


def test_stopping_twice_and_before_starting() -> None:
    world = World(2, 1 << 16)
    world.services[0].stop(time.monotonic() + 1)
    world.services[0].stop(time.monotonic() + 1)
    world.services[1].start()
    with pytest.raises(ProxyDied, match="started before"):
        world.services[1].start()
    world.services[1].stop(time.monotonic() + 5)
    world.services[1].stop(time.monotonic() + 5)
    world.services[1].check()


def test_drain_says_when_something_is_stuck() -> None:
    world = World(2, 1 << 16, fabric_options={"depth": 1})
    for _ in range(3):
        _put(world)
    world.services[0].step()
    assert not world.services[0].drain(time.monotonic() + 0.01)
    assert world.run(lambda: world.services[0].drain(0.0), 100)


def test_draining_misses_no_command_that_moves_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put and posted between two of its reads, a command must not be taken off the others."""
    world = World(2, 1 << 16)
    state = world.services[0].states[0]
    read, moves = stats.acquired, [lambda: _put(world), world.services[0].step]

    def read_slowly(address: int) -> int:
        value = int(read(address))
        while moves:
            moves.pop(0)()
        return value

    monkeypatch.setattr(stats, "acquired", read_slowly)
    assert stats.in_flight(state) > 0
    assert world.services[0].counters()["total"]["ring_depth"] == 0


def test_forgetting_a_peer_touches_only_streams_that_were_used() -> None:
    """The records of 256 streams are 100 KB per peer: a group that breaks up must not commit them all at once."""
    world = World(2, 1 << 16)
    state = world.services[0].states[0]
    # stands for "untouched": it would be cleared
    state.send[1, LL_COMBINE, words.WAITING // 8] = 7
    _put(world)
    world.services[0].step()
    world.services[0].forget(1)
    world.services[0].step()
    assert state.send[1, LL_COMBINE, words.WAITING // 8] == 7
    assert state.completed[1, LL_DISPATCH] == 1


def test_counters_leave_out_ranks_that_no_proxy_reaches() -> None:
    world = World(3, 1 << 16)
    state = world.services[0].states[0]
    state.peers[2, words.PEER_STATE // 8] = words.ABSENT
    state.send[2, LL_DISPATCH, words.NEXT // 8] = 5
    _put(world)
    world.services[0].step()
    assert world.services[0].counters()["total"]["writes"] == 1


def test_a_forked_child_is_refused_by_name() -> None:
    """It can neither use nor stop the threads of its parent, and does not hang at its exit."""
    world = World(2, 1 << 16)
    with running(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for action in (
                    world.services[0].check,
                    lambda: world.services[0].stop(time.monotonic() + 1),
                    lambda: world.services[0].drain(time.monotonic() + 1),
                    lambda: world.services[0].forget(1),
                    world.services[0].start,
                ):
                    with pytest.raises(ProxyDied, match="do not survive a fork"):
                        action()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        for service in world.services:
            service.check()
        _put(world)
        _until(lambda: world.arrived(1, 0, LL_DISPATCH) == 1)


def test_a_lost_peer_is_named_until_it_is_forgotten() -> None:
    world = World(3, 1 << 16)
    service = world.services[0]
    world.fabric.endpoint(0).inject(DOWN, 0, 2, 104)
    world.step()
    assert tuple(world.errors[0][:2]) == (FAILURE_PEER_LOST, 2)
    with pytest.raises(PeerLost, match=r"rank 2 is gone \(fake.*Connection reset") as caught:
        service.check()
    assert caught.value.peer == 2
    assert caught.value.cause == service.loss_of(2)
    assert str(caught.value).endswith(after_loss(2)), "the same next step as of a loss that others notice"
    assert "fake" in service.loss_of(2)
    assert service.loss_of(2).endswith("(Connection reset by peer), noticed by proxy 0 of rank 0")
    assert service.loss_of(1) == ""
    service.forget(2)
    service.check()
    # The next loss is another one.
    world.fabric.endpoint(0).inject(DOWN, 0, 1, 0)
    world.step()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        service.check()


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "forgotten"])
def test_what_waited_for_a_peer_that_is_gone_is_not_counted_as_sent(lost: bool) -> None:
    """A flight record is read for just that: did it reach the network?"""
    world = World(2, 1 << 16, peer_bytes_in_flight=LEAST_IN_FLIGHT, bytes_in_flight=LEAST_IN_FLIGHT)
    for _ in range(20):
        _put(world, 16384)
    for _ in range(3):
        world.services[0].step()
    before = world.services[0].counters()["total"]
    assert 0 < before["messages_sent"] < 20
    if lost:
        world.fabric.endpoint(0).inject(DOWN, 0, 1, 0)
    else:
        world.services[0].forget(1)
    world.services[0].step()
    total = world.services[0].counters()["total"]
    assert total["messages_sent"] == before["messages_sent"]
    assert total["discarded"] == 20 - before["messages_sent"]
    assert total["queue_depth"] == 0
    assert world.completed(0, 1, LL_DISPATCH) == 20


def test_commands_for_a_forgotten_peer_complete_at_once() -> None:
    """A kernel that had not seen the mask yet must not wait for its slots for ever."""
    world = World(3, 1 << 16)
    world.services[0].forget(1)
    world.step()
    _put(world)
    _put(world, peer=2)
    assert world.run(lambda: world.completed(0, 2, LL_DISPATCH) == 1, 50)
    assert world.completed(0, 1, LL_DISPATCH) == 1
    total = world.services[0].counters()["total"]
    assert total["discarded"] == 1
    assert total["writes"] == 1
    assert total["messages_sent"] == 1
    assert world.services[0].drain(time.monotonic() + 1)
    with pytest.raises(ConfigError, match="cannot forget rank 0"):
        world.services[0].forget(0)


def test_a_peer_that_no_proxy_reaches_may_be_forgotten_too() -> None:
    """A masked peer whose window is mapped, say: a command for it is a mistake as before, and does not vanish."""
    world = World(3, 1 << 16)
    state = world.services[0].states[0]
    state.peers[2, words.PEER_STATE // 8], state.peers[2, words.PEER_ENDPOINT // 8] = words.ABSENT, 0
    world.services[0].forget(2)
    world.step()
    assert state.peers[2, words.PEER_STATE // 8] == words.ABSENT
    _put(world, peer=2)
    world.step()
    with pytest.raises(ProtocolError, match=r"a command for a rank that no proxy reaches \(peer 2"):
        world.services[0].check()


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_written_slot_is_not_taken(half: int) -> None:
    """The lap bit stands in both words: either half alone is no command."""
    world = World(2, 1 << 16, ring_slots=2)
    producer = world.producer(0, LL_DISPATCH)
    for _ in range(3):
        # Over more than one lap, so that old contents lie in the slot.
        _put(world)
        assert world.run(lambda: producer.room == 2, 20)
    index = 3
    words = [LOW.pack(length=1, lap=lap_of(index, 2)), HIGH.pack(rank=1, stream=LL_DISPATCH, kind=1, last=1)]
    words[1] |= lap_of(index, 2)
    producer.put_half(index, half, words[half])
    for _ in range(3):
        world.services[0].step()
    assert world.services[0].counters()["total"]["commands"] == 3
    producer.put_half(index, 1 - half, words[1 - half])
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == 4, 20)


def test_a_completion_for_nothing_is_the_transports_mistake() -> None:
    world = World(2, 1 << 16)
    world.fabric.endpoint(1).inject(SENT, LL_DISPATCH << 12, 0)
    world.step()
    assert world.errors[1][ERROR_CODE] == FAILURE_TRANSPORT
    with pytest.raises(TransportError, match="not in flight"):
        world.services[1].check()


def test_a_completion_for_a_rank_that_is_none_is_the_transports_mistake() -> None:
    """Its records would lie behind those of all ranks."""
    world = World(2, 1 << 16)
    # what stands there looks like a peer that was dropped, whose completions change nothing
    world.fabric.endpoint(1).inject(SENT, TICKET.pack(sequence=0, last=1, stream=LL_DISPATCH, peer=2, length=4), 0)
    world.step()
    assert tuple(world.errors[1][:2]) == (FAILURE_TRANSPORT, 2)
    with pytest.raises(TransportError, match="not in flight"):
        world.services[1].check()


def test_a_completion_that_is_told_twice_is_counted_once() -> None:
    """Also behind a gap: counted again it would open the caps for writes that are not over."""
    world = World(2, 1 << 16)
    world.asleep.add(1)
    for _ in range(3):
        _put(world)
    world.step()
    state = world.services[0].states[0]
    assert state.word(words.LOAD) >> words.LOAD_SHIFT == 3
    second = TICKET.pack(sequence=1, last=1, stream=LL_DISPATCH, peer=1, length=4)
    for _ in range(2):
        world.fabric.endpoint(0).inject(SENT, second, 1)
        world.step()
    assert state.word(words.LOAD) >> words.LOAD_SHIFT == 2
    with pytest.raises(TransportError, match="not in flight"):
        world.services[0].check()


def test_a_full_quota_holds_the_ring_and_loses_nothing() -> None:
    world = World(3, 1 << 16, ring_slots=4096, fabric_options={"depth": 2})
    world.asleep.add(1)
    for _ in range(1500):
        _put(world, 0)
    _put(world, 16, peer=2)
    for _ in range(100):
        world.step()
    total = world.services[0].counters()["total"]
    assert total["queue_depth"] == 1024
    assert total["ring_depth"] == 1501 - 1024 - 2
    assert total["ring_blocked"] > 0
    world.asleep.clear()
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == 1500 and world.arrived(2, 0, LL_DISPATCH) == 1, 5000)


def test_streams_belong_to_one_proxy_each() -> None:
    world = World(2, 1 << 16, proxies=3, channels=4)
    service = world.services[0]
    rings = [service.ring(stream) for stream in range(STREAMS)]
    assert len(set(rings)) == 3
    for channel in range(4):
        # A stream, its credits and the other phases of its channel share a proxy.
        assert (
            service.ring(LL_DISPATCH + channel)
            == service.ring(LL_COMBINE + channel)
            == service.ring(CREDIT | LL_DISPATCH + channel)
        )
    assert service.arrived(1, LL_DISPATCH) != service.arrived(1, LL_DISPATCH + 1)
    assert service.completed(1, LL_DISPATCH) != service.arrived(1, LL_DISPATCH)


def test_constructor_refuses_contradictions() -> None:
    world = World(2, 1 << 16)
    common = {
        "window": world.windows[0].ctypes.data,
        "window_bytes": 1 << 16,
        "error": world.errors[0].ctypes.data,
        "endpoints": [[world.fabric.endpoint(0)]],
    }
    with pytest.raises(ConfigError, match="2 proxies"):
        ProxyService(rank=0, ranks=2, route=[-1, 0], settings=Settings(proxies=2, channels=2), **common)
    with pytest.raises(ConfigError, match="route"):
        ProxyService(rank=0, ranks=2, route=[0, 0], settings=Settings(), **common)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        ProxyService(rank=2, ranks=2, route=[-1, 0], settings=Settings(), **common)
