"""The soak's modules, and the cases and rank processes that it is made of."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("kernels", "system")]
