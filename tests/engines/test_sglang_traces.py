"""Routing of a real SGLang server, recorded through our Buffer: every token of every dispatch, by layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.served import PROXIED, nothing_left, serve_traced
from uccl_ep_serving.demo.checkpoint import TinyDeepSeek, write_checkpoint
from uccl_ep_serving.demo.sglang_launch import SglangLaunch
from uccl_ep_serving.traffic.trace import load

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

MODEL = TinyDeepSeek()


def test_a_server_records_what_each_of_its_layers_has_chosen(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    traces = tmp_path / "traces"
    settings = {"UCCL_EP_TRACE": str(traces), "UCCL_EP_TRACE_WHAT": "whole"}
    launch = SglangLaunch("uccl_ep", dp_attention=True, environment={**PROXIED, **settings})
    with nothing_left(tmp_path):
        tokens = serve_traced(launch, tmp_path, traces, 240.0, opening=2)
    whole = load(traces)
    assert whole.layers == tuple(range(MODEL.first_k_dense_replace, MODEL.num_hidden_layers))
    assert (whole.experts, whole.topk, whole.ranks) == (MODEL.n_routed_experts, MODEL.num_experts_per_tok, 2)
    assert {rank: sum(len(one.ids) for one in steps) for rank, steps in whole.steps.items()} == tokens
    by_layer = [load(traces, layer) for layer in whole.layers]
    # idle ranks step on, without tokens, until the server ends
    shapes = [[(one.step, one.mode, len(one.ids)) for one in layer.steps[0] if len(one.ids)] for layer in by_layer]
    assert all(one == shapes[0] for one in shapes)
    assert {mode for _, mode, _ in shapes[0]} == {0, 1}
