"""Random operations of both modes among two ranks on the GPU: ``python tests/gpu/soak.py SECONDS [SEED]``.

Over windows that peers map and over proxies, half of the time each. Prints JSON; exit status 1 when a result is wrong
or memory grows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

# after the path
import gpu_bodies
from gpu_ranks import GpuRanks


def main() -> int:
    """0 when all is well."""
    seconds, seed = float(sys.argv[1]) / 2, int(sys.argv[2]) if len(sys.argv) > 2 else 1
    pool, found, failed = GpuRanks(), {}, 0
    for path in ("ipc", "shm"):
        try:
            found[path] = pool.run(2, gpu_bodies.soak, gpu_bodies.PATHS[path], seconds, seed, timeout=seconds + 110)
        except AssertionError as error:
            failed, found[path] = 1, {"failed": str(error)[-2000:]}
    pool.close()
    print(json.dumps({"seconds": 2 * seconds, "seed": seed, **found}, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
