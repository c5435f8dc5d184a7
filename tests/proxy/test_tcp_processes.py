"""``tcp`` between processes: traffic both ways, SIGKILL, network namespaces."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.support.namespaces import run, two_namespaces

_CHILD = """
import os, sys, time
import numpy as np
from tests.support.contract import Group, Port
from tests.support.tcp_peers import make
rank, host = int(sys.argv[1]), sys.argv[2]
window = np.zeros(1 << 20, np.uint8)
endpoint = make(rank, 2, window, host=host)
print(endpoint.address().hex(), flush=True)
addresses = [None, None]
addresses[1 - rank] = bytes.fromhex(sys.stdin.readline())
endpoint.connect(addresses, time.monotonic() + 20)
print(endpoint.describe(1 - rank), flush=True)
port = Port(Group([endpoint, endpoint], [window, window], None), rank)
window[: 1 << 19] = np.arange(1 << 19) % 251
posted = arrived = 0
deadline = time.monotonic() + 20
while arrived < 100 or posted < 100:
    if posted < 100 and port.post(1 - rank, 0, 1 << 19, 1 << 19, rank << 20 | 8 << 12 | posted, posted) == 0:
        posted += 1
    port.flush()
    arrived += sum(event.kind == 2 for event in port.poll())
    assert time.monotonic() < deadline
assert np.array_equal(window[1 << 19 :], window[: 1 << 19])
parent = os.getpid()
if "fork" in sys.argv and os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.05)
    time.sleep(3)
    os._exit(0)
print("done", flush=True)
while True:
    port.flush()
    for event in port.poll():
        if event.kind == 4 - 1:
            print("down", event.peer, time.time(), flush=True)
            sys.exit(0)
    time.sleep(0.001)
"""


@contextlib.contextmanager
def two_processes(
    hosts: Sequence[str], prefixes: Sequence[Sequence[str]] = ((), ()), arguments: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that exchanged 100 writes of 512 KiB each way and now wait for the other's end."""
    with contextlib.ExitStack() as stack:
        children = []
        for rank in range(2):
            command = [
                *prefixes[rank],
                sys.executable,
                "-c",
                _CHILD,
                str(rank),
                hosts[rank],
                *arguments,
            ]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        addresses = [line(child) for child in children]
        for rank, child in enumerate(children):
            assert child.stdin is not None
            child.stdin.write(addresses[1 - rank] + "\n")
            child.stdin.flush()
        for rank, child in enumerate(children):
            assert hosts[1 - rank] in line(child)
        for child in children:
            assert line(child) == "done"
        yield children


def line(child: subprocess.Popen[str], seconds: float = 60.0) -> str:
    """The next line of a child's output."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], seconds)
    assert ready, "the child says nothing"
    return child.stdout.readline().strip()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a forked child that lives on"])
def test_two_processes_and_sigkill(victim: int, forks: bool) -> None:
    with two_processes(["127.0.0.1", "127.0.0.1"], arguments=["fork"] if forks else []) as children:
        killed = time.time()
        os.kill(children[victim].pid, signal.SIGKILL)
        word, peer, when = line(children[1 - victim]).split()
        assert (word, int(peer)) == ("down", victim)
        assert float(when) - killed < 1.0


def test_between_network_namespaces() -> None:
    """Nothing assumes loopback: neither namespace even has it up. A link that is down for a moment loses no peer."""
    with two_namespaces() as found:
        prefixes = [("ip", "netns", "exec", name) for name in found.names]
        with two_processes(list(found.addresses), prefixes) as children:
            run("ip", "-n", found.names[0], "link", "set", found.ends[0], "down")
            time.sleep(0.5)
            run("ip", "-n", found.names[0], "link", "set", found.ends[0], "up")
            assert children[1].stdout is not None
            assert not select.select([children[1].stdout], [], [], 0.5)[0], "reported down"
            os.kill(children[0].pid, signal.SIGKILL)
            assert line(children[1], 2.0).startswith("down 0")
