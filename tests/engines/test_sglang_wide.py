"""Wider proof with the real SGLang server: two hosts, four ranks, redundant experts, DeepSeek-V3's real row.

Each server is started as a user starts it and answers as the same server does without us.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from namespaces import run as shell
from namespaces import two_namespaces
from network_namespace import OWN_MEMORY, inside

from uccl_ep_serving.cli import demo_supervisor
from uccl_ep_serving.cli.checkpoint import TinyDeepSeek, write_checkpoint
from uccl_ep_serving.cli.demo_client import Answer, Client, compare
from uccl_ep_serving.cli.demo_report import reduced_rows
from uccl_ep_serving.cli.demo_server import DemoServer, Launch, free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

START_SECONDS = 400.0
TOKENS = 16
PROMPTS = ("The router chose", "a", "several windows of tokens, one after another, " * 10, "0123456789")
PROXIED = {"UCCL_EP_DIRECT": "0", "UCCL_EP_TRANSPORT": "shm"}
OURS = Launch("uccl_ep", environment=PROXIED)
BOTH_MODES = {"ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine"}
#: Rows, top-k and experts of DeepSeek-V3 (experts of four GPUs' worth), one MoE layer; the rest stays small.
REAL_ROW = TinyDeepSeek(
    hidden_size=7168,
    num_hidden_layers=2,
    n_routed_experts=64,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
)


@dataclass
class Served:
    """Answers of a server, and what its Buffers counted, by rank."""

    answers: list[Answer]
    traffic: list[dict[str, Any]] = field(default_factory=list)


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start a server of ``launch`` over a model, ask everything, stop it; equal ones are served once."""
    directory = tmp_path_factory.mktemp("wide")  # short: Unix sockets are made below it
    done: dict[str, Served] = {}
    before = demo_supervisor.snapshot()

    def served(launch: Launch, model: TinyDeepSeek | None = None) -> Served:
        key = f"{launch} {model}"
        if key not in done:
            place = directory / str(len(done))
            write_checkpoint(place / "model", model=model)
            with DemoServer(launch, place, "server") as server:
                server.wait_ready(START_SECONDS, lambda _seconds, _phase: None)
                answers = Client(server.url).complete_all(PROMPTS, TOKENS, at_once=2)
                done[key] = Served(answers, server.traffic() if launch.backend == "uccl_ep" else [])
        return done[key]

    yield served
    assert demo_supervisor.clean(before) == [], "servers left something in shared memory"


def assert_equal(expected: Served, got: Served) -> None:
    """Same greedy texts, and logprobs that differ by the order of float32 sums only."""
    difference = compare(expected.answers, got.answers)
    assert difference.equal == difference.answers == len(PROMPTS), [answer.text for answer in got.answers]
    assert difference.largest < 1e-3


def assert_moved(traffic: list[dict[str, Any]], ranks: int, transport: str) -> None:
    """Every rank ran both modes, and sent rows to each other rank over ``transport``."""
    assert [rank["rank"] for rank in traffic] == list(range(ranks))
    for rank in traffic:
        assert {name for name, operation in rank["ops"].items() if operation["count"]} == BOTH_MODES
        assert rank["transport_by_peer"] == {str(peer): transport for peer in range(ranks) if peer != rank["rank"]}
        assert rank["bytes_sent"]
    assert sum(rank["bytes_sent"] for rank in traffic) == sum(rank["bytes_received"] for rank in traffic)
    sent, returned = reduced_rows(traffic)
    assert sent == returned > 0


@pytest.mark.parametrize("dp_attention", [False, True], ids=["tp", "dp-attention"])
def test_four_ranks(serve: Serve, dp_attention: bool) -> None:
    got = serve(replace(OURS, ranks=4, dp_attention=dp_attention))
    assert_equal(serve(Launch("none")), got)
    assert_moved(got.traffic, 4, "shm")


def test_rows_of_deepseek_v3(serve: Serve) -> None:
    """Hidden 7168, top-8 of 64 experts, one MoE layer."""
    got = serve(replace(OURS, ranks=2), REAL_ROW)
    assert_equal(serve(Launch("none"), REAL_ROW), got)
    assert_moved(got.traffic, 2, "shm")


@pytest.mark.parametrize("placement", ["trivial", "mixed"])
def test_redundant_experts(serve: Serve, placement: str) -> None:
    """Two experts more than the model has: the engine dispatches to physical experts, of which two are copies."""
    arguments = ["--ep-num-redundant-experts", "2"]
    if placement == "mixed":
        # copies of 0 and 3 on ranks 1 and 0; everything else changed places
        placed = [[7, 6, 0, 4, 3, 5, 1, 2, 3, 0]] * TinyDeepSeek().num_hidden_layers
        arguments += ["--init-expert-location", json.dumps({"physical_to_logical_map": placed})]
    got = serve(replace(OURS, arguments=tuple(arguments)))
    assert_equal(serve(Launch("none")), got)
    assert_moved(got.traffic, 2, "shm")


@dataclass(frozen=True)
class _Node(Launch):
    """One of several nodes."""

    node: int = 0
    head: str = ""

    def command(self, model: Path, port: int) -> list[str]:
        """As typed on this node."""
        nodes = ["--nnodes", "2", "--node-rank", str(self.node), "--dist-init-addr", self.head]
        return [*OWN_MEMORY, *super().command(model, port), *nodes]


def test_two_nodes_in_network_namespaces_over_tcp(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> None:
    """``--nnodes 2``, a rank on each of two "hosts" that share neither network nor memory; nothing is set for us."""
    expected = serve(Launch("none"))
    directory = tmp_path_factory.mktemp("hosts")
    write_checkpoint(directory / "model")
    head, port = free_port(), free_port()
    with two_namespaces() as hosts:
        for name in hosts.names:
            shell("ip", "-n", name, "link", "set", "lo", "up")  # the engine's own processes talk over it

        def node(number: int) -> DemoServer:
            launch = _Node(
                "uccl_ep",
                node=number,
                head=f"{hosts.addresses[0]}:{head}",
                # for gloo and the engine, which would resolve the name of this machine
                environment={"GLOO_SOCKET_IFNAME": hosts.ends[number], "SGLANG_HOST_IP": hosts.addresses[number]},
            )
            return DemoServer(launch, directory, f"node{number}", port=port)

        first, second = node(0), node(1)
        try:
            for name, server in zip(hosts.names, (first, second), strict=True):
                with inside(name):
                    server.start()
            with inside(hosts.names[0]):
                first.wait_ready(START_SECONDS, lambda _seconds, _phase: None)
                answers = [Client(first.url).complete(prompt, TOKENS) for prompt in PROMPTS]
                traffic = first.traffic()
            with inside(hosts.names[1]):
                traffic += second.traffic()
        finally:
            first.stop()
            second.stop()
    assert_equal(expected, Served(answers))
    assert_moved(traffic, 2, "tcp")
