"""Dispatches and combines small enough for compute-sanitizer: ``python tests/gpu/sanitized.py [interpreter]``.

Two ranks, each a process that this one starts, so that a sanitizer which follows children checks both. Every kernel
inside a node runs, in both modes, over device memory that the peer maps and through rings to proxies, and the result is
verified against the oracle. A sanitizer slows kernels down a hundred times, hence the deadline of ten minutes.
"""

from __future__ import annotations

import datetime
import subprocess
import sys

RANKS = 2


def serve(device: str, rank: int, port: int) -> None:
    """One rank. ``device``: cuda, or interpreter for Triton's on CPU tensors."""
    import torch
    import torch.distributed as dist

    from tests.support import gpu_bodies, ll_cases, normal_cases
    from uccl_ep_serving.check.paths import PATHS
    from uccl_ep_serving.control_plane.bootstrap import StoreExchange

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=600))
    low_latency = [
        ll_cases.Case(),
        ll_cases.Case(reduced=False, routing="holes"),
        ll_cases.Case(fp8=True, hidden=256),
    ]
    normal = [
        normal_cases.Case(tokens=(9, 6), experts=8),
        normal_cases.Case(tokens=(0, 7), experts=8, dtype=torch.float8_e4m3fn),
    ]
    for path in ("ipc", "shm"):
        for body, cases in (
            (gpu_bodies.against_the_oracle, low_latency),
            (gpu_bodies.normal_against_the_oracle, normal),
        ):
            name = f"{body.__name__} over {path}"
            exchange = StoreExchange(store, rank, RANKS, name)
            slow = {"timeout": 600.0, "connect_timeout": 600.0}
            body(exchange, {**PATHS[path], **slow, "device": device}, cases)
            # one write: the ranks share the pipe
            sys.stdout.write(f"sanitized: rank {rank}: {name}\n")
            sys.stdout.flush()


def main() -> int:
    """0 when every rank has ended well."""
    device, *rank = sys.argv[1:] or ["cuda"]
    if rank:
        serve(device, *map(int, rank))
        return 0
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, device]
    ranks = [subprocess.Popen([*command, str(rank), str(store.port)]) for rank in range(RANKS)]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
