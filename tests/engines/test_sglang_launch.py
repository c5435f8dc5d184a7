"""Launch lines as on GPUs, through SGLang's own parser and resolution: window, requests, memory, and refusals.

No GPU is there: the machine's facts and the size of its memory are given to the engine, which resolves everything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from uccl_ep_serving import Settings
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.demo.checkpoint_models import TinyDeepSeek
from uccl_ep_serving.engines.memory_budget import GIB, MemoryBudget, MoeShape, memory_budget

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]

H200_GIB = 141
#: What of DeepSeek-V3 decides.
SHAPE = TinyDeepSeek(
    hidden_size=7168,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    num_hidden_layers=2,
)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
#: By model type, what SGLang has no default for.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16"},
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "dtype": "bfloat16",
        "compress_ratios": [0, 0, 4, 128],
        "head_dim": 512,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "num_experts_per_tok": 6,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
    },
    "sdar_moe": {
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
DEEPSEEK_V3 = MoeShape(hidden=7168, experts=256, topk=8, intermediate=2048)
NODE = "--tp 8 --attn-dp-size 8"
MTP = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
EPLB = "--enable-eplb --ep-num-redundant-experts 32"
PREFILL = f"{NODE} --disaggregation-mode prefill"
BF16 = '--json-model-override-args {"quantization_config":null}'
CUTEDSL = "--moe-runner-backend flashinfer_cutedsl --quantization modelopt_fp4"
#: Models whose memory SGLang sizes in another way where --max-running-requests is given; HERE is where they lie.
QWEN3_NEXT = "--model-path HERE/qwen3_next"
DEEPSEEK_V4 = "--model-path HERE/deepseek_v4"
#: A diffusion model, which denoises blocks of four tokens.
SDAR = "--model-path HERE/sdar_moe --dllm-algorithm LowConfidence"
VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"

#: Line, variables, tokens of the window, most running requests of a data-parallel rank.
DECIDED = [
    pytest.param(NODE, {}, 512, 512, id="attention data-parallel"),
    pytest.param("--tp 8", {}, 512, 512, id="tensor-parallel"),
    pytest.param(NODE, {"SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP": "1"}, 512, 512, id="a warm-up of pipelines alone"),
    pytest.param("--tp 16 --attn-dp-size 16 --nnodes 2 --dist-init-addr a:1", {}, 512, 512, id="two nodes"),
    pytest.param(NODE, {VARIABLE: "128"}, 128, 128, id="the variable"),
    pytest.param(NODE, {VARIABLE: "8192"}, 8192, 8192, id="beyond the engine's assert"),
    pytest.param(f"{NODE} --max-running-requests 256", {}, 32, 32, id="requests that fit"),
    pytest.param(f"{NODE} --cuda-graph-max-bs-decode 64", {}, 64, 64, id="small graphs"),
    pytest.param(f"{NODE} {MTP} --speculative-num-draft-tokens 4", {}, 32, 8, id="MTP"),
    pytest.param(
        f"{NODE} {MTP} --speculative-num-draft-tokens 4 --max-running-requests 1024", {}, 512, 128, id="MTP wide"
    ),
    pytest.param(f"{NODE} --enable-two-batch-overlap", {}, 512, 512, id="two-batch overlap"),
    pytest.param(f"{NODE} --max-running-requests 64 {SDAR}", {}, 32, 8, id="a diffusion model"),
    pytest.param(f"{NODE} --deepep-mode low_latency --disaggregation-mode decode", {}, 512, 512, id="decode server"),
    pytest.param(f"{NODE} --deepep-mode normal --disaggregation-mode prefill", {}, 0, None, id="prefill server"),
    pytest.param(PREFILL, {}, 0, None, id="prefill server, auto"),
    pytest.param(f"{PREFILL} {EPLB}", {}, 0, None, id="prefill server, auto, EPLB"),
    pytest.param(f"{NODE} --deepep-mode normal", {}, 0, None, id="normal mode"),
    pytest.param(f"{NODE} --deepep-mode low_latency", {}, 512, 512, id="low-latency mode alone"),
    pytest.param(
        "--tp 8 --deepep-mode low_latency --cuda-graph-backend-prefill breakable",
        {},
        512,
        512,
        id="low-latency mode alone, tensor-parallel",
    ),
    pytest.param("--tp 2 --max-running-requests 61", {}, 128, 128, id="whole tiles of experts"),
    pytest.param(f"{NODE} {CUTEDSL}", {}, 512, 512, id="experts that low latency serves alone"),
    pytest.param(
        f"{NODE} --deepep-mode low_latency --disaggregation-mode decode {EPLB}",
        {},
        512,
        512,
        id="EPLB",
    ),
]

REFUSED = [
    (
        f"{NODE} --max-running-requests 8192",
        {},
        ["1024 tokens of a rank", "--max-running-requests 4096", f"{VARIABLE}=1024"],
    ),
    (
        f"{NODE} {MTP} --speculative-num-draft-tokens 4 --max-running-requests 2048",
        {},
        ["x 4 tokens a request = 1024", "--max-running-requests 1024"],
    ),
    (
        f"{NODE} --deepep-mode low_latency --chunked-prefill-size 8192",
        {},
        ["up to 1024 tokens", "--chunked-prefill-size 4096", "--deepep-mode auto", f"{VARIABLE}=1024"],
    ),
    (
        f"{NODE} --deepep-mode low_latency --cuda-graph-backend-prefill breakable --cuda-graph-bs-prefill 64 2048",
        {},
        ["graph of prefill has 2048 tokens", "--cuda-graph-max-bs-prefill 512", f"{VARIABLE}=2048"],
    ),
    (
        "--tp 24 --attn-dp-size 24 --nnodes 3 --dist-init-addr a:1",
        {},
        ["256 experts", "24 expert-parallel ranks", "--ep-num-redundant-experts 8"],
    ),
    (
        f"{NODE} --pp-size 2 --enable-dynamic-chunking --deepep-mode low_latency --chunked-prefill-size 1024",
        {},
        ["up to 16384 tokens (--enable-dynamic-chunking", "Next step: leave out --enable-dynamic-chunking"],
    ),
    (f"{PREFILL} --enable-pd-role-switch", {}, ["MoE all-to-all (--moe-a2a-backend deepep)"]),
    (f"{NODE} --enable-eplb", {}, ["--enable-eplb with --deepep-mode auto", "normal or low_latency"]),
    (
        f"{NODE} --expert-distribution-recorder-mode stat_approx --deepep-mode low_latency",
        {},
        ["stat_approx with --deepep-mode low_latency", "Next step: --deepep-mode normal;"],
    ),
    (f"{NODE} --deepep-dispatcher-output-dtype nvfp4", {}, ["output-dtype nvfp4", "bf16 or fp8"]),
    (NODE, {"SGLANG_MOE_NVFP4_DISPATCH": "1"}, ["SGLANG_MOE_NVFP4_DISPATCH=1", "Unset it"]),
    (
        f"{NODE} --pp-size 2 --nnodes 2 --dist-init-addr a:1",
        {"SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP": "1"},
        ["with --deepep-mode auto", "unset it, or --deepep-mode normal"],
    ),
    (
        f"{NODE} --pp-size 2 --nnodes 2 --dist-init-addr a:1 --deepep-mode low_latency",
        {"SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP": "1"},
        ["with --deepep-mode low_latency", "more tokens than the low-latency window holds"],
    ),
    (NODE, {"SGLANG_FLASHINFER_AUTOTUNE_EXTEND": "1"}, ["more tokens than the low-latency window holds"]),
    (NODE, {VARIABLE: "8193"}, [f"{VARIABLE} = 8193 is outside 1..8192"]),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(SHAPE.config() | {"quantization_config": FP8}))
    for name, config in OTHERS.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(
            json.dumps({"model_type": name, "num_hidden_layers": 4, **config})
        )
    return str(directory)


RESERVED = [
    pytest.param(NODE, 512, 1, 2, id="auto"),
    pytest.param(f"{NODE} {BF16}", 512, 1, 2, id="weights in BF16"),
    pytest.param(f"{NODE} --enable-waterfill", 512, 1, 2, id="a shared expert with a slot on each rank"),
    pytest.param(f"{NODE} --cuda-graph-max-bs-decode 64 --enable-two-batch-overlap", 64, 2, 2, id="two-batch overlap"),
    pytest.param(f"{NODE} --deepep-mode low_latency --disaggregation-mode decode", 512, 1, 2, id="decode server"),
    # the engine reserves nothing for DeepEP where no decode graph is captured
    pytest.param(f"{NODE} --deepep-mode normal", 0, 1, 0, id="normal mode"),
]

#: Of DeepSeek-V4 SGLang itself says how many.
SIZED_BY_REQUESTS = [
    f"{NODE} --deepep-mode low_latency --disaggregation-mode decode {QWEN3_NEXT}",
    f"{NODE} --disable-radix-cache {QWEN3_NEXT}",
    f"{NODE} {DEEPSEEK_V4}",
    NODE,
]

GIVEN = f"{NODE} --mem-fraction-static 0.97"

Case = tuple[str, tuple[tuple[str, str], ...], str]


def case(line: str, variables: dict[str, str] | None = None, backend: str = "uccl_ep") -> Case:
    return line, tuple((variables or {}).items()), backend


def engine_launches(model: str, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """What ``sglang serve`` decides for each line before it starts a scheduler, on a node of H200."""
    import os

    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import common

    from uccl_ep_serving.engines.sglang import hooks

    load_plugins()
    for module in (common, memory_hook):
        module.get_device_memory_capacity = lambda device=None: H200_GIB * 1024
    hooks.check_device = lambda *_arguments: None  # it has tests of its own
    environment, found = dict(os.environ), {}
    for one in cases:
        line, variables, backend = one
        os.environ.update(variables)
        options = ["--model-path", model, "--device", "cuda", "--moe-a2a-backend", backend]
        found[one] = decide([*options, *(word.replace("HERE", model) for word in line.split())])
        found[one]["variable"] = os.environ.get(VARIABLE)
        os.environ.clear()
        os.environ.update(environment)
    return found


def decide(options: list[str]) -> dict[str, Any]:
    """Parse and resolve as the launcher does."""
    import argparse
    import logging

    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    from uccl_ep_serving.engines.sglang import workers
    from uccl_ep_serving.errors import ConfigError

    said: list[str] = []
    log, handler = logging.getLogger("uccl_ep_serving"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    server_args = ServerArgs.from_cli_args(parser.parse_args(options))
    try:
        with override_platform(is_cuda=True, is_sm90=True):
            server_args.resolve_once()
    except (ConfigError, ValueError) as error:  # ours, and the engine's own
        return {"refused": str(error)}
    finally:
        log.removeHandler(handler)
    resolved = server_args.resolved_dict()
    decisions = workers.decisions_of(server_args) if server_args.moe_a2a_backend == "uccl_ep" else None
    return {
        "tokens": decisions.tokens if decisions and decisions.low_latency else 0,
        "requests": decisions.requests if decisions else None,
        "declared": resolved["max_running_requests"],
        "chunk": resolved["chunked_prefill_size"],
        "mode": resolved["deepep_mode"],
        "fraction": resolved["mem_fraction_static"],
        "log": said,
    }


@pytest.fixture(scope="module")
def launches(in_engine: InEngine, model: str) -> dict[Case, dict[str, Any]]:
    """Every launch of this file, in one process: what one has decided is not what the next is asked for."""
    cases = [case(*one.values[:2]) for one in DECIDED] + [case(line, variables) for line, variables, _ in REFUSED]
    both = [one.values[0] for one in RESERVED] + SIZED_BY_REQUESTS
    cases += [case(line, None, backend) for line in both for backend in ("uccl_ep", "deepep")]
    found: dict[Case, dict[str, Any]] = in_engine(engine_launches, model, list(dict.fromkeys([*cases, case(GIVEN)])))
    return found


Launches = dict[Case, dict[str, Any]]


@pytest.mark.parametrize(("line", "variables", "tokens", "requests"), DECIDED)
def test_what_a_launch_decides(
    launches: Launches, line: str, variables: dict[str, str], tokens: int, requests: int | None
) -> None:
    found = launches[case(line, variables)]
    assert "refused" not in found, found
    assert (found["tokens"], found["requests"]) == (tokens, requests)
    assert any("takes " in one and "GiB of each GPU" in one for one in found["log"])
    if tokens:
        assert any(one.startswith(f"uccl_ep: low-latency window of {tokens} tokens a rank") for one in found["log"])
    # what was chosen is not what the user asked for, should this process start another engine
    assert found["variable"] == variables.get(VARIABLE)


@pytest.mark.parametrize("line", SIZED_BY_REQUESTS)
def test_requests_that_the_user_leaves_to_the_engine_stay_so(launches: Launches, line: str) -> None:
    """SGLang sizes the states of linear attention by them where it caches no prefixes, 512 of 74 MiB, and the pool of a
    sliding window; they are bounded all the same."""
    ours, theirs = (launches[case(line, None, backend)] for backend in ("uccl_ep", "deepep"))
    assert ours["declared"] == theirs["declared"]
    assert ours["requests"] == ours["tokens"] > 0


def test_prefill_goes_through_the_window_in_low_latency_mode(launches: Launches) -> None:
    assert launches[case(f"{NODE} --deepep-mode low_latency")]["chunk"] == 512
    assert launches[case(NODE)]["chunk"] == 8192 // 8


def test_a_prefill_server_never_goes_through_a_window_that_it_has_not(launches: Launches) -> None:
    """FlashInfer's autotuning runs a decode step of all requests on it."""
    assert launches[case(PREFILL)]["mode"] == "normal"
    assert launches[case(NODE)]["mode"] == "auto"


