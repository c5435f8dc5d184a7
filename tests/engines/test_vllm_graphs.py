"""Steps of ``uccl_ep`` that a CUDA graph may hold: which they are, that they are right, that no host waits in them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.test_vllm_layer import ODD, eight_bit
from tests.engines.vllm_moe import EXPERTS, Case, Layer, difference, group

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

InEngine = Callable[..., Any]
InRanks = Callable[..., list[Any]]
LARGEST = 512
ROUTED = Case(16, 128, 256, 6)


# --- everything below that starts with "engine_" runs in a process that has vLLM --------------------------------------


def step_of(tokens: list[int], mode: str = "NONE") -> Any:
    """A forward context of a step in which data-parallel rank r has ``tokens[r]``."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import DPMetadata, override_forward_context

    metadata = DPMetadata(torch.tensor(tokens, dtype=torch.int32))
    return override_forward_context(
        SimpleNamespace(dp_metadata=metadata, cudagraph_runtime_mode=CUDAGraphMode[mode])  # type: ignore[arg-type]
    )


def compilation(mode: str = "FULL_AND_PIECEWISE") -> Any:
    """What vLLM's configuration says of graphs, on a machine that captures some."""
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], max_cudagraph_capture_size=LARGEST)


def on_such_a_machine() -> None:
    """Layers that are made from now on find :func:`compilation`."""
    import vllm.config

    vllm.config.get_current_vllm_config_or_none = lambda: SimpleNamespace(compilation_config=compilation())


def in_a_capture() -> None:
    """From now on this process's stream captures a graph."""
    from uccl_ep_serving.engines.vllm import all2all, graph_steps

    graph_steps.capturing = all2all.capturing = lambda: True  # type: ignore[attr-defined]


def engine_most_rows(
    tokens: list[int] | None, mode: str, configured: str, captured: bool, shards: int, own: int
) -> int | str:
    """Room that this rank's dispatch of ``own`` tokens makes; ``tokens`` None: outside of any step."""
    import contextlib

    from uccl_ep_serving.engines.vllm.graph_steps import GraphSteps
    from uccl_ep_serving.errors import ConfigError

    if captured:
        in_a_capture()
    steps = GraphSteps(compilation(configured), ranks=2 * shards, shards=shards)
    with contextlib.nullcontext() if tokens is None else step_of(tokens, mode):
        try:
            return steps.most_rows(own)
        except ConfigError as error:
            return str(error)


def engine_captured_layers(rank: int, ranks: int, rendezvous: str, cases: list[Case]) -> list[str]:
    """Every case in the worst-case form and, as a step too large for a graph, in the exact one; what is wrong."""
    on_such_a_machine()
    problems: list[str] = []
    with group(rank, ranks, rendezvous) as buffer:
        asked: list[int] = []
        dispatch = buffer.dispatch

        def noted(*args: Any, num_worst_tokens: int = 0, **kwargs: Any) -> Any:
            asked.append(num_worst_tokens)
            return dispatch(*args, num_worst_tokens=num_worst_tokens, **kwargs)

        buffer.dispatch = noted  # type: ignore[method-assign]
        for case in cases:
            layer = Layer(case, False, buffer, rank, ranks)
            tokens = [case.count(one) for one in range(ranks)]
            # the same tokens in a step of which another rank, for all this one knows, has too many for a graph
            for seed, counts in enumerate((tokens, tokens, [*tokens[:-1], LARGEST + 1])):
                step = layer.step(seed)
                with step_of(counts):
                    problem = difference(layer.apply(step), step.expected)
                if problem:
                    problems.append(f"rank {rank}, {case}, step {seed}: {problem}")
            if asked != [ranks * max(tokens)] * 2 + [0]:
                problems.append(f"rank {rank}, {case}: room for {asked} rows")
            asked.clear()
    return problems


