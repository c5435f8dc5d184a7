"""The flight recorder: one file an epoch, written once this rank cannot go on, with the first error put beside it."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_serving.control_plane.bootstrap import Card, Introduction
from uccl_ep_serving.data_plane import flight_recorder
from uccl_ep_serving.data_plane.flight_recorder import SUFFIX, FlightRecorder
from uccl_ep_serving.errors import ConfigError, PeerLost, PeerTimeout, TransportError


def recorder_in(place: Path) -> tuple[FlightRecorder, list[int]]:
    """A recorder whose counters say how often they were read."""
    reads: list[int] = []

    def stats() -> dict[str, Any]:
        reads.append(0)
        return {"read": len(reads)}

    recorder = FlightRecorder(str(place), 3, stats, lambda: [(1.5, "ll_dispatch", 8, 0.25)])
    recorder.group = "abcd"
    return recorder, reads


def settle() -> None:
    """Until no file is being written."""
    for thread in threading.enumerate():
        if thread.name == "uccl-ep flight":
            thread.join(10.0)


def test_what_was_known_first_is_kept_and_the_first_error_is_put_beside_it(tmp_path: Path) -> None:
    recorder, reads = recorder_in(tmp_path / "made" / "here")
    for error in (None, None, PeerTimeout("silent", peer=1), None, PeerLost("gone", peer=1)):
        recorder.record(2, error)
    settle()
    (path,) = (tmp_path / "made" / "here").iterdir()
    assert path.name == f"abcd-epoch2-rank3{SUFFIX}"
    found = json.loads(path.read_text())
    assert found["stats"] == {"read": 1}
    assert len(reads) == 1
    assert found["error"] == "PeerTimeout: silent"
    assert found["calls"] == [[1.5, "ll_dispatch", 8, 0.25]]
    here = next(frame for frame in found["threads"]["MainThread"] if __file__ in frame)
    assert here.endswith(test_what_was_known_first_is_kept_and_the_first_error_is_put_beside_it.__name__)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_with_an_error_the_file_is_there_on_return(tmp_path: Path) -> None:
    recorder, _ = recorder_in(tmp_path)
    recorder.record(0, PeerLost("gone", peer=1))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = recorder_in(tmp_path)
    release = threading.Event()
    replace = os.replace

    def slow(*paths: Any) -> None:
        assert release.wait(20.0)
        replace(*paths)

    monkeypatch.setattr(flight_recorder, "_WRITE_SECONDS", 0.05)
    monkeypatch.setattr(os, "replace", slow)
    recorder.record(0, PeerLost("gone", peer=1))
    assert not list(tmp_path.glob("abcd*"))
    release.set()
    settle()
    assert len(list(tmp_path.glob("abcd*"))) == 1


def test_a_buffer_that_fails_again_and_again_does_not_fill_a_disk(tmp_path: Path) -> None:
    recorder, _ = recorder_in(tmp_path)
    for epoch in range(100):
        recorder.record(epoch, PeerLost("gone", peer=1))
    assert len(list(tmp_path.iterdir())) == 16


def test_a_disk_without_room_and_a_system_without_threads_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, _ = recorder_in(tmp_path)

    def full(*paths: Any) -> None:
        raise OSError("No space left on device")

    def no_thread(*arguments: Any) -> None:
        raise TransportError("no thread", device="thread")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        recorder.record(0, PeerLost("gone", peer=1))
    with monkeypatch.context() as patch:
        patch.setattr(flight_recorder, "start_thread", no_thread)
        recorder.record(1, PeerLost("gone", peer=1))
    assert not list(tmp_path.iterdir())
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "rank 3 writes no flight record: No space left on device",
        "rank 3 writes no flight record: no thread",
    ]


def test_a_directory_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"UCCL_EP_FLIGHT_RECORDER=.*file.*Next step"):
        recorder_in(tmp_path / "file")


def test_a_group_has_a_name_of_its_own_that_does_not_tell_its_secret() -> None:
    def introduction(salt: bytes, rank: int) -> Introduction:
        cards = (Card(0, 2, "1", 1, 7, "a", salt=salt), Card(1, 2, "1", 1, 8 + rank, "b"))
        return Introduction(cards, salt)

    salt = bytes(range(32))
    assert introduction(salt, 0).group == introduction(salt, 1).group != introduction(salt[::-1], 0).group
    assert introduction(salt, 0).group not in salt.hex()
