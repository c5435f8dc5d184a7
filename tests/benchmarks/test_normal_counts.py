"""``benchmarks/normal_counts.py``: every kernel of normal mode is compiled and counted once."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from benchmarks import normal_counts
from benchmarks.host_time import check_out
from tests.support.nvrtc import needs_nvrtc
from tests.support.source_tree import ROOT

pytestmark = [
    needs_nvrtc,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.mark.model
def test_bulk_copies_of_a_group() -> None:
    found = normal_counts.execute_here(2, 8, "tma")
    assert {"copy_dispatch", "copy_combine", "open_rows"} <= set(found)
    # all counts of a layout, the layout's copies of two, ids and weights
    assert found[normal_counts.BY_TORCH] == {"launches": 5}
    for name in ("copy_dispatch", "copy_combine"):
        assert found[name]["launches"] == 1
        assert 0 < found[name]["longest"] < found[name]["executed"]


def test_the_table_says_what_was_compiled_and_executed() -> None:
    compiled = {
        "nodes": False,
        "seconds": 4.2,
        "text": 5000,
        "bytes": 300000,
        "registers": 200,
        "spilled": 0,
        "in_flight": 64.0,
    }
    ways = {"now": [{"kernel": name, **compiled} for name in ("dispatch_rows", "copy_dispatch")], "before": []}
    ways["before"] = [{"kernel": "advance", **compiled, "nodes": True, "seconds": 21.0}]
    executed = {"8 tma": {"copy_dispatch": {"launches": 1.0, "longest": 7781, "executed": 153997.5}}}
    torchs = {normal_counts.BY_TORCH: {"launches": 7.0}}
    executed["8 triton"] = {"dispatch_rows": {"launches": 1.0, "longest": 5000, "executed": 40000.0}} | torchs
    doubled = {"8 triton": {"dispatch_rows": {"launches": 1.0, "longest": 9000, "executed": 46000.0}} | torchs}
    moved = {"combine_rows": {"loaded": 2.0, "stored": 1.281}}
    found = {"before": "abc", "tokens": 16, "lines": {"now": 2700, "before": 4000}, "moved": moved}
    found |= {"compiled": ways, "executed": executed, "doubled": doubled}
    table = normal_counts.markdown(found)
    assert "| now | 1 | 4 | 5,000 | 300,000 | 4.2 | 2,700 |" in table
    assert "| before | `advance` | between nodes | 21 | 5,000 | 3e+05 | 200 | 0 | 64 |" in table
    assert "| EP8, tma | now | `copy_dispatch` | 1 | 7,781 | 153,998 | - |" in table
    # 6,000 more for the 2 tokens more of a rank
    assert "| EP8, triton | now | `dispatch_rows` | 1 | 5,000 | 40,000 | 3,000 |" in table
    assert "| EP8, triton | now | `fill_, copy_` | 7 | - | - | - |" in table
    assert "| now | `combine_rows` | 2.00 | 1.28 |" in table
    # the earlier commit is compiled only in some records
    assert "| EP8, triton | before |" not in table
    before = {
        "advance": {"launches": 4.0, "longest": 3000, "executed": 7000.0},
        "move_rows": {"launches": 4.0, "longest": 8000, "executed": 500000.0},
    }
    both = {
        "executed_before": {"8 triton": before},
        "doubled_before": {"8 triton": {**before, "move_rows": {**before["move_rows"], "executed": 900000.0}}},
        "moved_before": {"move_rows": {"loaded": 2.7, "stored": 2.6}, "reduce_rows": {"loaded": 1.0, "stored": 0.2}},
    }
    table = normal_counts.markdown({**found, **both})
    assert "| EP8, triton | now | all | 8 | - | 40,000 | 3,000 |" in table
    assert "| EP8, triton | before | `move_rows` | 4 | 8,000 | 500,000 | 200,000 |" in table
    assert "| EP8, triton | before | all | 8 | - | 507,000 | 200,000 |" in table
    assert "| EP8, tma | before |" not in table
    assert "| before | all | 3.70 | 2.80 |" in table


@pytest.mark.model
def test_the_first_design_of_a_group(tmp_path: Path) -> None:
    commit = "220b7e3"
    if subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", commit], capture_output=True, check=False).returncode:
        pytest.skip(f"{commit} is not in this clone")
    check_out(commit, tmp_path)
    normal_counts.lay_over(tmp_path)
    found = normal_counts.process(tmp_path, "execute", 2, 8, "triton")
    # a step to pack and one to unpack, of a dispatch and of a combine
    steps = {"open_operation": 2, "advance": 4, "move_rows": 4, "finish": 2, "reduce_rows": 1}
    assert {name: found[name]["launches"] for name in steps} == steps
    assert all(0 < found[name]["longest"] <= found[name]["executed"] for name in steps)
    assert found[normal_counts.BY_TORCH] == {"launches": 9}


@pytest.mark.model
def test_a_whole_measurement() -> None:
    found = normal_counts.measure([2], tokens=8)
    kernels = {one["kernel"] for one in found["compiled"][normal_counts.NOW]}
    assert kernels >= {"dispatch_rows", "combine_rows", "open_rows", "mark_tokens", "copy_dispatch", "copy_combine"}
    assert 0 < found["compile"][normal_counts.NOW]["slowest"] < found["compile"][normal_counts.NOW]["seconds"]
    table = normal_counts.markdown(found)
    # into the pipe, and from there to the output: nothing is written more than twice
    dispatch, combine = (found["moved"][name] for name in ("dispatch_rows", "combine_rows"))
    assert (dispatch["stored"], combine["loaded"]) == (pytest.approx(2), pytest.approx(2))
    # out of the pipe; and a token once, however many rows it has
    assert dispatch["loaded"] == pytest.approx(combine["stored"])
    assert 1.49 < dispatch["loaded"] < 2
    assert "| EP2, triton | now | `dispatch_rows` | 1 |" in table
    assert "| EP2, tma | now | `copy_combine` | 1 |" in table