class _NoDevice:
    """A Buffer for tensors that have no content, so that whoever looks at it, as only a host can, is caught.

    Its dispatch gives the room that is asked for, as a device does; with none, its host would have to wait.
    """

    group, runtime = None, None
    capture = None

    def get_dispatch_layout(self, ids: Any, experts: int, **_options: Any) -> Any:
        per_rank, per_expert = ids.new_empty(2, dtype=_torch().int32), ids.new_empty(experts, dtype=_torch().int32)
        return per_rank, None, per_expert, ids.new_empty(len(ids), 2, dtype=_torch().bool), self._event()

    def dispatch(self, x: Any, *, topk_idx: Any, topk_weights: Any, num_worst_tokens: int, **_options: Any) -> Any:
        if not num_worst_tokens:
            raise RuntimeError("the host waits for how many rows come")
        rows = num_worst_tokens, topk_idx.shape[1]
        received = tuple(one.new_empty(rows[0], one.shape[1]) for one in (x if isinstance(x, tuple) else (x,)))
        self.handed = len(topk_idx)
        return (
            received if isinstance(x, tuple) else received[0],
            topk_idx.new_empty(rows),
            topk_weights.new_empty(rows),
            [],
            object(),
            self._event(),
        )

    def combine(self, x: Any, handle: Any, **_options: Any) -> Any:
        return x.new_empty(self.handed, x.shape[1]), None, self._event()

    @staticmethod
    def _event() -> Any:
        return SimpleNamespace(current_stream_wait=lambda: None)


def _torch() -> Any:
    import torch

    return torch


def engine_without_a_host(backend: str, fp8: bool, look: bool) -> str:
    """vLLM's modular kernel over a layer of ``backend`` in a capture, on tensors whose content nobody has: of torch's
    fake ones, whatever would have to be looked at raises.

    Args:
        look: experts that look at how many rows they have, as some do on a CPU.
    """
    import torch
    import vllm.model_executor.layers.fused_moe.utils as fused_moe
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context

    from tests.engines import vllm_moe
    from uccl_ep_serving.demo.vllm_cpu.experts import TorchExperts

    def experts(self: Any, *, output: Any, topk_ids: Any, expert_map: Any, **_given: Any) -> None:
        here = expert_map[topk_ids] >= 0
        if look:
            assert here.any()
        output.copy_(output + here.any(1, keepdim=True))

    TorchExperts.apply = experts  # type: ignore[method-assign]
    fused_moe.per_token_group_quant_fp8 = lambda x, block, **_options: (
        x.to(torch.float8_e4m3fn),
        x.new_empty(len(x), x.shape[1] // block, dtype=torch.float32),
    )
    on_such_a_machine()
    in_a_capture()
    case = Case(16, 128, 256, 6, fp8=fp8)
    original = vllm_moe.moe_config

    def configured(*args: Any) -> Any:
        moe = original(*args)
        moe.moe_parallel_config.all2all_backend = backend
        return moe

    vllm_moe.moe_config = configured
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = Layer(case, False, _NoDevice(), 0, 2)
        step: Any = SimpleNamespace(
            a1=torch.empty(16, case.hidden, dtype=torch.bfloat16),
            ids=torch.empty(16, case.topk, dtype=torch.int64),
            weights=torch.empty(16, case.topk),
        )
        # vLLM has the numbers in a tensor of the host, which has content, and there is none of those here
        counts = SimpleNamespace(max=lambda: 16)
        with override_forward_context(
            SimpleNamespace(  # type: ignore[arg-type]
                dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=counts), cudagraph_runtime_mode=CUDAGraphMode.NONE
            )
        ):
            try:
                output = layer.apply(step)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return str(list(output.shape))


