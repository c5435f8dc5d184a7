"""A rank is lost at any point of low latency: once it is masked, those that are left go on, right to the last bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import bodies
from tests.support.combinations import diagonal, first_of
from tests.support.ll_cases import Case, check_received, expected_combined, expert_output, received_values
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane import steps
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.data_plane.compiling import COMPILING
from uccl_ep_serving.errors import ConfigError, PeerLost, PeerTimeout, UcclEpError
from uccl_ep_serving.oracle import LowLatencyInput

LOST = 1


def case_of(ranks: int, seed: int = 0) -> Case:
    return Case(ranks=ranks, tokens=8, hidden=128, experts=4 * ranks, topk=4, counts=(8, 5, 8, 3), seed=seed)


def dropped(case: Case, inputs: list[LowLatencyInput], lost: set[int]) -> list[LowLatencyInput]:
    """The oracle's inputs without the ranks ``lost``: no token of theirs, and no token chooses an expert of theirs."""
    local = case.experts // case.ranks
    kept = []
    for rank, given in enumerate(inputs):
        ids = given.topk_idx.clone()
        for peer in lost:
            ids[(ids >= peer * local) & (ids < (peer + 1) * local)] = -1
        rows = slice(0, 0) if rank in lost else slice(None)
        kept.append(LowLatencyInput(given.x[rows], ids[rows], given.topk_weights[rows]))
    return kept


def dispatched(buffer: Buffer, case: Case, hook: bool = False) -> tuple[Any, ...]:
    given = case.inputs()[buffer.rank]
    return buffer.low_latency_dispatch(
        given.x,
        given.topk_idx,
        case.tokens,
        case.experts,
        use_fp8=False,
        topk_weights=given.topk_weights,
        return_recv_hook=hook,
    )


def combined(buffer: Buffer, case: Case, arrived: tuple[Any, ...], hook: bool = False) -> tuple[Any, ...]:
    given = case.inputs()[buffer.rank]
    y = expert_output(received_values(case, arrived[0], arrived[1]), buffer.rank)
    return buffer.low_latency_combine(y, given.topk_idx, given.topk_weights, arrived[2], return_recv_hook=hook)


def checked_trip(buffer: Buffer, case: Case, lost: set[int]) -> None:
    """Dispatch and combine, equal to the oracle with ``lost`` dropped."""
    from uccl_ep_serving.oracle import low_latency_dispatch

    arrived = dispatched(buffer, case)
    inputs = dropped(case, case.inputs(), lost)
    check_received(case, arrived[0], arrived[1], arrived[2], low_latency_dispatch(inputs, buffer.rank, 8, case.experts))
    assert torch.equal(combined(buffer, case, arrived)[0], expected_combined(case, inputs, buffer.rank))


def die() -> None:
    time.sleep(0.3)  # what was sent is on its way, and the others wait
    os.kill(os.getpid(), signal.SIGKILL)


def in_dispatch_recv(buffer: Buffer, case: Case) -> None:
    if buffer.rank == LOST:
        die()
    dispatched(buffer, case)


def in_dispatch_hook(buffer: Buffer, case: Case) -> None:
    if buffer.rank == LOST:
        die()
    arrived = dispatched(buffer, case, hook=True)
    arrived[4]()


def in_dispatch_recv_of_some(buffer: Buffer, case: Case) -> None:
    """Its last message reached rank 0, which completes the dispatch and waits in combine, and nobody else."""
    if buffer.rank == LOST:
        buffer.runtime.mask[2:] = 1
        dispatched(buffer, case, hook=True)
        die()
    combined(buffer, case, dispatched(buffer, case))


def in_dispatch_send(buffer: Buffer, case: Case) -> None:
    """It has not read the first of two dispatches: a third waits to be sent."""
    pending = [dispatched(buffer, case, hook=True)[4] for _ in range(2)]
    if buffer.rank == LOST:
        die()
    for hook in pending:
        hook()
    dispatched(buffer, case)


def in_combine_send(buffer: Buffer, case: Case) -> None:
    arrived = dispatched(buffer, case)
    pending = [combined(buffer, case, arrived, hook=True)[2] for _ in range(2)]
    if buffer.rank == LOST:
        die()
    for hook in pending:
        hook()
    combined(buffer, case, arrived)


def in_combine_recv(buffer: Buffer, case: Case) -> None:
    arrived = dispatched(buffer, case)
    if buffer.rank == LOST:
        die()
    combined(buffer, case, arrived)


