"""A pytest plugin that writes down, as it happens, which test runs and which has failed; a run that hangs or dies can
be read all the same. Needs nothing but pytest, and writes a JSON list a line to the file in ``MUTANTS_JOURNAL``; after
``MUTANTS_SECONDS`` of tests no other is begun.
"""

from __future__ import annotations

import json
import os
import time

import pytest


def _write(*words: object) -> None:
    with open(os.environ["MUTANTS_JOURNAL"], "a") as file:
        file.write(json.dumps(words) + "\n")


def pytest_configure() -> None:
    """The run begins; its clock as well."""
    _write("begun", "")


class _Clock:
    first = 0.0


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _Clock.first = _Clock.first or time.monotonic()
    _write("runs", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A part of a test is over."""
    if report.failed:
        _write("failed", report.nodeid, str(report.longrepr)[-2000:])
    elif report.when == "call" and report.passed:
        _write("passed", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file cannot be imported."""
    if report.failed:
        _write("failed", report.nodeid, str(report.longrepr)[-2000:])


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """A test is over."""
    _write("over", nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):  # type: ignore[no-untyped-def]
    """End the run when its time is over."""
    result = yield
    if time.monotonic() - _Clock.first > float(os.environ["MUTANTS_SECONDS"]):
        item.session.shouldstop = "the seconds of a mutant are over"
    return result
