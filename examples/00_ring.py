"""Commands pass through a ring to a proxy, the proxy writes, and a count says that everything is there.

Two ranks live in this process, on the ``fake`` transport that reorders and repeats what they send. Rank 0 plays a
kernel: it puts sixteen 16-byte commands, one per 64-byte message, into its ring. Its proxy thread issues the writes;
rank 1's proxy restores their order and publishes how many messages have arrived without a gap. That count is all that
rank 1 waits for.

    .venv/bin/python examples/00_ring.py
"""

from __future__ import annotations

import ctypes
import time

import numpy as np

from uccl_ep_serving.config import Settings
from uccl_ep_serving.protocol.command import COMMAND_BYTES, Command, encode
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.protocol.ring import HEAD, SLOTS, lap_of
from uccl_ep_serving.protocol.streams import LL_DISPATCH
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.fake import Adversary, FakeFabric

RANKS, MESSAGES, MESSAGE_BYTES, WINDOW_BYTES = 2, 16, 64, 1 << 16
#: Messages leave from the first half of rank 0's window and land in the second half of rank 1's.
LANDING = WINDOW_BYTES // 2


def word(address: int) -> ctypes.c_int64:
    """The int64 at ``address``."""
    return ctypes.c_int64.from_address(address)


def put(ring: int, index: int, command: Command, slots: int) -> None:
    """What a kernel does with one command: reserve an index, then store both words with this lap's bit."""
    word(ring + HEAD).value = index + 1
    slot = ring + SLOTS + index % slots * COMMAND_BYTES
    low, high = encode(command, lap_of(index, slots))
    word(slot).value = low
    word(slot + 8).value = high


def main() -> None:
    """Send, wait, check, and show what the proxies counted."""
    settings = Settings(ring_slots=64)
    fabric = FakeFabric(RANKS, WINDOW_BYTES, seed=1, adversary=Adversary(reorder=0.5, duplicate=0.3))
    windows = [np.zeros(WINDOW_BYTES, np.uint8) for _ in range(RANKS)]
    errors = [np.zeros(ERROR_WORDS, np.int64) for _ in range(RANKS)]
    services = []
    for rank in range(RANKS):
        fabric.register_window(rank, windows[rank].ctypes.data)
        fabric.endpoint(rank).connect(
            [None if peer == rank else f"fake:{peer}.0".encode() for peer in range(RANKS)], time.monotonic() + 1
        )
    for rank in range(RANKS):
        service = ProxyService(
            rank=rank,
            ranks=RANKS,
            window=windows[rank].ctypes.data,
            window_bytes=WINDOW_BYTES,
            settings=settings,
            error=errors[rank].ctypes.data,
            endpoints=[[fabric.endpoint(rank)]],
            route=[-1 if peer == rank else 0 for peer in range(RANKS)],
        )
        service.start()
        services.append(service)
    try:
        size = MESSAGES * MESSAGE_BYTES
        windows[0][:size] = np.arange(size) % 251
        for i in range(MESSAGES):
            at = i * MESSAGE_BYTES
            put(
                services[0].ring(LL_DISPATCH),
                i,
                Command(1, LL_DISPATCH, source=at, target=LANDING + at, length=MESSAGE_BYTES, last=True),
                settings.ring_slots,
            )
        arrived = word(services[1].arrived(0, LL_DISPATCH))
        deadline = time.monotonic() + 10
        while arrived.value < MESSAGES:
            for service in services:
                service.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{arrived.value} of {MESSAGES} messages after 10 s: {services[1].counters()}")
            time.sleep(0.0001)
        assert np.array_equal(windows[1][LANDING : LANDING + size], windows[0][:size])
        services[0].drain(deadline)
        sent, received = (service.counters()["total"] for service in services)
        print(f"{arrived.value} messages of {MESSAGE_BYTES} bytes arrived whole and in order")
        print(f"rank 0: {sent['commands']} commands, {sent['writes']} writes, {sent['bytes_sent']} bytes")
        print(
            f"rank 1: {received['held_back']} writes came early and were held back, "
            f"{received['duplicates']} repeats were ignored"
        )
    finally:
        for service in services:
            service.stop(time.monotonic() + 5)


if __name__ == "__main__":
    main()
