"""Dispatches and combines small enough for compute-sanitizer: ``python tests/gpu/sanitized.py``.

Two ranks, each a process that this one starts, so that a sanitizer which follows children checks both. Every kernel
runs, over device memory that the peer maps and through rings to proxies, and the result is held against the oracle.
A sanitizer slows kernels down a hundred times, hence the deadline of ten minutes.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

for place in ("kernels", "system"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / place))

RANKS = 2


def serve(rank: int, port: int) -> None:
    """One rank."""
    import gpu_bodies
    import torch.distributed as dist
    from ll_cases import Case

    from uccl_ep_serving.bootstrap import StoreExchange

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=600))
    cases = [Case(), Case(reduced=False, routing="holes"), Case(fp8=True, hidden=256)]
    for path in ("ipc", "shm"):
        exchange = StoreExchange(store, rank, RANKS, path)
        overrides = {**gpu_bodies.PATHS[path], "timeout": 600.0, "connect_timeout": 600.0}
        gpu_bodies.against_the_oracle(exchange, overrides, cases)


def main() -> int:
    """0 when every rank has ended well."""
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), int(sys.argv[2]))
        return 0
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(store.port)]) for rank in range(RANKS)]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
