"""In which order an expert's rows stand: by source rank where that is asked for, else as messages come."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.direct_ranks import DirectGroup
from tests.support.ll_cases import CASE, check_combined, check_received, expert_output, received_values, reserve
from uccl_ep_serving.config import Settings
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.oracle import low_latency_dispatch


@pytest.mark.parametrize(("setting", "keyword"), [(False, None), (True, None), (True, False), (False, True)])
def test_rows_of_a_late_source_stand_behind_unless_order_is_asked_for(setting: bool, keyword: bool | None) -> None:
    """Rank 0 sends when the others have received each other's rows, or wait for its own: combined tokens are equal."""
    case = replace(CASE, ranks=3, experts=12, counts=(8, 8, 8), deterministic=setting if keyword is None else keyword)
    inputs = case.inputs()
    group = DirectGroup(3, settings=Settings(timeout=20.0, deterministic=setting))
    others_sent = threading.Barrier(3)

    def body(runtime: Any) -> torch.Tensor:
        low_latency = LowLatency(runtime)
        reserve(low_latency, case)
        given = inputs[runtime.rank]
        waits = torch.zeros(3, dtype=torch.int64)
        if runtime.rank == 0:
            others_sent.wait(20)
            threading.Event().wait(0.3)
        rows, count, handle, _, hook = low_latency.dispatch(
            given.x,
            given.topk_idx,
            case.tokens,
            case.experts,
            topk_weights=given.topk_weights,
            deterministic=keyword,
            dispatch_wait_recv_cost_stats=waits,
            return_recv_hook=True,
            **case.options,
        )
        if runtime.rank:
            others_sent.wait(20)
        assert hook is not None
        hook()
        check_received(case, rows, count, handle, low_latency_dispatch(inputs, runtime.rank, case.tokens, case.experts))
        if runtime.rank:
            begins = handle.layout_range >> 32
            first = bool((begins[:, 0] == 0).all())
            assert first == case.deterministic
            # until its message was here, whoever was unpacked before
            assert waits[0] >= 250_000_000 > waits[3 - runtime.rank] or case.deterministic
        y = expert_output(received_values(case, rows, count), runtime.rank)
        return low_latency.combine(y, given.topk_idx, given.topk_weights, handle)[0]

    for rank, combined in enumerate(group.run(body)):
        check_combined(case, inputs, rank, combined)
