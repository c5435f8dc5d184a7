"""The scripts that measure a GPU: what runs without one, and all of normal mode's in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_first_dispatch, gpu_frame, gpu_normal
from tests.support.combinations import first_of

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    # as scripts/gpu-check calls them
    path = f"{ROOT}:{ROOT / 'benchmarks'}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)


def test_figures_are_bytes_over_seconds_and_shares_of_the_copies_beside_them() -> None:
    samples = {"dispatch": [2e-3, 4e-3, 4e-3], "copy_dispatch": [1e-3, 3e-3, 4e-3]}
    found = gpu_normal.figures(samples, {"dispatch": 8_000_000})["dispatch"]
    assert found["microseconds"]["median"] == pytest.approx(4000)
    assert found["gb_per_s"]["median"] == pytest.approx(2.0)
    assert found["copy_gb_per_s"]["median"] == pytest.approx(8 / 3)
    # round by round: a half, three quarters, all
    assert found["share_of_copy"]["median"] == pytest.approx(0.75)


@pytest.mark.parametrize("script", first_of("gpu_low_latency.py", "gpu_normal.py"))
def test_without_a_gpu_it_says_so(script: str) -> None:
    shown = run(script)
    assert shown.returncode == 1
    assert shown.stderr == "no GPU: torch finds no CUDA or ROCm device\n"


def test_a_part_that_does_not_exist_is_refused() -> None:
    shown = run("gpu_normal.py", "--only", "normal_alone,nothing")
    assert shown.returncode == 2
    assert (
        "no part is named nothing; there are normal_alone, normal_exchange, normal_first, normal_deepep" in shown.stderr
    )


class DyingPool:
    """Ranks of which the second ends in the middle of a call."""

    def run(self, ranks: int, body: object, *arguments: str, timeout: float) -> None:
        for rank in range(ranks):
            gpu_frame.reached(arguments[-1], rank, "import deep_ep")
        gpu_frame.reached(arguments[-1], 1, "Buffer")
        raise AssertionError("rank 1 raised ProcessDied")


def test_the_call_that_a_rank_does_not_come_back_from_is_named() -> None:
    found = gpu_frame.beside_deepep(DyingPool(), 2, print)
    assert [(one["rank"], one["failed"]) for one in found] == [(0, "import deep_ep"), (1, "Buffer")]
    assert "ProcessDied" in found[1]["error"]


def test_ranks_are_new_ones_after_a_failure() -> None:
    from tests.support.gpu_ranks import GpuRanks
    from tests.support.ranks import RankFailed

    pool = GpuRanks()
    try:
        first = pool.run(1, type)
        before = pool.pid(0)
        assert pool.run(1, type) == first
        assert pool.pid(0) == before
        with pytest.raises(RankFailed, match="TypeError"):
            pool.run(1, len)
        assert pool.run(1, type) == first
        assert pool.pid(0) != before
    finally:
        pool.close()


@pytest.mark.interpreter
@pytest.mark.timeout(1300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_normal_mode_is_measured_to_the_end_in_the_interpreter(tmp_path: Path) -> None:
    """Everything but the times: both formats, alone and between two ranks, verified against the oracle."""
    kept = tmp_path / "figures.json"
    small = ("--tokens", "3", "--hidden", "128", "--rounds", "1", "--calls", "1", "--programs", "24")
    shown = run("gpu_normal.py", "--interpreter", *small, "--json", str(kept))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found = json.loads(kept.read_text())
    assert found["machine"]["device"].startswith("Triton's interpreter")
    for part, ranks in (("normal_alone", 1), ("normal_exchange", 2)):
        assert [(one["format"], one["rank"]) for one in found[part]] == [
            (form, rank) for form in gpu_normal.FORMATS for rank in range(ranks)
        ]
        for one in found[part]:
            # top-8 of 64 experts: three tokens of every rank go everywhere
            assert one["received_rows"] == 3 * ranks
            assert all(one[step]["gb_per_s"]["median"] > 0 for step in ("dispatch", "first_dispatch", "combine"))
    for one in found["normal_first"]:
        assert all(one["host_us"][step]["median"] > 0 for step in gpu_first_dispatch.STEPS)
    assert [one["rank"] for one in found["normal_first"]] == [0, 0, 1]
    if importlib.util.find_spec("deep_ep") is None:
        assert [one["failed"] for one in found["normal_deepep"]] == ["import deep_ep"] * 4
