"""A copy of a source tree, and what a mutant in it does to the tests that concern it.

The checkout itself is never touched. A mutant is killed when a test fails with it that passes without it; one that
makes the tests hang is killed as well, and told apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.mutants.draw import Mutant, applied

__all__ = ["KILLED", "SURVIVED", "TIMEOUT", "Limits", "Outcome", "Tree"]

KILLED, TIMEOUT, SURVIVED = "killed", "timeout", "survived"
#: In place of a test: what every run does before the first one.
STARTING = "starting"
#: A test that fails with and without the mutant is left out, and the others are tried again, as often.
_FLAKY = 3
_PLUGIN = Path(__file__).with_name("journal.py")


class Limits(NamedTuple):
    """Seconds: of all tests of a mutant, after which no other is begun; of one test; of the rest, compiling included.
    And of waiting until a run begins, where a command before it queues for the machine."""

    tests: float = 120.0
    one: float = 60.0
    rest: float = 240.0
    queue: float = 7200.0


class Outcome(NamedTuple):
    """What became of a mutant: one of KILLED, TIMEOUT, SURVIVED.

    ``by`` is the test that killed it, ``tests`` how many passed before, ``suite`` the markers of the tests that ran.
    """

    verdict: str
    by: str
    tests: int
    seconds: float
    suite: str = ""


class _Run(NamedTuple):
    """What a journal says: the test that failed (or hung), why, and those that passed."""

    failed: str
    why: str
    hung: bool
    passed: list[str]


@dataclass
class Tree:
    """A copy of a source tree.

    Args:
        root: where it stands.
        names: what is importable, by name: a path from ``root``.
        interpreter: by file of tests: the Python that runs it.
        options: of pytest.
        environment: besides that of this process.
        before: a command that is put before each run.
    """

    root: Path
    names: Mapping[str, str]
    interpreter: Callable[[str], str]
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    _passed: set[str] = field(default_factory=set)
    _serial: int = 0
    _suite: str = ""

    def __post_init__(self) -> None:
        # only these names, not the whole root: a directory in it may have the name of somebody's package
        self._path = self.root / ".names"
        self._path.mkdir()
        for name, place in self.names.items():
            (self._path / name).symlink_to(self.root / place)
        shutil.copy(_PLUGIN, self._path / "mutants_journal.py")

    def write(self, file: str, text: str) -> None:
        """Write a source, with an mtime of its own: bytecode is known by that, and by the size."""
        path = self.root / file
        path.write_text(text)
        self._serial += 2
        os.utime(path, (1_500_000_000 + self._serial,) * 2)

    @contextlib.contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """The tree has the mutant while the block runs."""
        source = (self.root / mutant.file).read_text()
        self.write(mutant.file, applied(source, mutant))
        try:
            yield
        finally:
            self.write(mutant.file, source)

    def try_mutant(
        self,
        mutant: Mutant,
        tests: Sequence[str],
        limits: Limits,
        prepare: Callable[[], None],
        suite: str = "not slow",
    ) -> Outcome:
        """Run ``tests``, files in this order, with ``mutant`` until one fails.

        Args:
            prepare: called once the mutant is in the tree.
            suite: markers of the tests that run, as pytest's ``-m`` takes them.
        """
        begun = time.monotonic()
        self._suite = suite
        left_out: list[str] = []
        for _ in range(_FLAKY):
            with self.with_mutant(mutant):
                prepare()
                run = self._run(tests, limits, left_out)
            if not run.failed or self._passes_without(run.failed, limits):
                verdict = SURVIVED if not run.failed else TIMEOUT if run.hung else KILLED
                return Outcome(verdict, run.failed, len(run.passed), round(time.monotonic() - begun, 1), suite)
            left_out.append(run.failed)
        return Outcome(SURVIVED, "", len(run.passed), round(time.monotonic() - begun, 1), suite)

    def _passes_without(self, test: str, limits: Limits) -> bool:
        if test not in self._passed and test != STARTING:
            run = self._run([test], limits, [])
            self._passed.update(run.passed)
            if not run.failed:
                self._passed.add(test)  # a file that can be collected, or a test that is skipped
        return test in self._passed or test == STARTING

    def _run(self, tests: Sequence[str], limits: Limits, left_out: Sequence[str]) -> _Run:
        """The tests of each interpreter in a process of its own, until one fails."""
        passed: list[str] = []
        by_interpreter: dict[str, list[str]] = {}
        for test in tests:
            by_interpreter.setdefault(self.interpreter(test), []).append(test)
        for python, files in by_interpreter.items():
            journal = self.root / ".journal"
            journal.unlink(missing_ok=True)
            command = [*self.before, python, "-P", "-m", "pytest", "-x", "-q", "-p", "mutants_journal"]
            command += [*self.options, "-m", self._suite, *(f"--deselect={test}" for test in left_out), *files]
            environment = {
                **os.environ,
                **self.environment,
                "PYTHONPATH": str(self._path),
                "MUTANTS_JOURNAL": str(journal),
                "MUTANTS_SECONDS": str(limits.tests),
            }
            log = self.root / ".log"
            with open(log, "w") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self.root,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                ended = _ends(process, journal, limits)
            run = _read(journal, process.returncode if ended else None, log)
            passed += run.passed
            if run.failed:
                return run._replace(passed=passed)
        return _Run("", "", False, passed)


def _ends(process: subprocess.Popen[bytes], journal: Path, limits: Limits) -> bool:
    """Wait for the end of a run, at most as long as its limits say; nothing of its session is left."""
    deadline = time.monotonic() + limits.queue
    has_begun = False
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                return True
            if not has_begun and journal.exists():
                has_begun = True
                deadline = time.monotonic() + limits.tests + limits.one + limits.rest
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(journal: Path, status: int | None, log: Path) -> _Run:
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    passed = [line[1] for line in lines if line[0] == "passed"]
    for kind, test, *why in lines:
        if kind == "failed":
            return _Run(test, why[0], "Timeout (>" in why[0] or " hang" in why[0], passed)
    running = [line[1] for line in lines if line[0] == "runs"]
    over = {line[1] for line in lines if line[0] == "over"}
    # pytest's own statuses: 0, 1 with a failure, 2 also where the time of the tests was over, 5 without any test
    if status not in (0, 1, 5) and not (status == 2 and over):
        where = next((test for test in reversed(running) if test not in over), STARTING)
        return _Run(where, log.read_text()[-2000:], status is None, passed)
    return _Run("", "", False, passed)
