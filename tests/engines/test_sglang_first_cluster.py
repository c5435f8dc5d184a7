"""The lines for SGLang in docs/first-cluster.md go through SGLang's own parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.launch_lines import table_lines
from tests.engines.test_sglang_examples import engine_parse

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_sglang_takes_every_line(in_engine: Callable[..., Any]) -> None:
    lines = table_lines("docs/first-cluster.md", "sglang")
    assert list(lines) == ["one node", "two nodes, the first", "two nodes, the second", "prefill", "decode", "Ray"]
    parsed = {what: in_engine(engine_parse, line[2:]) for what, line in lines.items()}
    assert all(one["moe_a2a_backend"] == "uccl_ep" for one in parsed.values())
    assert all(one["tp_size"] == one["attn_dp_size"] == 8 * one["nnodes"] for one in parsed.values())
    assert [parsed[f"two nodes, the {which}"]["node_rank"] for which in ("first", "second")] == [0, 1]
    assert [parsed[what]["disaggregation_mode"] for what in ("prefill", "decode")] == ["prefill", "decode"]
    assert [parsed[what]["deepep_mode"] for what in ("prefill", "decode", "Ray")] == ["normal", "low_latency", "auto"]
    assert parsed["Ray"]["use_ray"]
