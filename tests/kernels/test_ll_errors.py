"""What low-latency mode refuses by name before anything moves, and the counts it keeps."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.direct_ranks import DirectGroup
from tests.support.ll_cases import CASE, arguments, check_combined, expert_output, received_values, run_rank
from tests.support.source_tree import PYPROJECT
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, ProtocolError
from uccl_ep_serving.modes.arguments import CPU, check_device
from uccl_ep_serving.modes.low_latency_arguments import check_combine, check_ring
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.protocol.layout import LowLatencyPlan
from uccl_ep_serving.protocol.streams import LL_COMBINE, LL_DISPATCH


def with_id(value: int) -> torch.Tensor:
    ids = arguments()["topk_idx"].clone()
    ids[3, 2] = value
    return ids


BAD_DISPATCH = {
    "x is not a tensor": ({"x": None}, "x must be"),
    "x has three dimensions": ({"x": torch.zeros(1, 8, 128)}, "x must be"),
    "x is float64": ({"x": torch.zeros(8, 128, dtype=torch.float64)}, "float64"),
    "x is not contiguous": ({"x": torch.zeros(128, 8).t()}, "contiguous"),
    "hidden is no multiple of 16 bytes": ({"x": torch.zeros(8, 9, dtype=torch.bfloat16)}, "16 bytes"),
    "hidden is no multiple of 128 for fp8": ({"x": torch.zeros(8, 96), "use_fp8": True}, "multiple of 128"),
    "hidden is no multiple of 512 for ue8m0": (
        {"x": torch.zeros(8, 384), "use_fp8": True, "round_scale": True, "use_ue8m0": True},
        "multiple of 512",
    ),
    "ue8m0 without round_scale": ({"use_fp8": True, "use_ue8m0": True}, "round_scale"),
    "more tokens than T": ({"num_max_dispatch_tokens_per_rank": 7}, "8 tokens exceed"),
    "T is a float": ({"num_max_dispatch_tokens_per_rank": 8.0}, r"tokens = 8.0 is no integer"),
    "T is a word": ({"num_max_dispatch_tokens_per_rank": "8"}, r"tokens = '8' is no integer"),
    "experts are missing": ({"num_experts": None}, "experts = None is no integer"),
    "T beyond the formats": ({"num_max_dispatch_tokens_per_rank": 8193}, "8193"),
    "experts not divisible by ranks": ({"num_experts": 9}, "multiple of 2 ranks"),
    "fewer experts than top-k": ({"num_experts": 2}, "topk"),
    "ids are int32": ({"topk_idx": torch.zeros(8, 4, dtype=torch.int32)}, "int64"),
    "ids of other tokens": ({"topk_idx": torch.zeros(7, 4, dtype=torch.int64)}, "8 tokens and topk_idx 7"),
    "id beyond the experts": ({"topk_idx": with_id(8)}, r"topk_idx\[3, 2\] = 8"),
    "id below -1": ({"topk_idx": with_id(-2)}, r"topk_idx\[3, 2\] = -2"),
    "weights of another shape": ({"topk_weights": torch.zeros(8, 3)}, "topk_weights"),
    "weights are a list": ({"topk_weights": [[1.0] * 4] * 8}, "topk_weights must be float32.*not list"),
    "stats are a list": ({"cumulative_local_expert_recv_stats": [0] * 4}, "not list"),
    "stats elsewhere": (
        {"cumulative_local_expert_recv_stats": torch.zeros(4, dtype=torch.int32, device="meta")},
        "is on meta",
    ),
    "weights are bfloat16": ({"topk_weights": torch.zeros(8, 4, dtype=torch.bfloat16)}, "topk_weights"),
    "stats of another length": (
        {"cumulative_local_expert_recv_stats": torch.zeros(8, dtype=torch.int32)},
        "cumulative_local_expert_recv_stats",
    ),
    "wait stats are int32": (
        {"dispatch_wait_recv_cost_stats": torch.zeros(2, dtype=torch.int32)},
        "dispatch_wait_recv_cost_stats",
    ),
    "event and hook": ({"async_finish": True, "return_recv_hook": True}, "exclude"),
}


@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_dispatch_refuses(name: str) -> None:
    """Refused on rank 0 while rank 1 is already waiting; then rank 0 calls correctly and nothing has been harmed."""
    changes, words = BAD_DISPATCH[name]

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        inputs = CASE.inputs()
        check_combined(CASE, inputs, runtime.rank, run_rank(CASE, low_latency, runtime.rank, inputs))
        if runtime.rank == 0:
            with pytest.raises(ConfigError, match=words):
                low_latency.dispatch(**{**arguments(), **changes})
        check_combined(CASE, inputs, runtime.rank, run_rank(CASE, low_latency, runtime.rank, inputs))

    DirectGroup(2).run(body)


def bad_combine() -> dict[str, Any]:
    """Name -> (changes of a good combine's arguments, words of the message)."""
    return {
        "x of another shape": ({"x": torch.zeros(4, 15, 128, dtype=torch.bfloat16)}, "x must be"),
        "x is wider than planned": ({"x": torch.zeros(4, 16, 128)}, "4-byte values"),
        "x is fp8": ({"x": torch.zeros(4, 16, 128, dtype=torch.float8_e4m3fn)}, "x must be"),
        "x is not contiguous": (
            {"x": torch.zeros(4, 128, 16, dtype=torch.bfloat16).transpose(1, 2)},
            "contiguous",
        ),
        "other ids": ({"topk_idx": with_id(-1)}, r"topk_idx\[3, 2\] is -1, and was \d+ at dispatch.*the weight 0"),
        "other weights": ({"topk_weights": torch.ones(8, 4)}, "differ from those at dispatch"),
        "weights of another shape": ({"topk_weights": torch.ones(8, 3)}, "topk_weights"),
        "weights are float64": ({"topk_weights": torch.ones(8, 4, dtype=torch.float64)}, "topk_weights"),
        "out of another shape": ({"out": torch.zeros(7, 128, dtype=torch.bfloat16)}, "out must be"),
        "out of another dtype": ({"out": torch.zeros(8, 128)}, "out must be"),
        "x elsewhere": ({"x": torch.zeros(4, 16, 128, dtype=torch.bfloat16, device="meta")}, "x is on meta"),
        "ids are a list": ({"topk_idx": [[0] * 4] * 8}, "topk_idx list differs"),
        "no weights": ({"topk_weights": None}, "not NoneType"),
        "out is a list": ({"out": []}, "not list"),
        "out elsewhere": ({"out": torch.zeros(8, 128, dtype=torch.bfloat16, device="meta")}, "out is on meta"),
        "no handle": ({"handle": (1, 2, 3, 4, 5)}, "same Buffer"),
        "event and hook": ({"async_finish": True, "return_recv_hook": True}, "exclude"),
        "wait stats of another length": (
            {"combine_wait_recv_cost_stats": torch.zeros(3, dtype=torch.int64)},
            "combine_wait_recv_cost_stats",
        ),
    }


@pytest.mark.parametrize("name", bad_combine())
def test_combine_refuses(name: str) -> None:
    changes, words = bad_combine()[name]
    inputs = CASE.inputs()

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        rows, count, handle, _, _ = low_latency.dispatch(**arguments(rank=runtime.rank))
        given = inputs[runtime.rank]
        good = {
            "x": expert_output(received_values(CASE, rows, count), runtime.rank),
            "topk_idx": given.topk_idx,
            "topk_weights": given.topk_weights,
            "handle": handle,
        }
        if runtime.rank == 0:
            with pytest.raises(ConfigError, match=words):
                low_latency.combine(**{**good, **changes})
        combined, _, _ = low_latency.combine(**good)
        check_combined(CASE, inputs, runtime.rank, combined)

    DirectGroup(2).run(body)


def test_contents_on_a_device_are_not_waited_for() -> None:
    """Tensors without contents stand for those of a GPU: comparing them would raise here, and synchronise there."""
    plan = LowLatencyPlan(ranks=2, tokens=8, hidden=128, experts=8, topk=4, element=2)
    ids = torch.empty(8, 4, dtype=torch.int64, device="meta")
    weights = torch.empty(8, 4, device="meta")
    x = torch.empty(4, 16, 128, dtype=torch.bfloat16, device="meta")
    handle: Any = SimpleNamespace(topk_idx=ids, topk_weights=weights)
    check_combine(plan, handle, x, ids.clone(), weights.clone(), None)
    with pytest.raises(ConfigError, match="topk_idx"):
        check_combine(plan, handle, x, ids[:7], weights, None)


def test_handles_of_others() -> None:
    """A handle of another Buffer, one that is not received, and one from before the window changed."""

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        rows, _, handle, _, hook = low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)
        rest = handle.topk_idx, handle.topk_weights
        assert not handle.received  # a combine that believes it would read what no kernel has written
        with pytest.raises(ConfigError, match="was not received, so that x is not made of its rows"):
            low_latency.combine(rows, *rest, handle)
        hook()
        assert handle.received
        with pytest.raises(ConfigError, match="same Buffer"):
            LowLatency(runtime).combine(rows, *rest, handle)
        wider = replace(CASE, dtype=torch.float32)
        low_latency.dispatch(**arguments(wider, runtime.rank))
        with pytest.raises(ConfigError, match="the windows were rebuilt since the dispatch of this handle was sent"):
            low_latency.combine(rows, *rest, handle)
        with pytest.raises(ConfigError, match="the windows were rebuilt since the dispatch of this handle was sent"):
            low_latency.next_combine_buffer(handle)

    DirectGroup(2).run(body)


