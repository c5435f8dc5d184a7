"""The launch scripts of examples/06_vllm: what they type is what vLLM takes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.launch_lines import page_lines, pod_line, typed

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples" / "06_vllm"
InEngine = Callable[..., Any]


def engine_parse(arguments: list[str]) -> dict[str, Any]:
    """What ``vllm serve`` makes of them."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = command.subparser_init(FlexibleArgumentParser().add_subparsers())
    parsed = parser.parse_args(arguments)
    command.validate(parsed)
    return {name: value for name, value in vars(parsed).items() if isinstance(value, (str, int, bool, type(None)))}


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "expected"),
    [
        ("one_node.sh", (), {}, {"data_parallel_size": 8, "all2all_backend": "uccl_ep"}),
        (
            "one_node.sh",
            ("--max-num-seqs", "64"),
            {"MODE": "low_latency", "GPUS": "4"},
            {"data_parallel_size": 4, "all2all_backend": "uccl_ep_low_latency", "max_num_seqs": 64},
        ),
        (
            "several_nodes.sh",
            (),
            {"HEAD": "10.0.0.1", "NNODES": "2", "NODE_RANK": "0"},
            {"data_parallel_size": 16, "data_parallel_size_local": 8, "headless": False, "port": 8000},
        ),
        (
            "several_nodes.sh",
            (),
            {"HEAD": "10.0.0.1", "NNODES": "2", "NODE_RANK": "1"},
            {"data_parallel_start_rank": 8, "data_parallel_address": "10.0.0.1", "all2all_backend": "uccl_ep"},
        ),
        (
            "ray.sh",
            (),
            {"HEAD": "10.0.0.1", "NNODES": "2"},
            {"data_parallel_backend": "ray", "data_parallel_size": 16, "all2all_backend": "uccl_ep"},
        ),
        (
            "prefill_decode.sh",
            ("prefill",),
            {"ADDRESS": "10.0.0.1"},
            {"all2all_backend": "uccl_ep_high_throughput", "port": 8100},
        ),
        (
            "prefill_decode.sh",
            ("decode",),
            {"WINDOW": "128", "ADDRESS": "10.0.0.2"},
            {"all2all_backend": "uccl_ep_low_latency", "max_num_batched_tokens": 128},
        ),
    ],
)
def test_vllm_takes_what_the_scripts_type(
    in_engine: InEngine,
    tmp_path: Path,
    script: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    expected: dict[str, Any],
) -> None:
    command, *options = typed(tmp_path / "vllm", EXAMPLES / script, *arguments, **environment)
    assert command == "serve"
    parsed = in_engine(engine_parse, options)
    assert parsed["enable_expert_parallel"]
    assert {name: parsed[name] for name in expected} == expected


def test_vllm_takes_the_lines_of_its_page(in_engine: InEngine) -> None:
    """Every flag exists in the installed version and has the value that the line gives it."""
    lines = page_lines("docs/vllm.md", "vLLM")
    assert all(line[:2] == ["vllm", "serve"] for line in lines)
    parsed = [in_engine(engine_parse, line[2:]) for line in lines]
    assert [one["data_parallel_size"] for one in parsed] == [8, 16, 16, 8, 8]
    assert [one["data_parallel_backend"] for one in parsed] == ["mp", "mp", "ray", "mp", "mp"]
    assert all(one["enable_expert_parallel"] for one in parsed)
    assert [one["all2all_backend"] for one in parsed] == [
        "uccl_ep",
        "uccl_ep",
        "uccl_ep",
        "uccl_ep_high_throughput",
        "uccl_ep_low_latency",
    ]
    second_node = in_engine(engine_parse, [*lines[1][2:], "--headless", "--data-parallel-start-rank", "8"])
    assert (second_node["headless"], second_node["data_parallel_start_rank"]) == (True, 8)


def test_vllm_takes_the_line_of_the_readme(in_engine: InEngine) -> None:
    ((program, command, *options),) = page_lines("README.md", "vLLM")
    assert (program, command) == ("vllm", "serve")
    parsed = in_engine(engine_parse, options)
    assert (parsed["all2all_backend"], parsed["data_parallel_size"]) == ("uccl_ep", 8)
    assert parsed["enable_expert_parallel"]


@pytest.mark.parametrize("index", [0, 1])
def test_vllm_takes_the_line_of_the_pods(in_engine: InEngine, tmp_path: Path, index: int) -> None:
    command, *options = pod_line(tmp_path / "vllm", "roce.yaml", index)
    assert command == "serve"
    parsed = in_engine(engine_parse, options)
    assert (parsed["all2all_backend"], parsed["data_parallel_address"]) == ("uccl_ep", "vllm-0.vllm")
    assert (parsed["data_parallel_size"], parsed["data_parallel_size_local"]) == (16, 8)
    assert (parsed["headless"], parsed["data_parallel_start_rank"]) == ((True, 8) if index else (False, None))


def engine_ray_key() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.ray_device_key)


def test_vllm_runs_no_ray_on_a_cpu(in_engine: InEngine) -> None:
    """Why ray.sh is parsed and not run: vLLM's Ray executor stops without a key. When this fails, run it."""
    assert in_engine(engine_ray_key) == ""


def test_unknown_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        typed(tmp_path / "vllm", EXAMPLES / "prefill_decode.sh", "router")
    assert "prefill or decode" in failure.value.stderr
