"""DeepEP's first interface: DeepEP itself, and UCCL-EP, which offers it in a package of the same name.

Normal mode: the layout is a phase of its own; a dispatch exchanges counts (the host waits for them), and delivers rows
once per (token, rank) with ids and weights, and the rows of each expert as a list. fp8 rows are quantised beforehand.
Low-latency mode: see :class:`AnyOrderLowLatency`.
"""

from __future__ import annotations

import importlib
from typing import Any

from uccl_ep_serving.bench import peers
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.compare.backends.installed import lacks, not_importable

__all__ = ["why_not_deepep", "why_not_uccl"]

_BUFFER = ("num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "explicitly_destroy")
_LAYOUT = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert")
#: As of DeepEP 2.1.0 (deep_ep/buffers/legacy.py) and of UCCL da914a2 (ep/bench/buffer.py).
SIGNATURES = {
    "Buffer.__init__": ("group", *_BUFFER),
    "Buffer.get_dispatch_config": ("num_ranks",),
    "Buffer.get_combine_config": ("num_ranks",),
    "Buffer.get_low_latency_rdma_size_hint": ("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts"),
    "Buffer.get_dispatch_layout": ("topk_idx", "num_experts"),
    "Buffer.dispatch": ("x", "topk_idx", "topk_weights", *_LAYOUT),
    "Buffer.combine": ("x", "handle"),
    "Buffer.low_latency_dispatch": ("x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts", "use_fp8"),
    "Buffer.low_latency_combine": ("x", "topk_idx", "topk_weights", "handle"),
}


def _unfit(card: Card, ucclised: bool) -> str:
    """What speaks against the package ``deep_ep``; it is imported last, which takes GPUs."""
    if card.dtype not in ("bf16", "fp8"):
        return f"it has no {card.dtype} rows"
    reason = peers.gpus_missing(card) or not_importable("deep_ep")
    if reason:
        return reason
    deep_ep: Any = importlib.import_module("deep_ep")
    if hasattr(deep_ep, "initialize_uccl") != ucclised:
        return "the installed deep_ep is DeepEP's own" if ucclised else "the installed deep_ep is UCCL's: name it uccl"
    return lacks("deep_ep", SIGNATURES)


def why_not_deepep(card: Card) -> str:
    """Why DeepEP cannot run in this process, "" when it can."""
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed"
    return _unfit(card, ucclised=False)


def why_not_uccl(card: Card) -> str:
    """Why UCCL-EP cannot run in this process, "" when it can."""
    if importlib.util.find_spec("uccl") is None:
        return "uccl is not installed"
    if importlib.util.find_spec("deep_ep") is None:
        return "UCCL's deep_ep is not installed: it stands in ep/deep_ep_wrapper of its repository"
    return _unfit(card, ucclised=True)
