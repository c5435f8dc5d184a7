"""Compile for the guest, outside of it: what takes a minute here would take most of an hour under emulation.

Run with the guest's NUMBA_CPU_NAME and UCCL_EP_CACHE_DIR; prints nothing unless something fails.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from typing import Any


def serve(rank: int, path: str, overrides: dict[str, Any], answers: Any) -> None:
    """Both modes over tcp: kernels and proxies are the same whatever the transport."""
    import torch.distributed as dist

    from tests.support import bodies
    from uccl_ep_serving.control_plane.bootstrap import StoreExchange

    answers.put(bodies.both_modes(StoreExchange(dist.FileStore(path, 2), rank, 2), overrides, 1)["rank"])


def main() -> None:
    from uccl_ep_serving.native.groups import load
    from uccl_ep_serving.preflight.turns import WIRE
    from uccl_ep_serving.proxy.service import proxy_groups

    load(*proxy_groups("roce"), WIRE)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        overrides = {"transport": "tcp", "direct": False, "heap_bytes": 8 << 20, "timeout": 300.0}
        overrides |= {"connect_timeout": 300.0}
        ranks = [
            context.Process(target=serve, args=(rank, f"{directory}/store", overrides, answers)) for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(600)
            if process.exitcode != 0:
                raise SystemExit(f"warming the cache failed: exit status {process.exitcode}")


if __name__ == "__main__":
    main()
