"""Normal mode without room: rounds instead of rows in place, and the lease of what was returned."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from tests.kernels.test_wait_publish import Bench
from tests.support.bits import same_bits
from tests.support.direct_ranks import DirectGroup
from tests.support.normal_cases import Case, Outcome, check, dispatch, round_trip
from uccl_ep_serving.config import Settings
from uccl_ep_serving.kernels.blocks import normal as block
from uccl_ep_serving.kernels.cpu.normal_receive import give_grant
from uccl_ep_serving.kernels.cpu.words import MOVED, NOTHING
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol.layout import NormalPlan
from uccl_ep_serving.protocol.message import GRANT_SLOTS
from uccl_ep_serving.protocol.streams import NORMAL_GRANT

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
#: Two slots per source of about a dozen rows of 512 bytes, for 3 ranks.
TINY_ROUNDS = 48 << 10


def run(case: Case, plan: NormalPlan, channels: int = 1, **options) -> list[Outcome]:
    inputs = case.inputs()
    group = DirectGroup(case.ranks, plan, Settings(timeout=20.0, channels=channels))
    outcomes = group.run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank, **options))
    check(inputs, outcomes, worst=options.get("num_worst_tokens", 0))
    return outcomes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3])
def test_no_heap_at_all(dtype: torch.dtype, channels: int):
    plan = NormalPlan(3, 64, heap=0, rounds=TINY_ROUNDS, chunk=4096)
    run(Case((150, 0, 77), experts=12, dtype=dtype), plan, channels)


@pytest.mark.parametrize("case", [Case((0, 300, 0), experts=6), Case((100, 90, 80), experts=12, hot=0)])
def test_rounds_of_uneven_ranks(case: Case):
    run(case, NormalPlan(3, 64, heap=0, rounds=TINY_ROUNDS, chunk=8192))


def test_rounds_with_worst_case_outputs():
    run(Case((40, 20, 9), experts=6), NormalPlan(3, 64, heap=0, rounds=TINY_ROUNDS, chunk=4096), num_worst_tokens=128)


def test_rows_of_many_rounds_in_one_slot_each():
    """The smallest slots: one row a grant, so every grant slot is reused many times."""
    run(Case((60, 50), hidden=256, experts=4, topk=2), NormalPlan(2, 64, heap=0, rounds=4096, chunk=4096))


def test_grant_slot_is_used_again_only_when_complete():
    """The peer may have read a grant long before its write completes here, and until then a NIC may repeat it."""
    bench, peer = Bench(capacity=16), 2
    counts = np.zeros((3, block.COUNT_WORDS), np.int64)
    operation, peers = np.zeros(block.OPERATION_WORDS, np.int64), np.zeros((3, block.PEER_WORDS), np.int64)
    operation[block.GRANT_SEND], operation[block.GRANT_RECV] = bench.layout.grant_send, bench.layout.grant_recv
    peers[peer, [block.RECV_ROWS, block.CONSUMED]] = 100
    peers[peer, block.SLOT_ROWS] = 1

    def give() -> int:
        blocks = (counts.ctypes.data, operation.ctypes.data, peers.ctypes.data)
        return give_grant(bench.space.context, *blocks, peer)

    assert [give() for _ in range(GRANT_SLOTS + 1)] == [MOVED] * GRANT_SLOTS + [NOTHING]
    bench.completed[NORMAL_GRANT] = 1
    assert [give(), give()] == [MOVED, NOTHING]
    sources = [command.source for command in bench.take()]
    assert len(set(sources)) == GRANT_SLOTS
    assert sources[0] == sources[GRANT_SLOTS]


def test_a_landing_slot_is_granted_again_only_when_consumed():
    """A peer has two landing slots: grant g names slot g % 2, whose rows of grant g - 2 must be read."""
    bench, peer = Bench(capacity=16), 2
    counts = np.zeros((3, block.COUNT_WORDS), np.int64)
    operation, peers = np.zeros(block.OPERATION_WORDS, np.int64), np.zeros((3, block.PEER_WORDS), np.int64)
    operation[block.GRANT_SEND], operation[block.GRANT_RECV] = bench.layout.grant_send, bench.layout.grant_recv
    peers[peer, [block.RECV_ROWS, block.SLOT_ROWS]] = 100, 10
    bench.completed[NORMAL_GRANT] = 100

    def give() -> int:
        blocks = (counts.ctypes.data, operation.ctypes.data, peers.ctypes.data)
        return give_grant(bench.space.context, *blocks, peer)

    assert [give() for _ in range(3)] == [MOVED, MOVED, NOTHING]
    peers[peer, block.CONSUMED] = 9
    assert give() == NOTHING
    peers[peer, block.CONSUMED] = 10
    assert [give(), give()] == [MOVED, NOTHING]


def test_results_are_equal_bit_by_bit_whatever_the_plan():
    """In place, in rounds, large and small chunks, one channel and five: nothing of it shows."""
    case = Case((211, 0, 150, 33), hidden=384, experts=16, topk=6, seed=4)
    big = NormalPlan(4, 64, heap=16 << 20, rounds=1 << 20, chunk=1 << 20)
    first = run(case, big)
    for plan, channels in (
        (NormalPlan(4, 64, heap=16 << 20, rounds=1 << 20, chunk=4096), 5),
        (NormalPlan(4, 64, heap=0, rounds=64 << 10, chunk=4096), 2),
        (NormalPlan(4, 64, heap=0, rounds=1 << 20, chunk=64 << 10, depth=1), 1),
        (NormalPlan(4, 64, heap=256 << 10, rounds=128 << 10, chunk=8192), 1),
    ):
        for one, other in zip(first, run(case, plan, channels), strict=True):
            assert same_bits(one.rows, other.rows)
            assert same_bits(one.combined, other.combined)
            assert same_bits(one.combined_weights, other.combined_weights)


def test_kept_tensors_stay_as_they_were():
    """Twenty dispatches and combines whose results are all kept: the heap fills up, later ones go in rounds."""
    cases = [Case((40, 30), experts=8, seed=seed).inputs() for seed in range(20)]
    group = DirectGroup(2, NormalPlan(2, 64, heap=512 << 10, rounds=64 << 10, chunk=8192))

    def body(runtime):
        normal = Normal(runtime)
        kept = [round_trip(normal, inputs, runtime.rank) for inputs in cases]
        room = runtime.heap.free_bytes
        return kept, room

    results = group.run(body)
    for index, inputs in enumerate(cases):
        check(inputs, [kept[index] for kept, _ in results])
    assert all(room < 64 << 10 for _, room in results)


def test_memory_comes_back_when_tensors_go():
    inputs = Case((40, 30), experts=8).inputs()
    group = DirectGroup(2, NormalPlan(2, 64, heap=512 << 10, rounds=64 << 10, chunk=8192))

    def body(runtime):
        normal = Normal(runtime)
        for _ in range(30):
            received, *_ = dispatch(normal, inputs, runtime.rank)
            part = received[3:5]
            del received
            assert runtime.heap.free_bytes < 512 << 10  # the view still holds the range
            del part
        gc.collect()
        return runtime.heap.free_bytes

    assert group.run(body) == [512 << 10] * 2


def test_a_caller_may_overwrite_what_it_received():
    """Experts often work in place; a handle leads back all the same."""
    inputs = Case((40, 30), experts=8).inputs()

    def body(runtime):
        normal = Normal(runtime)
        received, *_, handle, _ = dispatch(normal, inputs, runtime.rank)
        received.fill_(1.0)
        combined = normal.combine(received, handle)[0]
        return bool((combined == handle.is_token_in_rank.sum(dim=1, keepdim=True)).all())

    assert DirectGroup(2).run(body) == [True, True]
