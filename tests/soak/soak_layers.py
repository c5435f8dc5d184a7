"""Layers (dispatch, experts, combine) on one rank of a group of processes, each checked against the oracle.

Every rank draws the same sequence from the seed: layer ``n`` depends on the seed and ``n`` alone, so a run can start
anywhere. Modes alternate, and dtypes, routings, token counts and forms vary from layer to layer; ranks are slow by
turns. Inputs and expected results come from a fixed pool made beforehand, walked in another order each time, so that
what a layer costs is the layer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.soak.soak_samples import Sample, sample
from tests.support import ll_cases, normal_cases
from tests.support.bits import same_bits
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.oracle import low_latency_dispatch

__all__ = ["LayerPlan", "stretch"]

POOL = 48
TOKENS, HIDDEN, TOPK = 16, 512, 4
FORMATS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.float32},
    {},
    {"dtype": torch.float16},
    {"fp8": True},
    {"fp8": True, "round_scale": True},
    {"fp8": True, "round_scale": True, "ue8m0": True},
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
ROUTINGS = ("random", "holes", "far", "twice", "one", "none", "last", "random")
#: Layers after which another rank is the slow one, and the most seconds that it dawdles at a time.
TURN, DAWDLE, LONG = 50, 0.002, 0.03


@dataclass(frozen=True)
class LayerPlan:
    """What the ranks run. ``settings`` are overrides; ``first`` is the number of the first layer."""

    seed: int
    ranks: int
    first: int
    settings: dict[str, Any]


class _Pool:
    """Inputs of all ranks and what this rank must get, by mode."""

    def __init__(self, plan: LayerPlan, rank: int) -> None:
        self.low_latency: list[tuple[ll_cases.Case, Any, Any, torch.Tensor]] = []
        self.normal: list[normal_cases.Inputs] = []
        dice = random.Random(plan.seed)
        experts = 4 * plan.ranks
        for number in range(POOL):
            case = ll_cases.Case(
                ranks=plan.ranks,
                tokens=TOKENS,
                hidden=HIDDEN,
                experts=experts,
                topk=TOPK,
                counts=tuple(dice.choice((0, 1, TOKENS, dice.randint(0, TOKENS))) for _ in range(plan.ranks)),
                routing=ROUTINGS[number % len(ROUTINGS)],
                reduced=dice.random() < 0.5,
                seed=dice.randrange(1 << 30),
                **FORMATS[number % len(FORMATS)],
            )
            inputs = case.inputs()
            combined = ll_cases.expected_combined(case, inputs, rank)
            received = low_latency_dispatch(inputs, rank, case.tokens, case.experts)
            self.low_latency.append((case, inputs[rank], received, combined))
            self.normal.append(
                normal_cases.Case(
                    tokens=tuple(dice.choice((0, 1, dice.randint(2, 96))) for _ in range(plan.ranks)),
                    hidden=HIDDEN,
                    experts=experts,
                    topk=TOPK,
                    dtype=DTYPES[number % len(DTYPES)],
                    lost=dice.choice((0.0, 0.2, 0.9)),
                    hot=dice.choice((-1, -1, -1, dice.randrange(plan.ranks))),
                    seed=dice.randrange(1 << 30),
                ).inputs()
            )

    def order(self, seed: int, turn: int) -> list[int]:
        """In which order the pool is walked the ``turn``-th time."""
        order = list(range(POOL))
        random.Random(f"{seed} {turn}").shuffle(order)
        return order


class _Rank:
    """What a rank process keeps between stretches."""

    def __init__(self, plan: LayerPlan, exchange: StoreExchange) -> None:
        self.plan, self.rank = plan, exchange.rank
        self.pool = _Pool(plan, exchange.rank)
        self.buffer: Buffer | None = None

    def open(self, exchange: StoreExchange) -> Buffer:
        """The Buffer, built with all other ranks when there is none."""
        if self.buffer is None:
            self.buffer = Buffer(exchange, settings=Settings.from_environment({}, **self.plan.settings))
            # the widest type first: its window serves all others, and none is rebuilt under overlapped layers
            _low_latency(self, self.buffer, [0], lambda: None)
        return self.buffer

    def close(self) -> dict[str, Any]:
        """Close the Buffer with all other ranks; returns what it counted."""
        assert self.buffer is not None
        stats = self.buffer.stats()
        self.buffer.destroy()
        self.buffer = None
        return {name: stats[name] for name in ("bytes_sent", "messages_sent", "writes", "transport_by_peer")}


_state: _Rank | None = None


def stretch(
    exchange: StoreExchange, plan: LayerPlan, begin: int, end: int, last: bool
) -> tuple[Sample, dict[str, Any]]:
    """Layers ``begin`` up to ``end`` (counted from ``plan.first``) on this rank; with ``last`` the Buffer is closed.

    Returns what the process holds while the Buffer is open, and, when it was closed, its counters.

    Raises:
        AssertionError: a layer's data is wrong; the message tells which layer.
        UcclEpError: an operation failed.
    """
    global _state
    if _state is None or _state.plan != plan:
        _state = _Rank(plan, exchange)
    buffer = _state.open(exchange)
    layer = plan.first + begin
    try:
        while layer < plan.first + end:
            layer += _one(_state, buffer, layer)
    except BaseException as error:
        error.add_note(f"rank {exchange.rank}, layer {layer}")
        raise
    held = sample(begin)
    return held, _state.close() if last else {}


def _one(state: _Rank, buffer: Buffer, layer: int) -> int:
    """Run the layer (or two overlapped ones) that starts at ``layer``; returns how many."""
    plan, step = state.plan, layer // 4
    index = state.pool.order(plan.seed, step * 2 // POOL)[step * 2 % POOL]
    other = state.pool.order(plan.seed, step * 2 // POOL)[(step * 2 + 1) % POOL]
    dawdle = _dawdle(state, layer)
    # by fours: low latency plain, normal, then two low-latency layers overlapped through their hooks, or two of one
    match layer % 4:
        case 0:
            _low_latency(state, buffer, [index], dawdle)
            return 1
        case 1:
            _normal(state, buffer, index, dawdle, asynchronous=step % 2 == 1)
            return 1
        case 2 if step % 2:
            _low_latency(state, buffer, [index, other], dawdle)
            return 2
        case 2:
            _low_latency(state, buffer, [other], dawdle)
            return 1
        case _:
            _normal(state, buffer, other, dawdle, asynchronous=step % 2 == 0)
            return 1


def _dawdle(state: _Rank, layer: int) -> Callable[[], None]:
    """What this rank does between the parts of ``layer``: nothing, or waste time when it is its turn to be slow."""
    dice = random.Random(f"{state.plan.seed} {layer} slow")
    if layer // TURN % state.plan.ranks != state.rank:
        return lambda: None
    return lambda: time.sleep(LONG if dice.random() < 0.01 else DAWDLE * dice.random())


def _low_latency(state: _Rank, buffer: Buffer, indices: list[int], dawdle: Callable[[], None]) -> None:
    """One layer, or two at a time: both sent before either is received, and received in the other order."""
    chosen = [state.pool.low_latency[index] for index in indices]
    sent = []
    for case, given, _, _ in chosen:
        dawdle()
        weights = ll_cases.weights_at_dispatch(case, given)
        options = {**case.options, "topk_weights": weights, "return_recv_hook": True}
        sent.append(buffer.low_latency_dispatch(given.x, given.topk_idx, case.tokens, case.experts, **options))
    outputs: list[torch.Tensor] = []
    for (case, _, want, _), (rows, count, handle, _, hook) in zip(reversed(chosen), reversed(sent), strict=True):
        assert hook is not None
        hook()
        ll_cases.check_received(case, rows, count, handle, want)
        outputs.insert(0, ll_cases.expert_output(ll_cases.received_values(case, rows, count), state.rank))
    combining = []
    for (_, given, _, _), (_, _, handle, _, _), y in zip(chosen, sent, outputs, strict=True):
        dawdle()
        combining.append(
            buffer.low_latency_combine(y, given.topk_idx, given.topk_weights, handle, return_recv_hook=True)
        )
    for (_, _, _, expected), (combined, _, hook) in zip(reversed(chosen), reversed(combining), strict=True):
        assert hook is not None
        hook()
        assert torch.equal(combined, expected), "low-latency combine differs from the oracle"


def _normal(state: _Rank, buffer: Buffer, index: int, dawdle: Callable[[], None], *, asynchronous: bool) -> None:
    """One layer; asynchronous ones dispatch a second time with the handle of the first, as a cached layout."""
    inputs = state.pool.normal[index]
    dawdle()
    outcome = normal_cases.round_trip(buffer, inputs, state.rank, async_finish=asynchronous)
    normal_cases.check_rank(inputs, state.rank, outcome)
    if asynchronous:
        dawdle()
        again, *_, event = buffer.dispatch(inputs.rows(state.rank), handle=outcome.handle, async_finish=True)
        event.current_stream_wait()
        rows = again[0] if isinstance(again, tuple) else again
        assert same_bits(rows, outcome.rows), "a cached dispatch differs from the first"
