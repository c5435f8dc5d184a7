"""Kernels of normal mode without what they hold: compiled, and noticed on the model machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
sources = pytest.importorskip("tests.ptx.faults.sources", reason="needs Triton")

from tests.ptx.faults.judge import raised  # noqa: E402
from tests.ptx.faults.normal_sources import FAULTS, Fault  # noqa: E402
from tests.ptx.faults.scenes import WITHIN  # noqa: E402
from tests.ptx.product import trials  # noqa: E402
from tests.ptx.product.test_normal import BETWEEN_NODES, SHAPES, compiled  # noqa: E402

#: Of three tokens at least each rank has rows in both channels.
_NEAR, _FAR = SHAPES["one rank is chosen"], BETWEEN_NODES["bf16"]


def _play(fault: Fault, memory: str, seed: int) -> None:
    case, nodes = (_FAR, 2) if fault.nodes else (_NEAR, 1)
    trials.exchange(compiled(memory), memory, fault.path, case, seed, fault.narrow, nodes, fault.held)


def test_every_change_finds_what_it_changes() -> None:
    for fault in FAULTS.values():
        assert sources.changed(fault.change)


@pytest.mark.model
@pytest.mark.parametrize("name", FAULTS)
def test_is_noticed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    with sources.serving(sources.changed(fault.change), tmp_path, "normal"):
        assert any(
            raised(lambda memory=memory, seed=seed: _play(fault, memory, seed))  # type: ignore[misc]
            for memory in ("weak", "sequential")
            for seed in range(WITHIN)
        )


@pytest.mark.model
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.held])
def test_as_they_are(name: str) -> None:
    for seed in range(2):
        _play(FAULTS[name], "weak", seed)
