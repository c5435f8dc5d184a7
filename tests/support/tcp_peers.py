"""TCP endpoints for tests, and a peer that a test plays byte by byte."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.support.contract import Event, Group, Port
from uccl_ep_serving.config import Settings
from uccl_ep_serving.protocol import frame, handshake
from uccl_ep_serving.protocol.imm import Immediate, encode
from uccl_ep_serving.proxy.transport.tcp import TcpEndpoint

SECRET = bytes(range(32))
JOB = b"a job"
CONNECTIONS = 2
WINDOW = 1 << 16


def make(
    rank: int,
    ranks: int,
    window: np.ndarray,
    *,
    secret: bytes = SECRET,
    host: str = "127.0.0.1",
    job: bytes = JOB,
    connections: int = CONNECTIONS,
    proxy: int = 0,
    settings: Settings | None = None,
) -> TcpEndpoint:
    return TcpEndpoint(
        rank,
        ranks,
        proxy,
        window=window.ctypes.data,
        window_bytes=window.nbytes,
        secret=secret,
        settings=settings or Settings(tcp_connections=connections),
        host=host,
        job=job,
    )


def connect_all(
    endpoints: Sequence[TcpEndpoint], seconds: float = 10.0, addresses: Sequence[bytes] = ()
) -> list[BaseException | None]:
    """All endpoints connect to each other, at their own addresses or at these, each in a thread, and hear that all
    have; by rank, what it raised."""
    addresses = addresses or [endpoint.address() for endpoint in endpoints]
    raised: list[BaseException | None] = [None] * len(endpoints)
    deadline = time.monotonic() + seconds

    def connect(rank: int) -> None:
        try:
            endpoints[rank].connect([a if r != rank else None for r, a in enumerate(addresses)], deadline)
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(len(endpoints))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not any(raised):
        for endpoint in endpoints:
            endpoint.established()
    return raised


@contextlib.contextmanager
def tcp_group(ranks: int, window_bytes: int, host: str = "127.0.0.1", **options: Any) -> Iterator[Group]:
    """``through``: what becomes of the endpoints' addresses before their peers learn them."""
    through = options.pop("through", lambda addresses: addresses)
    windows = [np.zeros(window_bytes, np.uint8) for _ in range(ranks)]
    endpoints = [make(rank, ranks, window, host=host, **options) for rank, window in enumerate(windows)]
    try:
        addresses = through([endpoint.address() for endpoint in endpoints])
        assert connect_all(endpoints, addresses=addresses) == [None] * ranks
        yield Group(endpoints, windows, lambda rank: endpoints[rank].close())
    finally:
        for endpoint in endpoints:
            endpoint.close()
            endpoint.close()


def drive(connection: socket.socket, talk: handshake.Handshake) -> handshake.Proven:
    """Run a handshake on a blocking socket."""
    request = next(talk)
    while True:
        try:
            if isinstance(request, bytes):
                connection.sendall(request)
                request = talk.send(b"")
            else:
                received = b""
                while len(received) < request:
                    part = connection.recv(request - len(received))
                    if not part:
                        raise ConnectionResetError("closed during the handshake")
                    received += part
                request = talk.send(received)
        except StopIteration as end:
            return end.value


def identity(rank: int, ranks: int = 2, secret: bytes = SECRET, **changes: int) -> handshake.Identity:
    values = {"proxy": 0, "connections": CONNECTIONS, "window_bytes": WINDOW, **changes}
    return handshake.Identity(rank, ranks, values["proxy"], values["connections"], values["window_bytes"], JOB, secret)


class Played:
    """Rank 0 is real; rank 1 (of 2, or of 3 with a real rank 2) is two proven raw sockets."""

    def __init__(self, ranks: int = 2) -> None:
        self.windows = [np.zeros(WINDOW, np.uint8) for _ in range(ranks)]
        self.real = {rank: make(rank, ranks, self.windows[rank]) for rank in range(ranks) if rank != 1}
        listener = socket.create_server(("127.0.0.1", 0))
        addresses = [self.real[r].address() if r != 1 else b"" for r in range(ranks)]
        addresses[1] = frame.encode_address(*listener.getsockname())
        deadline = time.monotonic() + 10
        threads = [
            threading.Thread(
                target=endpoint.connect, args=([a if r != rank else None for r, a in enumerate(addresses)], deadline)
            )
            for rank, endpoint in self.real.items()
        ]
        for thread in threads:
            thread.start()
        self.sockets = []
        host, port = frame.decode_address(addresses[0])
        for number in range(CONNECTIONS):
            connection = socket.create_connection((host, port), timeout=5)
            drive(connection, handshake.connect(identity(1, ranks), 0, number))
            self.sockets.append(connection)
        self.others = []
        for _ in range(CONNECTIONS * (ranks - 2)):
            connection, _ = listener.accept()
            drive(connection, handshake.accept(identity(1, ranks), frozenset([2])))
            self.others.append(connection)
        for thread in threads:
            thread.join()
        listener.close()
        endpoints = [self.real.get(rank, self.real[0]) for rank in range(ranks)]
        self.where = (host, port)
        self.group = Group(endpoints, self.windows, lambda rank: None)
        self.port = Port(self.group, 0)

    def events(self, count: int, seconds: float = 5.0) -> list[Event]:
        """The first ``count`` events of rank 0."""
        events: list[Event] = []
        deadline = time.monotonic() + seconds
        while len(events) < count:
            events += self.port.poll()
            assert time.monotonic() < deadline, f"only {events}"
        return events

    def close(self) -> None:
        for connection in self.sockets + self.others:
            connection.close()
        for endpoint in self.real.values():
            endpoint.close()


@contextlib.contextmanager
def played(ranks: int = 2) -> Iterator[Played]:
    peer = Played(ranks)
    try:
        yield peer
    finally:
        peer.close()


def raw(
    imm: int = encode(Immediate(1, 8, 0, True)),
    target: int = 0,
    length: int = 16,
    number: int = 0,
    magic: int = frame.FRAME_MAGIC,
) -> bytes:
    """A frame header with any values, right or wrong."""
    return struct.pack("<IIQQQ", magic, imm, target, length, number)


def raw_count(arrived: int, number: int = 0) -> bytes:
    """A frame that only says how many frames have arrived."""
    return frame.encode_frame(frame.Frame(0, 0, 0, number, arrived, is_ack=True))
