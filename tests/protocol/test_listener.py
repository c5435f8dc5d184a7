"""Listening inside a range of ports: busy ones are skipped, no two share one, and what is said when it is full."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.control_threads import ThreadExchange, in_threads, joined
from tests.support.tcp_peers import make
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.links import Listeners
from uccl_ep_serving.errors import BootstrapError, TransportError
from uccl_ep_serving.protocol import listener
from uccl_ep_serving.protocol.frame import decode_address
from uccl_ep_serving.protocol.listener import PortsTaken, listen

HOST = "127.0.0.1"


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def ports() -> tuple[int, int]:
    """A range of eight ports that nobody uses, below those that the kernel gives away."""
    for first in range(20_000, 30_000, 8):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + 8):
                held.enter_context(listen(HOST, (port, port)))
            return first, first + 7
    raise AssertionError("no eight free ports")


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_busy_ports_are_skipped(opened: contextlib.ExitStack, ports: tuple[int, int]) -> None:
    first, _ = ports
    # the program of somebody else, which shares no port, and one that listens on every address
    for address, port in ((HOST, first), ("", first + 1)):
        other = opened.enter_context(socket.socket())
        # connections of the last seconds to this port do not hold it
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((address, port))
        other.listen()
    assert [_port(opened.enter_context(listen(HOST, ports))) for _ in range(2)] == [first + 2, first + 3]


def test_listeners_that_open_at_the_same_time_share_no_port(
    opened: contextlib.ExitStack, ports: tuple[int, int]
) -> None:
    found: list[int] = []
    together = threading.Barrier(8)

    def work() -> None:
        together.wait(10)
        found.append(_port(opened.enter_context(listen(HOST, ports))))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(found) == list(range(ports[0], ports[1] + 1))


def test_connections_that_were_accepted_do_not_keep_a_port(
    opened: contextlib.ExitStack, ports: tuple[int, int]
) -> None:
    only = (ports[0], ports[0])
    for _ in range(2):
        with listen(HOST, only) as listener:
            opened.enter_context(socket.create_connection((HOST, only[0])))
            opened.enter_context(listener.accept()[0])


def test_a_port_that_was_just_freed_is_found(
    opened: contextlib.ExitStack, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine on the host, which shares the range, has just connected."""
    two = (ports[0], ports[0] + 1)
    held = [opened.enter_context(listen(HOST, two)) for _ in range(2)]
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            held[0].close()

    monkeypatch.setattr(listener.time, "sleep", pause)
    assert _port(opened.enter_context(listen(HOST, two))) == ports[0]
    assert len(pauses) == 2
    with pytest.raises(PortsTaken):
        listen(HOST, two)
    assert sum(pauses) < 1


def test_a_full_range_is_named_with_what_it_must_hold(opened: contextlib.ExitStack, ports: tuple[int, int]) -> None:
    two = (ports[0], ports[0] + 1)
    for _ in range(2):
        opened.enter_context(listen(HOST, two))
    words = rf"all 2 ports of UCCL_EP_PORT_RANGE={two[0]}-{two[1]} are taken"
    with pytest.raises(PortsTaken, match=words):
        listen(HOST, two)
    with pytest.raises(PortsTaken, match=rf"the only port of UCCL_EP_PORT_RANGE={two[0]}-{two[0]} is taken"):
        listen(HOST, (two[0], two[0]))
    settings = Settings(port_range=two, proxies=2, socket_ifname="lo")
    needs = r"16 x 3 = 48 ports where all 16 ranks are on one host.*a wider UCCL_EP_PORT_RANGE"
    with pytest.raises(BootstrapError, match=f"rank 5 cannot listen for its peers on {HOST}: {words}.*{needs}"):
        Listeners(5, 16, settings)
    with pytest.raises(TransportError, match=f"rank 5: cannot listen on {HOST}: {words}.*{needs}"):
        make(5, 16, np.zeros(64, np.uint8), settings=settings)


def test_a_proxys_listener_keeps_to_the_range(ports: tuple[int, int]) -> None:
    endpoints = [make(0, 2, np.zeros(64, np.uint8), settings=Settings(port_range=ports)) for _ in range(2)]
    try:
        assert [decode_address(one.address())[1] for one in endpoints] == [ports[0], ports[0] + 1]
    finally:
        for one in endpoints:
            one.close()


def test_two_engines_on_one_host_share_a_range(ports: tuple[int, int]) -> None:
    """Two groups of three ranks that open at the same time."""

    def body(exchange: ThreadExchange) -> int:
        mesh = joined(exchange, port_range=ports, socket_ifname="lo")
        try:
            mesh.steps.gather("all here")
            return mesh.port
        finally:
            mesh.goodbye()
            mesh.close()

    found: list[list[int]] = []
    engines = [threading.Thread(target=lambda: found.append(in_threads(3, body))) for _ in range(2)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(30)
    assert all(ports[0] <= port <= ports[1] for one in found for port in one), found
    assert [len(set(one)) for one in found] == [3, 3]
