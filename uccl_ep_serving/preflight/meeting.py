"""How the ranks of a check find each other: a store at the master's address, which nobody waits for in silence."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import msgspec
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..check.faults import Wrong
from ..control_plane.bootstrap import StoreExchange
from ..protocol.command import MAX_RANKS
from .job import Job, Place, skew

__all__ = ["Meeting", "meet"]

#: Part of the time of a check that ranks have to come, at most; and seconds between two attempts.
_SHARE, _LONGEST, _PAUSE = 0.5, 900.0, 0.2
#: Longest wait for an answer to one attempt to connect.
_ANSWER_SECONDS = 5.0
#: At the end the rank that has the store waits so long for those that still read it.
_LEAVE_SECONDS = 10.0
_MEETING = "meeting"


class _Node(msgspec.Struct, frozen=True):
    """What a node says of itself: its ranks, how many nodes it was told, version of the package, name of the host."""

    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    nodes: int
    version: str
    host: str


def _node(number: int, said: bytes) -> _Node:
    """What node ``number`` has said. Raises Wrong: whoever reaches the store may write there."""
    try:
        return msgspec.json.decode(said, type=_Node)
    except msgspec.MsgspecError as error:
        cause = "another program writes to the store, or another version of uccl_ep_serving runs there"
        raise Wrong(f"node {number}", "its ranks and nodes", str(error), cause, "another --port on all nodes") from None


class Meeting:
    """The store, and who has come.

    Args:
        store: of all ranks.
        place: of this one.
    """

    def __init__(self, store: c10d.Store, place: Place) -> None:
        self.store, self.place = store, place

    def exchange(self, name: str) -> StoreExchange:
        """An all-gather of the ranks under a name that nothing else has."""
        return StoreExchange(self.store, self.place.rank, self.place.ranks, f"uccl_ep check/{name}")

    def leave(self) -> None:
        """Say that this rank reads nothing more; rank 0, which may have the store, waits until all have said so."""
        prefix = c10d.PrefixStore("uccl_ep check/left", self.store)
        prefix.set(str(self.place.rank), "")
        deadline = time.monotonic() + _LEAVE_SECONDS
        keys = [str(rank) for rank in range(self.place.ranks)]
        while self.place.rank == 0 and not prefix.check(keys) and time.monotonic() < deadline:
            time.sleep(_PAUSE / 10)


def meet(job: Job, say: Callable[[str], None] = lambda words: None) -> Meeting:
    """Connect to the store, or open it on the first rank of all, and wait for all nodes.

    Raises:
        Wrong: with the name of what stands in the way.
    """
    deadline = time.monotonic() + min(job.seconds * _SHARE, _LONGEST) + skew(job)
    opens = job.node == job.local == 0 and not job.served
    where = f"node {job.node} to the master, {job.master} port {job.port}"
    if not opens:
        say(f"connects to {job.master} port {job.port}")
        _reach(job, where, deadline)
    try:
        wait = datetime.timedelta(seconds=job.seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            job.master, job.port, is_master=opens, timeout=wait, wait_for_workers=False
        )
    except RuntimeError as error:
        in_use = "address already in use" in str(error).lower()
        raise Wrong(
            where,
            "a port to listen on" if opens else "a store",
            str(error).splitlines()[0][:200],
            "another program listens there" if in_use else "--master is no address of node 0",
            "another --port on all nodes" if in_use else "--master HOST with an address of node 0, on all nodes",
        ) from error
    return Meeting(store, _everybody(store, job, deadline, say))


def _reach(job: Job, where: str, deadline: float) -> None:
    """Return once somebody listens at the master's address. Raises Wrong, in the words of the last attempt."""
    last: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((job.master, job.port), timeout=min(_ANSWER_SECONDS, left)).close()
            return
        except OSError as error:  # of a pod that has just begun not even the name need be there yet
            last = error
            time.sleep(_PAUSE)
    if isinstance(last, socket.gaierror):
        step = "--master with an address, or correct /etc/hosts and DNS on this node"
        raise Wrong(where, "a name that is known", f"{last.strerror}", "no such name here", step) from last
    if isinstance(last, TimeoutError) or last is None:
        cause = f"a firewall drops TCP to port {job.port} of {job.master}, or no route leads there"
    elif isinstance(last, ConnectionRefusedError):
        cause = "the check does not run on node 0, or another --port there, or a firewall rejects the connection"
    else:
        cause = "no route to the master's address"
    step = f"run the check on node 0 at the same time; open TCP port {job.port} there; or another --master, --port"
    raise Wrong(where, "a connection", str((last and last.strerror) or "no answer"), cause, step)


def _everybody(store: c10d.Store, job: Job, deadline: float, say: Callable[[str], None]) -> Place:
    """Who the ranks are once all nodes have said how many they have there. Raises Wrong."""
    prefix = c10d.PrefixStore("uccl_ep check/nodes", store)
    if job.local == 0:
        own = _Node(job.locals, job.nodes, metadata.version("uccl_ep_serving"), socket.gethostname())
        prefix.set(str(job.node), msgspec.json.encode(own).decode())
    say(f"waits for {job.nodes} node{'s' * (job.nodes > 1)}")
    while missing := [node for node in range(job.nodes) if not prefix.check([str(node)])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise Wrong(
                _MEETING,
                f"{job.nodes} nodes",
                f"nothing from node {names}",
                "the check does not run there, runs with the --node-rank of another one, or does not reach this store",
                f"run it on node {names} at the same time, and read what it says there",
            )
        time.sleep(_PAUSE / 10)
    nodes = [_node(number, prefix.get(str(number))) for number in range(job.nodes)]
    if wrong := [(node, one.nodes) for node, one in enumerate(nodes) if one.nodes != job.nodes]:
        node, there = wrong[0]
        said = f"{there} there"
        raise Wrong(f"node {node}", f"--nnodes {job.nodes} on all nodes", said, "other arguments", "the same on all")
    before = sum(one.ranks for one in nodes[: job.node])
    ranks = sum(one.ranks for one in nodes)
    if ranks > MAX_RANKS:
        raise Wrong(_MEETING, f"{MAX_RANKS} ranks at most", f"{ranks}", "other arguments", "fewer --ranks")
    return Place(job.node, job.nodes, job.local, job.locals, before + job.local, ranks)
