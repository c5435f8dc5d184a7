"""A fake of a load client, which writes what that of SGLang does after requests of two output tokens:
``python fake_client.py RESULT REQUESTS SEED SPEED STATUS MISSING``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    result, requests = sys.argv[1], int(sys.argv[2])
    seed, speed, status, missing = map(float, sys.argv[3:7])
    wobble = 1 + (seed % 7) / 100
    figures = {
        "completed": requests - int(missing), "duration": 1.0, "total_output_tokens": 2 * requests,
        "errors": ["", "broke off"],
        "output_throughput": 100 * speed * wobble,
        "median_ttft_ms": 10 / speed * wobble, "p99_ttft_ms": 20 / speed * wobble,
        "median_tpot_ms": 1 / speed * wobble, "p99_tpot_ms": 2 / speed * wobble,
    }  # fmt: skip
    with Path(result).open("a") as file:
        file.write(json.dumps(figures) + "\n")
    if status:
        print("Traceback ...\nRuntimeError: the client fell over", file=sys.stderr)
    sys.exit(int(status))


if __name__ == "__main__":
    main()
