"""What the layers of a model get from the vLLM plugin: the object of their mode, formats, hidden sizes and SMs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm_settings import parallel_config
from uccl_ep_serving.errors import ConfigError

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]


def engine_rounded(backend: str, hidden: int, **given: Any) -> int:
    import torch
    from vllm.model_executor.layers.fused_moe import all2all_utils

    from uccl_ep_serving.engines.vllm import layer_hooks

    layer_hooks.activate()
    fields = {
        "all2all_backend": backend,
        "use_all2all_kernels": True,
        "use_deepep_ht_kernels": False,
        "use_deepep_ll_kernels": False,
        "use_deepep_v2_kernels": False,
        "use_nixl_ep_kernels": False,
    }
    parallel = SimpleNamespace(**fields | given)
    return all2all_utils.maybe_roundup_layer_hidden_size(hidden, torch.bfloat16, parallel)


def engine_made(fields: dict[str, Any]) -> str:
    """Build a layer's object over a stand-in for the manager; the class, or the refusal."""
    from uccl_ep_serving.engines.vllm import layer_hooks

    parallel_config(all2all_backend="uccl_ep")
    layer_hooks.activate()
    manager = SimpleNamespace(world_size=2, rank=1, get_handle=lambda kwargs: None, reserve=lambda **formats: None)
    defaults = {"backend": "uccl_ep", "num_experts": 8, "max_num_tokens": 64, "hidden_dim": 256, "quant": {}, "dp": 2}
    asked = defaults | fields
    if asked["dp"] == 1:
        import vllm.config

        compilation = SimpleNamespace(cudagraph_mode=1, max_cudagraph_capture_size=asked["captured"])
        vllm.config.get_current_vllm_config_or_none = lambda: SimpleNamespace(compilation_config=compilation)
    quant = {"quant_dtype": None, "block_shape": None, "a1_scale": None, "a2_scale": None} | asked["quant"]
    moe = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(
            all2all_backend=asked["backend"], sp_size=1, dp_size=asked["dp"], is_sequence_parallel=False
        ),
        num_experts=asked["num_experts"],
        num_local_experts=asked["num_experts"] // 2,
        max_num_tokens=asked["max_num_tokens"],
        hidden_dim=asked["hidden_dim"],
    )
    try:
        made = layer_hooks.make_prepare_finalize(moe, SimpleNamespace(**quant), None, manager)
    except ConfigError as error:
        return f"refused: {error}"
    return type(made).__name__


def engine_sms(backend: str, rocm: bool) -> dict[str, Any]:
    """SM control of dual-batch overlap on a manager without a group."""
    import vllm.distributed.device_communicators.base_device_communicator as base
    from vllm.platforms import current_platform

    from uccl_ep_serving import Buffer
    from uccl_ep_serving.engines.vllm.all2all import UcclEpAll2AllManager

    base.All2AllManagerBase.__init__ = lambda *_arguments: None
    type(current_platform).is_rocm = lambda _self: rocm
    manager = UcclEpAll2AllManager(None, backend=backend)
    seen = []
    for asked in (8, 9, 132):
        manager.set_num_sms(asked)
        seen.append(Buffer.num_sms)
    manager.destroy()
    return {"seen": seen, "most": manager.max_sms_used()}


@pytest.mark.parametrize(
    ("name", "hidden", "expected"),
    [("uccl_ep", 2880, 2880), ("uccl_ep_low_latency", 2880, 2880), ("uccl_ep", 2881, 2888), ("nixl", 2881, 2881)],
)
def test_hidden_size_is_rounded_to_16_bytes(in_engine: InEngine, name: str, hidden: int, expected: int) -> None:
    assert in_engine(engine_rounded, name, hidden) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "HighThroughput"),
        ({"backend": "uccl_ep_low_latency"}, "LowLatencyBatched"),
        ({"num_experts": 9}, "refused: --all2all-backend uccl_ep: 9 experts"),
        ({"backend": "uccl_ep_low_latency", "max_num_tokens": 8193}, "refused: --all2all-backend uccl_ep_low_latency"),
        ({"max_num_tokens": 8193}, "HighThroughput"),
        ({"dp": 1, "captured": 64}, "refused: --all2all-backend uccl_ep: with one data-parallel rank"),
        ({"dp": 1, "captured": 0}, "HighThroughput"),
        (
            {"dp": 1, "captured": 64, "backend": "uccl_ep_high_throughput"},
            "refused: --all2all-backend uccl_ep_high_throughput: with one data-parallel rank",
        ),
        ({"dp": 1, "captured": 64, "backend": "uccl_ep_low_latency"}, "LowLatencyBatched"),
    ],
)
def test_layers_get_the_object_of_their_mode(in_engine: InEngine, fields: dict[str, Any], expected: str) -> None:
    assert in_engine(engine_made, fields).startswith(expected)


