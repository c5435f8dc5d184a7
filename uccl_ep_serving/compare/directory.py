"""The directory that holds a comparison: its plan and one file per start, so that an interrupted one goes on.

One process at a time writes there, and starts that differ in what they were given or ran on are not put together.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from uccl_ep_serving.config import KEY_VARIABLE
from uccl_ep_serving.errors import ConfigError

__all__ = [
    "FEWEST_STARTS",
    "Planned",
    "begin_anew",
    "finished",
    "lasting",
    "missing_starts",
    "open_directory",
    "read_json",
    "read_starts",
    "start_file",
    "variables",
    "write_json",
]

#: How starts differ does not show in fewer.
FEWEST_STARTS = 3
_FORMAT = 2
_PLAN = "plan.json"
#: Of the variables that settings are read from.
_SETTINGS = ("UCCL_EP_", "NCCL_")
#: Of a machine, what changes from one look to the next.
_PASSING = ("when", "load", "load_after")


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


@contextlib.contextmanager
def open_directory(directory: Path, plan: Planned, machine: Mapping[str, Any]) -> Iterator[None]:
    """Make ``directory`` that of ``plan``, or go on in it; nobody else does until the end of the ``with`` block.

    Args:
        machine: this one, as bench.machine describes it: the package's version, commit and sources.

    Raises:
        ConfigError: it holds another plan, another package's starts or other files, it was begun with other variables,
            another process measures there, or it cannot be written.
    """
    version = machine["versions"].get("uccl_ep_serving", "unknown")
    package = " ".join(filter(None, (version, machine["commit"], machine.get("sources"))))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _PLAN
        if not path.exists():
            if any(directory.iterdir()):
                raise ConfigError(f"compare: {directory} holds other files. Next step: name a new directory")
            begun = {"format": _FORMAT, "package": package, "plan": plan.as_dict(), "variables": variables(_SETTINGS)}
            write_json(path, begun)
        file = path.open()
    except OSError as error:
        raise ConfigError(f"compare: {directory} cannot be written: {error}") from None
    with file:
        _alone(file.fileno(), directory)
        kept = read_json(path)
        if kept.get("format") != _FORMAT or kept.get("plan") != plan.as_dict():
            different = _difference(kept.get("plan", {}), plan.as_dict())
            raise ConfigError(
                f"compare: {directory} holds another comparison ({different}). "
                "Next step: name a new directory, or give the same options"
            )
        # also of a finished one: whoever sets a variable wants to know what it does
        before, now = kept.get("variables", {}), variables(_SETTINGS)
        if before != now:
            raise ConfigError(
                f"compare: {directory} was begun with other variables ({_difference(before, now)}). "
                "Next step: name a new directory with --output, or set them as they were"
            )
        if kept["package"] != package and missing_starts(directory, plan):
            raise ConfigError(
                f"compare: {directory} was begun with uccl_ep_serving {kept['package']}, this is {package}: starts of "
                "both do not compare. Next step: name a new directory"
            )
        yield


def variables(beginnings: tuple[str, ...]) -> dict[str, str]:
    """Variables in force by name, of those whose names begin so, but the key."""
    given = sorted(os.environ.items())
    return {name: value for name, value in given if name.startswith(beginnings) and name != KEY_VARIABLE}


def begin_anew(directory: Path) -> str:
    """The next step where a start that has been kept lacks a backend."""
    return f"Next step: mend that, and remove {directory} or name another with --output: its starts are kept"


def finished(directory: Path, plan: Planned) -> str:
    """That a command measures nothing, since all starts are there, and of which package they are; "" where some are
    missing."""
    if not (directory / _PLAN).exists() or missing_starts(directory, plan):
        return ""
    package = read_json(directory / _PLAN).get("package")
    return (
        f"nothing is measured: {directory} holds all starts already, of uccl_ep_serving {package}. Next step: "
        "name another directory with --output to measure again"
    )


def _alone(descriptor: int, directory: Path) -> None:
    """Raise ConfigError where another process holds the file. File systems that know no locks hold nobody back."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"compare: another process measures in {directory}. Next step: wait for it, or name a new directory"
        ) from None
    except OSError:
        return


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first field of two plans, or of what two starts were given, that differs; "another format" without one."""
    for name in {**new, **old}:
        before, now = old.get(name), new.get(name)
        if isinstance(now, Mapping) and isinstance(before, Mapping) and before != now:
            return _difference(before, now)
        if before != now:
            return f"{name} {before}, now {now}"
    return "another format"


def start_file(directory: Path, number: int) -> Path:
    """Where start ``number``, from 1, is kept."""
    return directory / f"start-{number}.json"


def missing_starts(directory: Path, plan: Planned) -> list[int]:
    """The starts of ``plan`` that have not finished, by number from 1."""
    return [number for number in range(1, plan.starts + 1) if not start_file(directory, number).exists()]


def read_starts(
    directory: Path, plan: Planned, given: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda start: {}
) -> list[dict[str, Any]]:
    """What each start of ``plan`` measured.

    Args:
        given: of a start, what must be the same in all, by name.

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
    first = given(starts[0])
    for start in starts[1:]:
        if (other := given(start)) != first:
            raise ConfigError(
                f"compare: start {start['start']} in {directory} was made under other conditions than start 1 "
                f"({_difference(first, other)}): they do not compare. Next step: name a new directory"
            )
    return starts


def lasting(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What a machine is, without its load and the time."""
    return {name: value for name, value in machine.items() if name not in _PASSING}
