"""Names, order and defaults of the parameters of DeepEP's ``Buffer``: ours takes the same, by position and keyword."""

from __future__ import annotations

import inspect

import pytest

from uccl_ep_serving.buffer import Buffer, Config

#: Method -> its parameters in DeepEP's order, with their defaults; ``*`` starts what ours adds, by keyword only.
DEEPEP = {
    "__init__": "group num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False num_qps_per_rank=24"
    " allow_nvlink_for_low_latency_mode=True allow_mnnvl=False use_fabric=False explicitly_destroy=False"
    " enable_shrink=False comm=None * settings=None",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_comm_stream": "",
    "get_local_buffer_tensor": "dtype size=None offset=0 use_rdma_buffer=False",
    "get_dispatch_layout": "topk_idx num_experts previous_event=None async_finish=False allocate_on_comm_stream=False",
    "dispatch": "x handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None is_token_in_rank=None"
    " num_tokens_per_expert=None topk_idx=None topk_weights=None expert_alignment=1 num_worst_tokens=0"
    " config=None previous_event=None async_finish=False allocate_on_comm_stream=False",
    "combine": "x handle topk_weights=None bias=None config=None previous_event=None async_finish=False"
    " allocate_on_comm_stream=False",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts"
    " cumulative_local_expert_recv_stats=None dispatch_wait_recv_cost_stats=None use_fp8=True"
    " round_scale=False use_ue8m0=False async_finish=False return_recv_hook=False * topk_weights=None"
    " deterministic=None use_nvfp4=False x_global_scale=None",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt=False zero_copy=False async_finish=False"
    " return_recv_hook=False out=None combine_wait_recv_cost_stats=None * overlap=False src_signals=None"
    " src_signal_expect_value=0 packed_recv_count=None comp_signal=None block_m=64 threshold=0 num_sms=0",
    "get_next_low_latency_combine_buffer": "handle",
    "low_latency_update_mask_buffer": "rank_to_mask mask=False",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "destroy": "",
}


def _written(parameter: inspect.Parameter) -> str:
    empty = parameter.default is inspect.Parameter.empty
    return parameter.name if empty else f"{parameter.name}={parameter.default!r}"


@pytest.mark.parametrize("method", list(DEEPEP))
def test_parameters_are_those_of_deepep(method: str) -> None:
    parameters = [one for one in inspect.signature(getattr(Buffer, method)).parameters.values() if one.name != "self"]
    by_position, _, by_keyword = DEEPEP[method].partition("*")
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    assert [_written(one) for one in parameters if one.kind != keyword_only] == by_position.split()
    assert [_written(one) for one in parameters if one.kind == keyword_only] == by_keyword.split()


def test_config_takes_deepeps_numbers_by_position() -> None:
    config = Config(24, 8, 288, 32, 128)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens) == (
        24,
        8,
        288,
    )
    assert (config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens) == (32, 128)
