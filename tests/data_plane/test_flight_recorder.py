"""The flight recorder: one file an epoch, written once this rank cannot go on, with the first error put beside it."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
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

    recorder = FlightRecorder(str(place), 3, stats, lambda: [(0, 1.5, "ll_dispatch", 8, 0.25)])
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
    assert found["calls"] == [[0, 1.5, "ll_dispatch", 8, 0.25]]
    here = found["threads"]["MainThread"][0]  # not where the recorder is
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

    monkeypatch.setattr(flight_recorder, "_WAIT_SECONDS", 0.05)
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
    left = {int(path.name.split("-")[1].removeprefix("epoch")) for path in tmp_path.iterdir()}
    assert left == set(range(84, 100))


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
    for place in (tmp_path / "file", Path("~nosuchuser/here")):
        with pytest.raises(ConfigError, match=r"UCCL_EP_FLIGHT_RECORDER=.*(file|nosuchuser).*Next step"):
            recorder_in(place)


def test_a_directory_that_does_not_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(flight_recorder, "_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(Path, "mkdir", lambda *words, **named: release.wait(20.0))
    with pytest.raises(ConfigError, match="does not answer within"):
        recorder_in(tmp_path)
    release.set()
    settle()


def test_a_relative_directory_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder, _ = recorder_in(Path("here"))
    monkeypatch.chdir("/")
    recorder.record(0, PeerLost("gone", peer=1))
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_who_answers_the_peers_does_not_wait_for_counters(tmp_path: Path) -> None:
    """A rank that answers nothing while something is decided is taken for lost."""
    release = threading.Event()

    def stats() -> dict[str, Any]:
        assert release.wait(20.0)
        return {}

    recorder = FlightRecorder(str(tmp_path), 3, stats, list)
    begun = time.monotonic()
    recorder.record(0)
    assert time.monotonic() - begun < 0.2
    release.set()
    settle()
    assert len(list(tmp_path.iterdir())) == 1


def test_threads_of_one_name_are_all_there(tmp_path: Path) -> None:
    recorder, _ = recorder_in(tmp_path)
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, name="uccl-ep control 0") for _ in range(2)]
    for thread in threads:
        thread.start()
    recorder.record(0, PeerLost("gone", peer=1))
    release.set()
    for thread in threads:
        thread.join()
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())["threads"]
    assert {f"uccl-ep control 0 ({thread.ident})" for thread in threads} <= set(found)


def test_a_group_has_a_name_of_its_own_that_does_not_tell_its_secret() -> None:
    def introduction(salt: bytes, rank: int) -> Introduction:
        cards = (Card(0, 2, "1", 1, 7, "a", salt=salt), Card(1, 2, "1", 1, 8 + rank, "b"))
        return Introduction(cards, salt)

    salt = bytes(range(32))
    assert introduction(salt, 0).group == introduction(salt, 1).group != introduction(salt[::-1], 0).group
    assert introduction(salt, 0).group not in salt.hex()
