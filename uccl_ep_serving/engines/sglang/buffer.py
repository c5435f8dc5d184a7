"""The Buffer as SGLang's dispatcher sees it: router weights at dispatch, and open before a graph is captured."""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Iterator
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

    The engine would build it at the first dispatch. An operation of one token is dispatched and combined for each
    shape: it lays out the windows, compiles the kernels, and shows that the ranks reach each other.

    Args:
        deepep: the engine's module.
        sized: low-latency mode will be used.
    """
    import torch

    done = set()
    for dispatcher in _dispatchers(deepep, model):
        low_latency = getattr(dispatcher, "_low_latency_dispatcher", None)
        one = low_latency or dispatcher._normal_dispatcher
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
        if low_latency is not None and sized:
            _exchange_one_token(low_latency, device)
    if done and torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # rows of the worst case, which a graph's own memory pool could not use


def _exchange_one_token(low_latency: Any, device: str) -> None:
    import torch

    def wait(event: Any, hook: Any) -> None:
        if low_latency.return_recv_hook:
            hook()
        else:
            event.current_stream_wait()

    topk = low_latency.router_topk
    x = torch.zeros(1, low_latency.hidden_size, dtype=low_latency.params_dtype, device=device)
    ids = torch.arange(topk, dtype=torch.int64, device=device).unsqueeze(0)
    weights = torch.full((1, topk), 1 / topk, dtype=torch.float32, device=device)
    layer = getattr(low_latency, LAYER, UNKNOWN_LAYER)
    setattr(low_latency, LAYER, None)  # no layer's routing: traces leave it out
    rows, _, event, hook = low_latency._dispatch_core(x, ids, weights)
    setattr(low_latency, LAYER, layer)
    wait(event, hook)
    values = rows[0] if isinstance(rows, tuple) else rows
    outputs = torch.empty(values.shape, dtype=x.dtype, device=device)
    _, event, hook = low_latency._combine_core(outputs, ids, weights)
    wait(event, hook)
