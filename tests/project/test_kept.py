"""What long runs keep: rows of one commit, in a file that can be read at any time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kept import Kept, same_commit, write


def kept(file: Path, commit: str) -> Kept:
    return Kept(file, "trials", lambda row: row["seed"], {"commit": commit})


def test_a_run_goes_on_at_the_same_commit_alone(tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    first = kept(file, "a")
    for seed in (2, 1):
        first.keep({"seed": seed})
    assert [row["seed"] for row in json.loads(file.read_text())["trials"]] == [1, 2]
    assert list(kept(file, "a").rows) == [1, 2]
    assert kept(file, "b").rows == {}


def test_what_has_not_changed_is_still_true_at_another_commit(tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    first = kept(file, "a")
    for seed in (1, 2):
        first.keep({"seed": seed})
    odd = Kept(file, "trials", lambda row: row["seed"], {"commit": "b"}, lambda row: row["seed"] % 2 == 1)
    odd.keep({"seed": 4})
    assert list(kept(file, "b").rows) == [1, 4]


@pytest.mark.parametrize(
    ("before", "now", "same"), [("a", "a", True), ("a", "b", False), ("a+", "a+", False), ("", "", False)]
)
def test_sources_without_a_commit_are_never_the_same(before: str, now: str, same: bool) -> None:
    assert same_commit(before, now) == same


def test_rows_by_name(tmp_path: Path) -> None:
    file = tmp_path / "subjects.json"
    write(file, {"commit": "a"}, "subjects", {"one": {"cases": 1}, "two": {"cases": 2}})
    found = json.loads(file.read_text())
    assert found["subjects"] == {"one": {"cases": 1}, "two": {"cases": 2}}
    assert "load_after" in found["machine"]