def engine_room(tokens: int) -> list[int]:
    """What a low-latency layer of 2 ranks makes room for, and says that it takes, of so many tokens."""
    import torch

    from uccl_ep_serving.engines.vllm import layer_hooks

    seen: list[int] = []
    manager = SimpleNamespace(
        world_size=2, rank=1, get_handle=lambda kwargs: None, reserve=lambda moe, room, **formats: seen.append(room)
    )
    moe = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(all2all_backend="uccl_ep_low_latency"),
        num_experts=8,
        max_num_tokens=tokens,
        hidden_dim=256,
    )
    quant = SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128], a1_scale=None, a2_scale=None)
    made = layer_hooks.make_prepare_finalize(moe, quant, None, manager)
    made.post_init_setup(
        SimpleNamespace(expects_unquantized_inputs=False, supports_packed_ue8m0_act_scales=lambda: False)
    )
    return [*seen, made.max_num_tokens_per_rank()]


@pytest.mark.parametrize(("tokens", "room"), [(1, 128), (128, 128), (129, 256), (8192, 8192)])
def test_experts_get_whole_tiles_of_rows(in_engine: InEngine, tokens: int, room: int) -> None:
    assert in_engine(engine_room, tokens) == [room, room]


def engine_without_experts(backend: str) -> str:
    """What a layer says whose data-parallel ranks have all experts each."""
    try:
        engine_rounded(backend, 256, use_all2all_kernels=False, dp_size=2, use_ep=False)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_without_experts_of_their_own_are_refused(in_engine: InEngine) -> None:
    assert "Next step: --enable-expert-parallel" in in_engine(engine_without_experts, "uccl_ep")
    assert in_engine(engine_without_experts, "nixl") == ""


def engine_made_fp8(hidden: int, scale: int) -> str:
    import torch

    quant: dict[str, Any] = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}
    if scale:
        quant |= {"block_shape": None, "a1_scale": torch.ones(scale)}
    return engine_made({"backend": "uccl_ep_low_latency", "hidden_dim": hidden, "quant": quant})


@pytest.mark.parametrize(
    ("hidden", "scale", "expected"),
    [
        (256, 0, "LowLatencyBatched"),
        (320, 0, "refused: uccl_ep_low_latency: hidden size 320"),
        (320, 1, "LowLatencyBatched"),
        (256, 4, "refused: uccl_ep_low_latency: static activation scales per token"),
    ],
)
def test_formats_are_refused_before_a_token_moves(in_engine: InEngine, hidden: int, scale: int, expected: str) -> None:
    assert in_engine(engine_made_fp8, hidden, scale).startswith(expected)


def engine_quantised(form: str) -> list[list[list[float]]]:
    """What is quantised of two experts' rows, of which the first has got one and the second two."""
    import torch

    from uccl_ep_serving.engines.vllm import low_latency

    seen: list[Any] = []

    def quantised(rows: Any, *_args: Any, **_options: Any) -> Any:
        seen.append(rows.clone())
        return rows, torch.ones(1)

    low_latency.quantised_after = quantised  # type: ignore[attr-defined]
    rows = torch.tensor([[[1.0, 2.0], [9.0, 9.0]], [[3.0, 4.0], [5.0, 6.0]]])
    quant = {"quant_dtype": torch.int8, "block_shape": None, "a1_scale": None, "per_act_token_quant": form == "token"}
    if form == "static":
        quant["a1_scale"] = torch.ones(1)
    low_latency._quantised_rows(rows, torch.tensor([1, 2], dtype=torch.int32), SimpleNamespace(**quant))
    return seen[0].view(2, 2, 2).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("form", "junk"), [("tensor", 0.0), ("static", 9.0), ("token", 9.0)])
