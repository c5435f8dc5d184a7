"""What ``scripts/gpu-check`` refuses before it does anything, and how its results are kept from run to run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import gpu_results

ROOT = Path(__file__).parents[2]

STAMP = {"commit": "abc", "when": "now"}
REPORT = """<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">
<testcase classname="tests.gpu.test_one" name="test_good" time="2.25"/>
<testcase classname="tests.gpu.test_one" name="test_wrong" time="1"><failure message="PeerTimeout"/></testcase>
<testcase classname="tests.gpu.test_one" name="test_worse"><error message="no fixture">where</error></testcase>
<testcase classname="tests.gpu.test_two" name="test_idle"><skipped message="no CuPy">where</skipped></testcase>
<testcase time="0.1"/>
</testsuite></testsuites>"""


def check(*parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "gpu-check"), *parts]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


def test_a_part_that_does_not_exist_is_refused() -> None:
    done = check("figure")
    assert done.returncode == 1
    assert "no part is named figure; there are probe, first, tests, figures, sanitizer, soak, profile" in done.stdout


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_made(tmp_path: Path) -> None:
    done = check(VENV=str(tmp_path / "venv"), LOGS=str(tmp_path / "logs"), RESULTS=str(tmp_path / "gpu.json"))
    assert done.returncode == 1
    assert "no GPU: neither /dev/nvidiactl (NVIDIA) nor /dev/kfd (AMD) is there" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_pytest_names_what_failed(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)
    before = {"tests of test_three": {"passed": 1}}
    found = gpu_results.merged(before, tmp_path, False, STAMP)
    failed = {"test_wrong": "PeerTimeout", "test_worse": "no fixture"}
    assert found.pop("tests of test_one") == {"passed": 1, "failed": failed, "skipped": [], "seconds": 3.2}
    assert found.pop("tests of test_two") == {"passed": 0, "failed": {}, "skipped": ["test_idle"], "seconds": 0.0}
    assert found == {**before, "found": {"tests of test_one": STAMP, "tests of test_two": STAMP}}


def test_parts_that_did_not_run_keep_what_they_said_and_when(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text('{"clock": "32 ns"}\n')
    # interrupted
    (tmp_path / "soak.json").write_text('{"seconds": 6')
    (tmp_path / "memcheck").write_text("clean\n")
    earlier = {"commit": "old", "when": "then"}
    before = {"probe": {"clock": "1 us"}, "soak": {"seconds": 60}, "memcheck": "clean"}
    before["found"] = dict.fromkeys(("probe", "soak", "memcheck"), earlier)
    found = gpu_results.merged(before, tmp_path, False, STAMP)
    assert (found["probe"], found["soak"], found["memcheck"]) == ({"clock": "32 ns"}, {"seconds": 60}, "clean")
    assert found["found"] == {"probe": STAMP, "soak": earlier, "memcheck": STAMP}


def test_figures_with_mps_stand_beside_those_without(tmp_path: Path) -> None:
    (tmp_path / "low_latency.json").write_text(json.dumps({"machine": {"mps": False}, "alone": [1]}))
    plain = gpu_results.merged({}, tmp_path, False, STAMP)
    (tmp_path / "low_latency.json").write_text(json.dumps({"machine": {"mps": True}, "alone": [2]}))
    both = gpu_results.merged(plain, tmp_path, True, STAMP)
    assert both["alone"] == [1]
    assert both["with_mps"] == {"machine": {"mps": True}, "alone": [2]}


def test_a_script_of_figures_that_failed_says_so_until_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "normal.json").write_text('{"failed": "no result, status 124"}')
    found = gpu_results.merged({"alone": [1]}, tmp_path, False, STAMP)
    assert found["normal"] == {"failed": "no result, status 124"}
    (tmp_path / "normal.json").write_text('{"normal_alone": [2]}')
    found = gpu_results.merged(found, tmp_path, False, STAMP)
    assert "normal" not in found
    assert (found["alone"], found["normal_alone"]) == ([1], [2])


def test_a_soak_says_what_each_rank_did_or_that_it_failed() -> None:
    assert gpu_results._soaked([{"steps": 3}, {"steps": 4}]) == "3+4 operations"
    assert gpu_results._soaked({"failed": "rank 1 raised PeerTimeout"}) == "failed"
