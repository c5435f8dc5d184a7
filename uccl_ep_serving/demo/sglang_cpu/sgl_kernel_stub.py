"""Stands for SGLang's ``sgl_kernel`` on a CPU for which there is no build of it.

The CPU engine imports a handful of names; serving DeepSeek-V3 without speculation calls one of them. The others
raise when called, so a path that needs the real kernels fails by name instead of computing nonsense.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["assign_req_to_token_pool_cpu"]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of the request-to-token table.

    Args:
        req_pool_indices: integer ``[batch]``, row of each request.
        req_to_token: int32 ``[requests, max context]``, changed in place.
        start_offset: integer ``[batch]``, first position to write.
        end_offset: integer ``[batch]``, one past the last position.
        out_cache_loc: integer ``[sum(end - start)]``, the slots, requests one after another.
    """
    taken = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def _missing(name: str) -> Any:
    def absent(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this CPU (stub of uccl_ep_serving's demo)")

    absent.__name__ = name
    return absent


for _name in (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
):
    globals()[_name] = _missing(_name)