def test_rows_that_nobody_sent_decide_no_scale(in_engine: InEngine, form: str, junk: float) -> None:
    assert in_engine(engine_quantised, form) == [[[1.0, 2.0], [junk, junk]], [[3.0, 4.0], [5.0, 6.0]]]


def engine_kept(overlap: bool) -> list[bool]:
    """Whether received rows are there before and after their combine, when nobody else holds them."""
    import weakref

    import torch

    from uccl_ep_serving.engines.vllm import high_throughput

    event = SimpleNamespace(current_stream_wait=lambda: None)
    rows, ids = [torch.ones(3, 2)], torch.zeros(3, 1, dtype=torch.int64)
    seen, alive = [], weakref.ref(rows[0])
    buffer = SimpleNamespace(
        capture=None,
        get_dispatch_layout=lambda *_args, **_options: (None,) * 5,
        dispatch=lambda *_args, **_options: (rows.pop(), ids, torch.ones(3, 1), [3], "handle", event),
        combine=lambda _rows, handle, **_options: seen.append(alive() is not None) or (handle, None, event),
    )
    high_throughput.dbo_enabled = lambda: overlap  # type: ignore[attr-defined]
    torch.cuda.current_stream = lambda: None
    made = high_throughput.HighThroughput(buffer, 2, rank_expert_offset=0)  # type: ignore[arg-type]
    quant = SimpleNamespace(quant_dtype=None, block_shape=None)
    made.prepare_async(torch.ones(2, 2), torch.ones(2, 1), ids[:2], 4, None, False, quant, True)()
    made.finalize_async(rows, torch.zeros(0, 2), None, None, False, None)  # type: ignore[arg-type]
    return [*seen, alive() is not None]


@pytest.mark.parametrize("overlap", [False, True])
def test_micro_batches_keep_what_they_received_until_their_combine(in_engine: InEngine, overlap: bool) -> None:
    assert in_engine(engine_kept, overlap) == [overlap, False]


def engine_checked(given_up: bool) -> str:
    """What a manager says of a Buffer that is closed: its own, or one that it gives up meanwhile."""
    from tests.engines.vllm_moe import manager_of
    from uccl_ep_serving.errors import UcclEpError

    class Closed:
        group = None

        def check(self) -> None:
            if given_up:
                manager._buffer = None
            raise UcclEpError("this Buffer is closed")

    manager = manager_of(Closed(), 0, 2)
    try:
        manager.check()
    except UcclEpError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("given_up", "said"), [(False, "this Buffer is closed"), (True, "")])
def test_a_group_that_is_given_up_says_nothing_more(in_engine: InEngine, given_up: bool, said: str) -> None:
    assert in_engine(engine_checked, given_up) == said


@pytest.mark.parametrize(
    ("backend", "rocm", "most"),
    [
        ("uccl_ep", False, 20),
        ("uccl_ep_high_throughput", False, 20),
        ("uccl_ep_high_throughput", True, 0),
        ("uccl_ep_low_latency", False, 0),
    ],
)
def test_sms_for_communication(in_engine: InEngine, backend: str, rocm: bool, most: int) -> None:
    """Even and bounded where overlap reserves any, and none where vLLM reserves none for the built-in twin."""
    assert in_engine(engine_sms, backend, rocm) == {"seen": [8, 8, 20], "most": most}


def test_only_vllms_modules_that_hold_the_function_get_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that hold another one by that name, or none, and nobody else's."""
    from uccl_ep_serving.engines.vllm import layer_hooks

    def original() -> None: ...

    def other() -> None: ...

    def replacement() -> None: ...

    held = {"vllm.holds": original, "vllm.has_another": other, "vllm.has_none": None, "vllmish.holds": original}
    for name, function in held.items():
        module = ModuleType(name)
        if function is not None:
            module.make = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    before = {name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("vllm.")}
    layer_hooks._rebind("make", original, replacement)
    assert {name: getattr(sys.modules[name], "make", None) for name in held} == {**held, "vllm.holds": replacement}
    changed = [name for name, was in before.items() if vars(sys.modules[name]) != was]
    assert changed == ["vllm.holds"]
