"""What rank processes run in the tests of normal mode's Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import bodies
import normal_cases
import pytest
import torch
from normal_cases import Case, same_bits

from uccl_ep_serving.bootstrap import StoreExchange
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.errors import ConfigError, UcclEpError
from uccl_ep_serving.normal_device import DeviceNormal


def opened(exchange: StoreExchange, overrides: dict[str, Any], device: str = "interpreter") -> Buffer:
    """A Buffer whose kernels are Triton's, interpreted, or the CPU's."""
    os.environ["TRITON_INTERPRET"] = "1"
    return bodies.opened(exchange, {"device": device, "timeout": 120.0, "connect_timeout": 120.0, **overrides})


def run_cases(buffer: Buffer, rank: int, cases: list[Case]) -> int:
    """Dispatch bit-exact, combine within DeepEP's tolerances, for every case on one Buffer, which is then closed."""
    for case in cases:
        inputs = case.inputs()
        outcome = normal_cases.round_trip(buffer, inputs, rank)
        normal_cases.check_rank(inputs, rank, outcome)
    buffer.destroy()
    return len(cases)


def against_the_oracle(exchange: StoreExchange, overrides: dict[str, Any], cases: list[Case]) -> int:
    """All ranks run Triton's kernels."""
    return run_cases(opened(exchange, overrides), exchange.rank, cases)


def beside_the_cpu_kernels(exchange: StoreExchange, overrides: dict[str, Any], cases: list[Case]) -> int:
    """Odd ranks run Triton's kernels and even ones Numba's, over one wire."""
    return run_cases(mixed(exchange, overrides, exchange.rank % 2 == 0), exchange.rank, cases)


def mixed(exchange: StoreExchange, overrides: dict[str, Any], cpu: bool) -> Buffer:
    """A Buffer of a group of which some ranks run Numba's kernels (``cpu``) and the others Triton's."""
    buffer = opened(exchange, overrides, "cpu")
    if not cpu:
        from uccl_ep_serving.device_ground import DeviceGround

        buffer._normal = DeviceNormal(buffer.runtime, DeviceGround(buffer.runtime, torch.device("cpu")))
    return buffer


def no_turns(exchange: StoreExchange, overrides: dict[str, Any], case: Case) -> None:
    """The host launches no turns at all."""
    buffer = opened(exchange, overrides)
    normal: Any = buffer._normal
    normal._turns = lambda *_: 0
    run_cases(buffer, exchange.rank, [case, replace(case, tokens=(14, 9))])


