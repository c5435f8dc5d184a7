"""What is compared, and the directory that holds it: one file per start, so that an interrupted comparison goes on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.compare.names import BACKENDS
from uccl_ep_serving.errors import ConfigError

__all__ = ["FEWEST_STARTS", "Plan", "missing_starts", "open_directory", "read_starts", "write_json"]

#: How starts differ does not show in fewer.
FEWEST_STARTS = 3
_FORMAT = 1
_PLAN = "plan.json"
#: Fields of a card that say how `uccl-ep bench` opens what it measures.
_OF_BENCH = ("paths", "against", "name")
_AGAIN = re.compile(r"#\d+$")


@dataclass(frozen=True, slots=True)
class Plan:
    """One comparison.

    Attributes:
        card: the workload; its iterations are the measured rounds of a start, its repeat the layers that follow one
            another without a pause in each sample.
        backends: who is measured, the first beside every other one. A name given twice is opened twice: the second,
            NAME#2, shows what the method says of equals.
        starts: how often all processes are started anew.
        slowed: percent by backend: each of its calls is lengthened by that much of its own time, to try the method.
    """

    card: Card
    backends: tuple[str, ...]
    starts: int = 5
    slowed: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.starts < FEWEST_STARTS:
            raise ConfigError(f"compare: {self.starts} starts say nothing of how starts differ: {FEWEST_STARTS} do")
        if len(self.backends) < 2:
            raise ConfigError("compare: name at least two backends, the one in question first")
        if self.card.iterations < 2:
            raise ConfigError(f"compare: {self.card.iterations} rounds a start are too few")
        object.__setattr__(self, "backends", _distinct(self.backends))
        strange = sorted({name for name in map(self.backend_of, self.backends) if name not in BACKENDS})
        if strange:
            raise ConfigError(f"compare: no backend {', '.join(strange)}; there are {', '.join(BACKENDS)}")
        unknown = sorted(set(self.slowed or {}) - set(self.backends))
        if unknown:
            raise ConfigError(f"compare: slowed, but not compared: {', '.join(unknown)}")
        if any(not 0 <= percent <= 1000 for percent in (self.slowed or {}).values()):
            raise ConfigError("compare: a backend is slowed by 0 to 1000 %")

    @staticmethod
    def backend_of(name: str) -> str:
        """The backend of a name of :attr:`backends`: the name itself but for "#2"."""
        return _AGAIN.sub("", name)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        card = {name: value for name, value in self.card.as_dict().items() if name not in _OF_BENCH}
        return {
            "card": card,
            "backends": list(self.backends),
            "starts": self.starts,
            "slowed": dict(self.slowed or {}),
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Plan:
        """A plan from plain values. Raises ConfigError."""
        card = Card.from_mapping({"name": "compare", **values["card"]})
        return cls(card, tuple(values["backends"]), values["starts"], values["slowed"])

    @property
    def digest(self) -> str:
        """Equal for equal plans."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        again = sum(Plan.backend_of(one) == name for one in found)
        found.append(f"{name}#{again + 1}" if again else name)
    return tuple(found)


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


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"compare: {path} is damaged ({error}). Next step: remove it") from None


def open_directory(directory: Path, plan: Plan, commit: str) -> None:
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
    kept = _read(path)
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
        if name == "card":
            for field, wanted in value.items():
                if old.get("card", {}).get(field) != wanted:
                    return f"{field} {old.get('card', {}).get(field)}, now {wanted}"
        elif old.get(name) != value:
            return f"{name} {old.get(name)}, now {value}"
    return "another format"


def start_file(directory: Path, number: int) -> Path:
    """Where start ``number``, from 1, is kept."""
    return directory / f"start-{number}.json"


def missing_starts(directory: Path, plan: Plan) -> list[int]:
    """The starts of ``plan`` that have not finished, by number from 1."""
    return [number for number in range(1, plan.starts + 1) if not start_file(directory, number).exists()]


def read_starts(directory: Path, plan: Plan) -> list[dict[str, Any]]:
    """What each start of ``plan`` measured. Raises ConfigError when one is missing, damaged or of another plan."""
    missing = missing_starts(directory, plan)
    if missing:
        raise ConfigError(f"compare: starts {missing} have not finished. Next step: run the same command again")
    starts = [_read(start_file(directory, number)) for number in range(1, plan.starts + 1)]
    for start in starts:
        if start.get("plan") != plan.digest:
            raise ConfigError(f"compare: start {start.get('start')} in {directory} is of another plan: remove it")
    for given in ("routing", "inputs"):
        if len({start[given] for start in starts}) != 1:
            raise ConfigError(
                f"compare: the starts in {directory} were not given the same {given}: a trace or the package has "
                "changed between them. Next step: name a new directory"
            )
    return starts
