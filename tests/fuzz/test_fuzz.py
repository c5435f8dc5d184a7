"""Some cases of each subject, quickly; that a wrong case is found and named; and that a run goes on where it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import fuzz as table
from tests.fuzz import command, parent
from tests.fuzz import tcp_words as fuzz
from tests.fuzz.subject import Block, Wrong
from tests.fuzz.subjects import SUBJECTS, make
from tests.fuzz.tcp import TcpFrames

#: Enough to have each kind of change many times, in less than a second.
CASES = {"tcp": 4000, "tcp-macs": 1500, "handshakes": 600, "control": 600, "mailboxes": 400, "efa": 300, "roce": 300}


def run(name: str) -> Block:
    place = np.zeros(1, np.int64)
    subject = make(name, place)
    try:
        return subject.run(0, CASES[name])
    finally:
        subject.close()


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_case_ends_as_it_must(name: str) -> None:
    rows = run(name).rows
    assert sum(row[0] for row in rows.values()) == CASES[name]
    assert 0 < sum(row[1] for row in rows.values()) < CASES[name], "some are refused, and some are not"


@pytest.fixture
def frames() -> Any:
    place = np.zeros(1, np.int64)
    subject = TcpFrames(place.ctypes.data, auth=False, sample=1)
    yield subject
    subject.close()


def test_a_write_outside_of_what_was_taken_is_found(frames: TcpFrames) -> None:
    frames.run(0, 5)
    window = frames._window.array()
    for at in (0, 4095, 4096, len(window) - 4096, len(window) - 1):
        window[at] ^= 1
        with pytest.raises(Wrong, match="window or a canary"):
            frames.run(1, 1)
        window[:] = frames._shadow


def test_a_word_that_must_not_change_is_found(frames: TcpFrames) -> None:
    # the place in the ring of connections changes in each case
    frames._rooms_of_work[fuzz.LOOSE][:] = 0
    with pytest.raises(Wrong, match="a word of the context changed"):
        frames.run(0, 1)


def test_the_oracle_is_asked_and_refuses(frames: TcpFrames, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frames.run(0, 10).sampled == 10
    monkeypatch.setattr("tests.fuzz.tcp.check", lambda **_: "no")
    with pytest.raises(Wrong, match="the oracle says: no"):
        frames.run(0, 1)


def test_a_process_that_crashes_is_named_with_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(
        "import os, sys\nopen(sys.argv[-1], 'wb').write((77).to_bytes(8, 'little'))\nos.kill(os.getpid(), 11)\n"
    )
    real = parent.subprocess.Popen
    monkeypatch.setattr(
        parent.subprocess,
        "Popen",
        lambda command, **options: real([command[0], str(script), command[-1]], **options),
    )
    with pytest.raises(Wrong, match="SIGSEGV") as caught:
        list(parent.blocks("tcp", 0, 10))
    assert caught.value.case == 77


def lines(first: int, count: int, size: int = 10) -> list[dict[str, Any]]:
    return [
        {
            "first": begin,
            "cases": min(size, first + count - begin),
            "rows": {"nothing": [10, 1, 20, 20]},
            "sampled": 1,
            "seconds": 0.5,
            "processor": 0.25,
            "held": [begin, 1 << 20, 3, 7],
        }
        for begin in range(first, first + count, size)
    ]


def test_a_run_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, int, int]] = []

    def some(name: str, first: int, count: int) -> list[dict[str, Any]]:
        asked.append((name, first, count))
        return lines(first, count if len(asked) > 1 else 20)

    monkeypatch.setattr(command, "blocks", some)
    machine = {**command.describe(), "commit": "abc"}
    monkeypatch.setattr(command, "describe", lambda: machine)
    arguments = ["--subject", "efa", "--cases", "10000", "--output", str(tmp_path / "fuzz.json")]
    for _ in range(3):
        assert CliRunner().invoke(command.app, arguments).exit_code == 0
    assert asked == [("efa", 0, 50), ("efa", 20, 30)]
    found = json.loads((tmp_path / "fuzz.json").read_text())
    assert found["subjects"]["efa"]["cases"] == 50
    assert "50 cases" in table.markdown(found)
    # of another commit nothing is kept
    machine["commit"] = "def"
    assert CliRunner().invoke(command.app, arguments).exit_code == 0
    assert asked[-1] == ("efa", 0, 50)


def test_a_wrong_case_is_named_with_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, first: int, count: int) -> list[dict[str, Any]]:
        raise Wrong(1234, "an event too many")

    monkeypatch.setattr(command, "blocks", wrong)
    done = CliRunner().invoke(command.app, ["--dry", "--subject", "control"])
    assert done.exit_code == 1
    assert 'make fuzz ARGS="--dry --subject control --first 1234 --cases 1"' in done.output


def test_growth_is_wrong() -> None:
    flat = [[step, 100 << 20, 3, 7] for step in range(16)]
    assert command.wrongs(flat) == []
    assert command.wrongs([[one[0], one[1] + (one[0] << 20), *one[2:]] for one in flat])
    assert command.wrongs([*flat[:-1], [15, 100 << 20, 3, 8]])