def test_the_combine_buffer_has_the_dtype_of_the_dispatched_tokens() -> None:
    """Whatever wider one the window has room for, and however they travelled."""

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float16):
            given = arguments(replace(CASE, dtype=dtype), runtime.rank)
            handles = [low_latency.dispatch(**{**given, "use_fp8": fp8})[2] for fp8 in (False, True)]
            one, other = (low_latency.next_combine_buffer(handle) for handle in handles)
            assert one.dtype == dtype
            assert one.data_ptr() == other.data_ptr()
            out, _, _ = low_latency.combine(one.zero_(), given["topk_idx"], given["topk_weights"], handles[1])
            assert out.dtype == dtype

    DirectGroup(2).run(body)


def test_other_sizes_wait_for_what_is_in_flight() -> None:
    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        _, _, _, _, hook = low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)
        wider = arguments(replace(CASE, dtype=torch.float32), runtime.rank)
        with pytest.raises(ConfigError, match="in flight"):
            low_latency.dispatch(**wider)
        hook()
        low_latency.dispatch(**wider)

    DirectGroup(2).run(body)


def test_messages_that_no_ring_takes_are_refused() -> None:
    """Before the windows are laid out: gigabytes here, which nobody has to have for this test."""
    plan = LowLatencyPlan(ranks=2, tokens=8192, hidden=8192, experts=16, topk=16, element=4)
    with pytest.raises(ConfigError, match="raise UCCL_EP_RING_SLOTS"):
        check_ring(plan, 1, 2)
    check_ring(plan, 1, 64)
    check_ring(plan, 16, 16)

    def body(runtime: Any) -> None:
        given = {**arguments(rank=0), "num_max_dispatch_tokens_per_rank": 8192, "num_experts": 16}
        given["x"] = torch.zeros(1, 8192)
        given["topk_idx"] = torch.zeros(1, 16, dtype=torch.int64)
        given["topk_weights"] = None
        with pytest.raises(ConfigError, match="raise UCCL_EP_RING_SLOTS"):
            LowLatency(runtime).dispatch(**given)
        assert runtime.epoch == 0

    DirectGroup(1, settings=Settings(ring_slots=2, timeout=5.0)).run(body)


