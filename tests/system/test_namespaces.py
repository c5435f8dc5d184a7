"""Two "hosts": one rank in each of two network namespaces joined by a veth pair; a whole Buffer over tcp."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.namespaces import two_namespaces

BODY = """
import json, sys
import torch.distributed as dist
from tests.support import bodies
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

exchange = StoreExchange(dist.FileStore(sys.argv[1], 2), int(sys.argv[2]), 2)
stats = bodies.both_modes(exchange, {"proxies": 2, "channels": 2})
print(json.dumps({name: stats[name] for name in ("transport_by_peer", "bytes_sent")}))
"""


def test_ranks_in_different_namespaces_meet_over_tcp(tmp_path: Path) -> None:
    with two_namespaces() as namespaces:
        _serve(namespaces.names, tmp_path)


def _serve(namespaces: tuple[str, str], tmp_path: Path) -> None:
    """Both modes on a rank in each namespace."""
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", BODY, str(tmp_path / "store"), str(rank)],
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
