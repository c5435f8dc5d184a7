"""Transports over verbs. The contract of ``tests/proxy`` and the in-memory providers serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "provider"), str(Path(__file__).parents[1] / "proxy")]
