"""Advice speaks of what was measured here, of the same shape, and of nothing else."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.traffic import advice
from uccl_ep_serving.traffic.advice import Shape, Verdict, advise, device_name, find, store, transport_name

HERE = device_name(torch.device("cpu"))
SHAPE = Shape("low-latency", 16, 7168, 256, 8, "bfloat16", "tcp", HERE, 128)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(advice, "places", lambda name: [tmp_path / name])


def verdict(low: float, ratio: float, high: float, other: str = "gloo-gather", **shape: Any) -> Verdict:
    measured = dataclasses.replace(SHAPE, **shape)
    return Verdict(measured, other, ratio, low, high, "abc1234", "2026-11-23T05:00:00+00:00")


def test_without_a_measurement_nothing_is_said() -> None:
    assert advise(SHAPE) == ""
    store(verdict(1.7, 1.9, 2.2))
    for other in (
        {"mode": "normal"},
        {"ranks": 8},
        {"hidden": 4096},
        {"experts": 128},
        {"topk": 4},
        {"dtype": "float16"},
        {"transport": "direct"},
        {"device": "another"},
        {"tokens": 257},
        {"tokens": 63},
    ):
        assert advise(dataclasses.replace(SHAPE, **other)) == "", other  # type: ignore[arg-type]


def test_the_fastest_backend_speaks_and_says_by_how_much() -> None:
    store(verdict(1.1, 1.2, 1.3, "gloo"), verdict(1.7, 1.9, 2.2))
    said = advise(dataclasses.replace(SHAPE, tokens=100))
    assert said.startswith(
        "low latency, 100 x 7168 bfloat16, top-8 of 256 experts on 16 ranks over tcp: gloo-gather is"
    )
    assert "1.90 times as fast (1.70 .. 2.20), so the engine's own collectives serve it better" in said
    assert "measured here with 128 tokens on 2026-11-23, commit abc1234" in said
    assert "\n" not in said


def test_a_direction_is_claimed_only_where_the_interval_says_so() -> None:
    store(verdict(0.4, 0.5, 0.8))
    assert "uccl_ep is 2.00 times as fast as gloo-gather (1.25 .. 2.50)" in advise(SHAPE)
    store(verdict(0.9, 1.02, 1.1))
    assert "no difference seen from gloo-gather (0.91 .. 1.11 times as fast)" in advise(SHAPE)


def test_the_nearest_number_of_tokens_counts_and_the_latest_of_a_shape() -> None:
    store(verdict(1.1, 1.2, 1.3, tokens=64), verdict(1.1, 1.4, 1.5), verdict(2.0, 2.1, 2.2))
    assert [one.ratio for one in find(dataclasses.replace(SHAPE, tokens=120))] == [2.1]
    assert [one.ratio for one in find(dataclasses.replace(SHAPE, tokens=70))] == [1.2]


def test_an_old_report_that_is_shown_again_replaces_nothing() -> None:
    new = dataclasses.replace(verdict(1.1, 1.2, 1.3), when="2026-11-24T05:00:00+00:00")
    store(new)
    store(verdict(2.0, 2.1, 2.2))
    assert find(SHAPE) == [new]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_MOST", 3)
    store(*(verdict(1.1, 1.2, 1.3, hidden=hidden) for hidden in (128, 256, 384, 512)))
    assert [bool(find(dataclasses.replace(SHAPE, hidden=hidden))) for hidden in (128, 256, 512)] == [False, True, True]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1, "verdicts": [{"shape": {}}]}', "\\udcff"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    path = store(verdict(1.7, 1.9, 2.2))
    assert path is not None
    path.write_text(content)
    assert advise(SHAPE) == ""
    assert "is damaged and counts as empty" in caplog.text
    store(verdict(1.7, 1.9, 2.2))
    assert advise(SHAPE)


def test_others_cannot_advise(tmp_path: Path) -> None:
    path = store(verdict(1.7, 1.9, 2.2))
    assert path is not None
    path.parent.chmod(0o777)
    assert advise(SHAPE) == ""


def test_a_verdict_that_cannot_be_kept_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(advice, "places", lambda name: [Path("/proc") / name])
    assert store(verdict(1.7, 1.9, 2.2)) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("numbers", [(1.0, 0.9, 1.2), (0.0, 1.0, 2.0), (1.0, 1.0, math.inf), (1.0, math.nan, 2)])
def test_no_ratio_is_refused(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="no ratio of two times"):
        verdict(*numbers)


def test_transports_of_all_peers_are_named() -> None:
    assert transport_name({"transport_by_peer": {"1": "tcp", "2": "direct", "3": "tcp"}}) == "direct+tcp"
    assert transport_name({}) == "alone"
