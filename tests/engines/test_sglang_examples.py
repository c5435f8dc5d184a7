"""The launch scripts of examples/05_sglang: what they type is what SGLang takes; two nodes on one machine answer."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.launch_lines import page_lines, pod_line, typed
from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.client import Client
from uccl_ep_serving.demo.server import DemoServer, free_port
from uccl_ep_serving.demo.sglang_launch import SglangLaunch

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples" / "05_sglang"
InEngine = Callable[..., Any]


def engine_parse(arguments: list[str]) -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    parsed = vars(parser.parse_args(arguments))
    # what is parsed of the backend loads SGLang's plugins where it is unpickled: not in the tests' process
    return {name: str(value) if isinstance(value, str) else value for name, value in parsed.items()}


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "expected"),
    [
        ("one_node.sh", (), {}, {"tp_size": 8, "attn_dp_size": 8, "deepep_mode": "auto"}),
        ("one_node.sh", ("--mem-fraction-static", "0.7"), {"GPUS": "4"}, {"tp_size": 4, "mem_fraction_static": 0.7}),
        (
            "several_nodes.sh",
            (),
            {"HEAD": "10.0.0.1", "NNODES": "2", "NODE_RANK": "1"},
            {"nnodes": 2, "node_rank": 1, "tp_size": 16, "dist_init_addr": "10.0.0.1:20000"},
        ),
        (
            "prefill_decode.sh",
            ("prefill",),
            {},
            {"disaggregation_mode": "prefill", "deepep_mode": "normal", "port": 30000},
        ),
        (
            "prefill_decode.sh",
            ("decode",),
            {"KV_DEVICES": "mlx5_0"},
            {"disaggregation_mode": "decode", "deepep_mode": "low_latency", "disaggregation_ib_device": "mlx5_0"},
        ),
    ],
)
def test_sglang_takes_what_the_scripts_type(
    in_engine: InEngine,
    tmp_path: Path,
    script: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    expected: dict[str, Any],
) -> None:
    command, *options = typed(tmp_path / "sglang", EXAMPLES / script, *arguments, **environment)
    assert command == "serve"
    parsed = in_engine(engine_parse, options)
    assert parsed["moe_a2a_backend"] == "uccl_ep"
    assert {name: parsed[name] for name in expected} == expected


def server_arguments() -> Iterator[list[str]]:
    """The arguments of each ``sglang serve`` in docs/sglang.md, on the second node."""
    for program, command, *arguments in page_lines("docs/sglang.md", "SGLang", NODE_RANK="1"):
        assert (program, command) == ("sglang", "serve")
        yield arguments


def test_sglang_takes_the_lines_of_its_page(in_engine: InEngine) -> None:
    """Every flag exists in the installed version and has the value that the line gives it."""
    parsed = [in_engine(engine_parse, line) for line in server_arguments()]
    assert all(one["moe_a2a_backend"] == "uccl_ep" for one in parsed)
    assert all(one["tp_size"] == one["attn_dp_size"] for one in parsed)
    assert [one["nnodes"] for one in parsed] == [1, 2, 1, 1]
    assert parsed[1]["node_rank"] == 1
    assert parsed[1]["dist_init_addr"] == "10.0.0.1:20000"
    assert [one["disaggregation_mode"] for one in parsed] == ["null", "null", "prefill", "decode"]
    assert [one["deepep_mode"] for one in parsed] == ["auto", "auto", "normal", "low_latency"]


def test_sglang_takes_the_line_of_the_readme(in_engine: InEngine) -> None:
    ((program, command, *options),) = page_lines("README.md", "SGLang")
    assert (program, command) == ("sglang", "serve")
    parsed = in_engine(engine_parse, options)
    assert (parsed["moe_a2a_backend"], parsed["tp_size"], parsed["attn_dp_size"]) == ("uccl_ep", 8, 8)


@pytest.mark.parametrize("index", [0, 1])
def test_sglang_takes_the_line_of_the_pods(in_engine: InEngine, tmp_path: Path, index: int) -> None:
    command, *options = pod_line(tmp_path / "sglang", "efa.yaml", index)
    assert command == "serve"
    parsed = in_engine(engine_parse, options)
    assert (parsed["moe_a2a_backend"], parsed["tp_size"], parsed["attn_dp_size"]) == ("uccl_ep", 16, 16)
    assert (parsed["nnodes"], parsed["node_rank"], parsed["dist_init_addr"]) == (2, index, "sglang-0.sglang:20000")


def test_unknown_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        typed(tmp_path / "sglang", EXAMPLES / "prefill_decode.sh", "both")
    assert "prefill, decode or router" in failure.value.stderr


@dataclass(frozen=True)
class _Node(SglangLaunch):
    """One node of ``several_nodes.sh``, with the options that its README gives for machines without a GPU."""

    def command(self, model: Path, port: int) -> list[str]:
        options = (
            "--device cpu --dtype float32 --attention-backend torch_native --deepep-dispatcher-output-dtype bf16 "
            "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --mem-fraction-static 0.5 "
            "--max-total-tokens 4096 --skip-server-warmup --served-model-name tiny-deepseek-v3"
        )
        return ["bash", str(EXAMPLES / "several_nodes.sh"), *options.split()]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_two_nodes_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("nodes")
    write_checkpoint(directory / "model")
    port, rendezvous = free_port(), free_port()
    cpus = sorted(os.sched_getaffinity(0))

    def node(rank: int) -> DemoServer:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MODEL": str(directory / "model"),
            "HEAD": "127.0.0.1",
            "NNODES": "2",
            "NODE_RANK": str(rank),
            "RANKS": "2",
            "ATTN_DP": "1",
            "PORT": str(port if rank == 0 else free_port()),
            "DIST_PORT": str(rendezvous),
            "UCCL_EP_DIRECT": "0",
            "SGLANG_CPU_OMP_THREADS_BIND": str(cpus[rank % len(cpus)]),
        }
        return DemoServer(_Node("uccl_ep", environment=environment), directory, f"node{rank}", port=port)

    with node(0) as first, node(1) as second:
        first.wait_ready(300, lambda _seconds, _phase: None)
        answer = Client(first.url).complete("Two nodes", 12)
        assert len(answer.tokens) == 12
        traffic = [*first.traffic(), *second.traffic()]
    assert sorted(rank["rank"] for rank in traffic) == [0, 1]
    assert all(rank["bytes_sent"] for rank in traffic)
