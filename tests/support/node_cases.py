"""Operations of normal mode between nodes of two ranks, of which each bit is known."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.support import normal_cases
from tests.support.bits import check_bits
from tests.support.normal_cases import Case, Inputs


def exact_sums(normal: Any, rank: int) -> None:
    """A row that crosses is the sum of its node in float32, rounded once, and so is a token of what came; a single row
    is itself, the sign of a zero included."""
    inputs = Case(tokens=(6, 5, 0, 7), experts=4, topk=4, lost=0.3, seed=9).inputs()
    received, _, _, _, handle, _ = normal_cases.dispatch(normal, inputs, rank)
    delivered = inputs.delivered
    outputs = [
        torch.randn(len(one.source), inputs.case.hidden, generator=torch.Generator().manual_seed(peer)).bfloat16()
        for peer, one in enumerate(delivered)
    ]
    for one in outputs:
        one[:, 0] = -0.0
    assert len(received) == len(outputs[rank])
    combined, _, _ = normal.combine(outputs[rank], handle)
    node, expected = rank // 2, torch.zeros_like(inputs.x[rank])
    for token in range(len(expected)):
        parts: list[torch.Tensor] = []
        for there in range(2):
            rows = [
                outputs[peer][place].float()
                for peer in (2 * there, 2 * there + 1)
                for place in range(len(outputs[peer]))
                if (int(delivered[peer].source[place]), int(delivered[peer].token[place])) == (rank, token)
            ]
            if there == node:
                parts += rows
            elif rows:
                parts.append(_sum_in_order(rows).bfloat16().float())
        if parts:
            expected[token] = _sum_in_order(parts).bfloat16()
    check_bits("sums", combined, expected)


def _sum_in_order(rows: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, rows)


def broken_promise(normal: Any, session: Any, rank: int, tokens: int) -> Inputs:
    """More rows come than ``num_worst_tokens`` promised, more of which marks are to be kept than there is room for, and
    the combine is launched before the host knows, as on a device. It ends, and only what is there is summed. What was
    dispatched; the next call tells of the promise.

    Args:
        session: of ``normal``.
    """
    inputs = Case(tokens=(tokens,) * 4, experts=4, topk=2, lost=0.0, hidden=128).inputs()
    for own, ids in enumerate(inputs.topk_idx):
        # one expert a rank: every other token goes to both ranks of the other node, the rest to its first
        ids[:] = torch.tensor([2, 3]) if own < 2 else torch.tensor([0, 1])
        ids[1::2, 1] = -1
    combined, factors = normal_cases.combine_unaware(normal, session, inputs, rank, 8)
    # the first row of each rank is of the first token of the other node's first rank
    there = float(rank % 2 == 0)
    assert combined.tolist() == [[2 * there] * 128] + [[0.0] * 128] * (tokens - 1)
    assert factors.tolist() == [[there] * 2] + [[0.0] * 2] * (tokens - 1)
    return inputs
