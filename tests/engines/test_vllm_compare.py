"""``uccl-ep compare-serving`` with real vLLM servers and ``vllm bench serve``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.compared import check_comparison

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_its_servers_are_compared(tmp_path: Path) -> None:
    check_comparison("vllm", "allgather_reducescatter", tmp_path)