def without_a_look(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """``num_worst_tokens`` and cached dispatches give what an ordinary dispatch gives."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(9, 6), experts=4, topk=2)
    inputs = case.inputs()
    worst = normal_cases.round_trip(buffer, inputs, rank, num_worst_tokens=18)
    normal_cases.check_rank(inputs, rank, worst, worst=18)
    plain = normal_cases.round_trip(buffer, inputs, rank)
    rows = len(plain.rows)
    assert same_bits(worst.rows[:rows], plain.rows)
    assert same_bits(worst.combined, plain.combined)
    for outcome in (worst, plain):
        again, idx, _, counts, _, _ = buffer.dispatch(inputs.x[rank], handle=outcome.handle)
        assert idx is None
        assert counts == []
        assert same_bits(again[:rows], plain.rows)
        back, _, _ = buffer.combine(normal_cases.expert_outputs(again, rank), outcome.handle)
        assert same_bits(back, plain.combined)
    with pytest.raises(ConfigError, match="arrived where num_worst_tokens promised fewer"):
        normal_cases.dispatch(buffer, inputs, rank, num_worst_tokens=2)
    normal_cases.check_rank(inputs, rank, normal_cases.round_trip(buffer, inputs, rank))
    buffer.destroy()


def without_ids(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """A layout and rows only."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(5, 3), experts=4, topk=2).inputs()
    per_rank, nodes, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx[rank], 4)
    assert nodes is None
    received, idx, weights, counts, handle, _ = buffer.dispatch(
        inputs.x[rank], num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    there = inputs.delivered()[rank]
    assert idx is None
    assert weights is None
    assert same_bits(received, there.rows(inputs.x))
    assert counts == list(there.expert_counts)
    combined, none, _ = buffer.combine(received, handle)
    assert none is None
    copies = in_rank.sum(dim=1, keepdim=True)
    assert torch.equal(combined.float(), (inputs.x[rank].float() * copies).bfloat16().float())
    buffer.destroy()


def biases(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """One bias and two, alignment of the counts, and a handle that belongs to somebody else."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(5, 3), experts=4, topk=2, dtype=torch.float32).inputs()
    received, _, _, counts, handle, _ = normal_cases.dispatch(buffer, inputs, rank, expert_alignment=8)
    assert counts == [-(-count // 8) * 8 for count in inputs.delivered()[rank].expert_counts]
    first, second = torch.ones_like(inputs.x[rank]), torch.full_like(inputs.x[rank], 2.0)
    plain, _, _ = buffer.combine(received, handle)
    one, _, _ = buffer.combine(received, handle, bias=first)
    two, _, _ = buffer.combine(received, handle, bias=(first, second))
    assert torch.equal(one, plain + first)
    assert torch.equal(two, plain + first + second)
    with pytest.raises(ConfigError, match="rows, and the dispatch of this handle returned"):
        buffer.combine(received[:-1], handle)
    buffer.destroy()


def different(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 dispatches another hidden size; then both go on. Returns what was raised."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(4, 3), experts=4, topk=2)
    wrong = replace(case, hidden=512).inputs() if rank else case.inputs()
    with pytest.raises(ConfigError) as raised:
        normal_cases.dispatch(buffer, wrong, rank)
    run_cases(buffer, rank, [case])
    return str(raised.value)


def silent_peer(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int, str]:
    """Rank 1 does not make the second dispatch."""
    buffer = opened(exchange, {**overrides, "timeout": 6.0})
    inputs = Case(tokens=(4, 3), experts=4, topk=2).inputs()
    normal_cases.dispatch(buffer, inputs, exchange.rank)
    if exchange.rank == 1:
        time.sleep(15)
        buffer.runtime.close(0.1)
        return "", -1, ""
    found = "", -1, ""
    try:
        normal_cases.dispatch(buffer, inputs, exchange.rank)
    except UcclEpError as error:
        found = type(error).__name__, getattr(error, "peer", -1), str(error)
    buffer.destroy()
    return found


def bad_ids(exchange: StoreExchange, overrides: dict[str, Any], worst: int) -> str:
    """Rank 0 has expert ids that do not exist, which count as -1. What was raised; everybody goes on."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(4, 3), experts=4, topk=2, lost=0.0)
    inputs = case.inputs()
    given = inputs.topk_idx[rank].clone()
    if rank == 0:
        given[1, 1], given[2, 0] = 4, (1 << 33) + 1
    inputs.topk_idx[0][1, 1] = inputs.topk_idx[0][2, 0] = -1
    text, received = "", None
    try:
        mine = replace(inputs, topk_idx=[given] * len(case.tokens))
        received = normal_cases.dispatch(buffer, mine, rank, num_worst_tokens=worst)[0]
    except ConfigError as error:
        text = str(error)
    if received is not None:
        there = inputs.delivered()[rank]
        assert same_bits(received[: len(there.source)], there.rows(inputs.x))
    run_cases(buffer, rank, [case])
    return text


def both_modes(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Normal mode before and after low latency has laid the windows out anew."""
    buffer = opened(exchange, overrides)
    inputs = Case(tokens=(4, 3), experts=4, topk=2).inputs()
    for _ in range(2):
        outcome = normal_cases.round_trip(buffer, inputs, exchange.rank)
        normal_cases.check_rank(inputs, exchange.rank, outcome)
        assert bodies.round_trip(buffer, tokens=4) < 0.02
    buffer.destroy()
