"""Low-latency mode on a GPU: ranks as processes that share the one device, against the same oracle.

``make test-gpu`` runs them; what a GPU has said is in benchmarks/results/gpu.json.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import gpu_bodies
from tests.support.gpu_ranks import GpuRanks
from tests.support.ll_cases import Case
from tests.support.ll_replay import FORMS
from uccl_ep_serving.check.paths import PATHS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WIRE_FORMATS: list[dict[str, Any]] = [
    {},
    {"reduced": False},
    {"fp8": True, "hidden": 256},
    {"fp8": True, "hidden": 512, "ue8m0": True},
]


def cases_of(ranks: int) -> list[Case]:
    """Every format, and routing with holes from ranks that have no tokens."""
    cases = [Case(ranks=ranks, experts=4 * ranks, **form) for form in WIRE_FORMATS]
    cases.append(Case(ranks=ranks, experts=4 * ranks, counts=(8, 0, 3), routing="holes"))
    cases.append(Case(ranks=ranks, dtype=torch.float32))
    return cases


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_against_the_oracle(on_gpu: GpuRanks, ranks: int, path: str) -> None:
    on_gpu.run(ranks, gpu_bodies.against_the_oracle, PATHS[path], cases_of(ranks), timeout=500)


@pytest.mark.parametrize(("ranks", "node_ranks"), [(4, 2), (8, 4)])
def test_between_simulated_nodes(on_gpu: GpuRanks, ranks: int, node_ranks: int) -> None:
    """To some peers kernels write themselves, to others proxies do, in one operation."""
    overrides = {**gpu_bodies.NODES, "node_ranks": node_ranks}
    on_gpu.run(ranks, gpu_bodies.against_the_oracle, overrides, cases_of(ranks), timeout=500)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
def test_graph_replays_with_other_tokens(on_gpu: GpuRanks, path: str, form: str) -> None:
    on_gpu.run(2, gpu_bodies.replays, PATHS[path], form, 20, timeout=300)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_streams_and_events(on_gpu: GpuRanks, path: str) -> None:
    on_gpu.run(2, gpu_bodies.streams, PATHS[path], timeout=300)


@pytest.mark.parametrize("path", PATHS)
def test_a_silent_peer_is_named_and_the_gpu_stays_usable(on_gpu: GpuRanks, path: str) -> None:
    found = on_gpu.run(2, gpu_bodies.silent_peer, PATHS[path], timeout=300)[0]
    assert found == ("PeerTimeout", 1, True)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_a_peer_that_replays_no_graph_is_named(on_gpu: GpuRanks, path: str) -> None:
    found = on_gpu.run(2, gpu_bodies.silent_peer_of_replays, PATHS[path], timeout=300)[0]
    assert found == ("PeerTimeout", 1, True)
