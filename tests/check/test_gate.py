"""What an engine does on a GPU at launch: start, check first, or refuse."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.check.test_stamp import FAILED, HERE, PASSED
from uccl_ep_serving.check import gate, machine, stamp
from uccl_ep_serving.check.stamp import State
from uccl_ep_serving.engines import devices
from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.errors import ConfigError

#: The real one.
RUN = gate._run


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has asked for nothing yet, on a machine with GPUs."""
    monkeypatch.setattr(machine, "present", lambda: HERE)
    monkeypatch.setattr(devices, "_passed", set())
    monkeypatch.setattr(gate, "_run", lambda: pytest.fail("the check was run"))
    for name in ("UCCL_EP_DEVICE", "UCCL_EP_GPU_CHECK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool | None], list[int]]:
    """runs(passed): from now on a check finds that, None: leaves no record; the runs, as they come."""

    def begin(passed: bool | None) -> list[int]:
        counted: list[int] = []

        def run() -> str:
            counted.append(1)
            if passed is not None:
                stamp.write(HERE, passed, PASSED if passed else FAILED)
            return "the last words"

        monkeypatch.setattr(gate, "_run", run)
        return counted

    return begin


def launched() -> None:
    check_device("cuda", "--moe-a2a-backend uccl_ep", "uccl-ep demo")


def test_cpu_ranks_ask_nothing() -> None:
    check_device("cpu", "--moe-a2a-backend uccl_ep", "uccl-ep demo")


def test_with_a_record_that_fits_engines_start(caplog: pytest.LogCaptureFixture) -> None:
    stamp.write(HERE, True, PASSED)
    with caplog.at_level(logging.INFO):
        launched()
    assert "NVIDIA H200 (sm_90) passed `uccl-ep check --gpu`" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_one_the_launcher_checks_once(
    runs: Callable[[bool | None], list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = runs(True)
    for _ in range(2):
        launched()
        monkeypatch.setattr(devices, "_passed", set())
    assert counted == [1]
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "no check of this machine's GPUs is on record" in said
    assert "Running `uccl-ep check --gpu` before the engine starts: once on this host, 120 s at most" in said


def test_a_check_that_failed_refuses_with_the_kernel(runs: Callable[[bool | None], list[int]]) -> None:
    counted = runs(False)
    for _ in range(3):
        with pytest.raises(ConfigError) as refused:
            launched()
        said = str(refused.value)
        assert said.startswith("--moe-a2a-backend uccl_ep: `uccl-ep check --gpu` failed")
        assert "normal over ipc: kernel advance: expected 1; found 2" in said
        assert "Next step: `uccl-ep check --gpu` on this machine" in said
        assert "start with another --moe-a2a-backend" in said
    assert counted == [1]


def test_a_stale_record_is_told_and_checked_again(
    runs: Callable[[bool | None], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    stamp.write(HERE._replace(driver="550"), True, PASSED)
    counted = runs(True)
    launched()
    assert counted == [1]
    assert "is of driver 550, here is 560.35.03" in caplog.text


def test_a_check_that_says_nothing_refuses_with_its_last_words(runs: Callable[[bool | None], list[int]]) -> None:
    runs(None)
    with pytest.raises(ConfigError, match=r"left no record that fits.*it said: the last words"):
        launched()


@pytest.mark.parametrize(
    ("gpus", "value", "words"),
    [
        (HERE.gpus, "0", "no check of this machine's GPUs is on record.*UCCL_EP_GPU_CHECK=0 lets no engine run it"),
        ((), "1", "no GPU is visible to this process"),
    ],
)
def test_where_it_may_not_or_cannot_check_it_refuses_with_the_command(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], value: str, words: str
) -> None:
    monkeypatch.setattr(machine, "present", lambda: HERE._replace(gpus=gpus))
    monkeypatch.setenv("UCCL_EP_GPU_CHECK", value)
    with pytest.raises(ConfigError, match=f"{words}.*Next step: `uccl-ep check --gpu` on this machine"):
        launched()


def test_a_driver_that_does_not_answer_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def present() -> None:
        raise RuntimeError("the driver has not said within 60 s which GPUs there are")

    monkeypatch.setattr(machine, "present", present)
    with pytest.raises(ConfigError, match=r"has not said within 60 s.*`uccl-ep check --gpu`"):
        launched()


def test_who_knows_goes_on_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("UCCL_EP_DEVICE", "cuda")
    launched()
    assert "UCCL_EP_DEVICE=cuda skips the check of GPUs" in caplog.text


def test_a_record_that_could_be_kept_nowhere_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "usable", lambda directory: False)
    with pytest.raises(ConfigError, match="could not be kept anywhere: set UCCL_EP_CACHE_DIR"):
        launched()


def test_of_the_workers_of_a_host_one_checks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it."""
    heard = home / "heard"

    def run() -> str:
        with heard.open("a") as file:
            file.write("run\n")
        time.sleep(0.5)
        stamp.write(HERE, True, PASSED)
        return ""

    monkeypatch.setattr(gate, "_run", run)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=lambda: sys.exit(gate.checked(HERE).state != State.PASSED)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert heard.read_text() == "run\n"


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SECONDS", 0.3)
    monkeypatch.setattr(gate, "_PROCESS_SECONDS", 0.1)
    kept = stamp.directory()
    assert kept is not None
    with open(kept / f".{os.uname().nodename}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = gate.checked(HERE)
    assert found.state is State.UNKNOWN
    assert "another process of this host has been checking for more than 0 s" in found.why


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\nsleep 60\n", "nothing within 0 s, and was ended"),
        ("#!/bin/sh\necho no GPU is visible >&2\nexit 2\n", "no GPU is visible"),
        ("#!/bin/sh\nexit 3\n", "nothing (status 3)"),
    ],
)
def test_what_the_command_says(home: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    program = home / "python"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(gate, "SECONDS", 0.3 if "sleep" in script else 20.0)
    monkeypatch.setattr(gate, "_PROCESS_SECONDS", 0.1)
    assert words in RUN()
