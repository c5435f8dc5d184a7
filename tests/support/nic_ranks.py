"""Ranks as threads whose Runtimes reach each other through NICs in memory: only the NIC is not production's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.data_plane import nics as nic_endpoints
from uccl_ep_serving.data_plane.gpu_direct import Gpu
from uccl_ep_serving.data_plane.runtime import Runtime
from uccl_ep_serving.data_plane.topology import Nic, Topology
from uccl_ep_serving.kernels.select import cpu_groups
from uccl_ep_serving.native.groups import load
from uccl_ep_serving.proxy.service import proxy_groups

__all__ = ["efa_nics", "install", "roce_nics", "run_ranks"]


def efa_nics(rails: int, numa: int = 0) -> Topology:
    """A host with ``rails`` EFA devices, each behind a bridge of its own."""
    nics = []
    for rail in range(rails):
        path = (f"pci0000:{rail:02x}", f"0000:{rail:02x}:00.0")
        nics.append(Nic(f"efa{rail}", "efa", "Unknown", True, 100.0, numa, path[-1], path, (1,)))
    return Topology(nics=tuple(nics))


def roce_nics(network: MemoryNetwork, rank: int) -> Topology:
    """The host of ``rank``: each of its devices behind a bridge of its own."""
    nics = []
    for rail in range(network.rails):
        path = (f"pci0000:{rail:02x}", f"0000:{rail:02x}:00.0")
        name = network.device_name(rank, rail)
        nics.append(Nic(name, "bnxt_en", "Ethernet", True, 400.0, 0, path[-1], path, (1,)))
    return Topology(nics=tuple(nics))


@contextlib.contextmanager
def install(
    network: MemoryNetwork,
    monkeypatch: pytest.MonkeyPatch,
    topology: Topology | Callable[[int], Topology],
    transport: str = "efa",
) -> Iterator[threading.local]:
    """Let each rank's thread find the devices of its host; the thread says which rank it is in ``.rank``.

    ``topology``: of every host, or of each by rank.
    """
    here = threading.local()
    with monkeypatch.context() as patch:
        patch.setattr(nic_endpoints, "_LIBRARIES", {transport: lambda: network.library(here.rank)})
        of_host = topology if callable(topology) else lambda rank: topology
        patch.setattr(Topology, "read", lambda: of_host(here.rank))
        yield here


def run_ranks(
    network: MemoryNetwork,
    here: threading.local,
    settings: Settings,
    body: Callable[[Runtime], Any],
    failed: dict[int, BaseException] | None = None,
    gpus: Sequence[Gpu] = (),
) -> list[Any]:
    """``body`` with a Runtime per rank, each in a thread; results by rank, or the first failure raised.

    ``failed``: takes the failures by rank, instead of one being raised. ``gpus``: of the ranks that serve any.
    """
    # as Buffer does: a rank that compiles in its first operation eats into the time of the one that waits for it
    load(*cpu_groups(), *proxy_groups(settings.transport, nic_endpoints._LIBRARIES))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    results: list[Any] = [None] * network.ranks
    failures: dict[int, BaseException] = {} if failed is None else failed

    def work(rank: int) -> None:
        here.rank = rank
        try:
            gpu = gpus[rank] if gpus else None
            runtime = Runtime(StoreExchange(store, rank, network.ranks), settings, gpu=gpu)
            try:
                results[rank] = body(runtime)
            finally:
                runtime.close()
        except BaseException as failure:
            failures[rank] = failure

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(network.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if failures and failed is None:
        raise next(iter(failures.values()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    assert network.violation == 0
    assert not +network.objects, "a rank left C objects behind"
    return results
