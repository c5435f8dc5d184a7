"""Records of a check: one that fits is believed; stale, foreign, damaged and forged ones are told by name."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_serving.check import stamp
from uccl_ep_serving.check.machine import Machine
from uccl_ep_serving.check.stamp import State, look, write

HERE = Machine(("NVIDIA H200 (sm_90)",), "560.35.03 (CUDA 12.6)", "3.6.0", "1.0", "abc")
PASSED: dict[str, Any] = {"device": "cuda:0", "parts": [{"name": "clock", "passed": True, "fault": None}]}
FAILED: dict[str, Any] = {
    "device": "cuda:0",
    "parts": [
        {"name": "clock", "passed": True, "fault": None},
        {"name": "normal over ipc", "passed": False, "fault": "kernel advance: expected 1; found 2"},
    ],
}


def test_without_a_record_the_places_are_named(home: Path) -> None:
    found = look(HERE)
    assert found.state is State.UNKNOWN
    assert "no check of this machine's GPUs is on record" in found.why
    assert str(home / "cache") in found.why


def test_a_record_that_fits_is_believed(home: Path) -> None:
    file = write(HERE, True, PASSED)
    assert file.parent == home / "cache" / "uccl_ep_serving" / "gpu"
    assert file.stat().st_mode & 0o777 == 0o644
    found = look(HERE)
    assert (found.state, found.file) == (State.PASSED, file)
    assert "NVIDIA H200 (sm_90) passed `uccl-ep check --gpu` on 20" in found.why
    # a machine of several kinds was checked, and this process sees one of them
    write(HERE._replace(gpus=("NVIDIA H200 (sm_90)", "NVIDIA L4 (sm_89)"), driver="570"), True, PASSED)
    assert look(HERE._replace(driver="570")).state is State.PASSED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": ("NVIDIA B200 (sm_100)",)}, "GPU NVIDIA H200 (sm_90), here is NVIDIA B200 (sm_100)"),
        ({"gpus": (*HERE.gpus, "NVIDIA L4 (sm_89)")}, "here is NVIDIA L4 (sm_89)"),
        ({"driver": "570.1 (CUDA 12.8)"}, "driver 560.35.03 (CUDA 12.6), here is 570.1 (CUDA 12.8)"),
        ({"triton": "3.8.0"}, "Triton 3.6.0, here is 3.8.0"),
        ({"version": "1.1"}, "uccl_ep_serving 1.0, here is 1.1"),
        ({"kernels": "def"}, "kernel sources abc, here is def"),
    ],
)
def test_a_record_of_something_else_is_stale(change: dict[str, Any], words: str) -> None:
    file = write(HERE, True, PASSED)
    found = look(HERE._replace(**change))
    assert found.state is State.UNKNOWN
    assert str(file) in found.why
    assert words in found.why
    # and is not lost by another check: hosts may share a home
    write(HERE._replace(**change), True, PASSED)
    assert look(HERE).state is look(HERE._replace(**change)).state is State.PASSED


def changed(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        content = json.loads(file.read_text())
        edit(content)
        file.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text(file.read_text()[:100]),
        lambda file: file.write_bytes(b"\xff\xfe\0"),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text("{}"),
        changed(lambda content: content.update(passed=True)),
        changed(lambda content: content["machine"].update(driver=HERE.driver)),
        changed(lambda content: content.update(machine={**content["machine"], "gpus": 3})),
        changed(lambda content: content.pop("checksum")),
        changed(lambda content: content.update(format=2)),
    ],
)
def test_a_damaged_or_forged_record_opens_nothing(spoil: Callable[[Path], object]) -> None:
    spoil(write(HERE._replace(driver="550"), False, FAILED))
    for machine in (HERE, HERE._replace(driver="550")):
        found = look(machine)
        assert found.state is State.UNKNOWN
        assert "is damaged, or was changed by hand" in found.why


def test_what_others_could_have_written_is_not_believed(home: Path) -> None:
    file = write(HERE, True, PASSED)
    for path, mode in ((file, 0o666), (file.parent, 0o777), (home / "cache", 0o775)):
        before = path.stat().st_mode
        path.chmod(mode)
        found = look(HERE)
        assert found.state is State.UNKNOWN, path
        assert "is not believed: others can write it, or a directory above it" in found.why
        path.chmod(before)
    assert look(HERE).state is State.PASSED
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
        found = look(HERE)
        assert found.state is State.UNKNOWN
        assert "is not believed: it belongs to user 12345" in found.why
    file.rename(home / "elsewhere.json")
    file.symlink_to(home / "elsewhere.json")
    assert look(HERE).state is State.UNKNOWN


def test_a_directory_that_others_can_write_keeps_nothing(home: Path) -> None:
    (home / "cache").mkdir(mode=0o777)
    (home / "cache").chmod(0o777)
    assert write(HERE, True, PASSED).is_relative_to(home / "xdg")
    assert look(HERE).state is State.PASSED


def test_without_any_directory_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "usable", lambda directory: False)
    with pytest.raises(OSError, match="set UCCL_EP_CACHE_DIR"):
        write(HERE, True, PASSED)


def test_a_failure_counts_for_all_that_start_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    write(HERE, False, FAILED)
    found = look(HERE)
    assert found.state is State.FAILED
    assert "failed on 20" in found.why
    assert "normal over ipc: kernel advance: expected 1; found 2" in found.why
    assert "clock" not in found.why
    now = datetime.datetime.now().timestamp()
    monkeypatch.setattr("time.time", lambda: now + 601)
    found = look(HERE)
    assert found.state is State.UNKNOWN
    assert "failed: normal over ipc" in found.why
    monkeypatch.setattr("time.time", lambda: now)
    write(HERE, True, PASSED)
    assert look(HERE).state is State.PASSED
