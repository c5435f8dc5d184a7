"""``benchmarks/starts.py``: that each start is one, that what it measures is there, and that wrong data shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import starts
from benchmarks.cards import Target, load_targets
from tests.support.source_tree import ROOT
from uccl_ep_serving.bench.launch import RankFailed

SUMMARY = {"median": 1.0, "p10": 1.0, "p90": 1.0}
BUFFER = {"buffer": SUMMARY, "operation": SUMMARY, "whole": SUMMARY, "samples": 1}


@pytest.fixture
def targets() -> list[Target]:
    return [one for one in load_targets(ROOT / "benchmarks/cards.toml") if one.result == "starts"]


@pytest.mark.long
def test_the_import_is_measured_on_top_of_torch(targets: list[Target]) -> None:
    found = starts.imports(1)
    assert 0 < found["uccl_ep_serving.buffer"]["median"] < found["torch"]["median"]
    assert sum(one.measured({"starts": {"import_s": found}}) is not None for one in targets) == 1


@pytest.mark.long
def test_each_command_has_a_target_and_ends_as_it_should(
    targets: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = starts.commands(1)
    assert all(one["median"] > 0 for one in found.values())
    assert sum(one.measured({"starts": {"command_s": found}}) is not None for one in targets) == len(found)
    monkeypatch.setattr(starts, "COMMANDS", {"plan": (("plan",), (0,))})
    with pytest.raises(starts.subprocess.CalledProcessError):
        starts.commands(1)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "ranks"), [("normal", 1), ("low-latency", 2)])
def test_a_first_buffer_is_measured_from_inside_and_checked(mode: str, ranks: int) -> None:
    found = starts.start_buffer(mode, ranks)
    assert 0 < found["buffer"] < found["operation"] < found["whole"]


def test_wrong_data_is_no_figure(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    damage = (
        "from uccl_ep_serving.bench import subjects; "
        "subjects.NormalSubject._combine = lambda self, variant: setattr(self, '_combined', self._y[variant] * 2); "
    )
    monkeypatch.setattr(starts, "_RANK_PROGRAM", damage + starts._RANK_PROGRAM)
    with pytest.raises(RankFailed):
        starts.start_buffer("normal", 1)
    assert "WrongData: normal: combine" in capfd.readouterr().err


def test_each_kind_of_buffer_has_its_starts(targets: list[Target], monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Path | None] = []

    def start(mode: str, ranks: int, cache: Path | None = None) -> dict[str, float]:
        if cache is not None:
            assert not any(cache.iterdir()), "a cold start has an empty cache"
            (cache / "compiled").write_bytes(b"1" * ranks)
        caches.append(cache)
        return dict.fromkeys(("buffer", "operation", "whole"), float(ranks))

    monkeypatch.setattr(starts, "start_buffer", start)
    found = starts.first_buffers(times=2, cold=3, ranks=(1, 2, 8))
    kinds = ["low-latency, 1 rank", "low-latency, 2 ranks", "low-latency, 8 ranks", "normal, 2 ranks"]
    assert list(found) == ["warm, low-latency, 2 ranks", "warm, normal, 2 ranks", *(f"cold, {one}" for one in kinds)]
    assert [one["samples"] for one in found.values()] == [2, 2, 3, 3, 3, 3]
    assert found["cold, low-latency, 8 ranks"]["cache_bytes"] == 8
    # a warm one has an unmeasured start before it, a cold one a directory of its own
    assert caches[:6] == [None] * 6
    assert len(set(caches[6:])) == 12
    assert sum(one.measured({"starts": {"first_buffer_s": found}}) is not None for one in targets) == 4
    assert list(starts.first_buffers(times=1, cold=0, ranks=(2,))) == list(found)[:2]


def test_the_report_names_every_start() -> None:
    result = {
        "times": 5,
        "import_s": {"torch": SUMMARY, "uccl_ep_serving.buffer": SUMMARY},
        "command_s": {"plan": SUMMARY},
        "first_buffer_s": {
            "warm, normal, 2 ranks": BUFFER,
            "cold, normal, 2 ranks": BUFFER | {"cache_bytes": 3 << 10, "cache_files": 7},
        },
    }
    shown = starts.markdown(result).splitlines()
    assert "| `uccl-ep plan` | 1.00 | 1.00 - 1.00 |" in shown
    assert "| warm, normal, 2 ranks | 1.00 | 1.00 | 1.00 - 1.00 | 1.00 | 1 |  |" in shown
    assert shown[-1] == "| cold, normal, 2 ranks | 1.00 | 1.00 | 1.00 - 1.00 | 1.00 | 1 | 3 KiB in 7 files |"
