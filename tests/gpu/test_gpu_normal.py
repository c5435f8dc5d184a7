"""Normal mode on a GPU: ranks as processes that share the one device, against the same oracle.

``make test-gpu`` runs them; what a GPU has said is in benchmarks/results/gpu.json.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import gpu_bodies
from tests.support.gpu_ranks import GpuRanks
from tests.support.normal_cases import Case
from uccl_ep_serving.check.paths import PATHS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

#: No heap to speak of, and two landing slots of 4 KiB for each of two ranks: everything goes in rounds.
ROUNDS: dict[str, Any] = {"heap_bytes": 4096, "round_bytes": 16384, "chunk_bytes": 4096}


def cases_of(ranks: int) -> list[Case]:
    """Even and uneven ranks, FP8 and BF16, in few shapes: each takes some seconds to compile."""
    tokens = tuple((40, 0, 133, 7)[rank % 4] for rank in range(ranks))
    return [
        Case(tokens=tokens, experts=4 * ranks),
        Case(tokens=tokens, experts=4 * ranks, dtype=torch.float8_e4m3fn, hidden=1024, seed=1),
        Case(tokens=tokens[::-1], experts=4 * ranks, hot=0, seed=2),
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_against_the_oracle(on_gpu: GpuRanks, ranks: int, path: str) -> None:
    on_gpu.run(ranks, gpu_bodies.normal_against_the_oracle, PATHS[path], cases_of(ranks), timeout=500)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("ranks", [2, 8])
def test_bulk_copies(on_gpu: GpuRanks, ranks: int, rounds: bool) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no bulk copies before sm_90")
    overrides = {**PATHS["ipc"], **(ROUNDS if rounds else {}), "copy": "tma"}
    on_gpu.run(ranks, gpu_bodies.normal_against_the_oracle, overrides, cases_of(ranks), timeout=500)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_rounds(on_gpu: GpuRanks, path: str) -> None:
    overrides = {**PATHS[path], **ROUNDS}
    cases = cases_of(2)
    for case in cases:  # both slots are used again
        assert max(case.tokens) * case.hidden * case.dtype.itemsize > 4 * 4096
    on_gpu.run(2, gpu_bodies.normal_against_the_oracle, overrides, cases, timeout=500)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_a_graph_replays_with_other_tokens(on_gpu: GpuRanks, path: str) -> None:
    on_gpu.run(2, gpu_bodies.normal_replays, PATHS[path], 10, timeout=500)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_streams_and_events(on_gpu: GpuRanks, path: str) -> None:
    on_gpu.run(2, gpu_bodies.normal_streams, PATHS[path], timeout=300)


@pytest.mark.parametrize("path", ["shm", "ipc"])
def test_a_silent_peer_is_named_and_the_gpu_stays_usable(on_gpu: GpuRanks, path: str) -> None:
    found = on_gpu.run(2, gpu_bodies.normal_silent_peer, PATHS[path], timeout=300)[0]
    assert found == ("PeerTimeout", 1, True)


@pytest.mark.parametrize("window", ["host", "device"])
@pytest.mark.parametrize(("ranks", "node_ranks"), [(4, 2), (8, 4), (8, 2)])
def test_between_simulated_nodes(on_gpu: GpuRanks, ranks: int, node_ranks: int, window: str) -> None:
    """A row crosses once to a node, over proxies or, with windows in GPU memory, written by the kernels."""
    overrides = {**gpu_bodies.NODES, "node_ranks": node_ranks, "window": window}
    on_gpu.run(ranks, gpu_bodies.normal_against_the_oracle, overrides, cases_of(ranks), True, timeout=500)


def test_a_graph_replays_between_simulated_nodes(on_gpu: GpuRanks) -> None:
    on_gpu.run(4, gpu_bodies.normal_replays, {**gpu_bodies.NODES, "node_ranks": 2}, 10, timeout=500)
