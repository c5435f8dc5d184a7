"""Checkpoint, comparison and report of the demo: no engine and no server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.cli import warm_groups
from tests.support.empty_cache import empty_cache
from uccl_ep_serving.cli import demo
from uccl_ep_serving.demo import words
from uccl_ep_serving.demo.checkpoint import SPECIALS, TinyDeepSeek, write_checkpoint, write_trained
from uccl_ep_serving.demo.client import Answer, compare
from uccl_ep_serving.demo.report import reduced_rows, traffic_tables
from uccl_ep_serving.demo.run import Run, Transport, check_equal, check_traffic
from uccl_ep_serving.demo.sglang_launch import SglangLaunch
from uccl_ep_serving.demo.vllm_launch import MODELS, VllmLaunch
from uccl_ep_serving.kernels import select
from uccl_ep_serving.proxy import service

WORDS = Path(words.__file__).parent


@pytest.fixture
def write() -> Callable[..., TinyDeepSeek]:
    """The checkpoint writer, where the engine's file format is installed."""
    pytest.importorskip("safetensors")
    return write_checkpoint


def answer(text: str, *logprobs: float) -> Answer:
    """An answer whose tokens are the letters of ``text``; position i also lists the token ``other`` at -9."""
    return Answer(
        text,
        tuple(text),
        tuple(logprobs),
        tuple({letter: value, "other": -9.0} for letter, value in zip(text, logprobs, strict=True)),
    )


def counters(rank: int, sent: int, returned: int) -> dict[str, Any]:
    """What ``Buffer.stats()`` of one rank looks like."""
    quiet = {"count": 0, "tokens": 0, "rows": 0, "p50_us": 0.0, "p99_us": 0.0}
    return {
        "rank": rank,
        "world": 2,
        "transport_by_peer": {str(1 - rank): "shm"},
        "proxies": 1,
        "channels": 1,
        "direct_peers": [],
        "commands": 12,
        "writes": 34567,
        "bytes_sent": 3 << 20,
        "messages_sent": 56,
        "bytes_received": 1023,
        "messages_received": 78,
        "ops": {
            "ll_dispatch": {"count": 5, "tokens": 9, "rows": sent, "p50_us": 11.4, "p99_us": 99.6},
            "ll_combine": {"count": 5, "tokens": 9, "rows": returned, "p50_us": 12.0, "p99_us": 13.0},
            "normal_dispatch": quiet,
            "normal_combine": quiet,
        },
    }


def test_same_seed_same_checkpoint(tmp_path: Path, write: Callable[..., TinyDeepSeek]) -> None:
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        write(tmp_path / name, seed=seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "again", "two")}
    assert weights["one"] == weights["again"]
    assert weights["one"] != weights["two"]


def test_checkpoint_has_the_tensors_of_a_deepseek_v3(tmp_path: Path, write: Callable[..., TinyDeepSeek]) -> None:
    safetensors = pytest.importorskip("safetensors")
    model = write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        gate = file.get_tensor("model.layers.1.mlp.gate.weight")
        bias = file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    assert gate.shape == (model.n_routed_experts, model.hidden_size)
    assert bias.dtype is torch.float32
    assert "model.layers.0.mlp.gate_proj.weight" in names  # dense
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in names
    assert "model.layers.2.mlp.experts.8.down_proj.weight" not in names
    assert model.moe_layers == 2


def test_shape_can_be_chosen(tmp_path: Path, write: Callable[..., TinyDeepSeek]) -> None:
    wanted = TinyDeepSeek(n_routed_experts=16, num_hidden_layers=2)
    assert write(tmp_path, model=wanted) == wanted
    assert json.loads((tmp_path / "config.json").read_text())["n_routed_experts"] == 16


