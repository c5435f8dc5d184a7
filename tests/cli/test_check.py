"""``uccl-ep check --gpu``: what it prints and keeps of what was found, and its exit status."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from uccl_ep_serving.check import report, stamp
from uccl_ep_serving.check.faults import Fault
from uccl_ep_serving.check.gpu import Report, Result
from uccl_ep_serving.check.machine import Machine
from uccl_ep_serving.check.stamp import State, look

HERE = Machine(("NVIDIA H200 (sm_90)",), "560", "3.6.0", "1.0", "abc")
FAULT = Fault(
    "kernel advance", "1.5 there", "0.0 (3 of 9 values of rows differ)", "a defect of this kernel", "report it"
)
GOOD = Result("clock", True, 0.25, "steps of 32 ns")
BAD = Result("normal over ipc", False, 3.0, fault=FAULT)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Records go to a place of their own."""
    monkeypatch.setattr(stamp, "places", lambda name: [tmp_path / name])


def run(*results: Result, complete: bool = True, as_json: bool = False, machine: Machine = HERE) -> int:
    def check(groups: Any, seconds: float, say: Any) -> Report:
        return Report("NVIDIA H200 (cuda:0 and cuda:1)", results, 9.0, complete)

    return report.run(("probe", "first"), 120.0, as_json, lambda: machine, check)


def test_what_has_passed_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GOOD) == 0
    said = capsys.readouterr().out
    assert re.search(r"clock +ok +0.2 +steps of 32 ns", said)
    record = look(HERE)
    assert record.state is State.PASSED
    assert f"every part passed in 9 s; the record is {record.file}" in said
    assert record.content is not None
    assert record.content["parts"][0]["name"] == "clock"


def test_words_of_a_driver_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    words = "[/dev/nvidia0] a [step]"
    fault = Fault(words, "a", "b", "c", "d")
    assert run(Result("clock", True, 0.25, words), Result(words, False, 3.0, fault=fault)) == 1
    assert capsys.readouterr().out.count(words) == 4


def test_what_has_failed_names_the_kernel_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GOOD, BAD) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert (
        "normal over ipc: kernel advance\n  expected: 1.5 there\n  found: 0.0 (3 of 9 values of rows differ)\n" in said
    )
    assert "  likely cause: a defect of this kernel\n  next step: report it\n" in said
    assert "1 of 2 parts failed" in said
    record = look(HERE)
    assert record.state is State.FAILED
    assert "normal over ipc: kernel advance: expected 1.5 there" in record.why


def test_json_holds_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GOOD, BAD, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["machine"]["driver"]) == (False, "560")
    assert [part["passed"] for part in found["parts"]] == [True, False]
    assert found["record"] == str(look(HERE).file)


def test_a_part_alone_and_nothing_at_all_keep_no_record() -> None:
    assert run(GOOD, complete=False) == 0
    assert look(HERE).state is State.UNKNOWN
    assert run() == 1


def test_a_record_that_cannot_be_kept_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stamp, "usable", lambda directory: False)
    assert run(GOOD) == 1
    assert "could not be kept: no directory" in capsys.readouterr().err


def test_without_a_gpu_the_next_step_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GOOD, machine=HERE._replace(gpus=())) == 2
    assert "no GPU is visible to this process. Next step: uccl-ep doctor" in capsys.readouterr().err


def test_a_driver_that_does_not_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from uccl_ep_serving.cli import check as command

    def present() -> Machine:
        raise RuntimeError("the driver has not answered within 60 s")

    monkeypatch.setattr(command, "_gpus", lambda: 8)
    monkeypatch.setattr("uccl_ep_serving.cli.doctor.report.examine", dict)
    monkeypatch.setattr("uccl_ep_serving.check.machine.present", present)
    *_, found = command._alone(1)
    assert found.part == "GPU check"
    assert found.fault is not None
    assert found.fault.found == "the driver has not answered within 60 s"
