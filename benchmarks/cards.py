"""What ``cards.toml`` says: the cards that `make bench` runs, and the targets, with whether a result meets them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.errors import ConfigError

__all__ = ["Target", "load_cards", "load_targets", "missed_reasons", "target_rows"]

#: What is said of a target.
MET, MISSED, CANNOT_TELL, NOT_MEASURED = "met", "missed", "cannot tell", "not measured"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one value of a result, or on the quotient of two.

    Attributes:
        words: what the value is.
        result: name of the result.
        value: one or two lists of keys into it, joined by "/".
        at_most, at_least: the bound; exactly one of them.
        missed: what bounds the figure and where the time goes; shown only while the target is missed.
        interval: where the result has the interval of the value, "low" and "high" below it: only one that lies on one
            side of the bound meets or misses it.
    """

    words: str
    result: str
    value: tuple[str, ...]
    at_most: float | None = None
    at_least: float | None = None
    missed: str = ""
    interval: str = ""

    def __post_init__(self) -> None:
        if len(self.value) not in (1, 2) or (self.at_most is None) == (self.at_least is None):
            raise ConfigError(f"target {self.words!r}: one or two values, and either at_most or at_least")

    def measured(self, results: Mapping[str, Any]) -> float | None:
        """The value, or None when the result has none (a peer was skipped, the card was not run)."""
        places = [self._place(results, keys) for keys in self.value]
        if any(place is None for place in places):
            return None
        found = [float(place) for place in places]
        if len(found) == 1:
            return found[0]
        return found[0] / found[1] if found[1] else None

    def _place(self, results: Mapping[str, Any], keys: str) -> Any:
        """What stands in the result under ``keys``; None where nothing does."""
        place: Any = results.get(self.result, {})
        for key in keys.split("/"):
            if not isinstance(place, Mapping) or key not in place:
                return None
            place = place[key]
        return place

    def verdict(self, results: Mapping[str, Any]) -> str:
        """MET, MISSED, CANNOT_TELL or NOT_MEASURED."""
        measured = self.measured(results)
        if measured is None:
            return NOT_MEASURED
        ends = [measured]
        if self.interval:
            interval = self._place(results, self.interval)
            ends = [float(interval["low"]), float(interval["high"])]
        within = {self._within(end) for end in ends}
        return CANNOT_TELL if len(within) > 1 else MET if True in within else MISSED

    def _within(self, measured: float) -> bool:
        if self.at_most is not None:
            return measured <= self.at_most
        return self.at_least is not None and measured >= self.at_least


def load_cards(path: Path) -> list[Card]:
    """Cards of a TOML file: ``[[card]]`` tables; a table ``[defaults]`` fills what a card leaves out, and
    ``[[target]]`` tables are left to :func:`load_targets`.

    Raises:
        ConfigError: unreadable, no card, two of one name, or a card that contradicts itself.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    unknown = sorted(set(document) - {"card", "defaults", "target"})
    if unknown:
        raise ConfigError(f"{path}: unknown tables {', '.join(unknown)}; a card is a [[card]] table")
    cards = [Card.from_mapping({**document.get("defaults", {}), **table}) for table in document.get("card", [])]
    names = [card.name for card in cards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not cards:
        raise ConfigError(f"{path}: {'several cards are named ' + ', '.join(twice) if twice else 'no card'}")
    return cards


def load_targets(path: Path) -> list[Target]:
    """The ``[[target]]`` tables of a file of cards. Raises ConfigError."""
    try:
        tables = tomllib.loads(path.read_text()).get("target", [])
        return [Target(**{**table, "value": tuple(table.get("value", ()))}) for table in tables]
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def target_rows(targets: Iterable[Target], results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: what was expected, what was measured, and whether it is enough."""
    rows = []
    for target in targets:
        measured = target.measured(results)
        bound = f"at most {target.at_most:g}" if target.at_most is not None else f"at least {target.at_least:g}"
        shown = "-" if measured is None else f"{measured:.3g}"
        rows.append([target.words, target.result, bound, shown, target.verdict(results)])
    return ["target", "result", "bound", "measured", "verdict"], rows


def missed_reasons(targets: Iterable[Target], results: Mapping[str, Any]) -> list[str]:
    """One line for every target that is measured and missed: what was measured, at which commit, and why.

    The reasons are those of today's code, the figure may be of an older commit.
    """
    lines = []
    for target in targets:
        measured = target.measured(results)
        if measured is not None and target.verdict(results) == MISSED:
            commit = results[target.result].get("machine", {}).get("commit")
            figure = f"{measured:.3g} at commit {commit}" if commit else f"{measured:.3g}"
            lines.append(f"{target.words} ({figure}): {' '.join(target.missed.split()) or 'not explained yet'}")
    return lines
