"""``pytest --resume=NAME``: a run that was interrupted goes on where it was.

Every test that passes is noted at once in ``.pytest_cache/d/passed/NAME-COMMIT.jsonl``; the next run of that name at
the same commit leaves it out. Sources that differ from their commit are never resumed. With pytest-xdist the controller
writes the notes and the workers read them. Beside the notes stand the tests that are to be run, those that are skipped
left out. ``scripts/suites.py`` sums the seconds and counts what is left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from uccl_ep_serving.bench.machine import describe

__all__ = ["Note", "Resume", "add_option", "left", "notes"]


#: Beside the notes, a node id a line: what the runs have collected, and what they have skipped.
_WANTED, _SKIPPED = ".wanted", ".skipped"


class Note(NamedTuple):
    """One test that has passed: its node id, and the seconds of its set-up, call and teardown."""

    test: str
    seconds: float


def add_option(parser: pytest.Parser) -> None:
    """Add ``--resume`` to pytest's options."""
    parser.addoption(
        "--resume",
        nargs="?",
        const="tests",
        metavar="NAME",
        help="leave out what has passed under this name at this commit, and note what passes now",
    )


def notes(file: Path) -> list[Note]:
    """What ``file`` holds; a last line that was cut off does not count."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(Note(*json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def left(file: Path) -> int:
    """How many tests of the runs that write ``file`` have neither passed nor been skipped."""
    wanted, skipped = (_lines(file.with_suffix(suffix)) for suffix in (_WANTED, _SKIPPED))
    return len(wanted - skipped - {note.test for note in notes(file)})


def _lines(file: Path) -> set[str]:
    return set(file.read_text().splitlines()) if file.exists() else set()


class Resume:
    """The plugin of one run, or of one worker.

    Args:
        file: of the notes; None where the sources have no commit: nothing is noted or left out.
        writes: False in a worker.
    """

    def __init__(self, file: Path | None, *, writes: bool) -> None:
        self._file = file
        self._writes = writes
        self._left_out = 0
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, set[str]] = {}

    @classmethod
    def of(cls, config: pytest.Config) -> Resume:
        """The plugin for ``config``, which was given ``--resume``."""
        commit = describe()["commit"]
        assert config.cache is not None
        file = config.cache.mkdir("passed") / f"{config.getoption('resume')}-{commit}.jsonl"
        return cls(None if not commit or commit.endswith("+") else file, writes=not hasattr(config, "workerinput"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has passed."""
        if self._file is None:
            return
        with self._file.with_suffix(_WANTED).open("a") as file:
            file.writelines(f"{item.nodeid}\n" for item in items)
        passed = {note.test for note in notes(self._file)}
        left_out = [item for item in items if item.nodeid in passed]
        self._left_out = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test whose teardown is over and that has passed."""
        if not self._writes or self._file is None:
            return
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        self._outcomes.setdefault(name, set()).add(report.outcome)
        if report.when != "teardown" or "failed" in self._outcomes[name]:
            return
        if "skipped" in self._outcomes[name]:
            with self._file.with_suffix(_SKIPPED).open("a") as file:
                file.write(f"{name}\n")
            return
        with self._file.open("a") as file:
            file.write(json.dumps(Note(name, round(self._seconds[name], 3))) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing left to run is success."""
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._left_out:
            session.exitstatus = pytest.ExitCode.OK
