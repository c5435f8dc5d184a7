"""The record that a check leaves beside the cache of compiled code, and whether one fits this machine.

A launcher starts an engine on a GPU because of it, so it is believed under the rules of compiled code: only from where
nobody but this user and root can write. A checksum finds damage, and a hand that has changed it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from ..native.cache import ours, places, trusted, usable
from .machine import Machine

__all__ = ["COMMAND", "Record", "State", "directory", "look", "write"]

#: Shows that a machine can serve.
COMMAND = "uccl-ep check --gpu"
_FOLDER, _FORMAT = "gpu", 1
#: So long a failure counts, for all that start meanwhile. Whoever comes later checks again.
_FAILURE_SECONDS = 600.0
#: Clocks of hosts that share a home differ a little.
_CLOCK_SECONDS = 60.0


class State(StrEnum):
    """What the records say of this machine."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Record(NamedTuple):
    """What was found.

    Attributes:
        why: in words.
        file: that says it, where there is one.
        content: of a record that fits.
    """

    state: State
    why: str
    file: Path | None = None
    content: dict[str, Any] | None = None


def directory() -> Path | None:
    """Where records are kept: the first place that this user can write, and nobody else; None without any."""
    return next(filter(usable, places(_FOLDER)), None)


def write(machine: Machine, passed: bool, report: dict[str, Any]) -> Path:
    """Keep what a check has found, whole or not at all. Raises OSError where it cannot be kept.

    Args:
        report: what ran, as JSON has it.
    """
    kept = directory()
    if kept is None:
        raise OSError("no directory that this user can write and nobody else: set UCCL_EP_CACHE_DIR to one")
    content = {
        "format": _FORMAT,
        "passed": passed,
        "machine": machine._asdict(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": os.uname().nodename,
        **report,
    }
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n"
    path = kept / f"{hashlib.sha256(repr(machine).encode()).hexdigest()[:16]}.json"
    with tempfile.NamedTemporaryFile("w", dir=kept, prefix=".stamp", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    return path


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def look(machine: Machine) -> Record:
    """What the records say of ``machine``: the newest that fits, else why none does."""
    fits: list[Record] = []
    others: list[tuple[float, Record]] = []
    for place in places(_FOLDER):
        for file in _files(place):
            when, record = _judged(file, machine, believed=trusted(place))
            if record.content is not None:
                fits.append(record)
            else:
                others.append((when, record))
    if fits:
        return max(fits, key=lambda one: str((one.content or {}).get("when")))
    if others:
        return max(others, key=lambda one: one[0])[1]
    searched = ", ".join(str(place.parent) for place in places(_FOLDER))
    return Record(State.UNKNOWN, f"no check of this machine's GPUs is on record (looked below {searched})")


def _files(place: Path) -> list[Path]:
    try:
        return sorted(place.glob("*.json"))
    except OSError:
        return []


def _judged(file: Path, machine: Machine, believed: bool) -> tuple[float, Record]:
    """(when it was written, what it says). Only a record that is whole, believed and fits has a content."""

    def unknown(why: str) -> Record:
        return Record(State.UNKNOWN, f"the check on record in {file} {why}", file)

    try:
        found = file.lstat()
        if not (believed and ours(file)):
            owner = f"it belongs to user {found.st_uid}" if found.st_uid not in (os.geteuid(), 0) else ""
            why = owner or "others can write it, or a directory above it"
            return found.st_mtime, unknown(f"is not believed: {why}")
        content = json.loads(file.read_text())
        checksum = content.pop("checksum")
        kept = Machine(**{**content["machine"], "gpus": tuple(content["machine"]["gpus"])})
        if checksum != _checksum(content) or content["format"] != _FORMAT:
            raise ValueError
        date = datetime.datetime.fromisoformat(content["when"])
        passed, age = bool(content["passed"]), time.time() - date.timestamp()
        faults = [f"{part['name']}: {part['fault']}" for part in content["parts"] if not part["passed"]]
        fault = (faults or ["nothing ran"])[0] + (f" ({len(faults) - 1} more parts failed)" if faults[1:] else "")
    except OSError as error:
        return 0.0, unknown(f"cannot be read: {error}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return found.st_mtime, unknown("is damaged, or was changed by hand: it does not fit its checksum")
    if differences := machine.differences(kept):
        return found.st_mtime, unknown(f"({content['when']}) is of {'; '.join(differences)}")
    if passed:
        why = f"{', '.join(machine.gpus)} passed `{COMMAND}` on {content['when']} (host {content.get('host')}): {file}"
        return found.st_mtime, Record(State.PASSED, why, file, content)
    if not -_CLOCK_SECONDS < age < _FAILURE_SECONDS:
        return found.st_mtime, unknown(f"({content['when']}) failed: {fault}")
    why = f"`{COMMAND}` failed on {content['when']} (host {content.get('host')}): {fault}"
    return found.st_mtime, Record(State.FAILED, why, file, content)
