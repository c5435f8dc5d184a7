"""Where tensors of both modes lie that nobody was given: on the CPU, kept for a few sizes, for whoever comes next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import normal_cases
from tests.support.direct_ranks import DirectGroup
from tests.support.ll_cases import CASE, arguments, check_combined, run_rank
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.modes.low_latency_outputs import MOST_SIZES, OutputMemory
from uccl_ep_serving.modes.normal_cpu import Normal


class Elsewhere:
    """A mode whose calls are made while torch's default device is another one."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            with torch.device("meta"):
                return getattr(self._mode, name)(*given, **options)

        return call


@pytest.mark.parametrize("case", [CASE, replace(CASE, fp8=True, hidden=512), replace(CASE, reduced=True)], ids=str)
def test_low_latency_on_another_default_device(case: Any) -> None:
    inputs = case.inputs()

    def body(runtime: Any) -> torch.Tensor:
        with torch.device("meta"):
            low_latency: Any = Elsewhere(LowLatency(runtime))
        return run_rank(case, low_latency, runtime.rank, inputs)

    for rank, combined in enumerate(DirectGroup(2).run(body)):
        check_combined(case, inputs, rank, combined)


def test_normal_mode_on_another_default_device() -> None:
    inputs = normal_cases.Case(tokens=(20, 7)).inputs()

    def body(runtime: Any) -> Any:
        return normal_cases.round_trip(Elsewhere(Normal(runtime)), inputs, runtime.rank)  # type: ignore[arg-type]

    normal_cases.check(inputs, DirectGroup(2).run(body))


def test_memory_of_few_sizes_is_kept() -> None:
    """A caller whose batches all differ is no leak; one size in use is kept whatever comes in between."""
    memory = OutputMemory()
    often = memory.take(4096).data_ptr()
    for nbytes in range(1 << 13, (1 << 13) + 100):
        memory.take(nbytes)
        assert memory.take(4096).data_ptr() == often
        assert len(memory._free) <= MOST_SIZES


def test_combine_buffers_of_few_sizes_are_kept() -> None:
    def body(runtime: Any) -> None:
        low_latency, tokens = LowLatency(runtime), 2 * MOST_SIZES
        x, topk_idx, *_ = arguments(rank=runtime.rank).values()
        for most in range(tokens, 0, -1):
            handle = low_latency.dispatch(x[:1], topk_idx[:1], most, 8, use_fp8=False)[2]
            buffer = low_latency.next_combine_buffer(handle)
            assert low_latency.next_combine_buffer(handle) is buffer
        assert len(low_latency._combine_buffers) == MOST_SIZES

    DirectGroup(2).run(body)


def test_a_combine_buffer_of_a_warm_up_may_be_written_to_afterwards() -> None:
    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        handle = low_latency.dispatch(**arguments(rank=runtime.rank))[2]
        with torch.inference_mode():
            low_latency.next_combine_buffer(handle)
        low_latency.next_combine_buffer(handle).zero_()

    DirectGroup(2).run(body)


def test_zero_copy_of_another_tensor_is_refused() -> None:
    """DeepEP sends its own buffer then, whatever is given: here nobody gets other rows than he has filled."""

    def body(runtime: Any) -> None:
        low_latency, given = LowLatency(runtime), arguments(rank=runtime.rank)
        rows, _, handle, _, _ = low_latency.dispatch(**given)
        topk = given["topk_idx"], given["topk_weights"]
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"zero_copy=True, and x is not what get_next_low_latency_combine"):
                low_latency.combine(rows, *topk, handle, zero_copy=True)
            buffer = low_latency.next_combine_buffer(handle).copy_(rows)
        low_latency.combine(buffer, *topk, handle, zero_copy=True)

    DirectGroup(2).run(body)
