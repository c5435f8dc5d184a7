"""What SGLang's DeepEP dispatcher, which serves CUDA as well, does with a Buffer: ours takes every call of it."""

from __future__ import annotations

import pytest
from deepep_calls import Use, engine_file, fits, uses

pytestmark = pytest.mark.engine

#: Without these the reader of calls would have overlooked something.
EXPECTED = {
    "__init__",
    "capture",
    "clean_low_latency_buffer",
    "combine",
    "dispatch",
    "get_combine_config",
    "get_dispatch_config",
    "get_dispatch_layout",
    "get_low_latency_rdma_size_hint",
    "group_size",
    "low_latency_combine",
    "low_latency_dispatch",
    "low_latency_mode",
    "num_sms",
}


@pytest.fixture(scope="module")
def found() -> list[Use]:
    return uses(engine_file("sglang", "srt/layers/moe/token_dispatcher/deepep.py").read_text())


def test_every_use_fits(found: list[Use]) -> None:
    assert [fits(use) for use in found if fits(use)] == []
    assert {use.name for use in found} == EXPECTED


def test_keywords_in_dictionaries_are_read(found: list[Use]) -> None:
    named = {use.name: use.keywords for use in found if use.positional >= 0}
    assert {"use_fabric", "num_qps_per_rank"} <= named["__init__"]
    assert {"overlap", "comp_signal", "src_signals"} <= named["low_latency_combine"]
    assert {"use_nvfp4", "use_ue8m0"} <= named["low_latency_dispatch"]


def test_what_is_missing_is_found() -> None:
    source = """
def step(buffer, x):
    options = dict(use_mxfp8=True)
    buffer.low_latency_dispatch(x, x, 8, 8, **options)
    buffer.low_latency_dispatch(x)
    buffer.synchronize()
    return buffer.num_nodes
"""
    words = ["use_mxfp8", "missing a required argument", "synchronize is missing", "num_nodes is missing"]
    wrong = [fits(use) for use in uses(source)]
    assert len(wrong) == len(words)
    for fault, word in zip(wrong, words, strict=True):
        assert word in fault
