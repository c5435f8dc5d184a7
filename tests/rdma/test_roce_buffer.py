"""Both modes of a Buffer on two ranks over real RC verbs, data checked against what the experts must return."""

from __future__ import annotations

import datetime
import multiprocessing
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(400)]

OVERRIDES = {
    "transport": "roce",
    "direct": False,
    "nics": "rxe",
    # a second before anything is sent again: emulation is slow
    "nic_timeout": 18,
    "timeout": 60.0,
    "connect_timeout": 60.0,
    "heap_bytes": 8 << 20,
    "round_bytes": 1 << 20,
}


def _serve(rank: int, path: str, overrides: dict[str, Any], answers: Any) -> None:
    import torch.distributed as dist

    from tests.support import bodies
    from uccl_ep_serving.control_plane.bootstrap import StoreExchange

    try:
        store = dist.FileStore(path, 2)
        store.set_timeout(datetime.timedelta(seconds=60))
        start = time.monotonic()
        stats = bodies.both_modes(StoreExchange(store, rank, 2), overrides, 2)
        answers.put((rank, stats["transport_by_peer"], stats["bytes_sent"], time.monotonic() - start))
    except BaseException:
        answers.put((rank, traceback.format_exc(), 0, 0.0))


@pytest.mark.parametrize("settings", [{}, {"proxies": 2, "channels": 2, "nic_qps": 2}], ids=["plain", "two of each"])
def test_both_modes_over_reliable_connections(settings: dict[str, Any], tmp_path: Path) -> None:
    # imported once and inherited: torch takes most of a minute under emulation
    from tests.support import bodies  # noqa: F401

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=_serve, args=(rank, str(tmp_path / "store"), OVERRIDES | settings, answers), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = sorted(answers.get(timeout=240) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    for rank, ways, nbytes, seconds in found:
        assert ways == {str(1 - rank): "roce"}, ways
        assert nbytes > 0
        print(f"rank {rank}: {nbytes} bytes in {seconds:.1f} s")
