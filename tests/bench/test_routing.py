"""Routes: even, skewed by a known law, and those of a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.traffic import trace


def card(**values: Any) -> Card:
    return Card(**{"ranks": 2, "tokens": 64, "hidden": 128, "experts": 16, "topk": 4, **values})


@pytest.mark.parametrize("route", ["uniform", "zipf:1.2"])
def test_a_token_chooses_different_experts_and_its_weights_sum_to_one(route: str) -> None:
    one, again, other = (Routing.draw(card(route=route, seed=seed)) for seed in (1, 1, 2))
    for ids, weights in zip(one.topk_idx, one.topk_weights, strict=True):
        assert ids.shape == weights.shape == (64, 4)
        assert all(len(set(row)) == 4 for row in ids.tolist())
        torch.testing.assert_close(weights.sum(1), torch.ones(64))
    assert torch.equal(torch.cat(one.topk_idx), torch.cat(again.topk_idx))
    assert not torch.equal(torch.cat(one.topk_idx), torch.cat(other.topk_idx))
    assert not torch.equal(one.topk_idx[0], one.topk_idx[1])


def test_popularity_falls_as_the_exponent_says() -> None:
    # with one choice a token nothing is displaced: the counts are those of the law itself
    many = card(ranks=4, tokens=50_000, topk=1, route="zipf:1.2")
    counts = torch.bincount(torch.cat(Routing.draw(many).topk_idx).flatten(), minlength=16).double()
    law = torch.arange(1, 17).double() ** -1.2
    torch.testing.assert_close(counts.sort(descending=True).values / 200_000, law / law.sum(), rtol=0.05, atol=0)
    even = torch.bincount(torch.cat(Routing.draw(card(tokens=50_000)).topk_idx).flatten()).double()
    assert even.max() / even.mean() < 1.05


def test_a_trace_is_replayed_whole_or_by_its_layer(tmp_path: Path) -> None:
    ids = np.arange(12, dtype=np.int16).reshape(3, 4)
    records = [trace.Whole(layer, 0, 1, ids + layer) for layer in (0, 3)]
    file = tmp_path / "rank0.npz"
    trace.write_whole(file, rank=0, ranks=1, experts=16, topk=4, records=records)
    drawn = Routing.draw(card(route=f"trace:{file}:3"))
    rows = {tuple(row) for one in drawn.topk_idx for row in one.tolist()}
    assert rows == {tuple(row) for row in (ids + 3).tolist()}
    assert len(drawn.topk_idx[0]) == 64
    assert Routing.draw(card(route=f"trace:{tmp_path}")).topk_idx[0].shape == (64, 4)
    with pytest.raises(ConfigError, match="--experts 16 --topk 4"):
        Routing.draw(card(route=f"trace:{file}", experts=32))


@pytest.mark.parametrize("route", ["", "zipf", "zipf:-1", "zipf:nan", "zipf:x", "trace", "trace:", "skewed"])
def test_a_wrong_route_is_refused_by_name(route: str) -> None:
    with pytest.raises(ConfigError, match="must be uniform, zipf:S with an exponent"):
        card(route=route)
