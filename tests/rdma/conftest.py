"""Transports over verbs. The contract of ``tests/proxy`` and the in-memory providers serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / name) for name in ("rdma/provider", "proxy", "kernels", "topology")]
