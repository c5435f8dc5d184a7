"""The Buffer under SGLang's dispatcher: open and sized before a capture, past the engine's assert, weights checked."""

from __future__ import annotations

import datetime
import logging
import logging.config
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.engines.memory_budget import MoeShape, memory_budget
from uccl_ep_serving.engines.sglang import buffer as sglang_buffer
from uccl_ep_serving.errors import ConfigError

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]

TOKENS = 2048  # twice what the engine asserts
SHAPE = MoeShape(hidden=128, experts=8, topk=2, intermediate=64)


def test_a_logging_configuration_of_sglang_does_not_silence_us() -> None:
    """SGLang's workers load plugins first, and configure the log then, as its file says."""
    ours, below = logging.getLogger("uccl_ep_serving"), logging.getLogger("uccl_ep_serving.control_plane.links")
    other = logging.getLogger("another.library")
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        logging.config.dictConfig({"version": 1, "root": {"level": "INFO"}})
        assert all(one.disabled for one in (ours, below, other)), "what SGLANG_LOGGING_CONFIG_PATH does"
        sglang_buffer._enable_log()
        assert [one.disabled for one in (ours, below, other)] == [False, False, True]
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.disabled = False


def engine_open_rank(rank: int, ranks: int, rendezvous: str, tokens: int, mode: str, dtype: str) -> dict[str, Any]:
    """What ``ModelRunner.init_cuda_graphs`` finds when it begins: the engine's own dispatchers on a real Buffer."""
    import torch.distributed as dist
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins import load_plugins

    from uccl_ep_serving.demo import sglang_cpu
    from uccl_ep_serving.engines.sglang import activation
    from uccl_ep_serving.engines.sglang.workers import Decisions

    dist.init_process_group(
        "gloo", f"file://{rendezvous}", timeout=datetime.timedelta(seconds=60), rank=rank, world_size=ranks
    )
    sglang_cpu.register()  # builds the Buffer without asking CUDA
    load_plugins()
    found: dict[str, Any] = {}

    def capture(runner: Any, *_arguments: Any) -> str:
        buffer = deepep.DeepEPBuffer._state().buffer
        counts = {name: one["count"] for name, one in buffer.stats()["ops"].items() if one["count"]}
        found.update(window=len(buffer.runtime.window_bytes), counts=counts)
        return "captured"

    ModelRunner.init_cuda_graphs = capture
    activation.activate(Decisions(tokens, mode != "normal", {}))
    deepep.get_deepep_output_dtype = lambda _self: deepep.DispatcherOutputDtype(dtype)
    deepep.get_deepep_config = lambda: ""
    dispatchers = [
        deepep.DeepEPDispatcher(
            group=dist.group.WORLD,
            router_topk=SHAPE.topk,
            num_experts=SHAPE.experts,
            num_local_experts=SHAPE.experts // ranks,
            hidden_size=SHAPE.hidden,
            params_dtype=torch.bfloat16,
            deepep_mode=DeepEPMode(mode),
            return_recv_hook=True,
        )
        for _ in range(2)
    ]
    layers = [SimpleNamespace(dispatcher=one) for one in dispatchers] + [SimpleNamespace()]
    runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: layers), device="cpu")
    found["returned"] = ModelRunner.init_cuda_graphs(runner, True)
    name = "_normal_dispatcher" if mode == "normal" else "_low_latency_dispatcher"
    found["tokens"] = {getattr(one, name).num_max_dispatch_tokens_per_rank for one in dispatchers}
    deepep.DeepEPBuffer._state().buffer.destroy()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("mode", "dtype"), [("auto", "bf16"), ("auto", "fp8"), ("low_latency", "bf16"), ("normal", "bf16")]
)
def test_the_window_is_there_before_a_graph_is_captured(in_engine_ranks: InEngine, mode: str, dtype: str) -> None:
    """Its bytes are those that the launch has reserved; layers of one shape share it, and one token goes through it in
    each mode."""
    from uccl_ep_serving import Settings

    tokens = 0 if mode == "normal" else TOKENS
    expected = memory_budget(SHAPE, 2, tokens, normal_plan(2, Settings.from_environment(), 0))
    modes = {"auto": ("normal", "ll"), "normal": ("normal",), "low_latency": ("ll",)}[mode]
    counts = {f"{one}_{operation}": 1 for one in modes for operation in ("dispatch", "combine")}
    for found in in_engine_ranks(2, engine_open_rank, TOKENS, mode, dtype):
        assert found == {"window": expected.window, "counts": counts, "returned": "captured", "tokens": {TOKENS}}


def on_recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin's class over a Buffer that only takes calls."""
    import uccl_ep_serving
    from uccl_ep_serving.engines.sglang.buffer import buffer_class

    class Recorder:
        def low_latency_dispatch(self, *_arguments: Any, **_keywords: Any) -> tuple[Any, ...]:
            return None, None, SimpleNamespace(), None, None

        def low_latency_combine(self, *_arguments: Any, **_keywords: Any) -> str:
            return "combined"

    monkeypatch.setattr(uccl_ep_serving, "Buffer", Recorder)
    return buffer_class.__wrapped__()


def test_other_router_weights_at_combine_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that has folded them into its rows hands back ones, or a copy: rows would be weighted twice."""
    buffer = on_recorder(monkeypatch)()
    weights, x, ids = torch.rand(3, 2), torch.zeros(1), torch.zeros(3, 2, dtype=torch.int64)
    handle = buffer.low_latency_dispatch(x, ids, 8, 8, topk_weights=weights)[2]
    assert buffer.low_latency_combine(x, ids, weights, handle) == "combined"
    assert buffer.low_latency_combine(x, ids, weights[:], handle) == "combined"
    for other in (torch.ones_like(weights), weights.clone(), weights[:2]):
        with pytest.raises(ConfigError, match=r"other router weights .*\[\d, 2\].* at combine.*moe-runner-backend"):
            buffer.low_latency_combine(x, ids, other, handle)
    plain = buffer.low_latency_dispatch(x, ids, 8, 8)[2]
    assert buffer.low_latency_combine(x, ids, weights, plain) == "combined"


def test_a_buffer_is_not_built_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = on_recorder(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match=r"inside the capture of a CUDA graph.*Next step: "):
        ours()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert len(ours.alive) == 0
    kept = ours()
    assert list(ours.alive) == [kept]
