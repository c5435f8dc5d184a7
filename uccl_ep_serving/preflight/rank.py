"""What one rank of a check does, part by part; all ranks come to the same findings, and stop after the same part.

What has been found is kept when a later part fails, or never ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from ..check import faults
from ..config import Settings
from ..errors import UcclEpError
from .facts import Facts, compare, gather_facts
from .job import Finding, Job
from .links import links_of
from .loopback import try_nic
from .meeting import Meeting, meet
from .modes import MODES, try_mode
from .outcome import Outcome
from .reach import Listener, try_peers
from .ways import JOB, try_way, ways_of

__all__ = ["examine", "run"]

_T = TypeVar("_T")


def run(job: Job, say: Callable[[str, Outcome], None]) -> Outcome:
    """The check as one rank sees it. Never raises. ``say`` is told what begins, and what has been found before it."""
    outcome, where = Outcome(list(job.doctor)), f"node {job.node}"
    part = "meeting"
    try:
        device = _device(job)
        meeting = meet(job, lambda words: say(words, outcome))
        try:
            part, where = "check", f"rank {meeting.place.rank} on node {job.node}"
            examine(outcome, meeting, job, Settings.from_environment, device, lambda words: say(words, outcome))
        finally:
            with contextlib.suppress(RuntimeError):
                meeting.leave()
    except Exception as error:  # another rank is gone, or a defect of the check itself
        outcome.findings.append(Finding(part, where, fault=faults.of(error, where)))
    return outcome


def _device(job: Job) -> torch.device | None:
    """The GPU of this rank, made the process's own; None without one."""
    if not torch.cuda.is_available() or Settings.from_environment().device == "cpu":
        return None
    index = job.local % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def examine(
    outcome: Outcome,
    meeting: Meeting,
    job: Job,
    settings: Callable[[], Settings],
    device: torch.device | None,
    say: Callable[[str], None],
) -> None:
    """All parts, one after the other. Collective.

    Args:
        outcome: gets what each part has found.
        settings: gives those in force, or raises ConfigError.
        device: of this rank's tensors where that is a GPU ("cpu": one in memory).

    Raises:
        BootstrapError: another rank did not come to a part.
    """
    outcome.findings = _all(meeting, "doctor", list(job.doctor))
    say("facts")
    mine, findings = _facts(meeting, settings, device)
    told = _gather(meeting, "facts", mine, Facts | None)
    outcome.findings += _all(meeting, "facts found", findings)
    known = [one for one in told if one is not None]
    if len(known) < len(told):
        return
    outcome.known = known
    outcome.findings += compare(known)
    if any(one.fault for one in outcome.findings if one.part in ("versions", "settings")):
        return
    in_force = settings()
    say("TCP")
    reached = _reach(meeting, known, in_force)
    outcome.findings += reached
    if any(one.fault for one in reached):
        return
    if any(one.rails for one in known):
        rails = known[meeting.place.rank].rails
        alone = [found for rail in rails for found in try_nic(rail, meeting.place, in_force, device, say)]
        outcome.findings += _all(meeting, "NICs found", alone)
    for way in ways_of(known, in_force):
        found, routes = try_way(way, meeting, known, in_force, device, say)
        outcome.findings += _all(meeting, f"{way.name} found", found)
        if way.name == JOB:
            outcome.routes = _gather(meeting, "routes", routes, dict[int, str])
    for mode in MODES if outcome.passed else ():
        found = try_mode(mode, meeting, in_force, device or torch.device("cpu"), say)
        gathered = _all(meeting, f"{mode} found", found)
        wrong = [one for one in gathered if one.fault]
        outcome.findings += wrong or [msgspec.structs.replace(gathered[0], where="all ranks")]


def _facts(
    meeting: Meeting, settings: Callable[[], Settings], device: torch.device | None
) -> tuple[Facts | None, list[Finding]]:
    """Facts of this rank; without them, why."""
    place, where = meeting.place, f"rank {meeting.place.rank} on node {meeting.place.node}"
    gpu = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else ""
    gpu = "memory" if device is not None and not gpu else gpu
    try:
        host = meeting.exchange("").store_host
        return gather_facts(place, settings(), host, gpu, links_of(device)), []
    except (UcclEpError, OSError, RuntimeError) as error:
        return None, [Finding("settings", where, fault=faults.of(error, where))]


def _reach(meeting: Meeting, known: Sequence[Facts], settings: Settings) -> list[Finding]:
    """TCP between the first ranks of all nodes; of one node, between its first two ranks."""
    place = meeting.place
    firsts = {facts.node: rank for rank, facts in reversed(list(enumerate(known)))}
    several = len(firsts) > 1
    chosen = sorted(firsts.values()) if several else list(range(min(2, place.ranks)))
    words = {rank: f"node {known[rank].node}" if several else f"rank {rank}" for rank in chosen}
    where = words.get(place.rank, "")
    with contextlib.ExitStack() as stack:
        port, found = 0, []
        if where:
            try:
                port = stack.enter_context(Listener(known[place.rank].address, settings)).port
            except OSError as error:
                found = [Finding("TCP", where, fault=faults.of(error, f"{where} listens"))]
        ports = _gather(meeting, "ports", port, int)
        addresses = {rank: (known[rank].address, ports[rank]) for rank in chosen if ports[rank]}
        if port:
            found += try_peers(place.rank, addresses, words)
        # nobody stops listening before all have tried
        return _all(meeting, "TCP found", found)


def _gather(meeting: Meeting, name: str, mine: _T, kind: Any) -> list[_T]:
    """What every rank gives, by rank. Raises BootstrapError when one does not come."""
    answers = meeting.exchange(name).all_gather(msgspec.json.encode(mine))
    return [msgspec.json.decode(answer, type=kind) for answer in answers]


def _all(meeting: Meeting, name: str, mine: list[Finding]) -> list[Finding]:
    """The findings of all ranks, each once."""
    gathered = [one for found in _gather(meeting, name, mine, list[Finding]) for one in found]
    return list({msgspec.json.encode((one.part, one.where, one.said, one.note)): one for one in gathered}.values())