@pytest.mark.parametrize(("line", "variables", "words"), REFUSED)
def test_what_cannot_run_is_refused_before_a_scheduler_starts(
    launches: Launches, line: str, variables: dict[str, str], words: list[str]
) -> None:
    found = launches[case(line, variables)]
    for word in words:
        assert word in found.get("refused", str(found))


def budget(shape: MoeShape, tokens: int, batches: int, quantised: bool) -> MemoryBudget:
    row, config = 7168 * 2, Buffer.get_dispatch_config(8)
    heap = config.get_nvl_buffer_size_hint(row, 8)
    heap += 0 if tokens else config.get_rdma_buffer_size_hint(row, 8)
    normal = normal_plan(8, Settings.from_environment(), heap)
    return memory_budget(shape, 8, tokens, normal, batches=batches, quantised=quantised)


@pytest.mark.parametrize(("line", "tokens", "batches", "kept_gib"), RESERVED)
def test_the_engines_reserve_grows_by_what_we_take(
    launches: Launches, line: str, tokens: int, batches: int, kept_gib: int
) -> None:
    """``mem_fraction_static`` against that of ``deepep``, whose buffers SGLang's memory_hook reserves 2 GiB for."""
    ours, theirs = (launches[case(line, None, backend)] for backend in ("uccl_ep", "deepep"))
    shape = replace(DEEPSEEK_V3, experts=264, topk=9) if "waterfill" in line else DEEPSEEK_V3
    taken = budget(shape, tokens, batches, quantised=BF16 not in line).total / GIB
    assert ours["fraction"] == pytest.approx(theirs["fraction"] - max(0, taken - kept_gib) / H200_GIB, abs=0.00051)
    assert any(f"takes {taken:.1f} GiB of each GPU" in one for one in ours["log"])


def test_a_fraction_that_the_user_gives_stays(launches: Launches) -> None:
    found = launches[case(GIVEN)]
    assert found["fraction"] == 0.97
    assert any("leaves 4.2 GiB, too few. Next step: leave it out, or at most 0.93" in one for one in found["log"])
