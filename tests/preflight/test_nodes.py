"""``uccl-ep check`` as a user types it: on one node, and on two that network namespaces play, one of them walled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.namespaces import Namespaces, run, two_namespaces

#: A node alone imports torch three times.
pytestmark = pytest.mark.timeout(180)
#: Where ranks listen; above what kernels take for outgoing connections.
PORT = 20471


def start(arguments: Sequence[str], namespace: str = "", **variables: str) -> subprocess.Popen[str]:
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    command = [*inside, sys.executable, "-m", "uccl_ep_serving.cli.main", "check", "--json", *arguments]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def found(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    output, _ = process.communicate(timeout=150)
    return process.returncode, json.loads(output)


def nodes(places: Namespaces, *each: dict[str, str]) -> list[tuple[int, dict[str, Any]]]:
    """What each node of two says; ``each``: its variables."""
    common = ["--nnodes", "2", "--master", places.addresses[0], "--seconds", "60"]
    started = [
        start([*common, "--node-rank", str(node)], places.names[node], **variables)
        for node, variables in enumerate(each)
    ]
    return [found(process) for process in started]


def faults(said: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the doctor's, which are about this machine."""
    return [one["fault"] for one in said["findings"] if one["fault"] and not one["part"].startswith("doctor")]


def test_one_node_tries_each_way() -> None:
    status, said = found(start([]))
    assert faults(said) == []
    assert status == (0 if said["passed"] else 1)
    parts = [one["part"] for one in said["findings"]]
    assert parts[-8:] == ["as a job", "as a job", "shm", "shm", "tcp", "tcp", "low-latency mode", "normal mode"]
    assert said["routes"] == [{"1": "direct"}, {"0": "direct"}]
    shm = next(one["said"] for one in said["findings"] if one["part"] == "shm")
    assert shm.endswith("of a plain copy")


@pytest.mark.long
def test_a_firewall_and_a_name_on_loopback_are_told_by_node() -> None:
    """This machine's name is on loopback or unknown in a namespace, and no route leaves that."""
    ports = {"UCCL_EP_PORT_RANGE": f"{PORT}-{PORT + 20}"}
    with two_namespaces() as places:
        for name in places.names:
            run("ip", "-n", name, "link", "set", "lo", "up")
        # IPsec's policies block like a firewall, and every kernel has them
        blocked = f"src 0.0.0.0/0 dst {places.addresses[1]}/32 proto tcp dport {PORT} action block".split()
        run("ip", "-n", places.names[1], "xfrm", "policy", "add", "dir", "in", *blocked)
        named = {"GLOO_SOCKET_IFNAME": places.ends[0], "VLLM_HOST_IP": places.addresses[0]}
        answers = nodes(places, {**ports, **named}, ports)
    for status, said in answers:
        assert status == 1
        name, address, port = faults(said)
        assert name["step"].startswith(f"export GLOO_SOCKET_IFNAME={places.ends[1]} there")
        assert address["step"].startswith(f"export SGLANG_HOST_IP={places.addresses[1]} ")
        assert [one["where"].partition(" (")[0] for one in (name, address)] == ["node 1", "node 1"]
        assert port["where"] == "node 0 -> node 1"
        assert port["expected"] == f"a connection at {places.addresses[1]} port {PORT}"
        assert "firewall" in port["cause"]
        assert "UCCL_EP_PORT_RANGE" in port["step"]


@pytest.mark.parametrize("wrong", [["--nnodes", "2"], ["--node-rank", "1"], ["--only", "first"]])
def test_arguments_that_say_nothing_are_refused(wrong: list[str]) -> None:
    process = start(wrong)
    process.communicate(timeout=60)
    assert process.returncode == 2
