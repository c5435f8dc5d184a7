"""Normal mode through rings, proxies and a hostile wire: the same results as over mapped windows."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.support.bits import same_bits
from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import HOSTILE, FakeGroup
from tests.support.normal_cases import Case, Outcome, check, dispatch, round_trip
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, PeerLost, PeerTimeout, UcclEpError
from uccl_ep_serving.kernels.blocks import normal as block
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol.layout import NormalPlan
from uccl_ep_serving.proxy.transport.fake import Adversary

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def run(group: DirectGroup, case: Case, repeats: int = 3) -> list[list[Outcome]]:
    """``repeats`` round trips of different inputs, all checked; outcomes by repeat and rank."""
    inputs = [Case(**{**vars(case), "seed": case.seed + index}).inputs() for index in range(repeats)]

    def body(runtime: Any) -> list[Outcome]:
        normal = Normal(runtime)
        return [round_trip(normal, one, runtime.rank) for one in inputs]

    results = list(zip(*group.run(body), strict=True))
    for one, outcomes in zip(inputs, results, strict=True):
        check(one, outcomes)
    return [list(outcomes) for outcomes in results]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_quiet_wire(ranks: int) -> None:
    with FakeGroup(ranks, settings=Settings(timeout=30.0)) as group:
        run(group, Case((70, 0, 40, 55)[:ranks], experts=ranks * 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heap", [8 << 20, 0], ids=["in place", "rounds"])
def test_hostile_wire(dtype: torch.dtype, heap: int) -> None:
    """Reordered, delayed and repeated writes: a slot that is used again too early would show in the rows."""
    plan = NormalPlan(3, 64, heap=heap, rounds=96 << 10, chunk=8192, depth=2)
    settings = Settings(timeout=60.0, channels=3, proxies=2)
    with FakeGroup(3, adversary=HOSTILE, seed=heap + 1, normal=plan, settings=settings) as group:
        run(group, Case((60, 0, 33), experts=12, dtype=dtype))


def test_smallest_ring_and_one_slot() -> None:
    """A ring of two slots is full most of the time: a kernel goes on where it stopped and posts nothing twice."""
    plan = NormalPlan(3, 64, heap=1 << 20, rounds=64 << 10, chunk=4096, depth=1)
    settings = Settings(timeout=60.0, ring_slots=2, channels=2)
    with FakeGroup(3, adversary=HOSTILE, seed=7, normal=plan, settings=settings) as group:
        run(group, Case((60, 20, 33), experts=12))


def test_some_peers_mapped() -> None:
    """Two hosts of two ranks: neighbours write each other's window, the others go through proxies."""
    settings = Settings(timeout=30.0, channels=2)
    group = FakeGroup(4, settings=settings, adversary=HOSTILE, mapped=lambda rank, peer: rank // 2 == peer // 2)
    with group:
        run(group, Case((40, 30, 0, 20), experts=16))

        def body(runtime: Any) -> Any:
            return Normal(runtime).get_dispatch_layout(torch.tensor([[0, 15]]), 16)[:2]

        for per_rank, per_node in group.run(body):
            assert per_node.tolist() == per_rank.tolist() == [1, 0, 0, 1]


def test_the_wire_does_not_show_in_the_results() -> None:
    """Mapped windows, a quiet and a hostile wire give equal bits."""
    case = Case((50, 31, 44), hidden=384, experts=12, topk=6, seed=3)
    direct = run(DirectGroup(3), case)
    for adversary in (Adversary(), HOSTILE):
        with FakeGroup(3, adversary=adversary, settings=Settings(timeout=60.0, channels=2)) as group:
            for expected, actual in zip(direct, run(group, case), strict=True):
                for one, other in zip(expected, actual, strict=True):
                    assert same_bits(one.rows, other.rows)
                    assert same_bits(one.combined, other.combined)
                    assert same_bits(one.combined_weights, other.combined_weights)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_received_in_place_is_never_written_again(seed: int) -> None:
    """The caller overwrites its rows at once; a wire that may still repeat a write would undo that."""
    plan = NormalPlan(2, 64, heap=4 << 20, rounds=64 << 10, chunk=4096)
    adversary = Adversary(duplicate=0.6, linger=0.9)
    inputs = Case((60, 50), experts=4).inputs()
    with FakeGroup(2, adversary=adversary, seed=seed, normal=plan, settings=Settings(timeout=60.0)) as group:

        def body(runtime: Any) -> bool:
            normal = Normal(runtime)
            kept = []
            for number in range(6):
                received = dispatch(normal, inputs, runtime.rank)[0]
                assert normal._exchange.operation[block.IN_PLACE] == 1
                received.fill_(number)
                time.sleep(0.01)
                kept.append(received)
            return all(bool((rows == number).all()) for number, rows in enumerate(kept))

        assert group.run(body) == [True, True]


#: What a wire repeats, and when; a case waits seconds for what lingers.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_repeat_of_one_operation_never_lands_in_the_next(seed: int) -> None:
    """Memory is granted again, and staging packed again, by the very next operation; the wire repeats what it can."""
    plan = NormalPlan(3, 64, heap=256 << 10, rounds=96 << 10, chunk=4096, depth=4)
    adversary = Adversary(duplicate=0.7, linger=0.97)
    with FakeGroup(3, adversary=adversary, seed=seed, normal=plan, settings=Settings(timeout=60.0)) as group:
        run(group, Case((40, 50, 30), experts=6, seed=seed), repeats=12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_repeat_of_one_grant_never_lands_in_the_next_but_one(seed: int) -> None:
    """One chunk fills a landing slot and the staging holds eight: only the grant can make the sender wait."""
    plan = NormalPlan(2, 64, heap=0, rounds=16 << 10, chunk=4096, depth=8)
    adversary = Adversary(duplicate=0.7, linger=0.97)
    with FakeGroup(2, adversary=adversary, seed=seed, normal=plan, settings=Settings(timeout=60.0)) as group:
        run(group, Case((120, 110), experts=4, seed=seed), repeats=3)


def test_refused_operations_free_no_notify_slot_early() -> None:
    """Ranks that refuse each other wait for no completion, so the next notify but one must: here none ever comes."""
    inputs = [Case((8, 8), hidden=hidden, experts=4).inputs() for hidden in (256, 128)]
    with FakeGroup(2, adversary=Adversary(linger=1 - 2**-32), settings=Settings(timeout=0.5)) as group:

        def body(runtime: Any) -> Any:
            normal = Normal(runtime)
            for _ in range(2):
                with pytest.raises(ConfigError, match="different operations"):
                    dispatch(normal, inputs[runtime.rank], runtime.rank)
            with pytest.raises(PeerTimeout) as caught:
                dispatch(normal, inputs[0], runtime.rank)
            return caught.value

        for error in group.run(body):
            assert error.phase == "normal dispatch, opening"


def test_a_lost_write_ends_in_a_timeout_that_names_the_peer() -> None:
    """Nothing is delivered early: either the results are right, or the wait ends by name."""
    inputs = Case((60, 50), experts=4).inputs()
    adversary = Adversary(lose=0.2)
    with FakeGroup(2, adversary=adversary, seed=3, settings=Settings(timeout=0.5)) as group:

        def body(runtime: Any) -> Any:
            normal = Normal(runtime)

            def many() -> None:
                for _ in range(20):
                    dispatch(normal, inputs, runtime.rank)

            with pytest.raises(PeerTimeout) as caught:
                many()
            return caught.value

        for rank, error in enumerate(group.run(body)):
            assert error.peer == 1 - rank
            assert error.arrived < error.expected


def test_a_killed_peer_is_named_within_a_second() -> None:
    inputs = Case((60, 50, 40), experts=6).inputs()
    with FakeGroup(3, adversary=Adversary(kill=2, kill_after=9), settings=Settings(timeout=4.0)) as group:

        def body(runtime: Any) -> Any:
            normal = Normal(runtime)
            started = []

            def many() -> None:
                for _ in range(50):
                    started.append(time.monotonic())
                    round_trip(normal, inputs, runtime.rank)

            with pytest.raises(UcclEpError) as caught:
                many()
            return caught.value, time.monotonic() - started[-1]

        for error, seconds in group.run(body)[:2]:
            assert isinstance(error, PeerLost)
            assert error.peer == 2
            assert seconds < 1.0 + 1.0  # two ranks and their proxies share the machine with this test
