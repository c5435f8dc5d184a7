"""Workload cards: what one benchmark run does, as the command line or a table of plain values says it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uccl_ep_serving.errors import ConfigError

__all__ = ["DTYPES", "MODES", "PATHS", "PEERS", "TRACE", "UNIFORM", "ZIPF", "Card"]

MODES = ("low-latency", "normal")
#: How ranks reach each other, and the settings that make it so.
PATHS: Mapping[str, Mapping[str, Any]] = {
    "direct": {"direct": True, "transport": "auto"},
    "shm": {"direct": False, "transport": "shm"},
    "tcp": {"direct": False, "transport": "tcp"},
    "efa": {"direct": False, "transport": "efa"},
    "roce": {"direct": False, "transport": "roce"},
}
PEERS = ("gloo", "mpi", "nccl", "deepep")
#: Names of torch dtypes; "fp8" is e4m3 with a float32 scale per 128 values.
DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32", "fp8": "float8_e4m3fn"}
#: Kinds of routes: evenly over the experts; "zipf:S", skewed by the exponent S; "trace:FILE[:LAYER]", recorded.
UNIFORM, ZIPF, TRACE = "uniform", "zipf", "trace"
_SCALE_BLOCK = 128
#: More tokens, or values of one, are a slip; a larger seed does not fit the generators made of it.
_MOST_TOKENS, _MOST_SEED = 1 << 24, 1 << 40


@dataclass(frozen=True, slots=True)
class Card:
    """One workload. All ranks have the same number of tokens.

    Attributes:
        name: of the result file.
        mode: one of :data:`MODES`.
        paths: some of :data:`PATHS`, measured in the same run.
        against: some of :data:`PEERS`, measured in the same run, each skipped with its reason where it cannot run.
        ranks: EP ranks.
        tokens: tokens per rank.
        hidden: values per token.
        experts, topk: of the model; experts is a multiple of ranks.
        dtype: one of :data:`DTYPES`: of the rows of a dispatch. Rows of a combine are bf16 when it is fp8.
        weights_at_dispatch: low latency only: router weights travel with the dispatch, and one row returns per
            (token, rank).
        iterations: measured calls of each phase and subject. warmup: rounds before them.
        repeat: 1: a measured call starts at the same instant on all ranks, from rest. More: so many rounds of all
            phases follow one another without a pause, as in a loop over layers, and a sample is the mean of a phase.
        seed: of inputs and routing.
        route: who chooses which experts: "uniform", "zipf:S" with the exponent S (the i-th most popular expert is
            chosen in proportion to 1 / i**S), or "trace:FILE[:LAYER]", from a routing trace or a directory of them.
    """

    name: str = "custom"
    mode: str = "normal"
    paths: tuple[str, ...] = ("direct",)
    against: tuple[str, ...] = ("gloo",)
    ranks: int = 2
    tokens: int = 128
    hidden: int = 7168
    experts: int = 64
    topk: int = 8
    dtype: str = "bf16"
    weights_at_dispatch: bool = True
    iterations: int = 20
    warmup: int = 3
    repeat: int = 1
    seed: int = 0
    route: str = UNIFORM

    def __post_init__(self) -> None:
        self._check_choices()
        for field in ("ranks", "experts", "topk", "iterations", "repeat"):
            if getattr(self, field) < 1:
                raise ConfigError(f"card {self.name}: {field} = {getattr(self, field)} must be at least 1")
        for field, least, most in (("tokens", 1, _MOST_TOKENS), ("hidden", 1, _MOST_TOKENS), ("seed", 0, _MOST_SEED)):
            if not least <= getattr(self, field) <= most:
                raise ConfigError(f"card {self.name}: {field} = {getattr(self, field)} must be in {least}..{most}")
        if self.warmup < 0:
            raise ConfigError(f"card {self.name}: warmup = {self.warmup} must not be negative")
        if self.experts % self.ranks:
            raise ConfigError(f"card {self.name}: {self.experts} experts cannot be shared by {self.ranks} ranks evenly")
        if self.topk > self.experts:
            raise ConfigError(f"card {self.name}: topk = {self.topk} of only {self.experts} experts")
        if self.dtype == "fp8" and self.hidden % _SCALE_BLOCK:
            raise ConfigError(f"card {self.name}: fp8 needs hidden = {self.hidden} to be a multiple of {_SCALE_BLOCK}")
        if self.hidden * self.element_bytes % 16:
            raise ConfigError(
                f"card {self.name}: a row of {self.hidden * self.element_bytes} bytes is no multiple of 16"
            )

    def _check_choices(self) -> None:
        choices = (
            ("mode", (self.mode,), MODES),
            ("path", self.paths, tuple(PATHS)),
            ("against", self.against, PEERS),
            ("dtype", (self.dtype,), tuple(DTYPES)),
        )
        for name, given, allowed in choices:
            wrong = sorted(set(given) - set(allowed))
            if wrong:
                raise ConfigError(f"card {self.name}: {name} {', '.join(wrong)}: must be among {', '.join(allowed)}")
        self._check_route()
        if not self.paths:
            raise ConfigError(f"card {self.name}: no path to measure; choose among {', '.join(PATHS)}")

    def _check_route(self) -> None:
        kind, _, what = self.route.partition(":")
        if kind == TRACE and what:
            return
        try:
            right = self.route == UNIFORM or (kind == ZIPF and 0 < float(what) < math.inf)
        except ValueError:
            right = False
        if not right:
            raise ConfigError(
                f"card {self.name}: route {self.route!r} must be {UNIFORM}, {ZIPF}:S with an exponent S above 0 such "
                f"as {ZIPF}:1.2, or {TRACE}:FILE[:LAYER]"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one value of a dispatched row."""
        return {"f32": 4, "fp8": 1}.get(self.dtype, 2)

    @property
    def row_bytes(self) -> int:
        """Bytes of a dispatched row: values and scales."""
        scales = self.hidden // _SCALE_BLOCK * 4 if self.dtype == "fp8" else 0
        return self.hidden * self.element_bytes + scales

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a combined row."""
        return self.hidden * (2 if self.dtype == "fp8" else self.element_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a result."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Card:
        """A card from plain values; lists become tuples. Raises ConfigError for unknown fields and wrong types."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise ConfigError(f"card {values.get('name', '?')}: unknown fields {', '.join(unknown)}")
        chosen: dict[str, Any] = {}
        for name, value in values.items():
            default = fields[name].default
            plain = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
            if type(plain) is not type(default):
                raise ConfigError(
                    f"card {values.get('name', '?')}: {name} = {value!r} must be of type {type(default).__name__}"
                )
            chosen[name] = plain
        return cls(**chosen)
