"""Several Buffers in one process, and two operations in flight, against the oracle: rank processes over every path."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import bodies, ll_cases, normal_cases
from tests.support.combinations import diagonal
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.oracle import low_latency_dispatch

LAYERS = 6
PATH_NAMES = ["direct", "shm-2-proxies", "tcp-2-proxies"]


class LowLatencyLayer:
    """A dispatch and combine in four steps, each a call of its own, so that layers can be interleaved at will."""

    def __init__(self, buffer: Buffer, case: ll_cases.Case) -> None:
        self.buffer, self.case, self.rank = buffer, case, buffer.rank
        self.inputs = case.inputs()

    def send(self) -> Callable[[], None]:
        """Dispatch send; returns the recv hook."""
        given, case = self.inputs[self.rank], self.case
        self.rows, self.count, self.handle, _, hook = self.buffer.low_latency_dispatch(
            given.x,
            given.topk_idx,
            case.tokens,
            case.experts,
            topk_weights=ll_cases.weights_at_dispatch(case, given),
            return_recv_hook=True,
            **case.options,
        )
        assert hook is not None
        return hook

    def send_back(self) -> Callable[[], None]:
        """Check what was received, run the experts, combine send; returns the recv hook."""
        case, given = self.case, self.inputs[self.rank]
        want = low_latency_dispatch(self.inputs, self.rank, case.tokens, case.experts)
        ll_cases.check_received(case, self.rows, self.count, self.handle, want)
        y = ll_cases.expert_output(ll_cases.received_values(case, self.rows, self.count), self.rank)
        self.combined, _, hook = self.buffer.low_latency_combine(
            y, given.topk_idx, given.topk_weights, self.handle, return_recv_hook=True
        )
        y.fill_(float("nan"))  # combine has read it when it returned
        assert hook is not None
        return hook

    def check(self) -> None:
        """Hold the combined tokens against the oracle."""
        ll_cases.check_combined(self.case, self.inputs, self.rank, self.combined)


class NormalLayer:
    """The same for normal mode: dispatch and combine with ``async_finish``, events waited for before data is used."""

    def __init__(self, buffer: Buffer, case: normal_cases.Case) -> None:
        self.buffer, self.rank = buffer, buffer.rank
        self.inputs = case.inputs()

    def send(self) -> Callable[[], None]:
        """Layout and dispatch; returns the wait."""
        previous = self.buffer.capture()
        self.dispatched = normal_cases.dispatch(self.buffer, self.inputs, self.rank, async_finish=True,
                                                previous_event=previous)  # fmt: skip
        return self.dispatched[5].current_stream_wait

    def send_back(self) -> Callable[[], None]:
        """Combine; returns the wait."""
        received, idx, weights, per_expert, handle, _ = self.dispatched
        rows = received[0] if isinstance(received, tuple) else received
        combined, combined_weights, event = self.buffer.combine(
            normal_cases.expert_outputs(rows, self.rank), handle, topk_weights=weights, async_finish=True
        )
        self.outcome = normal_cases.Outcome(received, idx, weights, per_expert, handle, combined, combined_weights)
        return event.current_stream_wait

    def check(self) -> None:
        """Hold everything against the oracle."""
        normal_cases.check_rank(self.inputs, self.rank, self.outcome)


Layer = LowLatencyLayer | NormalLayer


def low_latency_layer(buffer: Buffer, number: int) -> LowLatencyLayer:
    """Layers of one plan that differ in dtype, form, counts and routing."""
    size = buffer.group_size
    formats: list[dict[str, Any]] = [{"dtype": torch.float32}, {}, {"fp8": True}, {"dtype": torch.float16}]
    counts = tuple((3 * rank + number) % 9 for rank in range(size))
    case = ll_cases.Case(ranks=size, hidden=256, experts=4 * size, counts=counts, seed=number)
    return LowLatencyLayer(buffer, replace(case, reduced=number % 3 > 0, **formats[number % 4]))


def normal_layer(buffer: Buffer, number: int) -> NormalLayer:
    """Layers that differ in dtype and counts."""
    size = buffer.group_size
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float32)
    tokens = tuple((17 * rank + 23 * number) % 60 for rank in range(size))
    return NormalLayer(buffer, normal_cases.Case(tokens, experts=4 * size, dtype=dtypes[number % 3], seed=number))


def overlapped(first: Layer, second: Layer, *, crossed: bool) -> None:
    """Both layers sent before either is received; with ``crossed`` the later one is received first."""
    pair = [first, second]
    order = [1, 0] if crossed else [0, 1]
    hooks = [layer.send() for layer in pair]
    for index in order:
        hooks[index]()
    hooks = [layer.send_back() for layer in pair]
    for index in order:
        hooks[index]()
    for layer in pair:
        layer.check()


def pipelined(layers: list[LowLatencyLayer]) -> None:
    """As an engine with two micro-batches: a layer's combine is under way while the next one's dispatch is."""
    combining: Callable[[], None] = lambda: None  # noqa: E731
    for layer in layers:
        hook = layer.send()
        combining()
        hook()
        combining = layer.send_back()
    combining()
    for layer in layers:
        layer.check()


def two_in_flight(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    """Every way to have two operations in flight on one Buffer."""
    buffer = bodies.opened(exchange, overrides)
    numbers = itertools.count()
    # the widest type first: a window cannot be rebuilt while an operation is in flight
    overlapped(low_latency_layer(buffer, 0), low_latency_layer(buffer, 4), crossed=False)
    for crossed in (False, True) * LAYERS:
        overlapped(low_latency_layer(buffer, next(numbers)), low_latency_layer(buffer, next(numbers)), crossed=crossed)
        overlapped(normal_layer(buffer, next(numbers)), normal_layer(buffer, next(numbers)), crossed=crossed)
        # one of each mode: decode of one micro-batch beside prefill of the other
        overlapped(low_latency_layer(buffer, next(numbers)), normal_layer(buffer, next(numbers)), crossed=crossed)
        pipelined([low_latency_layer(buffer, next(numbers)) for _ in range(3)])
    buffer.destroy()
    return next(numbers)


@pytest.mark.parametrize(("size", "path"), diagonal([2, 3], PATH_NAMES))
def test_two_operations_in_flight(ranks: Ranks, path: str, size: int) -> None:
    assert ranks.run(size, two_in_flight, PATHS[path]) == [9 * 2 * LAYERS] * size


def two_buffers(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    """Two Buffers of the same ranks, an operation in flight on each: nothing of one reaches the other."""
    pair = [
        bodies.opened(StoreExchange(exchange._store, exchange.rank, exchange.size, name), overrides)
        for name in ("one", "two")
    ]
    numbers = itertools.count()
    for buffer in pair:
        overlapped(low_latency_layer(buffer, 0), low_latency_layer(buffer, 4), crossed=False)
    for make_one, make_other in itertools.product((low_latency_layer, normal_layer), repeat=2):
        for crossed in (False, True) * 2:
            layers = make_one(pair[0], next(numbers)), make_other(pair[1], next(numbers))
            overlapped(*layers, crossed=crossed)
    pair[0].destroy()
    # the other one goes on when its neighbour is gone
    overlapped(low_latency_layer(pair[1], next(numbers)), normal_layer(pair[1], next(numbers)), crossed=True)
    pair[1].destroy()
    return next(numbers)


@pytest.mark.parametrize("path", PATH_NAMES)
def test_two_buffers_of_the_same_ranks(ranks: Ranks, path: str) -> None:
    assert ranks.run(3, two_buffers, PATHS[path]) == [34] * 3


def buffers_of_different_groups(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    """Four ranks, a Buffer over all of them and one over this rank's row or column, used in turn and overlapped."""
    dist.init_process_group("gloo", store=exchange._store, rank=exchange.rank, world_size=exchange.size)
    try:
        groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
        row, column = groups[exchange.rank // 2], groups[2 + exchange.rank % 2]
        settings = bodies.settings(**overrides)
        buffers = [Buffer(group, settings=settings) for group in (dist.group.WORLD, row, column)]
        assert [buffer.group_size for buffer in buffers] == [4, 2, 2]
        numbers = itertools.count()
        for buffer in buffers:
            overlapped(low_latency_layer(buffer, 0), low_latency_layer(buffer, 4), crossed=False)
        for one, other in itertools.permutations(buffers, 2):
            overlapped(low_latency_layer(one, next(numbers)), low_latency_layer(other, next(numbers)), crossed=True)
            overlapped(low_latency_layer(one, next(numbers)), normal_layer(other, next(numbers)), crossed=False)
            overlapped(normal_layer(one, next(numbers)), normal_layer(other, next(numbers)), crossed=True)
        for buffer in reversed(buffers):
            buffer.destroy()
        return next(numbers)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("path", ["direct", "tcp"])
def test_buffers_of_different_groups(mortal_ranks: Ranks, path: str) -> None:
    assert mortal_ranks.run(4, buffers_of_different_groups, PATHS[path]) == [36] * 4
