"""Two processes, their proxies and the TCP transport: what happens below a dispatch, without an engine or a Buffer.

    python examples/01_two_process_tcp.py [--bytes 1048576] [--times 500] [--connections 2]

Each process has a window, a ring, a proxy thread and a TCP endpoint. Rank 0 writes a message into rank 1's window, rank
1 waits for it and writes one back, and so on; every message is one command in a ring.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection

import numpy as np

from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.kernels.cpu.publish import put_write
from uccl_ep_serving.kernels.cpu.wait import wait_arrived
from uccl_ep_serving.protocol.layout import PAGE, NormalPlan, WindowLayout
from uccl_ep_serving.protocol.streams import NORMAL_DISPATCH, STREAMS
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.tcp import TcpEndpoint

STREAM = NORMAL_DISPATCH


def run(rank: int, nbytes: int, times: int, connections: int, secret: bytes, other: Connection) -> None:
    peer, settings = 1 - rank, Settings(tcp_connections=connections, timeout=20.0)

    # Memory: the same layout on both ranks. The heap's first half is what we send, the second what we receive.
    half = -(-nbytes // PAGE) * PAGE
    layout = WindowLayout(2, None, NormalPlan(ranks=2, local_experts=1, heap=2 * half, rounds=PAGE, chunk=PAGE))
    window = Segment.create(f"example window {rank}", layout.nbytes)
    space = KernelSpace(rank, 2, settings.least_channels, window, layout, settings.timeout)
    source, target = layout.normal_heap, layout.normal_heap + half

    # Control path: tell the peer where we listen, connect, and prove the job's secret to each other.
    endpoint = TcpEndpoint(
        rank, 2, 0, window=window.address, window_bytes=layout.nbytes, secret=secret, settings=settings,
        host="127.0.0.1", job=b"example",
    )  # fmt: skip
    other.send_bytes(endpoint.address())
    addresses: list[bytes | None] = [None, None]
    addresses[peer] = other.recv_bytes()
    endpoint.connect(addresses, time.monotonic() + settings.connect_timeout)

    # Data path: a thread that turns commands into writes and publishes what has arrived.
    service = ProxyService(
        rank=rank, ranks=2, window=window.address, window_bytes=layout.nbytes, settings=settings, error=space.error,
        endpoints=[[endpoint]], route=[-1 if r == rank else 0 for r in range(2)],
    )  # fmt: skip
    for stream in range(STREAMS // 2):
        space.set_ring(stream, service.ring(stream))
    space.connect_proxied(peer, service.arrived, service.completed)
    space.watch = service.check
    service.start()

    def send() -> None:
        space.wait("send", lambda _: put_write(space.context, peer, STREAM, source, target, nbytes, 1))

    def receive(count: int) -> None:
        space.wait("receive", lambda end: wait_arrived(space.context, space.progress, peer, STREAM, count, end))

    space.window_bytes[source : source + nbytes] = (np.arange(nbytes) + rank) % 251
    begun = 0.0
    for number in range(times + 1):
        if number == 1:
            begun = time.perf_counter()  # the first exchange compiled what it used
        if rank == 0:
            send()
        receive(number + 1)
        if rank == 1:
            send()
    seconds = time.perf_counter() - begun

    received = space.window_bytes[target : target + nbytes]
    assert np.array_equal(received, (np.arange(nbytes) + peer) % 251)
    if rank == 0:
        print(f"{times} round trips of {nbytes} bytes to rank {peer} over {endpoint.describe(peer)}")
        print(f"{seconds / times * 1e6:.0f} us each, {2 * nbytes * times / seconds / 1e9:.2f} GB/s, bytes checked")

    # Leaving: drain, agree that both are done, stop, and only then release what the thread used.
    service.drain(time.monotonic() + 5.0)
    other.send_bytes(b"done")
    other.recv_bytes()
    service.stop(time.monotonic() + 5.0)
    endpoint.close()
    window.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 20, help="bytes of a message, a multiple of 16")
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--connections", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.bytes % 16 or arguments.bytes < 16 or arguments.times < 1:
        parser.error("--bytes must be a positive multiple of 16, and --times at least 1")
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    shared = (arguments.bytes, arguments.times, arguments.connections, secrets.token_bytes(32))
    processes = [spawn.Process(target=run, args=(rank, *shared, ends[rank])) for rank in range(2)]
    for process in processes:
        process.start()
    for end in ends:
        end.close()  # the other process alone holds it: when one ends early, the other hears of it
    for process in processes:
        process.join()
    raise SystemExit(any(process.exitcode for process in processes))
