"""Random operations of both modes among two ranks on the GPU: ``python tests/gpu/soak.py SECONDS``.

Over windows that peers map and over proxies, half of the time each. Prints JSON; exit status 1 when a result is wrong
or memory grows.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.support import gpu_bodies
from tests.support.gpu_ranks import GpuRanks
from uccl_ep_serving.check.paths import PATHS


def main() -> int:
    """0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda", help="or interpreter: Triton's, on CPU tensors")
    options = parser.parse_args()
    pool, found, failed = GpuRanks(), {}, 0
    for path in ("ipc", "shm"):
        given = {**PATHS[path], "device": options.device}, options.seconds / 2, options.seed
        try:
            found[path] = pool.run(2, gpu_bodies.soak, *given, timeout=options.seconds / 2 + 200)
        except AssertionError as error:
            failed, found[path] = 1, {"failed": str(error)[-2000:]}
    pool.close()
    print(json.dumps({"seconds": options.seconds, "seed": options.seed, **found}, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
