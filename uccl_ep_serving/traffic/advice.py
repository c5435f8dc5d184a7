"""What `uccl-ep compare` has measured on this machine, kept beside the cache of compiled code, and what it advises.

A verdict compares a dispatch and its combine through this package with the same by another backend. It is of one kind
of device, group size and transport: nothing is said of others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..native.cache import places, trusted, usable

if TYPE_CHECKING:
    import torch

__all__ = ["Shape", "Verdict", "advise", "device_name", "find", "store", "transport_name"]

_log = logging.getLogger("uccl_ep_serving")

_FOLDER, _FILE = "advice", "advice.json"
_FORMAT = 1
#: Verdicts that are kept; the oldest go.
_MOST = 512
#: A measurement speaks for up to so many times as many tokens, or as few.
_NEAR = 2.0


@dataclass(frozen=True)
class Shape:
    """What decides how long an operation takes.

    Attributes:
        mode: "low-latency" or "normal".
        ranks, hidden, experts, topk: of the group and the model.
        dtype: of the dispatched rows, as torch names it: "bfloat16", "float8_e4m3fn".
        transport: :func:`transport_name`.
        device: :func:`device_name`.
        tokens: of a rank.
    """

    mode: str
    ranks: int
    hidden: int
    experts: int
    topk: int
    dtype: str
    transport: str
    device: str
    tokens: int


@dataclass(frozen=True)
class Verdict:
    """What was measured of a shape.

    Attributes:
        other: the backend compared with, as `uccl-ep compare` names it: "gloo-gather".
        ratio: time of dispatch and combine here, divided by that of ``other``: above 1 the other one is faster.
        low, high: the 95 % interval of ``ratio``.
        commit: of this package, "" when it is not known.
        when: ISO 8601.

    Raises:
        ConfigError: the ratio and its interval are no positive numbers in order.
    """

    shape: Shape
    other: str
    ratio: float
    low: float
    high: float
    commit: str
    when: str

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.ratio <= self.high < math.inf or self.shape.tokens < 0:
            raise ConfigError(f"advice: {self.ratio} in {self.low} .. {self.high} is no ratio of two times")

    @property
    def key(self) -> tuple[Any, ...]:
        """A later verdict with the same key takes the place of this one."""
        return (*dataclasses.astuple(self.shape), self.other)


def device_name(device: torch.device) -> str:
    """The kind of device of tensors: the name of a GPU, or of the processor with the number of its cores."""
    if device.type == "cuda":
        import torch

        return str(torch.cuda.get_device_name(device))
    return _cpu()


@functools.cache
def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return f"{value.strip()}, {os.cpu_count()} cores"
    return f"{platform.machine()}, {os.cpu_count()} cores"


def transport_name(stats: Mapping[str, Any]) -> str:
    """How a rank reaches its peers, from ``Buffer.stats()``: "direct", "tcp", "direct+efa"; "alone" without peers."""
    return "+".join(sorted(set(stats.get("transport_by_peer", {}).values()))) or "alone"


def store(*verdicts: Verdict) -> Path | None:
    """Keep ``verdicts``; those of the same shape and backend go, unless they are later ones. Returns the file.

    None where no directory can be written by this user and nobody else, or the disk refuses: said in one warning.
    """
    directory = next(filter(usable, places(_FOLDER)), None)
    try:
        if directory is None:
            raise OSError("no directory that this user can write and nobody else: set UCCL_EP_CACHE_DIR to one")
        path = directory / _FILE
        kept = {one.key: one for one in _read(path)}
        for one in verdicts:
            if one.key in kept and kept[one.key].when > one.when:
                continue  # a report of old starts was shown again
            kept.pop(one.key, None)
            kept[one.key] = one
        content = {"format": _FORMAT, "verdicts": [dataclasses.asdict(one) for one in list(kept.values())[-_MOST:]]}
        with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".advice", delete=False) as file:
            try:
                json.dump(content, file, indent=1)
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        _log.warning("the verdict is not kept for UCCL_EP_ADVICE: %s", error)
        return None
    return path


def _read(path: Path) -> list[Verdict]:
    """The verdicts in a file, in the order in which they were stored; [] where there is none, or it is damaged."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            return []
        return [Verdict(**{**one, "shape": Shape(**one["shape"])}) for one in content["verdicts"]]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s is damaged and counts as empty (%s: %s)", path, type(error).__name__, error)
        return []


def find(shape: Shape) -> list[Verdict]:
    """What was measured of ``shape``, newest first: with as many tokens, or nearly (within a factor of 2) where nobody
    has measured that."""
    same = dataclasses.replace(shape, tokens=0)
    known: dict[tuple[Any, ...], Verdict] = {}
    for place in filter(trusted, reversed(places(_FOLDER))):
        known |= {one.key: one for one in _read(place / _FILE) if dataclasses.replace(one.shape, tokens=0) == same}

    def distance(one: Verdict) -> float:
        return abs(math.log(max(one.shape.tokens, 1) / max(shape.tokens, 1)))

    near = [one for one in known.values() if distance(one) <= math.log(_NEAR)]
    best = min(map(distance, near), default=0.0)
    return sorted((one for one in near if distance(one) == best), key=lambda one: one.when, reverse=True)


def advise(shape: Shape) -> str:
    """In one line, whether this machine serves ``shape`` better by the engine's collectives, and by how much; "" where
    nobody has measured it here. Of several backends the fastest speaks."""
    found = find(shape)
    if not found:
        return ""
    best = max(found, key=lambda one: one.ratio)
    what = (
        f"{shape.mode.replace('-', ' ')}, {shape.tokens} x {shape.hidden} {shape.dtype}, top-{shape.topk} of "
        f"{shape.experts} experts on {shape.ranks} ranks over {shape.transport}"
    )
    measured = f"measured here with {best.shape.tokens} tokens on {best.when[:10]}"
    if best.commit:
        measured += f", commit {best.commit}"
    if best.low > 1:
        verdict = (
            f"{best.other} is {best.ratio:.2f} times as fast ({best.low:.2f} .. {best.high:.2f}), so the engine's own "
            "collectives serve it better. Next step: --moe-a2a-backend none (SGLang), --all2all-backend "
            "allgather_reducescatter (vLLM)"
        )
    elif best.high < 1:
        verdict = f"uccl_ep is {1 / best.ratio:.2f} times as fast as {best.other} "
        verdict += f"({1 / best.high:.2f} .. {1 / best.low:.2f})"
    else:
        verdict = f"no difference seen from {best.other} ({1 / best.high:.2f} .. {1 / best.low:.2f} times as fast)"
    return f"{what}: {verdict} ({measured})"
