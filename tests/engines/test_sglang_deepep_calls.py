"""What SGLang's DeepEP dispatcher, which serves CUDA as well, does with a Buffer: ours takes every call of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.engines.deepep_calls import Use, engine_file, fits, uses
from uccl_ep_serving.buffer import Config
from uccl_ep_serving.handles import EventOverlap

DISPATCHER = "srt/layers/moe/token_dispatcher/deepep.py"
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
    return uses(engine_file("sglang", DISPATCHER).read_text())


def test_every_use_fits(found: list[Use]) -> None:
    assert [fits(use) for use in found if fits(use)] == []
    assert {use.name for use in found} == EXPECTED


def test_every_use_of_a_config_and_of_an_event_fits() -> None:
    source = engine_file("sglang", DISPATCHER).read_text()
    for holders, ours, expected in (
        ({"config"}, Config, {"get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint"}),
        ({"event", "previous_event"}, EventOverlap, {"current_stream_wait"}),
    ):
        found = [use for use in uses(source, holders=holders) if not use.on_class and use.name != "__init__"]
        assert {use.name for use in found} == expected
        assert [fits(use, ours) for use in found if fits(use, ours)] == []


def test_nothing_else_of_the_engine_reaches_for_deep_ep() -> None:
    """On CUDA it is the dispatcher alone that uses our Buffer. What else there is would not be ours, without a word."""
    root = engine_file("sglang", "__init__.py").parent
    importing, holding = set(), {}
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(errors="replace")
        name = str(path.relative_to(root))
        if "deep_ep" in source and any(_imports(node, "deep_ep") for node in ast.walk(ast.parse(source))):
            importing.add(name)
        if "DeepEPBuffer" in source and name != DISPATCHER:
            holding[name] = {use.name for use in uses(source, holders={"DeepEPBuffer"})}
    # the other one is of DeepEP's second version, a backend of its own name
    assert importing == {DISPATCHER, str(Path(DISPATCHER).with_name("deepep_v2.py"))}
    assert holding == {
        # before each replay of a graph: where the plugin asks whether anything is wrong
        "srt/model_executor/runner_utils/deepep_adapter.py": {"set_dispatch_mode"},
        # Huawei's
        "srt/hardware_backend/npu/moe/fuseep.py": {"get_deepep_buffer", "set_dispatch_mode_as_low_latency"},
    }


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").split(".")[0] == module
    return isinstance(node, ast.Import) and any(one.name.split(".")[0] == module for one in node.names)


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
