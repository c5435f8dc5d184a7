"""The lines for vLLM in docs/first-cluster.md go through vLLM's own parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.launch_lines import table_lines
from tests.engines.test_vllm_examples import engine_parse

pytestmark = pytest.mark.engine


def test_vllm_takes_every_line(in_engine: Callable[..., Any]) -> None:
    lines = table_lines("docs/first-cluster.md", "vllm")
    assert list(lines) == ["one node", "two nodes, the first", "two nodes, the second", "prefill", "decode", "Ray"]
    parsed = {what: in_engine(engine_parse, line[2:]) for what, line in lines.items()}
    assert all(one["enable_expert_parallel"] for one in parsed.values())
    assert all(one["all2all_backend"].startswith("uccl_ep") for one in parsed.values())
    assert [one["data_parallel_size"] for one in parsed.values()] == [8, 16, 16, 8, 8, 8]
    second = parsed["two nodes, the second"]
    assert (second["headless"], second["data_parallel_start_rank"]) == (True, 8)
    assert parsed["Ray"]["data_parallel_backend"] == "ray"