def engine_rows_that_nobody_sent(form: str) -> list[list[float]]:
    """What is quantised of three received rows, of which the last is whatever the memory held, in the worst case."""
    import torch
    import vllm.model_executor.layers.fused_moe.utils as fused_moe

    from uccl_ep_serving.engines.vllm import high_throughput
    from uccl_ep_serving.engines.vllm.graph_steps import GraphSteps

    seen: list[Any] = []

    def quantised(rows: Any, scale: Any, *, per_act_token_quant: bool, **_options: Any) -> Any:
        assert per_act_token_quant is (form == "token")
        seen.append(rows)
        return rows, None

    fused_moe.moe_kernel_quantize_input = quantised
    nan = float("nan")
    buffer = SimpleNamespace(
        capture=None,
        get_dispatch_layout=lambda *_args, **_options: (None,) * 5,
        dispatch=lambda *_args, **_options: (
            torch.tensor([[1.0, 2.0], [3.0, 4.0], [nan, nan]]),
            torch.tensor([[0, -1], [-1, 1], [-1, -1]]),
            torch.zeros(3, 2),
            [],
            None,
            _NoDevice._event(),
        ),
    )
    made = high_throughput.HighThroughput(
        buffer,  # type: ignore[arg-type]
        2,
        rank_expert_offset=0,
        graphs=GraphSteps(compilation(), 2),
    )
    quant = SimpleNamespace(
        quant_dtype="mxfp8" if form == "mxfp8" else torch.int8,
        block_shape=[1, 32] if form == "mxfp8" else None,
        a1_scale=torch.ones(1) if form == "static" else None,
        per_act_token_quant=form == "token",
        is_scale_swizzled=True,
    )
    with step_of([2, 2]):
        received = made.prepare_async(torch.zeros(2, 2), torch.ones(2, 2), torch.zeros(2, 2), 4, None, False, quant)()
    assert received[2] is None, "no counts without a host that asks"
    assert received[3].tolist() == [[0, 3], [3, 1], [3, 3]], "expert 3 is another rank's"
    return torch.nan_to_num(seen[0], nan=-9.0).tolist()  # type: ignore[no-any-return]


def engine_scratch() -> dict[str, Any]:
    """What vLLM's workspace gives, measured for a step of 1,024 bytes and locked, then unlocked."""
    import torch
    from vllm.v1.worker.workspace import WorkspaceManager

    from uccl_ep_serving.engines.vllm import layer_hooks, workspace

    layer_hooks.activate()
    manager, seen = WorkspaceManager(torch.device("cpu")), {}
    torch.accelerator.empty_cache = lambda: None
    measured = manager._ensure_workspace_size(1024)
    manager.lock()
    seen["larger"] = manager._ensure_workspace_size(4096).numel()
    if manager._ensure_workspace_size(512).data_ptr() == measured.data_ptr():
        seen["then"] = "the measured one"
    workspace.capturing = lambda: True  # type: ignore[attr-defined]
    try:
        manager._ensure_workspace_size(4096)
    except AssertionError as error:
        seen["in a capture"] = str(error)[:19]
    manager.unlock()
    grown = manager._ensure_workspace_size(4096)
    if manager._ensure_workspace_size(512).data_ptr() == grown.data_ptr():
        seen["before it is locked"] = "grown"
    return seen


