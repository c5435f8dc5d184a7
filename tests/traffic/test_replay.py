"""Routing out of a trace: what ranks of a replay get of one moment of one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.traffic.replay import replay
from uccl_ep_serving.traffic.trace import Trace, Whole, load, write_histogram, write_whole

EXPERTS, TOPK = 4096, 2
LL, NORMAL = "low-latency", "normal"


def told(rank: int, layer: int, step: int, mode: int = 0, tokens: int = 2) -> Whole:
    """A dispatch whose ids say where it comes from: a token's first is its layer, step, rank and number."""
    first = layer * 1024 + step * 128 + rank * 32 + 2 * np.arange(tokens)
    return Whole(layer, step, mode, np.stack([first, first + 1], axis=1))


def trace(*by_rank: list[Whole]) -> Trace:
    steps = {rank: tuple(records) for rank, records in enumerate(by_rank)}
    counts = {one.layer: np.zeros(EXPERTS, np.int64) for records in by_rank for one in records}
    return Trace(EXPERTS, TOPK, len(by_rank), (0, 1), counts, steps)


def where(ids: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """(layer, step, rank, number) of every token."""
    return [(x // 1024, x // 128 % 8, x // 32 % 4, x % 32 // 2) for x in ids[:, 0].tolist()]


def test_all_ranks_get_the_same_step_of_the_same_layer() -> None:
    recorded = trace(*([told(rank, layer, step) for step in range(4) for layer in (0, 1)] for rank in range(2)))
    moments = set()
    for seed in range(60):
        routes = [where(ids) for ids in replay(recorded, 2, 2, LL, seed)]
        layer, step = routes[0][0][:2]
        assert routes == [[(layer, step, rank, 0), (layer, step, rank, 1)] for rank in range(2)]
        moments.add((layer, step))
    assert len(moments) == 8, "every moment is drawn by some seed"
    again = replay(recorded, 2, 2, LL, 7)
    assert all(torch.equal(a, b) for a, b in zip(again, replay(recorded, 2, 2, LL, 7), strict=True))


def test_more_tokens_are_those_of_later_steps_of_the_layer_and_then_of_the_first() -> None:
    recorded = trace([told(0, layer, step) for step in range(3) for layer in (0, 1)])
    (ids,) = replay(recorded, 1, 7, LL, 3)
    route = where(ids)
    layer, step = route[0][:2]
    assert route == [(layer, (step + number // 2) % 3, 0, number % 2) for number in range(7)]


def test_more_ranks_than_recorded_get_tokens_of_their_own() -> None:
    recorded = trace(*([told(rank, 0, step) for step in range(3)] for rank in range(2)))
    routes = [where(ids) for ids in replay(recorded, 4, 2, LL, 0)]
    assert [route[0][2] for route in routes] == [0, 1, 0, 1]
    assert len({token for route in routes for token in route}) == 8


def test_only_dispatches_of_the_mode_are_replayed() -> None:
    recorded = trace([told(0, 0, 0, mode=0), told(0, 0, 1, mode=1)])
    assert {one[1] for one in where(replay(recorded, 1, 5, NORMAL, 0)[0])} == {1}
    assert {one[1] for one in where(replay(recorded, 1, 5, LL, 0)[0])} == {0}
    with pytest.raises(ConfigError, match="no dispatch in normal mode"):
        replay(trace([told(0, 0, 0)]), 1, 1, NORMAL, 0)


def test_padding_is_left_out_and_steps_in_which_all_took_part_are_preferred() -> None:
    idle, cut = told(1, 0, 0), told(1, 0, 1, tokens=4)
    idle.ids[:] = -1
    cut.ids[1, 1] = -1
    recorded = trace([told(0, 0, 0), told(0, 0, 1)], [idle, cut])
    for seed in range(8):
        first, second = (where(ids) for ids in replay(recorded, 2, 3, LL, seed))
        assert {one[1] for one in first[:2]} == {1}
        assert [one[3] for one in second] == [0, 2, 3]


def test_a_rank_without_tokens_is_named() -> None:
    silent = told(1, 0, 0)
    silent.ids[:] = -1
    with pytest.raises(ConfigError, match="no token of rank 1 in layer 0"):
        replay(trace([told(0, 0, 0)], [silent]), 2, 1, LL, 0)
    with pytest.raises(ConfigError, match="nothing to replay"):
        replay(trace([silent]), 1, 1, LL, 0)


def counted(path: Path, experts: int, counts: dict[int, Any]) -> Trace:
    arrays = {layer: np.array(one, np.int64) for layer, one in counts.items()}
    dispatches = dict.fromkeys(counts, 3)
    write_histogram(path, rank=0, ranks=1, experts=experts, topk=4, counts=arrays, dispatches=dispatches)
    return load(path)


def test_a_histogram_is_replayed_by_drawing_from_one_layer(tmp_path: Path) -> None:
    hot = [50, 10, 10, 10, 10, 10] + [0] * 10
    recorded = counted(tmp_path / "a.npz", 16, {2: hot, 5: hot[::-1]})
    drawn = [replay(recorded, 2, 2000, LL, seed) for seed in range(8)]
    layers = set()
    for first, second in drawn:
        assert first.shape == (2000, 4)
        assert all(len(set(row)) == 4 for row in first.tolist())
        found = np.bincount(first.flatten().numpy(), minlength=16)
        layers.add(2 if found[0] else 5)
        assert not found[6:10].any()
        assert not found[10:].any() or not found[:6].any()
        assert found.max() > 1.2 * np.sort(found)[-2]
        assert not torch.equal(first, second)
        assert (np.bincount(second.flatten().numpy(), minlength=16) > 0).tolist() == (found > 0).tolist()
    assert layers == {2, 5}
    assert replay(recorded, 1, 0, LL, 0)[0].shape == (0, 4)
    few = counted(tmp_path / "few.npz", 16, {0: [1, 1, 1] + [0] * 13})
    with pytest.raises(ConfigError, match="counts 3 experts that layer 0 ever chose"):
        replay(few, 1, 1, LL, 0)


def test_a_trace_without_a_dispatch_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.npz"
    write_whole(whole, rank=0, ranks=1, experts=16, topk=4, records=[])
    for empty in (load(whole), counted(tmp_path / "counted.npz", 16, {})):
        with pytest.raises(ConfigError, match="holds no dispatch"):
            replay(empty, 1, 1, LL, 0)


def test_what_is_written_is_replayed(tmp_path: Path) -> None:
    for rank in range(2):
        records = [told(rank, 1, step, mode=1) for step in range(2)]
        write_whole(tmp_path / f"{rank}.npz", rank=rank, ranks=2, experts=EXPERTS, topk=TOPK, records=records)
    routes = [where(ids) for ids in replay(load(tmp_path, 1), 2, 2, NORMAL, 1)]
    assert routes[0][0][:2] == routes[1][0][:2]
