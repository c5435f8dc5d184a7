"""Each check of the parsers taken out: the fuzzing must notice within so many cases, and without that it must not.

What is compiled takes seconds for each family and is left to ``make test-rules``.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import time
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

from tests.fuzz.completions import Completions
from tests.fuzz.control import ControlFrames
from tests.fuzz.handshakes import Handshakes
from tests.fuzz.mailboxes import Mailboxes
from tests.fuzz.subject import Subject, Wrong
from tests.fuzz.tcp import TcpFrames
from tests.rules.family import execute
from tests.rules.fuzz_mutants import ALSO, FAMILIES, FUZZ_MUTANTS, PROXY, Check
from tests.rules.mutation import find, markers, mutated
from tests.rules.proxy_mutants import Mutants

#: A check that is gone may well make its parser wait for ever: that is noticed as well.
_MOST_SECONDS = 120.0
_CHECKS: dict[str, Check] = {**FUZZ_MUTANTS, **ALSO}
_IN_PYTHON = ("handshakes", "control")

Open = Callable[[np.ndarray], Subject]


class Family(NamedTuple):
    """Modules with a switch for each check."""

    modules: list[ModuleType]
    rules: list[str]
    switch: np.ndarray


def family_of(subject: str) -> str:
    return subject.removesuffix("-macs")


@functools.cache
def family(name: str) -> Family:
    """Executed once, and compiled where it must be."""
    rules = [rule for rule, check in _CHECKS.items() if family_of(check.subject) == name]
    switch = np.zeros(1, np.int64)
    files = dict(markers())
    files = {rule: files[rule] for rule in rules}
    sources = mutated({rule: _CHECKS[rule].way for rule in rules}, files, switch.ctypes.data)
    modules = list(execute(FAMILIES[name], sources).values())
    if name not in _IN_PYTHON:
        # a mutant must never be found by somebody else
        modules[-1].FUNCTIONS.compile(keep=False)
    return Family(modules, rules, switch)


@functools.cache
def proxy_mutants() -> Mutants:
    return Mutants()


def opened(subject: str, modules: list[ModuleType], place: np.ndarray) -> Subject:
    """The subject on a family; without one on the proxy whose rules can be taken out."""

    def say(case: int) -> None:
        place[0] = case

    if subject in ("efa", "roce"):
        return (
            Completions(say, subject, data=modules[-1])
            if modules
            else Completions(say, subject, step=proxy_mutants().step)
        )
    if subject == "handshakes":
        return Handshakes(say, modules[-1])
    if subject == "control":
        return ControlFrames(say, modules[-1], modules[0].Outbox)
    if subject == "mailboxes":
        return Mailboxes(say, modules[-1])
    return TcpFrames(place.ctypes.data, auth=subject == "tcp-macs", data=modules[-1])


def noticed(subject: str, modules: list[ModuleType], cases: int) -> int:
    """Cases that were needed to notice something wrong, by a wrong outcome, a crash or a hang; -1 when nothing was."""
    place = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
    child = os.fork()
    if child == 0:
        status = 2
        try:
            opened(subject, modules, place).run(0, cases)
            status = 0
        except Wrong as wrong:
            place[0], status = wrong.case, 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + _MOST_SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return -1 if ended[1] == 0 else int(place[0]) + 1


def check_it(rule: str) -> None:
    check = _CHECKS[rule]
    made = family(family_of(check.subject))
    assert noticed(check.subject, made.modules, min(check.cases, 500)) == -1, "with all checks in force"
    made.switch[0] = 1 + made.rules.index(rule)
    try:
        needed = noticed(check.subject, made.modules, check.cases)
    finally:
        made.switch[0] = 0
    assert 1 <= needed <= check.cases, "nothing was noticed"


@pytest.mark.parametrize("rule", [rule for rule, check in _CHECKS.items() if check.subject in _IN_PYTHON])
def test_a_check_in_python_is_missed(rule: str) -> None:
    check_it(rule)


@pytest.mark.mutants
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", [rule for rule, check in _CHECKS.items() if check.subject not in _IN_PYTHON])
def test_a_compiled_check_is_missed(rule: str) -> None:
    check_it(rule)


@pytest.mark.mutants
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", PROXY)
def test_a_rule_of_the_proxy_is_missed(rule: str) -> None:
    subject, cases = PROXY[rule]
    assert noticed(subject, [], cases) == -1, "with all rules in force"
    with proxy_mutants().without(rule):
        assert 1 <= noticed(subject, [], cases) <= cases, "nothing was noticed"


def test_the_checks_are_marked() -> None:
    assert find(FUZZ_MUTANTS).keys() == FUZZ_MUTANTS.keys()
    assert {family_of(check.subject) for check in _CHECKS.values()} == FAMILIES.keys()
