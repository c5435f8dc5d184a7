"""The long run: ``make soak``, or ``python tests/soak --help``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in (".", "soak", "kernels", "system")]

if __name__ == "__main__":
    from soak_command import app

    app()
