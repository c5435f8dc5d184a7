"""Normal mode on a GPU: ranks as processes that share the one device, against the same oracle.

These have not run yet: no machine of the project has had a GPU. ``make test-gpu`` runs them where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gpu_bodies
import pytest
import torch
from normal_cases import Case
from ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

#: No heap to speak of, and landing slots of a few rows: everything goes in rounds.
ROUNDS: dict[str, Any] = {"heap_bytes": 4096, "round_bytes": 1 << 20, "chunk_bytes": 65536}


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Ranks]:
    """Rank processes that each have a context of their own on the device."""
    pool = Ranks()
    yield pool
    pool.close()


def cases_of(ranks: int) -> list[Case]:
    """Even and uneven ranks, FP8 and BF16."""
    tokens = tuple((40, 0, 133, 7)[rank % 4] for rank in range(ranks))
    return [
        Case(tokens=tokens, experts=4 * ranks, hidden=1024),
        Case(tokens=tokens, experts=4 * ranks, dtype=torch.float8_e4m3fn, seed=1),
        Case(tokens=tokens[::-1], experts=4 * ranks, hot=0, seed=2),
    ]


@pytest.mark.parametrize("path", gpu_bodies.PATHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_against_the_oracle(on_gpu: Ranks, ranks: int, path: str) -> None:
    on_gpu.run(ranks, gpu_bodies.normal_against_the_oracle, gpu_bodies.PATHS[path], cases_of(ranks), timeout=500)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_rounds(on_gpu: Ranks, path: str) -> None:
    overrides = {**gpu_bodies.PATHS[path], **ROUNDS}
    on_gpu.run(2, gpu_bodies.normal_against_the_oracle, overrides, cases_of(2), timeout=500)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_a_graph_replays_with_other_tokens(on_gpu: Ranks, path: str) -> None:
    on_gpu.run(2, gpu_bodies.normal_replays, gpu_bodies.PATHS[path], 10, timeout=500)
