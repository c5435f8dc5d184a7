"""Starts the ranks of a node, each a process of its own, and gathers what they have found."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from ..check import faults
from ..check.faults import Fault
from ..check.machine import has_gpu_devices
from .job import Finding, Job, skew
from .outcome import Line, Outcome

__all__ = ["run_node"]

#: At least, before the time of a check: starting an interpreter with torch; and after it: ending what hangs.
_START_SECONDS, _GRACE_SECONDS = 60.0, 10.0
#: Of what a process has said on its way to an end of its own.
_LAST_WORDS = 400
#: What a pipe holds.
_READ_BYTES = 1 << 16


def run_node(jobs: Sequence[Job], say: Callable[[str], None]) -> Outcome:
    """What the ranks of ``jobs``, those of this node, have found together. A rank that ends or hangs is a finding,
    beside what was found before."""
    part, deadline, abandoned = "", time.monotonic() + max(_START_SECONDS, jobs[0].seconds), math.inf
    outcomes: dict[int, Outcome] = {}
    so_far = Outcome([])
    begun = [bytearray() for _ in jobs]
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        words = [stack.enter_context(tempfile.TemporaryFile()) for _ in jobs]
        processes = [_start(job, file) for job, file in zip(jobs, words, strict=True)]
        for local, process in enumerate(processes):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, local)
        try:
            while selector.get_map() and (left := min(deadline, abandoned) - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    lines = _lines(key.fd, begun[key.data])
                    for line in lines or ():
                        if line.end:
                            outcomes[key.data] = line.end
                        elif key.data == 0:
                            if not part:
                                deadline = time.monotonic() + jobs[0].seconds + skew(jobs[0])
                            part = line.begins
                            _add(so_far, line.more)
                            say(part)
                    if lines is None:
                        selector.unregister(key.fileobj)
                    end = outcomes.get(key.data)
                    if (lines is None and end is None) or (end and not end.known):
                        # the others wait for a rank that has ended by itself, or has not come so far
                        abandoned = min(abandoned, time.monotonic() + _GRACE_SECONDS)
        finally:
            hung = _end(processes)
        lost = [
            _lost(job, processes[local], words[local], part if processes[local] in hung else None)
            for local, job in enumerate(jobs)
            if local not in outcomes
        ]
    return _together([*(outcomes.values() or [so_far]), *lost])


def _lines(pipe: int, begun: bytearray) -> list[Line] | None:
    """What a rank has told since; None at its end. ``begun`` keeps what has come of a line: the last one may be
    megabytes long."""
    come = os.read(pipe, _READ_BYTES)
    if not come:
        return None
    begun += come
    if b"\n" not in come:
        return []
    *whole, rest = begun.split(b"\n")
    begun[:] = rest
    return [msgspec.json.decode(text, type=Line) for text in whole]


def _add(so_far: Outcome, more: Outcome | None) -> None:
    """Add to ``so_far`` what was told later."""
    if more is not None:
        so_far.findings += more.findings
        so_far.known, so_far.routes = more.known or so_far.known, more.routes or so_far.routes


def _start(job: Job, words: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "uccl_ep_serving.preflight.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        bufsize=0,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(job) + b"\n")
    process.stdin.close()
    return process


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Those that had to be killed."""
    deadline, killed = time.monotonic() + _GRACE_SECONDS, []
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed.append(process)
    return killed


def _lost(job: Job, process: subprocess.Popen[bytes], words: IO[bytes], hangs: str | None) -> Outcome:
    """Of a rank that has said nothing in the end; ``hangs``: the part in which it was ended, "" before the first."""
    where = f"local rank {job.local} of node {job.node}"
    words.seek(0)
    said = words.read().decode(errors="replace").strip()[-_LAST_WORDS:]
    fault = faults.died(process.returncode, where, gpu=has_gpu_devices())
    if hangs is not None:
        fault = Fault(
            where,
            f"an end within {job.seconds:.0f} s",
            f"none, in the part: {hangs or 'start of the rank'}; its process was ended",
            "a slow machine, other work on its cores or GPUs, or a rank that waits for another one that has failed",
            "check again when the machine is idle, with --seconds 600; a GPU: nvidia-smi or rocm-smi shows who uses it",
        )
    return Outcome([Finding("process", where, note=f"it said: {said}" if said else "", fault=fault)])


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    """The fullest of them, and what others have found besides."""
    best = max(outcomes, key=lambda one: (len(one.routes), len(one.known), len(one.findings)))
    known = {(one.part, one.where, one.said) for one in best.findings}
    more = [one for outcome in outcomes for one in outcome.findings if (one.part, one.where, one.said) not in known]
    best.findings = list(dict.fromkeys([*best.findings, *more]))
    return best
