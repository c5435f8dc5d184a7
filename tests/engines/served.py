"""A real server, asked once: its answers, traffic and log, how two of them compare, and that none leaves a thing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from uccl_ep_serving.demo import supervisor
from uccl_ep_serving.demo.client import MODEL, Answer, Client, compare
from uccl_ep_serving.demo.report import reduced_rows
from uccl_ep_serving.demo.run import EXACT
from uccl_ep_serving.demo.server import DemoServer, ServerLaunch
from uccl_ep_serving.traffic.trace import load

#: With ``UCCL_EP_DIRECT=0`` every remote row goes through rings, proxies and a transport, as if each rank were a node
#: of its own.
PROXIED = {"UCCL_EP_DIRECT": "0", "UCCL_EP_TRANSPORT": "shm"}

Ask = Callable[[DemoServer], list[Answer]]


@dataclass
class Served:
    """Answers of a server, what its Buffers counted (by rank), and its log."""

    answers: list[Answer]
    traffic: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""


def wait_ready(server: DemoServer, seconds: float) -> None:
    """Until it takes requests; without a progress line."""
    server.wait_ready(seconds, lambda _seconds, _phase: None)


def serve_once(launch: ServerLaunch, directory: Path, name: str, ask: Ask, seconds: float) -> Served:
    """Start a server (within ``seconds``), ask it everything, stop it."""
    with DemoServer(launch, directory, name) as server:
        wait_ready(server, seconds)
        answers = ask(server)
        return Served(answers, server.settled_traffic(), server.log.read_text(errors="replace"))


@contextlib.contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """Servers that ran in ``directory`` leave neither shared memory nor processes."""
    before = supervisor.snapshot()
    yield
    assert supervisor.clean(before) == [], "servers left something in shared memory"
    users = [process.pid for process in psutil.process_iter() if works_in(process, directory)]
    assert not users, f"processes of the servers are alive: {users}"


def works_in(process: psutil.Process, directory: Path) -> bool:
    """Whether a process was started by a server that ran in ``directory``."""
    try:
        return Path(process.cwd()).is_relative_to(directory)
    except psutil.Error:
        return False


def assert_equal(expected: Sequence[Answer], got: Sequence[Answer]) -> None:
    """Same greedy texts, and logprobs that differ by the order of float32 sums only."""
    difference = compare(expected, got)
    assert difference.equal == difference.answers == len(expected), [answer.text for answer in got]
    assert difference.largest < EXACT


def operations(traffic: Sequence[dict[str, Any]]) -> set[str]:
    """Operations that any rank has run."""
    return {name for rank in traffic for name, operation in rank["ops"].items() if operation["count"]}


def serve_traced(
    launch: ServerLaunch, directory: Path, traces: Path, seconds: float, opening: int = 0
) -> dict[int, int]:
    """Start a server that records whole dispatches, ask it, and stop it once its files in ``traces`` have everything.

    Args:
        opening: tokens that a rank exchanges when it opens its Buffer, of no layer.

    Returns:
        By rank, tokens that its Buffer has dispatched for layers, as it has counted them.
    """

    def written() -> dict[int, int]:
        steps = load(traces).steps if list(traces.glob("*.npz")) else {}
        return {rank: sum(len(one.ids) for one in records) for rank, records in steps.items()}

    with DemoServer(launch, directory, "traced") as server:
        wait_ready(server, seconds)
        client = Client(server.url, getattr(launch, "model", MODEL))
        client.complete_all(("The router chose", "several windows of tokens, " * 5), 8, at_once=1)
        both = ("ll_dispatch", "normal_dispatch")
        traffic = server.settled_traffic()
        tokens = {one["rank"]: sum(one["ops"][name]["tokens"] for name in both) - opening for one in traffic}
        wait_until(lambda: written() == tokens, 30.0, f"the files do not have what the Buffers have counted: {tokens}")
        return tokens


def assert_moved(traffic: Sequence[dict[str, Any]], ranks: int, transport: str, ran: set[str]) -> None:
    """Every rank ran all of ``ran``, sent rows to each other rank over ``transport``, and nothing was lost."""
    assert [rank["rank"] for rank in traffic] == list(range(ranks))
    for rank in traffic:
        assert operations([rank]) == ran
        assert rank["transport_by_peer"] == {str(peer): transport for peer in range(ranks) if peer != rank["rank"]}
        assert rank["bytes_sent"]
    assert sum(rank["bytes_sent"] for rank in traffic) == sum(rank["bytes_received"] for rank in traffic)
    sent, returned = reduced_rows(list(traffic))
    assert sent == returned


def wait_until(condition: Callable[[], bool], seconds: float, complaint: str) -> None:
    """Poll ``condition`` until it holds; fails with ``complaint``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)
