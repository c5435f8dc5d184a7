"""What became of the mutants that were drawn: kept in ``benchmarks/results/mutants.json``, summed up by area."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.mutants.draw import Mutant
from tests.mutants.trial import KILLED, SURVIVED, TIMEOUT, Outcome

__all__ = ["EQUIVALENT", "QUICK", "SLOW", "Record", "area_of", "is_for_devices", "sums"]

EQUIVALENT = "equivalent"
#: Markers of the tests that every mutant meets, and of those that one of code for devices meets when it survives them.
QUICK, SLOW = "not slow", "interpreter or triton"
_TOOLS = ("bench", "check", "cli", "compare", "demo", "preflight", "traffic")


def area_of(file: str) -> str:
    """Area of a file of the product, as the table has them."""
    parts = file.split("/")
    if parts[0] == "proxy":
        return "transports" if parts[1] == "transport" else "proxy"
    if parts[0] == "kernels":
        return "kernels/triton" if parts[1] == "triton" else "kernels/cpu"
    if parts[1] == "engines":
        return "engines"
    return "tools" if parts[1] in _TOOLS else "uccl_ep_serving"


def is_for_devices(file: str) -> bool:
    """True for what runs on a GPU, or prepares that, of which Triton's interpreter tests the most in slow suites."""
    return re.search(r"triton/|gpu|device|/check/", file) is not None


class Record:
    """The mutants of all seeds, in the order in which they were tried.

    Args:
        path: of the JSON file; made where it is not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.mutants: list[dict[str, Any]] = json.loads(path.read_text())["mutants"] if path.exists() else []

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        """What is known of ``mutant``."""
        return next((one for one in self.mutants if one["id"] == mutant.id), None)

    def keep(self, seed: int, mutant: Mutant, outcome: Outcome, commit: str) -> None:
        """Write what became of ``mutant``, in place of what was known of it; what became of it first is kept, of which
        slow tests have no part."""
        entry = {
            "id": mutant.id,
            "seed": seed,
            "commit": commit,
            "area": area_of(mutant.file),
            **{name: getattr(mutant, name) for name in ("file", "line", "kind", "before", "after")},
            **outcome._asdict(),
        }
        known = self.of(mutant)
        if known is None:
            self.mutants.append(entry | {"first": SURVIVED if outcome.suite == SLOW else outcome.verdict})
        else:
            known.update(entry)
        self._write()

    def excuse(self, identity: str, reason: str) -> None:
        """A survivor is equivalent: nothing can tell it from what stands there. Raises ValueError when it is none."""
        known = next((one for one in self.mutants if one["id"] == identity), None)
        if known is None or known["verdict"] not in (SURVIVED, EQUIVALENT):
            raise ValueError(f"{identity} is no survivor")
        known.update(verdict=EQUIVALENT, reason=reason)
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps({"mutants": self.mutants}, indent=1) + "\n")


def sums(mutants: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """By area (and "all") how many mutants ended how, how many the quick tests killed when they were first tried
    ("first"), and how many only slow tests tell ("slow")."""
    found: dict[str, dict[str, int]] = {}
    entries = list(mutants)
    for area in [*sorted({one["area"] for one in entries}), "all"]:
        mine = [one for one in entries if area in (one["area"], "all")]
        verdicts = [one["verdict"] for one in mine]
        found[area] = {verdict: verdicts.count(verdict) for verdict in (KILLED, TIMEOUT, SURVIVED, EQUIVALENT)}
        found[area]["first"] = sum(one["first"] != SURVIVED for one in mine)
        found[area]["slow"] = sum(one.get("suite") == SLOW and one["verdict"] in (KILLED, TIMEOUT) for one in mine)
    return found
