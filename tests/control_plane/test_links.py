"""How ranks meet: disagreement, wrong secrets, strangers, hosts that look alike, and a rank that gives up meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.control_threads import ThreadExchange, in_threads, introduced, joined
from uccl_ep_serving.control_plane import links
from uccl_ep_serving.control_plane.addresses import Address
from uccl_ep_serving.control_plane.bootstrap import Introduction
from uccl_ep_serving.control_plane.frames import DOING, GATHER, GOODBYE, Ended, read_frames, send_frame, send_now
from uccl_ep_serving.control_plane.links import Link
from uccl_ep_serving.errors import BootstrapError, ConfigError


def test_ranks_that_disagree_are_told_who_and_what() -> None:
    def body(exchange: ThreadExchange) -> Any:
        joined(exchange, proxies=1 + (exchange.rank == 2), channels=2)

    for error in in_threads(3, body):
        assert isinstance(error, ConfigError)
        assert "UCCL_EP_PROXIES: rank 0 has 1, rank 2" in str(error)


def test_a_wrong_secret_is_refused_and_strangers_do_not_disturb() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh, known = introduced(exchange, connect_timeout=1.0)
        if exchange.rank == 1:
            for noise in (b"GET / HTTP/1.1\r\n\r\n" * 10, b""):
                with socket.create_connection((known.cards[0].address, known.cards[0].port)) as stranger:
                    stranger.sendall(noise)
            known = Introduction(known.cards, b"x" * 32)
        mesh.connect(known)

    zero, one = in_threads(2, body)
    assert isinstance(one, BootstrapError)
    assert "the two sides do not have the same job secret" in str(one)
    assert isinstance(zero, BootstrapError)
    assert "ranks [1] have not connected" in str(zero)


@pytest.mark.parametrize("now", [False, True])
def test_a_handler_that_interrupts_who_writes_a_frame_leaves_it_whole(now: bool) -> None:
    """In the same thread, over a Unix socket: it must not wait for itself."""
    near, far = socket.socketpair()
    answers: list[object] = []

    class Interrupted:
        def sendall(self, frame: bytes) -> None:
            near.sendall(frame[:5])
            answers.append(send_now(link, DOING, b"doing") if now else send_frame(link, GOODBYE))
            near.sendall(frame[5:])

    link = Link(1, cast(socket.socket, Interrupted()), True)
    thread = threading.Thread(target=send_frame, args=(link, GATHER, 7, b"a part"), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits for itself"
    assert answers == [False if now else None]
    near.close()
    frames = []
    with contextlib.suppress(Ended):
        for frame in read_frames(Link(0, far, True)):
            frames.append((frame.kind, frame.sequence, frame.payload))
    assert frames == [(GATHER, 7, b"a part")]
    far.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_hosts_meet_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "choose_address", lambda settings, store_host: Address("::1", "lo, for a test"))

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=True)
        try:
            return [data for data, _ in mesh.steps.gather("all here", b"%d" % exchange.rank)], mesh.local_peers
        finally:
            mesh.goodbye()
            mesh.close()

    assert in_threads(2, body) == [([b"0", b"1"], frozenset())] * 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_overruled_variable_is_said_where_there_are_several_hosts(
    hosts: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = Address("127.0.0.1", "lo, for a test", overruled="GLOO_SOCKET_IFNAME=ens6 asks for ens6")
    monkeypatch.setattr(links, "choose_address", lambda settings, store_host: choice)

    def body(exchange: ThreadExchange) -> None:
        mesh = joined(exchange, tcp=hosts > 1)
        mesh.steps.gather("all here")
        mesh.goodbye()
        mesh.close()

    assert in_threads(2, body) == [None, None]
    said = [one.getMessage() for one in caplog.records if "GLOO" in one.getMessage()]
    assert sorted(said) == [f"rank {rank}: {choice.overruled}" for rank in range(2) if hosts > 1]


def test_silent_strangers_never_push_out_a_rank() -> None:
    """More of them than are kept, on both listeners, before and while the ranks connect."""

    def body(exchange: ThreadExchange) -> Any:
        mesh, known = introduced(exchange, connect_timeout=10.0)
        strangers = []
        for card in known.cards:
            for _ in range(30):
                strangers.append(socket.create_connection((card.address, card.port)))
                strangers.append(socket.socket(socket.AF_UNIX))
                strangers[-1].connect("\0" + card.socket_name)
        try:
            mesh.connect(known)
            return [data for data, _ in mesh.steps.gather("all here", b"%d" % exchange.rank)]
        finally:
            for stranger in strangers:
                stranger.close()
            mesh.goodbye()  # else it is lost for who still waits for the third rank
            mesh.close()

    assert in_threads(3, body) == [[b"0", b"1", b"2"]] * 3


def test_a_rank_that_gives_up_while_connecting_is_named_at_once() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh, known = introduced(exchange, connect_timeout=30.0)
        start = time.monotonic()
        try:
            if exchange.rank == 1:
                return None
            mesh.connect(known)
        except BootstrapError as error:
            return time.monotonic() - start, str(error)
        finally:
            mesh.close()

    (took0, text0), _, (took2, text2) = in_threads(3, body)
    assert max(took0, took2) < 8
    assert "nobody listens for rank 1" in text2
    assert "rank 2" in text0
    assert "left while the ranks were connecting" in text0


def test_silent_strangers_do_not_hold_up_the_group() -> None:
    strangers: list[socket.socket] = []

    def body(exchange: ThreadExchange) -> Any:
        mesh, known = introduced(exchange, connect_timeout=20.0)
        if exchange.rank == 1:
            strangers.extend(
                socket.create_connection((known.cards[0].address, known.cards[0].port)) for _ in range(100)
            )
        exchange.all_gather(b"")
        start = time.monotonic()
        mesh.connect(known)
        took = time.monotonic() - start
        mesh.steps.gather("all here")
        mesh.goodbye()
        mesh.close()
        return took

    try:
        assert max(in_threads(2, body)) < 3
    finally:
        for stranger in strangers:
            stranger.close()


def test_equal_host_identities_without_a_common_socket_meet_over_tcp() -> None:
    """Two machines started from one snapshot have the same boot id and the same namespace number."""
    import msgspec

    def body(exchange: ThreadExchange) -> Any:
        mesh, known = introduced(exchange, connect_timeout=10.0)
        cards = tuple(msgspec.structs.replace(card, socket_name=card.socket_name + "x") for card in known.cards)
        mesh.connect(Introduction(cards, known.secret))
        local = mesh.local_peers
        mesh.steps.gather("all here")
        mesh.goodbye()
        mesh.close()
        return local

    assert in_threads(2, body) == [frozenset(), frozenset()]
