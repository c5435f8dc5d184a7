"""Groups of ``roce`` endpoints on the RDMA devices of this machine (the soft-RoCE guest has rxe0 and rxe1)."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.contract import Group
from uccl_ep_serving.config import Settings
from uccl_ep_serving.proxy.transport.nic.roce import NicPort, RoceEndpoint

#: Soft-RoCE under emulation moves some tens of MB a second.
MAX_WRITE = 2 << 20
#: Who makes the objects of verbs, a value of UCCL_EP_VERBS; a test changes it.
VERBS = "ctypes"


def devices() -> list[str]:
    """Names of the devices, ranks are dealt to them in turn."""
    return sorted(path.name for path in Path("/sys/class/infiniband").iterdir())


@contextlib.contextmanager
def open_endpoints(ranks: int, window_bytes: int, **options: Any) -> Iterator[tuple[Group, list[RoceEndpoint]]]:
    """A connected group of endpoints over real verbs."""
    windows = [np.zeros(window_bytes, np.uint8) for _ in range(ranks)]
    names, rails = devices(), options.pop("rails", 1)
    settings = dataclasses.replace(options.pop("settings", Settings()), verbs=VERBS)
    endpoints: list[RoceEndpoint] = []
    try:
        for rank in range(ranks):
            endpoints.append(
                RoceEndpoint(
                    rank,
                    ranks,
                    0,
                    window=windows[rank].ctypes.data,
                    window_bytes=window_bytes,
                    peers=[peer for peer in range(ranks) if peer != rank],
                    settings=settings,
                    nics=[NicPort(names[(rank + rail) % len(names)]) for rail in range(rails)],
                    max_write=MAX_WRITE,
                    **options,
                )
            )
        addresses = [one.address() for one in endpoints]
        for rank, one in enumerate(endpoints):
            one.connect([None if peer == rank else a for peer, a in enumerate(addresses)], time.monotonic() + 5)
        for one in endpoints:
            one.established()
        yield Group(endpoints, windows, lambda rank: endpoints[rank].close()), endpoints
    finally:
        for one in endpoints:
            one.close()


@contextlib.contextmanager
def netem(*words: str) -> Iterator[None]:
    """Disturb what leaves either end of the pair of interfaces: ``netem("loss", "1%")``."""
    ends = [f"v{end}" for end in range(2)]
    for end in ends:
        subprocess.run(["tc", "qdisc", "add", "dev", end, "root", "netem", "limit", "10000", *words], check=True)
    try:
        yield
    finally:
        for end in ends:
            subprocess.run(["tc", "qdisc", "del", "dev", end, "root"], check=True)


@contextlib.contextmanager
def delayed(end: str, queue_pair: int, milliseconds: int) -> Iterator[None]:
    """Delay what leaves interface ``end`` for the RDMA queue pair with this number, and nothing else.

    A base transport header is 12 bytes behind IP (20) and UDP (8); the number is in bytes 5 to 7 of it.
    """
    band = ["tc", "qdisc", "add", "dev", end]
    subprocess.run([*band, "root", "handle", "1:", "prio", "bands", "3", "priomap", *["0"] * 16], check=True)
    subprocess.run(
        [*band, "parent", "1:3", "handle", "30:", "netem", "limit", "10000", "delay", f"{milliseconds}ms"], check=True
    )
    match = ["match", "u32", f"{queue_pair:#x}", "0x00ffffff", "at", "32"]
    subprocess.run(
        ["tc", "filter", "add", "dev", end, "parent", "1:", "protocol", "ip", "u32", *match, "flowid", "1:3"],
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", end, "root"], check=True)
