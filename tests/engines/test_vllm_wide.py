"""Wider proof with the real vLLM server: two hosts, and tensor-parallel attention over sequence-parallel experts.

Each server is started as a user starts it and answers as one rank without expert parallelism does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.network_namespace import OWN_MEMORY, inside
from tests.engines.served import PROXIED, assert_equal, assert_moved, nothing_left, wait_ready
from tests.support.namespaces import run as shell
from tests.support.namespaces import two_namespaces
from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.client import Answer, Client
from uccl_ep_serving.demo.run import PROMPTS
from uccl_ep_serving.demo.server import DemoServer, free_port
from uccl_ep_serving.demo.vllm_launch import MODELS, VllmLaunch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

START_SECONDS = 280.0
TOKENS = 16
MODEL = "qwen3-moe"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("wide")  # short: Unix sockets are made below it
    write_checkpoint(path / MODEL, model=MODELS[MODEL].shape)
    with nothing_left(path):
        yield path


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Answer]:
    """Of one rank."""
    with DemoServer(VllmLaunch(MODEL, ""), directory, "reference") as server:
        wait_ready(server, START_SECONDS)
        return answers_of(server)


def answers_of(server: DemoServer) -> list[Answer]:
    return Client(server.url, MODEL).complete_all(PROMPTS, TOKENS, MODELS[MODEL].at_once)


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_tensor_parallel_attention(directory: Path, expected: list[Answer], mode: str) -> None:
    """Two by two: attention over pairs of ranks, experts over all four; each of a pair sends its half of the tokens."""
    launch = VllmLaunch(MODEL, f"uccl_ep_{mode}", arguments=("--tensor-parallel-size", "2"), environment=PROXIED)
    kind = "normal" if mode == "high_throughput" else "ll"
    dispatch, prompt = f"{kind}_dispatch", "x" * 400
    with DemoServer(launch, directory, f"sequence-{mode}") as server:
        wait_ready(server, START_SECONDS)
        assert_equal(expected, answers_of(server))
        before = server.settled_traffic()
        Client(server.url, MODEL).complete(prompt, 1)
        after = server.settled_traffic()
    assert_moved(after, 4, "shm", {dispatch, f"{kind}_combine"})
    counted = [sum(rank["ops"][dispatch]["tokens"] for rank in traffic) for traffic in (before, after)]
    each_layer = (counted[1] - counted[0]) / MODELS[MODEL].shape.num_hidden_layers
    # replicated input would make it twice as many; some more than the prompt's are those of dummy steps
    assert len(prompt) <= each_layer < 1.5 * len(prompt)


@dataclass(frozen=True)
class _Node(VllmLaunch):
    """One of several nodes, each with one rank. Only the first answers requests."""

    node: int = 0
    head: str = ""
    head_port: int = 0

    def command(self, model: Path, port: int) -> list[str]:
        """As typed on this node (examples/06_vllm/several_nodes.sh)."""
        typed = super().command(model, port)
        options = ["--data-parallel-size-local", "1", "--data-parallel-address", self.head]
        options += ["--data-parallel-rpc-port", str(self.head_port)]
        if self.node:
            where = typed.index("--api-server-count")
            del typed[where : where + 2]
            options += ["--headless", "--data-parallel-start-rank", str(self.node)]
        return [*OWN_MEMORY, *typed, *options]


def test_two_nodes_in_network_namespaces_over_tcp(directory: Path, expected: list[Answer]) -> None:
    """Multi-node data parallelism, a rank on each of two "hosts" that share neither network nor memory; nothing is set
    for us."""
    port, head_port = free_port(), free_port()
    with two_namespaces() as hosts:
        for name in hosts.names:
            shell("ip", "-n", name, "link", "set", "lo", "up")  # the engine's own processes talk over it

        def node(number: int) -> DemoServer:
            launch = _Node(
                MODEL,
                "uccl_ep",
                node=number,
                head=hosts.addresses[0],
                head_port=head_port,
                # for gloo and the engine, which would resolve the name of this machine
                environment={"GLOO_SOCKET_IFNAME": hosts.ends[number], "VLLM_HOST_IP": hosts.addresses[number]},
            )
            return DemoServer(launch, directory, f"node{number}", port=port)

        first, second = node(0), node(1)
        try:
            for name, server in zip(hosts.names, (first, second), strict=True):
                with inside(name):
                    server.start()
            with inside(hosts.names[0]):
                wait_ready(first, START_SECONDS)
                # requests are opened here, so in this namespace: the client's own threads would not be
                client = Client(first.url, MODEL)
                answers = [client.complete(prompt, TOKENS) for prompt in PROMPTS]
                traffic = first.settled_traffic()
            with inside(hosts.names[1]):
                traffic += second.settled_traffic()
        finally:
            first.stop()
            second.stop()
    for server, address in zip((first, second), hosts.addresses, strict=True):
        # found by the route to the head, before gloo's variable
        assert re.search(rf"listens on {address} \(.*, host of the process group's store\)", server.log.read_text())
    assert_equal(expected, answers)
    assert_moved(traffic, 2, "tcp", {"normal_dispatch", "normal_combine"})
