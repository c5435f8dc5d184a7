"""The ranks of ``tests/system`` and the cases of ``tests/kernels`` serve here too; rank processes inherit the path."""

from __future__ import annotations

import sys
from pathlib import Path

for place in ("kernels", "system"):
    sys.path.insert(0, str(Path(__file__).parents[1] / place))
