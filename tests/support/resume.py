"""``pytest --resume=NAME``: a run that was interrupted goes on where it was.

Every test that passes is noted at once in ``.pytest_cache/d/passed/NAME-SOURCES.jsonl``; the next run of that name with
the same :func:`sources` leaves it out, whatever has changed that its tests do not load. Sources that differ from their
commit are never resumed. With pytest-xdist the controller writes the notes and the workers read them. Beside the notes
stand the tests that are to be run, those that are skipped left out. ``scripts/suites.py`` sums the seconds and counts
what is left; while something is, it keeps the notes among the results, so that a run of hours goes on in another
checkout.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .source_tree import ROOT

__all__ = ["UNFINISHED", "Note", "Resume", "add_option", "left", "notes", "sources"]

#: What has been found of runs and measurements that are not finished, among the results.
UNFINISHED = ROOT / "benchmarks/results/unfinished"

#: What a test that may take hours does not depend on.
_BESIDE = (":!docs", ":!*.md", ":!benchmarks/results")
#: By the name of a run, the folders that its tests load nothing of either (tests/project/test_resume.py): what is built
#: on the Buffer, the NICs, the tests of other parts, and what calls them.
NOT_LOADED = {
    "test-model": (
        *(f"uccl_ep_serving/{one}" for one in ("check", "cli", "compare", "demo", "engines", "preflight")),
        *("proxy/transport/nic", "proxy/transport/verbs"),
        *("tests/chaos", "tests/check", "tests/cli", "tests/compare", "tests/control_plane", "tests/data_plane"),
        *("tests/demo", "tests/engines", "tests/fuzz", "tests/modes", "tests/mutants", "tests/native"),
        *("tests/preflight", "tests/project", "tests/protocol", "tests/proxy", "tests/rdma", "tests/soak"),
        *("tests/system", "tests/traffic", ".ci", "scripts", "examples", "Makefile"),
    )
}

#: Beside the notes, a node id a line: what the runs have collected, and what they have skipped.
_WANTED, _SKIPPED = ".wanted", ".skipped"
#: What a worker tells the controller.
_LEFT_OUT = "left out"


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
        help="leave out what has passed under this name with the same sources, and note what passes now",
    )


def sources(name: str = "") -> str:
    """Which sources a run of this name has, whatever documents and results stand beside them; "" for those that no
    commit holds."""
    beside = [*_BESIDE, *(f":!{path}" for path in NOT_LOADED.get(name, ()))]

    def said(*words: str) -> bytes:
        command = ["git", *words, "--", ".", *beside]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout

    differing, held = said("status", "--porcelain", "--untracked-files=no"), said("ls-files", "--stage")
    return "" if differing or not held else hashlib.sha256(held).hexdigest()[:12]


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
        which = sources(config.getoption("resume"))
        assert config.cache is not None
        file = config.cache.mkdir("passed") / f"{config.getoption('resume')}-{which}.jsonl"
        return cls(file if which else None, writes=not hasattr(config, "workerinput"))

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

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """With pytest-xdist the workers collect, and the controller ends the run."""
        self._left_out += getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing left to run is success."""
        if not self._writes:
            session.config.workeroutput[_LEFT_OUT] = self._left_out  # type: ignore[attr-defined]
        elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._left_out:
            session.exitstatus = pytest.ExitCode.OK
