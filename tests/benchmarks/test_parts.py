"""A measurement of hours goes on where it was, with the same sources alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import parts
from benchmarks.parts import Parts


def test_a_part_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "sources", lambda name: "abc")
    measured: list[str] = []

    def measure(name: str) -> list[str]:
        measured.append(name)
        return [name]

    for _ in range(2):
        kept = Parts("counts", tmp_path)
        assert [kept.measured(name, lambda name=name: measure(name)) for name in ("one", "two")] == [["one"], ["two"]]
    assert measured == ["one", "two"]
    monkeypatch.setattr(parts, "sources", lambda name: "other")
    assert Parts("counts", tmp_path).measured("one", lambda: 3) == 3
    kept.end()
    assert [path.name for path in tmp_path.iterdir()] == ["counts-other.json"]


def test_sources_without_a_commit_keep_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "sources", lambda name: "")
    kept = Parts("counts", tmp_path)
    assert kept.measured("one", lambda: 3) == 3
    kept.end()
    assert not list(tmp_path.iterdir())
