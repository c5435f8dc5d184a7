"""``benchmarks/ep_sizes.py``: memory and time of each size are there, have targets, and wrong data shows."""

from __future__ import annotations

import pytest

from benchmarks import ep_sizes
from benchmarks.cards import load_targets
from tests.support.source_tree import ROOT
from uccl_ep_serving.bench.launch import RankFailed

SUMMARY = {"median": 3000.0, "p10": 2500.0, "p90": 4000.0}
BOUND = {"layer": {"median": 1000.0}}
SIZE = {
    "us": {"direct": dict.fromkeys(("layout", "dispatch", "combine", "layer"), SUMMARY), "memcpy": BOUND},
    "bytes": {"grown": 36 << 20, "window": 682 << 20},
}
RESULT = {"sizes": {mode: {str(ranks): SIZE for ranks in ep_sizes.RANKS} for mode in ep_sizes.MODES}}


def test_each_size_is_a_row() -> None:
    rows = ep_sizes.markdown(RESULT).splitlines()[4:]
    assert rows[0] == "| low-latency | 2 | 3,000 | 3,000 | 3,000 | 2,500 - 4,000 | 1,000 | 3.00 | 36 | 682 |"
    assert len(rows) == len(ep_sizes.MODES) * len(ep_sizes.RANKS)


def test_targets_find_their_values() -> None:
    targets = [one for one in load_targets(ROOT / "benchmarks/cards.toml") if one.result == "ep_sizes"]
    assert targets
    assert None not in [one.measured({"ep_sizes": RESULT}) for one in targets]


@pytest.mark.long
@pytest.mark.parametrize("mode", ep_sizes.MODES)
def test_memory_of_a_rank_is_part_of_its_window(mode: str) -> None:
    found = ep_sizes._memory(mode, 2)
    assert 0 < found["grown"] < found["window"]


@pytest.mark.long
def test_times_of_a_size() -> None:
    found = ep_sizes._times("normal", 2)
    assert all(found[who]["layer"]["median"] > found[who]["combine"]["median"] for who in ("direct", "memcpy"))


def test_wrong_data_is_no_figure(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    damage = (
        "from uccl_ep_serving.bench import subjects; "
        "subjects.NormalSubject._combine = lambda self, variant: setattr(self, '_combined', self._y[variant] * 2); "
    )
    monkeypatch.setattr(ep_sizes, "_RANK_PROGRAM", damage + ep_sizes._RANK_PROGRAM)
    with pytest.raises(RankFailed):
        ep_sizes._memory("normal", 1)
    assert "WrongData: normal: combine" in capfd.readouterr().err
