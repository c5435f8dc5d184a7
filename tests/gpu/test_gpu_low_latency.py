"""Low-latency mode on a GPU: ranks as processes that share the one device, against the same oracle.

These have not run yet: no machine of the project has had a GPU. ``make test-gpu`` runs them where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gpu_bodies
import pytest
import torch
from ll_cases import Case
from ll_replay import FORMS
from ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WIRE_FORMATS: list[dict[str, Any]] = [
    {},
    {"reduced": False},
    {"fp8": True, "hidden": 256},
    {"fp8": True, "hidden": 512, "ue8m0": True},
]


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Ranks]:
    """Rank processes that each have a context of their own on the device."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize("path", gpu_bodies.PATHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_against_the_oracle(on_gpu: Ranks, ranks: int, path: str) -> None:
    cases = [Case(ranks=ranks, experts=4 * ranks, **form) for form in WIRE_FORMATS]
    cases += [
        Case(ranks=ranks, experts=4 * ranks, counts=(8, 0, 3), routing="holes"),
        Case(ranks=ranks, dtype=torch.float32),
    ]
    on_gpu.run(ranks, gpu_bodies.against_the_oracle, gpu_bodies.PATHS[path], cases, timeout=500)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", gpu_bodies.PATHS)
def test_graph_replays_with_other_tokens(on_gpu: Ranks, path: str, form: str) -> None:
    on_gpu.run(2, gpu_bodies.replays, gpu_bodies.PATHS[path], form, 20, timeout=300)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_streams_and_events(on_gpu: Ranks, path: str) -> None:
    on_gpu.run(2, gpu_bodies.streams, gpu_bodies.PATHS[path], timeout=300)


@pytest.mark.parametrize("path", gpu_bodies.PATHS)
def test_a_silent_peer_is_named_and_the_gpu_stays_usable(on_gpu: Ranks, path: str) -> None:
    kind, peer, works = on_gpu.run(2, gpu_bodies.silent_peer, gpu_bodies.PATHS[path], timeout=300)[0]
    assert (kind, peer, works) == ("PeerTimeout", 1, True)
