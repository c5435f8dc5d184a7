"""Two "hosts": one rank in each of two network namespaces joined by a veth pair; a whole Buffer over tcp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BODY = """
import json, sys
import torch.distributed as dist
import bodies
from uccl_ep_serving.bootstrap import StoreExchange

exchange = StoreExchange(dist.FileStore(sys.argv[1], 2), int(sys.argv[2]), 2)
stats = bodies.both_modes(exchange, {"proxies": 2, "channels": 2})
print(json.dumps({name: stats[name] for name in ("transport_by_peer", "bytes_sent")}))
"""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Names of two namespaces, 192.0.2.1 and 192.0.2.2 (RFC 5737) between them; skips where they cannot be made."""
    names = [f"uccl-ep-{os.getpid()}-{side}" for side in "ab"]
    ends = [f"ue{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
            for side in (0, 1):
                _run("ip", "-n", names[side], "addr", "add", f"192.0.2.{side + 1}/24", "dev", ends[side])
                _run("ip", "-n", names[side], "link", "set", ends[side], "up")
                _run("ip", "-n", names[side], "link", "set", "lo", "up")
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"network namespaces cannot be made here: {detail.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_ranks_in_different_namespaces_meet_over_tcp(namespaces: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", BODY, str(tmp_path / "store"), str(rank)],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, name in enumerate(namespaces)
    ]
    try:
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors.decode()[-3000:]
            found = json.loads(output.splitlines()[-1])
            # one kernel, two network namespaces: no shared memory, although /proc would show the other process
            assert found["transport_by_peer"] == {str(1 - rank): "tcp"}
            assert found["bytes_sent"] > 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
