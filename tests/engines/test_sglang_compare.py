"""``uccl-ep compare-serving`` with real SGLang servers and ``sglang.benchmark.serving``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.compared import check_comparison

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_its_servers_are_compared(tmp_path: Path) -> None:
    check_comparison("sglang", "none", tmp_path)