def test_tokenizer_is_one_token_a_byte(tmp_path: Path, write: Callable[..., TinyDeepSeek]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "héllo\n\twörld €"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_compare_equal_answers() -> None:
    difference = compare([answer("ab", -1.0, -2.0)], [answer("ab", -1.5, -2.0)])
    assert (difference.equal, difference.answers, difference.positions) == (1, 1, 2)
    assert difference.largest == pytest.approx(0.5)
    assert difference.mean == pytest.approx(0.5 / 4)  # "other" agrees at both positions


def test_compare_stops_after_the_first_different_token() -> None:
    """What follows a different token continues a different text: its logprobs must not count."""
    difference = compare([answer("abc", -1.0, -2.0, -3.0)], [answer("axc", -1.0, -2.0, -8.0)])
    assert difference.equal == 0
    assert difference.positions == 2
    assert difference.largest == 0.0


def test_report_shows_every_rank_and_only_operations_that_ran() -> None:
    console = Console(width=80)  # a terminal of 80 columns shows every cell whole
    with console.capture() as capture:
        console.print(traffic_tables([counters(0, 10, 7), counters(1, 4, 7)]))
    text = capture.get()
    assert "…" not in text
    assert text.count("low-latency dispatch") == 2
    assert "normal" not in text
    for shown in ("34,567", "3.0 MiB", "1023 B", "shm", "11", "100"):
        assert shown in text


def test_reduced_rows_are_summed_over_ranks() -> None:
    """A rank returns rows for what others sent, so only the sums can be equal."""
    assert reduced_rows([counters(0, 10, 4), counters(1, 4, 10)]) == (14, 14)
    assert reduced_rows([counters(0, 10, 8), counters(1, 4, 12)]) == (14, 20)


@pytest.mark.parametrize(
    ("launch", "present", "absent"),
    [
        (SglangLaunch("none"), "--ep-size 2", "--deepep-mode"),
        (SglangLaunch("none", dp_attention=True), "--boundary-reduction ar", "--deepep-mode"),
        (SglangLaunch("uccl_ep", deepep_mode="normal"), "--deepep-mode normal", "--ep-size"),
        (SglangLaunch("uccl_ep", dp_attention=True), "--attn-dp-size 2", "--boundary-reduction"),
    ],
)
def test_command_line(launch: SglangLaunch, present: str, absent: str) -> None:
    command = " ".join(launch.command(Path("/model"), 1234))
    assert "sglang.launch_server --model-path /model" in command
    assert f"--moe-a2a-backend {launch.backend}" in command
    assert present in command
    assert absent not in command


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose checks print nothing."""
    return Run(Console(quiet=True), tmp_path, 1.0)


def test_servers_find_compiled_code_in_the_cache(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first request must not wait for a compiler. Small groups stand for the kernels and the proxies of TCP."""
    kernels, proxies = warm_groups.small()
    monkeypatch.setattr(select, "cpu_groups", lambda: [kernels])
    monkeypatch.setattr(service, "proxy_groups", {"tcp": [proxies]}.__getitem__)
    with empty_cache(tmp_path):
        assert [group.cached for group in (kernels, proxies)] == [False, False]
        run.compile(Transport.TCP)
        assert [group.cached for group in (kernels, proxies)] == [True, True]


def test_demo_fails_when_answers_differ_from_the_reference(run: Run) -> None:
    same, other = answer("ab", -1.0, -2.0), answer("ax", -1.0, -2.0)
    check_equal(run, [same], [same], "the reference")
    assert not run.failures
    check_equal(run, [same], [other], "the reference")
    assert "1 of 1 texts" in run.failures[0]


def test_demo_fails_when_logprobs_differ_although_texts_agree(run: Run) -> None:
    check_equal(run, [answer("ab", -1.0, -2.0)], [answer("ab", -1.0, -2.01)], "the reference")
    assert "logprobs" in run.failures[0]


@pytest.mark.parametrize(
    ("logprob", "complaint"), [(-1.0, "nothing was quantised"), (-1.1, None), (-4.0, "more than 0.4")]
)
def test_demo_bounds_fp8_from_both_sides(run: Run, logprob: float, complaint: str | None) -> None:
    demo._check_fp8(run, [answer("a", -1.0)], [answer("a", logprob)])
    assert [complaint in failure for failure in run.failures] == ([True] if complaint else [])


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ([], "did not run on this backend"),
        ([counters(0, 10, 8), counters(1, 4, 12)], "did not reduce"),
        ([counters(0, 10, 4), {**counters(1, 4, 10), "bytes_sent": 0}], "rank 1 sent nothing"),
    ],
)
def test_demo_fails_on_wrong_traffic(run: Run, ranks: list[dict[str, Any]], complaint: str) -> None:
    check_traffic(run, ranks)
    assert complaint in run.failures[0]