def engine_reserved(rank: int, ranks: int, rendezvous: str) -> list[Any]:
    """Room in the windows before and after a low-latency layer is built, and after it ran; lines of the log."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with group(rank, ranks, rendezvous) as buffer:
        logging.getLogger("uccl_ep_serving").addHandler(handler)
        plans = [buffer.runtime.layout.low_latency]
        layer = Layer(ROUTED, True, buffer, rank, ranks)
        plans.append(buffer.runtime.layout.low_latency)
        Layer(ROUTED, True, buffer, rank, ranks)  # of a second layer
        epoch = buffer.runtime.epoch
        layer.apply(layer.step(0))
        plans.append(buffer.runtime.layout.low_latency)
        return [*plans, buffer.runtime.epoch - epoch, [line for line in lines if "each rank has" in line]]


def engine_opened_in_a_capture() -> str:
    from tests.engines.vllm_moe import manager_of
    from uccl_ep_serving.errors import ConfigError

    in_a_capture()
    manager = manager_of(_NoDevice(), 0, 2)
    manager._buffer = None
    try:
        manager.get_handle({})
    except ConfigError as error:
        return str(error)
    return "no error"


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "mode", "configured", "captured", "shards", "own", "expected"),
    [
        pytest.param([3, LARGEST], "NONE", "FULL", False, 1, 3, 2 * LARGEST, id="a warm-up, or too few for a graph"),
        pytest.param([3, LARGEST + 1], "NONE", "FULL", False, 1, 3, 0, id="one rank prefills"),
        pytest.param([40, 40], "PIECEWISE", "FULL_AND_PIECEWISE", False, 1, 40, 80, id="piecewise"),
        pytest.param([600, 600], "FULL", "FULL", False, 1, 600, 1200, id="full, of an unusual size"),
        pytest.param([600, 600], "NONE", "FULL", True, 1, 600, 1200, id="captured as the second runner does"),
        pytest.param([8, 8], "NONE", "NONE", False, 1, 8, 0, id="--enforce-eager"),
        pytest.param([7, 6], "NONE", "FULL", False, 2, 4, 16, id="sequence-parallel input"),
        pytest.param(None, "NONE", "FULL", False, 1, 8, 0, id="outside of a step"),
        pytest.param(None, "NONE", "FULL", True, 1, 8, "how many rows may come is unknown", id="captured outside"),
        pytest.param([8, 8], "FULL", "FULL", False, 1, 9, "this rank dispatches 9 tokens", id="more than agreed"),
    ],
)
def test_which_steps_make_room_for_the_worst_case(
    in_engine: InEngine,
    tokens: list[int] | None,
    mode: str,
    configured: str,
    captured: bool,
    shards: int,
    own: int,
    expected: int | str,
) -> None:
    found = in_engine(engine_most_rows, tokens, mode, configured, captured, shards, own)
    assert found == expected if isinstance(expected, int) else expected in found


def test_captured_steps_give_what_exact_ones_give(in_engine_ranks: InRanks) -> None:
    problems = in_engine_ranks(2, engine_captured_layers, [ROUTED, *ODD, *eight_bit(ODD[:3])])
    assert not any(problems), problems


@pytest.mark.parametrize("fp8", [False, True])
def test_no_host_waits_in_a_captured_step(in_engine: InEngine, fp8: bool) -> None:
    assert in_engine(engine_without_a_host, "uccl_ep", fp8, False) == "[16, 256]"


@pytest.mark.parametrize(
    ("backend", "look", "caught"),
    [
        ("uccl_ep_high_throughput", False, "the host waits for how many rows come"),
        ("uccl_ep", True, "DataDependentOutputException"),
    ],
)
def test_a_host_that_waits_is_noticed(in_engine: InEngine, backend: str, look: bool, caught: str) -> None:
    assert caught in in_engine(engine_without_a_host, backend, False, look)


@pytest.mark.parametrize(("form", "junk"), [("tensor", 0.0), ("static", -9.0), ("token", -9.0), ("mxfp8", -9.0)])
def test_rows_that_nobody_sent_decide_no_scale(in_engine: InEngine, form: str, junk: float) -> None:
    """All of these are quantised where the experts are, each as the experts want it."""
    assert in_engine(engine_rows_that_nobody_sent, form) == [[1.0, 2.0], [3.0, 4.0], [junk, junk]]


def test_a_step_larger_than_any_measured_gets_scratch_of_its_own(in_engine: InEngine) -> None:
    assert in_engine(engine_scratch) == {
        "larger": 4096,
        "then": "the measured one",
        "in a capture": "Workspace is locked",
        "before it is locked": "grown",
    }


def test_windows_have_room_once_the_layers_are_built(in_engine_ranks: InRanks) -> None:
    """vLLM profiles memory, and captures, after that."""
    for rank, (before, built, after, rebuilt, said) in enumerate(in_engine_ranks(2, engine_reserved)):
        assert before is None
        assert built is not None
        assert (after, rebuilt) == (built, 0)
        assert len(said) == (rank == 0)
        assert all(f"{EXPERTS} experts and hidden size 256 at 128 tokens a rank and step" in line for line in said)
        assert all("GiB in host memory" in line for line in said)


def test_a_buffer_is_not_opened_in_a_capture(in_engine: InEngine) -> None:
    assert "is not open yet, and opening it cannot be captured" in in_engine(engine_opened_in_a_capture)