def test_ranks_that_disagree_on_sizes() -> None:
    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        case = replace(CASE, experts=8 if runtime.rank else 16)
        with pytest.raises(ConfigError, match="disagree"):
            low_latency.dispatch(**arguments(case, runtime.rank))
        low_latency.dispatch(**arguments(rank=runtime.rank))

    DirectGroup(2).run(body)


def test_ranks_that_disagree_on_the_format() -> None:
    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        low_latency.dispatch(**arguments(rank=runtime.rank))
        given = {**arguments(rank=runtime.rank), "use_fp8": runtime.rank == 1}
        with pytest.raises(ProtocolError, match=f"rank {1 - runtime.rank} sent"):
            low_latency.dispatch(**given)

    DirectGroup(2).run(body)


def test_statistics() -> None:
    """Counts that callers ask for, and what the runtime records."""
    case = replace(CASE, reduced=True)
    inputs = case.inputs()

    def body(runtime: Any) -> list[tuple[str, int, int, int]]:
        low_latency = LowLatency(runtime)
        received = torch.full((4,), 10, dtype=torch.int32)
        waited = torch.zeros(2, dtype=torch.int64)
        out = torch.empty(8, 128, dtype=torch.bfloat16)
        for _ in range(2):
            rows, count, handle, _, _ = low_latency.dispatch(
                **arguments(rank=runtime.rank),
                cumulative_local_expert_recv_stats=received,
                dispatch_wait_recv_cost_stats=waited,
            )
            y = low_latency.next_combine_buffer(handle)
            y.copy_(expert_output(received_values(case, rows, count), runtime.rank))
            combined, _, _ = low_latency.combine(
                y,
                handle.topk_idx,
                handle.topk_weights,
                handle,
                zero_copy=True,
                out=out,
                combine_wait_recv_cost_stats=waited,
            )
            assert combined.data_ptr() == out.data_ptr()
            check_combined(case, inputs, runtime.rank, out)
        assert torch.equal(received, 10 + 2 * count)
        assert waited.min() > 0
        return runtime.records

    records = DirectGroup(2).run(body)
    for rank in range(2):
        owners = inputs[rank].topk_idx // 4
        remote = int((owners == 1 - rank).any(dim=1).sum())
        returned = int((inputs[1 - rank].topk_idx // 4 == rank).any(dim=1).sum())
        assert [record[:3] for record in records[rank]] == [
            ("ll_dispatch", 8, remote),
            ("ll_combine", 8, returned),
        ] * 2
        assert all(record[3] > 0 for record in records[rank])


def test_unserved_device_is_refused() -> None:
    words = "x is on meta, and this Buffer serves tensors on cpu: UCCL_EP_DEVICE says so, or its first tensor was there"
    with pytest.raises(ConfigError, match=words):
        check_device(CPU, x=torch.zeros(1, device="meta"))


def test_without_triton_the_needed_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from uccl_ep_serving.kernels.select import device_normal_kernels

    # what Python takes for a module that is not there
    monkeypatch.setitem(sys.modules, "uccl_ep_serving.kernels.triton.normal", None)
    extra = PYPROJECT["project"]["optional-dependencies"]["cuda"]
    (needed,) = (one for one in extra if one.startswith("triton"))
    with pytest.raises(ConfigError, match=re.escape(f"Next step: pip install '{needed}'")):
        device_normal_kernels(1, interpreted=False)


def test_streams_of_both_phases_are_apart() -> None:
    """Dispatch and combine of both parities never share a stream, whatever the channel."""
    from uccl_ep_serving.kernels.cpu.ll_message import streams_of

    used = [
        streams_of(phase, number) + channel
        for phase in (LL_DISPATCH, LL_COMBINE)
        for number in (0, 1)
        for channel in range(16)
    ]
    assert len(set(used)) == len(used)