def test_demo_accepts_right_traffic(run: Run) -> None:
    check_traffic(run, [counters(0, 10, 4), counters(1, 4, 10)])
    assert not run.failures


@pytest.mark.parametrize("kind", MODELS.values(), ids=list(MODELS))
def test_models_of_vllm_have_as_many_experts_as_their_config_says(
    tmp_path: Path, write: Callable[..., Any], kind: Any
) -> None:
    safetensors = pytest.importorskip("safetensors")
    model = write(tmp_path, model=kind.shape)
    config = json.loads((tmp_path / "config.json").read_text())
    experts = config.get("num_experts", config.get("n_routed_experts"))
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.endswith("experts.0.up_proj.weight")]  # noqa: SIM118
        last = f"mlp.experts.{experts - 1}.up_proj.weight"
        assert sum(name.endswith(last) for name in file.keys()) == len(names) == model.moe_layers  # noqa: SIM118
        assert sum(name.endswith("gate.weight") for name in file.keys()) == model.moe_layers  # noqa: SIM118


@pytest.mark.parametrize(
    ("launch", "present", "absent"),
    [
        (VllmLaunch("qwen3-moe", ""), "serve /checkpoints/qwen3-moe", "--enable-expert-parallel"),
        (VllmLaunch("deepseek-v3", "uccl_ep"), "--all2all-backend uccl_ep", "--tensor-parallel-size"),
        (VllmLaunch("deepseek-v3", "uccl_ep", ranks=4), "--data-parallel-size 4", "sglang"),
    ],
)
def test_command_line_of_vllm(launch: VllmLaunch, present: str, absent: str) -> None:
    command = " ".join(launch.command(Path("/checkpoints/model"), 1234))
    assert present in command
    assert absent not in command


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("(EngineCore_DP0 pid=1) INFO 11-21 12:46:00 [api_utils.py:286] Loading", "Loading"),
        ("WARNING 11-21 12:46:00 [envs.py:1] slow", "slow"),
        ("Traceback (most recent call last):", None),
    ],
)
def test_phase_of_vllm_is_what_a_log_line_says(line: str, text: str | None) -> None:
    assert VllmLaunch("qwen3-moe", "").phase(line) == text


class TestTheTrainedModel:
    def test_it_is_small_and_says_how_it_was_trained(self) -> None:
        files = {path.name: path.stat().st_size for path in WORDS.iterdir() if path.is_file()}
        assert sum(files[name] for name in ("model.safetensors", "tokenizer.json", "training.json")) <= 2_000_000
        about = json.loads((WORDS / "training.json").read_text())
        assert about["tokens"] == about["steps"] * about["batch"] * about["length"]
        # nats a token of two letters, over prose and conversations
        assert about["loss"][0][1] > 6 > 2 > about["loss"][-1][1]

    def test_its_tensors_and_ids_are_those_that_its_configuration_says(self, tmp_path: Path) -> None:
        safetensors = pytest.importorskip("safetensors")
        model = write_trained(tmp_path)
        with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert found == dict(model.shapes())
        vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
        assert sorted(vocabulary.values()) == list(range(model.vocab_size))
        assert [vocabulary[word] for word in SPECIALS] == [0, 1, 2, 3]


def test_the_time_line_names_each_step_and_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 14.0, 44.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    run = Run(Console(), tmp_path, 1.0)
    run.step("compiling")
    run.step("reference")
    assert run.time_line() == "compiling 4 s, reference 30 s; 34 s in all"
