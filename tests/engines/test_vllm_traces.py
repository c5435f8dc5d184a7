"""Routing of a real vLLM server, recorded through our Buffer: every token of every dispatch, by layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.served import PROXIED, nothing_left, serve_traced
from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.vllm_launch import MODELS, VllmLaunch
from uccl_ep_serving.traffic.trace import load

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DEEPSEEK = list(MODELS)[1]


@pytest.mark.parametrize(("backend", "mode"), [("uccl_ep_high_throughput", 1), ("uccl_ep_low_latency", 0)])
def test_a_server_records_what_each_of_its_layers_has_chosen(tmp_path: Path, backend: str, mode: int) -> None:
    shape = MODELS[DEEPSEEK].shape
    write_checkpoint(tmp_path / DEEPSEEK, model=shape)
    traces = tmp_path / "traces"
    settings = {"UCCL_EP_TRACE": str(traces), "UCCL_EP_TRACE_WHAT": "whole"}
    launch = VllmLaunch(DEEPSEEK, backend, environment={**PROXIED, **settings})
    with nothing_left(tmp_path):
        tokens = serve_traced(launch, tmp_path, traces, 280.0)
    whole = load(traces)
    assert whole.layers == tuple(range(shape.first_k_dense_replace, shape.num_hidden_layers))
    assert whole.ranks == 2
    assert {rank: sum(len(one.ids) for one in steps) for rank, steps in whole.steps.items()} == tokens
    by_layer = [load(traces, layer) for layer in whole.layers]
    # idle ranks step on, without tokens, until the server ends
    shapes = [[(one.step, one.mode, len(one.ids)) for one in layer.steps[0] if len(one.ids)] for layer in by_layer]
    assert all(one == shapes[0] for one in shapes)
    assert {one for _, one, _ in shapes[0]} == {mode}