POINTS = [
    in_dispatch_recv,
    in_dispatch_hook,
    in_dispatch_recv_of_some,
    in_dispatch_send,
    in_combine_send,
    in_combine_recv,
]


def lose_and_go_on(
    exchange: StoreExchange, overrides: dict[str, Any], point: Callable[[Buffer, Case], None]
) -> dict[str, Any]:
    buffer = bodies.opened(exchange, overrides)
    case = case_of(exchange.size)
    checked_trip(buffer, case, set())
    old = dispatched(buffer, case)
    combined(buffer, case, old)
    with pytest.raises(PeerLost) as caught:
        point(buffer, case)
    assert caught.value.peer == LOST
    if exchange.rank == 2:
        time.sleep(0.2)  # the ranks that are left need not mask at once
    buffer.low_latency_update_mask_buffer(LOST, True)
    buffer.low_latency_update_mask_buffer(LOST, True)  # twice is no harm
    buffer.low_latency_update_mask_buffer(0 if exchange.rank else 2)  # without ``mask`` nothing is masked
    with pytest.raises(ConfigError, match=f"rank {LOST} cannot be un-masked in place"):
        buffer.low_latency_update_mask_buffer(LOST)
    with pytest.raises(ConfigError, match=f"rank {LOST} was masked, so what was sent before is void"):
        combined(buffer, case, old)
    for seed in range(4):
        checked_trip(buffer, replace(case, seed=seed), {LOST})
    status = torch.zeros(exchange.size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(rank == LOST) for rank in range(exchange.size)]
    column = torch.full((exchange.size, 1), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(column)
    assert column.flatten().tolist() == status.tolist()
    with pytest.raises(ConfigError, match="the windows were rebuilt since"):
        combined(buffer, case, old)
    stats = buffer.stats()
    buffer.destroy()
    return stats


@pytest.mark.parametrize(("path", "point"), diagonal(["direct", "shm", "tcp"], POINTS))
def test_the_others_go_on_wherever_the_loss_strikes(mortal_ranks: Ranks, path: str, point: Any) -> None:
    mortal_ranks.start(3, lose_and_go_on, PATHS[path], point)
    for succeeded, found in mortal_ranks.finish([0, 2], timeout=180).values():
        assert succeeded, found
        assert found["masked"] == [LOST]
        assert found["epoch"] > 1


def lose_two(exchange: StoreExchange, overrides: dict[str, Any], normal_first: bool) -> list[int]:
    """Rank 1 is lost in an operation, rank 3 instead of rebuilding the windows."""
    buffer = bodies.opened(exchange, overrides)
    case = case_of(4)
    checked_trip(buffer, case, set())
    with pytest.raises(PeerLost):
        in_dispatch_recv(buffer, case)
    buffer.low_latency_update_mask_buffer(LOST, True)
    if exchange.rank == 3:
        # rank 0 hears its part of the first step, rank 2 does not: they fail in steps of different numbers
        send = steps.send_frame
        steps.send_frame = lambda link, *rest, **options: None if link.peer == 2 else send(link, *rest, **options)
        threading.Timer(1.0, die).start()
    lost = []
    for _ in range(3):
        try:
            if normal_first:
                bodies.normal_trip(buffer, lost=frozenset({LOST, *lost}))
            checked_trip(buffer, case, {LOST, *lost})
            break
        except PeerLost as error:
            lost.append(error.peer)
            buffer.low_latency_update_mask_buffer(error.peer, True)
    for seed in range(3):
        checked_trip(buffer, replace(case, seed=seed), {LOST, *lost})
        bodies.normal_trip(buffer, seed, lost=frozenset({LOST, *lost}))
    buffer.destroy()
    return lost


@pytest.mark.parametrize(("path", "normal_first"), first_of(("tcp", False), ("direct", True), ("direct", False)))
def test_a_second_rank_is_lost_while_the_others_rebuild(mortal_ranks: Ranks, path: str, normal_first: bool) -> None:
    mortal_ranks.start(4, lose_two, PATHS[path], normal_first)
    results = mortal_ranks.finish([0, 2], timeout=180)
    assert results == {0: (True, [3]), 2: (True, [3])}


def fall_silent(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 sends its last dispatch to rank 0 only and falls silent: rank 2 notices first and masks it, and rank 0
    learns it from there instead of blaming rank 2. The silent rank comes back and is told."""
    buffer = bodies.opened(exchange, {**overrides, "timeout": 2.0})
    case = case_of(3)
    checked_trip(buffer, case, set())
    if exchange.rank == LOST:
        buffer.runtime.mask[2] = 1
        dispatched(buffer, case, hook=True)
        buffer.runtime.mask[2] = 0
        exchange.all_gather(b"")
        with pytest.raises(UcclEpError) as told:
            dispatched(buffer, case)
        buffer.destroy()
        return str(told.value)
    try:
        arrived = dispatched(buffer, case)
        time.sleep(1.0)
        combined(buffer, case, arrived)
    except (PeerLost, PeerTimeout) as error:
        text = f"{type(error).__name__} {error.peer}: {error}"
    buffer.low_latency_update_mask_buffer(LOST, True)
    for seed in range(3):
        checked_trip(buffer, replace(case, seed=seed), {LOST})
    exchange.all_gather(b"")
    buffer.destroy()
    return text


@pytest.mark.parametrize("path", first_of("shm", "tcp", "direct"))
def test_a_silent_rank_is_masked_by_all_and_told(ranks: Ranks, path: str) -> None:
    zero, one, two = ranks.run(3, fall_silent, PATHS[path])
    assert zero.startswith(f"PeerTimeout {LOST}: low-latency combine recv")
    assert "has not begun the operation in which rank 2 waits for it" in zero
    assert two.startswith(f"PeerTimeout {LOST}: low-latency dispatch recv")
    assert "this rank takes part no more: ranks [0, 2] have gone on without it" in one
    assert "has not begun the operation in which rank 2 waits for it" in one


def mask_differently(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """Ranks 0 and 2 mask different ranks of four: both are told, and agree afterwards."""
    buffer = bodies.opened(exchange, {**overrides, "timeout": 5.0})
    case = case_of(4)
    checked_trip(buffer, case, set())
    exchange.all_gather(b"")  # a rank that is still in its combine would hear of the masks there
    if exchange.rank in (1, 3):
        time.sleep(3.0)
        buffer.destroy()
        return []
    texts = []
    buffer.low_latency_update_mask_buffer(1 if exchange.rank == 0 else 3, True)
    time.sleep(0.5)
    with pytest.raises(PeerLost) as caught:
        dispatched(buffer, case)
    texts.append(f"{caught.value.peer}: {caught.value}")
    buffer.low_latency_update_mask_buffer(caught.value.peer, True)
    checked_trip(buffer, case, {1, 3})
    buffer.destroy()
    return texts


def test_ranks_that_mask_different_peers_are_told(ranks: Ranks) -> None:
    zero, _, two, _ = ranks.run(4, mask_differently, PATHS["shm"])
    assert zero[0].startswith("3:")
    assert "rank 2 has masked it" in zero[0]
    assert two[0].startswith("1:")
    assert "rank 0 has masked it" in two[0]


def dies_in_the_last_step_of_compiling(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """Before the first normal operation the lost rank answers rank 0, and not rank 2: one knows that all can go on."""
    buffer = bodies.opened(exchange, overrides)
    if exchange.rank == LOST:
        send = steps.send_frame

        def half(link: Any, kind: int, number: int = 0, body: bytes = b"", descriptors: Any = ()) -> None:
            if COMPILING.encode() not in body[:20]:
                send(link, kind, number, body, descriptors)
            elif link.peer == 0:
                send(link, kind, number, body, descriptors)
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)

        steps.send_frame = half
    x, topk_idx, weights = bodies.tokens_of(exchange.rank, 8, 128, 6, 2)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 6)
    layout: Any = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    raised = []
    for _ in range(3):
        try:
            received = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **layout)[0]
            mine = [bodies.tokens_of(peer, 8, 128, 6, 2) for peer in (0, 2)]
            rows = [given[(ids // 2 == exchange.rank).any(dim=1)] for given, ids, _ in mine]
            assert torch.equal(received, torch.cat(rows))
            break
        except PeerLost as error:
            raised.append(type(error).__name__)
            buffer.low_latency_update_mask_buffer(error.peer, True)
    buffer.destroy()
    return raised


def test_ranks_that_lost_one_on_the_way_to_normal_mode_go_on(mortal_ranks: Ranks) -> None:
    mortal_ranks.start(3, dies_in_the_last_step_of_compiling, PATHS["tcp"])
    found = mortal_ranks.finish([0, 2])
    assert [one for _, one in found.values()] == [["PeerLost"], ["PeerLost"]]
