"""What is compared, of backends by themselves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.compare.directory import FEWEST_STARTS, lasting
from uccl_ep_serving.compare.names import BACKENDS
from uccl_ep_serving.errors import ConfigError

__all__ = ["Plan", "distinct", "given"]

#: How variables begin that a launcher sets anew for each launch.
_OF_LAUNCHERS = ("OMPI_MCA_", "PRTE_MCA_")
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
        object.__setattr__(self, "backends", distinct(self.backends))
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


def given(start: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all starts: hosts and ranks, versions, devices, variables, and a trace."""
    environment = start["environment"].items()
    return {
        "trace": start["trace"],
        "devices": start["devices"],
        "environment": {name: value for name, value in environment if not name.startswith(_OF_LAUNCHERS)},
        **{f"host {number}": lasting(one) for number, one in enumerate(start["machines"])},
    }


def distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """``names``, of which one that comes again gets "#2", "#3" behind it."""
    found: list[str] = []
    for name in names:
        again = sum(Plan.backend_of(one) == name for one in found)
        found.append(f"{name}#{again + 1}" if again else name)
    return tuple(found)
