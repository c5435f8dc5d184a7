"""The Buffer as SGLang's dispatcher sees it: router weights at dispatch, and open before a graph is captured."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.traffic.trace import UNKNOWN_LAYER

__all__ = ["LAYER", "buffer_class", "open_before_capture", "router_weights"]

router_weights: contextvars.ContextVar[Any] = contextvars.ContextVar("uccl_ep_router_weights", default=None)
"""Router weights of the low-latency dispatch in progress; float32 ``[tokens, topk]`` or None."""

#: Attribute of a dispatcher's modes: the layer that they are of, for routing traces.
LAYER = "uccl_ep_layer"
#: Attribute of a dispatch's handle: the router weights that it was given.
_GIVEN = "given_weights"


@functools.cache
def buffer_class() -> type[Any]:
    """Our Buffer with the router weights at dispatch.

    SGLang hands them to ``low_latency_dispatch`` on one other platform only, yet they are what lets the expert side
    sum a token's experts and return one row per (token, rank) instead of one per (token, expert). The weights must be
    those that ``low_latency_combine`` gets: the rows are weighted once, with the former.
    """
    import torch

    from uccl_ep_serving import Buffer

    class SGLangBuffer(Buffer):
        #: Those of this process.
        alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    "the first dispatch of this process is inside the capture of a CUDA graph, and a Buffer cannot be "
                    "built there: its ranks meet and register memory. ModelRunner.init_cuda_graphs, where the plugin "
                    "builds it, was not called before. Next step: --cuda-graph-backend-decode disabled"
                )
            _enable_log()
            super().__init__(*args, **kwargs)
            self.alive.add(self)

        @classmethod
        def check_all(cls) -> None:
            """Raise what is known to be wrong with any of them; see ``Buffer.check``."""
            for buffer in list(cls.alive):
                if not buffer.runtime.closed:
                    buffer.check()

        def low_latency_dispatch(self, *args: Any, topk_weights: Any = None, **kwargs: Any) -> Any:
            if topk_weights is None:
                topk_weights = router_weights.get()
            result = super().low_latency_dispatch(*args, topk_weights=topk_weights, **kwargs)
            setattr(result[2], _GIVEN, topk_weights)
            return result

        def low_latency_combine(
            self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, *args: Any, **kwargs: Any
        ) -> Any:
            given = getattr(handle, _GIVEN, None)
            if given is not None and not _same_memory(given, topk_weights):
                raise ConfigError(
                    "low-latency combine: the expert runner returned other router weights than dispatch was given "
                    f"({_in_words(topk_weights)} at combine, {_in_words(given)} at dispatch), so it has weighted the "
                    "rows, or wants them weighted, in a way of its own; the experts' side would weight them again. "
                    "Next step: another --moe-runner-backend (deep_gemm hands them through), and tell us which it was"
                )
            return super().low_latency_combine(x, topk_idx, topk_weights, handle, *args, **kwargs)

    return SGLangBuffer


def _enable_log() -> None:
    """Undo what SGLANG_LOGGING_CONFIG_PATH does to every logger that its file does not name, unless that says
    ``disable_existing_loggers: false``: a worker reads the file once plugins are loaded, and errors of ours would be in
    no log."""
    ours = logging.getLogger("uccl_ep_serving")
    ours.disabled = False
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith(f"{ours.name}.") and isinstance(logger, logging.Logger):
            logger.disabled = False


def _same_memory(one: Any, other: Any) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    )


def _in_words(tensor: Any) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} at {tensor.data_ptr():#x}"


# --- before a graph is captured -------------------------------------------------------------------------------------


def _dispatchers(deepep: Any, model: Any) -> Iterator[Any]:
    """Each DeepEP dispatcher of ``model``: one a layer, two with two-batch overlap."""
    for module in model.modules():
        outer = getattr(module, "dispatcher", None)
        for one in getattr(outer, "_inners", (outer,)):
            if isinstance(one, deepep.DeepEPDispatcher):
                yield one


def open_before_capture(deepep: Any, model: Any, device: str, sized: bool) -> None:
    """Open the Buffer of this process and size its windows for every shape of ``model``; collective.

    The engine would build it at the first dispatch. One token is dispatched and combined for each shape, in each mode:
    that lays out the windows, compiles the kernels, and shows that the ranks reach each other.

    Args:
        deepep: the engine's module.
        sized: low-latency mode will be used.
    """
    import torch

    done = set()
    for dispatcher in _dispatchers(deepep, model):
        low_latency: Any = getattr(dispatcher, "_low_latency_dispatcher", None)
        normal: Any = getattr(dispatcher, "_normal_dispatcher", None)
        one = low_latency or normal
        shape = (one.hidden_size, one.num_experts, one.router_topk, one.params_dtype)
        if shape in done:
            continue
        done.add(shape)
        deepep.DeepEPBuffer.get_deepep_buffer(
            one.group,
            one.hidden_size,
            one.params_bytes,
            one.deepep_mode,
            one.num_max_dispatch_tokens_per_rank,
            one.num_experts,
        )
        # low latency last: a decode graph is what is captured next
        if normal is not None:
            _exchange_in_normal_mode(normal, device)
        if low_latency is not None and sized:
            _exchange_in_low_latency(low_latency, device)
    if done and torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # rows of the worst case, which a graph's own memory pool could not use


def _one_token(mode: Any, device: str) -> tuple[Any, Any, Any]:
    """Its row, its experts and their weights."""
    import torch

    topk = mode.router_topk
    x = torch.zeros(1, mode.hidden_size, dtype=mode.params_dtype, device=device)
    ids = torch.arange(topk, dtype=torch.int64, device=device).unsqueeze(0)
    return x, ids, torch.full((1, topk), 1 / topk, dtype=torch.float32, device=device)


@contextlib.contextmanager
def _of_no_layer(mode: Any) -> Iterator[None]:
    """Traces leave out what is dispatched here."""
    layer = getattr(mode, LAYER, UNKNOWN_LAYER)
    setattr(mode, LAYER, None)
    try:
        yield
    finally:
        setattr(mode, LAYER, layer)


def _exchange_in_normal_mode(normal: Any, device: str) -> None:
    """Without the engine's recorder of expert loads, in the form that its rows have (FP8 where it quantises them)."""
    import torch

    x, ids, weights = _one_token(normal, device)
    dtype = x.dtype
    x, *_ = normal.dispatch_a(x, SimpleNamespace(topk_ids=ids, topk_weights=weights))
    with _of_no_layer(normal):
        buffer = normal._get_buffer()
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, normal.num_experts)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
    values = rows[0] if isinstance(rows, tuple) else rows
    buffer.combine(torch.zeros(values.shape, dtype=dtype, device=device), handle)


def _exchange_in_low_latency(low_latency: Any, device: str) -> None:
    import torch

    def wait(event: Any, hook: Any) -> None:
        if low_latency.return_recv_hook:
            hook()
        else:
            event.current_stream_wait()

    x, ids, weights = _one_token(low_latency, device)
    with _of_no_layer(low_latency):
        rows, _, event, hook = low_latency._dispatch_core(x, ids, weights)
    wait(event, hook)
    values = rows[0] if isinstance(rows, tuple) else rows
    outputs = torch.empty(values.shape, dtype=x.dtype, device=device)
    _, event, hook = low_latency._combine_core(outputs, ids, weights)
    wait(event, hook)
