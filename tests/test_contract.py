"""Names and order of what engines pass to DeepEP's ``Buffer``: ours takes the same, by position and by keyword."""

from __future__ import annotations

import fcntl
import inspect
from pathlib import Path

import pytest

from uccl_ep_serving.buffer import Buffer, Config
from uccl_ep_serving.native import jit

#: Method -> its parameters in DeepEP's order; ``*`` starts what ours adds, by keyword only.
DEEPEP = {
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank allow_nvlink_for_low_latency_mode"
    " allow_mnnvl use_fabric explicitly_destroy enable_shrink comm * settings",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_comm_stream": "",
    "get_local_buffer_tensor": "dtype size offset use_rdma_buffer",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert topk_idx"
    " topk_weights expert_alignment num_worst_tokens config previous_event async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts cumulative_local_expert_recv_stats"
    " dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 async_finish return_recv_hook"
    " * topk_weights use_nvfp4 x_global_scale",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish return_recv_hook out"
    " combine_wait_recv_cost_stats"
    " * overlap src_signals src_signal_expect_value packed_recv_count comp_signal block_m threshold num_sms",
    "get_next_low_latency_combine_buffer": "handle",
    "low_latency_update_mask_buffer": "rank_to_mask mask",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "destroy": "",
}


@pytest.mark.parametrize("method", list(DEEPEP))
def test_parameters_are_those_of_deepep(method: str) -> None:
    parameters = [one for one in inspect.signature(getattr(Buffer, method)).parameters.values() if one.name != "self"]
    by_position, _, by_keyword = DEEPEP[method].partition("*")
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    assert [one.name for one in parameters if one.kind != keyword_only] == by_position.split()
    assert [one.name for one in parameters if one.kind == keyword_only] == by_keyword.split()


def test_config_takes_deepeps_numbers_by_position() -> None:
    config = Config(24, 8, 288, 32, 128)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens) == (
        24,
        8,
        288,
    )
    assert (config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens) == (32, 128)


def test_a_rank_that_hangs_while_compiling_does_not_hang_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(jit, "_LOCK_SECONDS", 0.1)
    with open(tmp_path / ".lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with jit.compile_lock("kernels"):
            pass
