"""The directory that holds a comparison: its plan and one file per start, so that an interrupted one goes on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from uccl_ep_serving.errors import ConfigError

__all__ = [
    "FEWEST_STARTS",
    "Planned",
    "missing_starts",
    "open_directory",
    "read_json",
    "read_starts",
    "start_file",
    "write_json",
]

#: How starts differ does not show in fewer.
FEWEST_STARTS = 3
_FORMAT = 1
_PLAN = "plan.json"


class Planned(Protocol):
    """What is to be measured."""

    @property
    def starts(self) -> int:
        """How often everything is started anew."""

    @property
    def digest(self) -> str:
        """Equal for equal plans."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that ``path`` never holds half of it. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}", delete=False) as file:
        try:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_json(path: Path) -> Any:
    """What ``path`` holds. Raises ConfigError where it is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"compare: {path} is damaged ({error}). Next step: remove it") from None


def open_directory(directory: Path, plan: Planned, commit: str) -> None:
    """Make ``directory`` that of ``plan``, or go on in it.

    Args:
        commit: of this package.

    Raises:
        ConfigError: it holds another plan, another commit's starts or other files, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _PLAN
        if not path.exists():
            if any(directory.iterdir()):
                raise ConfigError(f"compare: {directory} holds other files. Next step: name a new directory")
            write_json(path, {"format": _FORMAT, "commit": commit, "plan": plan.as_dict()})
            return
    except OSError as error:
        raise ConfigError(f"compare: {directory} cannot be written: {error}") from None
    kept = read_json(path)
    if kept.get("format") != _FORMAT or kept.get("plan") != plan.as_dict():
        different = _difference(kept.get("plan", {}), plan.as_dict())
        raise ConfigError(
            f"compare: {directory} holds another comparison ({different}). "
            "Next step: name a new directory, or give the same options"
        )
    if kept["commit"] != commit and missing_starts(directory, plan):
        raise ConfigError(
            f"compare: {directory} was begun with commit {kept['commit'] or 'unknown'}, this is {commit or 'unknown'}: "
            "starts of both do not compare. Next step: name a new directory"
        )


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first field of two plans that differs."""
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            for field in {**value, **before}:
                if before.get(field) != value.get(field):
                    return f"{field} {before.get(field)}, now {value.get(field)}"
        elif before != value:
            return f"{name} {before}, now {value}"
    return "another format"


def start_file(directory: Path, number: int) -> Path:
    """Where start ``number``, from 1, is kept."""
    return directory / f"start-{number}.json"


def missing_starts(directory: Path, plan: Planned) -> list[int]:
    """The starts of ``plan`` that have not finished, by number from 1."""
    return [number for number in range(1, plan.starts + 1) if not start_file(directory, number).exists()]


def read_starts(directory: Path, plan: Planned, given: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What each start of ``plan`` measured.

    Args:
        given: fields that must be the same in all.

    Raises:
        ConfigError: one is missing, damaged, of another plan, or was given something else.
    """
    missing = missing_starts(directory, plan)
    if missing:
        raise ConfigError(f"compare: starts {missing} have not finished. Next step: run the same command again")
    starts = [read_json(start_file(directory, number)) for number in range(1, plan.starts + 1)]
    for start in starts:
        if start.get("plan") != plan.digest:
            raise ConfigError(f"compare: start {start.get('start')} in {directory} is of another plan: remove it")
    for field in given:
        if len({start[field] for start in starts}) != 1:
            raise ConfigError(
                f"compare: the starts in {directory} were not given the same {field}: a trace or the package has "
                "changed between them. Next step: name a new directory"
            )
    return starts
