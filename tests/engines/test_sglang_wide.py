"""Wider proof with the real SGLang server: two hosts, four ranks, redundant experts, DeepSeek-V3's real row.

Each server is started as a user starts it and answers as the same server does without us.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.engines.network_namespace import OWN_MEMORY, inside
from tests.engines.served import PROXIED, Served, assert_equal, assert_moved, nothing_left, serve_once, wait_ready
from tests.support.namespaces import run as shell
from tests.support.namespaces import two_namespaces
from uccl_ep_serving.demo.checkpoint import TinyDeepSeek, write_checkpoint
from uccl_ep_serving.demo.client import Answer, Client
from uccl_ep_serving.demo.server import DemoServer, free_port
from uccl_ep_serving.demo.sglang_launch import SglangLaunch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

START_SECONDS = 400.0
TOKENS = 16
PROMPTS = ("The router chose", "a", "several windows of tokens, one after another, " * 10, "0123456789")
OURS = SglangLaunch("uccl_ep", environment=PROXIED)
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


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start a server of ``launch`` over a model, ask everything, stop it; equal ones are served once."""
    directory = tmp_path_factory.mktemp("wide")  # short: Unix sockets are made below it
    done: dict[str, Served] = {}

    def ask(server: DemoServer) -> list[Answer]:
        return Client(server.url).complete_all(PROMPTS, TOKENS, at_once=2)

    def served(launch: SglangLaunch, model: TinyDeepSeek | None = None) -> Served:
        key = f"{launch} {model}"
        if key not in done:
            place = directory / str(len(done))
            write_checkpoint(place / "model", model=model)
            done[key] = serve_once(launch, place, "server", ask, START_SECONDS)
        return done[key]

    with nothing_left(directory):
        yield served


@pytest.mark.parametrize("dp_attention", [False, True], ids=["tp", "dp-attention"])
def test_four_ranks(serve: Serve, dp_attention: bool) -> None:
    got = serve(replace(OURS, ranks=4, dp_attention=dp_attention))
    assert_equal(serve(SglangLaunch("none")).answers, got.answers)
    assert_moved(got.traffic, 4, "shm", BOTH_MODES)


def test_rows_of_deepseek_v3(serve: Serve) -> None:
    """Hidden 7168, top-8 of 64 experts, one MoE layer."""
    got = serve(replace(OURS, ranks=2), REAL_ROW)
    assert_equal(serve(SglangLaunch("none"), REAL_ROW).answers, got.answers)
    assert_moved(got.traffic, 2, "shm", BOTH_MODES)


@pytest.mark.parametrize("placement", ["trivial", "mixed"])
def test_redundant_experts(serve: Serve, placement: str) -> None:
    """Two experts more than the model has: the engine dispatches to physical experts, of which two are copies."""
    arguments = ["--ep-num-redundant-experts", "2"]
    if placement == "mixed":
        # copies of 0 and 3 on ranks 1 and 0; everything else changed places
        placed = [[7, 6, 0, 4, 3, 5, 1, 2, 3, 0]] * TinyDeepSeek().num_hidden_layers
        arguments += ["--init-expert-location", json.dumps({"physical_to_logical_map": placed})]
    got = serve(replace(OURS, arguments=tuple(arguments)))
    assert_equal(serve(SglangLaunch("none")).answers, got.answers)
    assert_moved(got.traffic, 2, "shm", BOTH_MODES)


@dataclass(frozen=True)
class _Node(SglangLaunch):
    """One of several nodes."""

    node: int = 0
    head: str = ""

    def command(self, model: Path, port: int) -> list[str]:
        """As typed on this node."""
        nodes = ["--nnodes", "2", "--node-rank", str(self.node), "--dist-init-addr", self.head]
        return [*OWN_MEMORY, *super().command(model, port), *nodes]


def test_two_nodes_in_network_namespaces_over_tcp(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> None:
    """``--nnodes 2``, a rank on each of two "hosts" that share neither network nor memory; nothing is set for us."""
    expected = serve(SglangLaunch("none"))
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
                wait_ready(first, START_SECONDS)
                answers = [Client(first.url).complete(prompt, TOKENS) for prompt in PROMPTS]
                traffic = first.traffic()
            with inside(hosts.names[1]):
                traffic += second.traffic()
        finally:
            first.stop()
            second.stop()
    for server, address in zip((first, second), hosts.addresses, strict=True):
        # found by the route to the head, before gloo's variable
        assert re.search(rf"listens on {address} \(.*, host of the process group's store\)", server.log.read_text())
    assert_equal(expected.answers, answers)
    assert_moved(traffic, 2, "tcp", BOTH_MODES)
