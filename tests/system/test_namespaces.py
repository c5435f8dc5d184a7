"""Two "hosts": one rank in each of two network namespaces joined by a veth pair; a whole Buffer over tcp.

Each host has a bridge of containers of the same address, and may listen on a few ports only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.namespaces import Namespaces, run, two_namespaces

BODY = """
import json, sys
import psutil
import torch.distributed as dist
from tests.support import bodies
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

host, rank = sys.argv[1], int(sys.argv[2])
exchange = StoreExchange(dist.TCPStore(host, 29400, 2, is_master=rank == 0), rank, 2)
buffer = bodies.opened(exchange, {"proxies": 2, "channels": 2, "port_range": (20000, 20002)})
bodies.round_trip(buffer)
bodies.normal_trip(buffer)
stats = {name: buffer.stats()[name] for name in ("transport_by_peer", "bytes_sent")}
ends = [(one.laddr.port, one.raddr.port) for one in psutil.Process().net_connections("tcp") if one.raddr]
buffer.destroy()
exchange.all_gather(b"")  # the store is rank 0's
print(json.dumps({**stats, "address": buffer.runtime._mesh.address, "ends": ends}))
"""


@pytest.mark.long
def test_ranks_in_different_namespaces_meet_over_tcp(tmp_path: Path) -> None:
    with two_namespaces() as namespaces:
        for name in namespaces.names:
            ip = ("ip", "-n", name)
            run(*ip, "link", "set", "lo", "up")
            run(*ip, "link", "add", "docker0", "type", "bridge")
            run(*ip, "link", "add", "port0", "type", "veth", "peer", "a_container")
            run(*ip, "link", "set", "port0", "master", "docker0")
            run(*ip, "address", "add", "172.17.0.1/16", "dev", "docker0")
            for one in ("docker0", "port0", "a_container"):
                run(*ip, "link", "set", one, "up")
        _serve(namespaces, tmp_path)


def _serve(namespaces: Namespaces, tmp_path: Path) -> None:
    """Both modes on a rank in each namespace."""
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", BODY, namespaces.addresses[0], str(rank)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, name in enumerate(namespaces.names)
    ]
    try:
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors.decode()[-3000:]
            found = json.loads(output.splitlines()[-1])
            # one kernel, two network namespaces: no shared memory, although /proc would show the other process
            assert found["transport_by_peer"] == {str(1 - rank): "tcp"}
            assert found["bytes_sent"] > 0
            assert found["address"] == namespaces.addresses[rank]
            # rank 0 accepts: on its end of a control connection and of 2 for each of 2 proxies
            accepted = [end[rank] for end in found["ends"] if 29400 not in end]
            assert len(accepted) == 5
            assert set(accepted) <= {20000, 20001, 20002}
    finally:
        for process in processes:
            process.kill()
            process.wait()
