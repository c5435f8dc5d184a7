"""``tcp``, connecting: the job's secret, strangers, other groups, peers that are late, silent or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Generator, Iterator

import numpy as np
import pytest

from tests.support.tcp_peers import CONNECTIONS, SECRET, WINDOW, connect_all, drive, identity, make, tcp_group
from uccl_ep_serving.errors import BootstrapError, ConfigError, TransportError
from uccl_ep_serving.protocol import frame, handshake, talks
from uccl_ep_serving.proxy.transport import tcp_connect
from uccl_ep_serving.proxy.transport.tcp import TcpEndpoint


@contextlib.contextmanager
def waiting_rank(begin: threading.Event | None = None) -> Iterator[tuple[tuple[str, int], list[BaseException]]]:
    """Rank 0 of two, which waits for one connection in a thread (from ``begin`` on): its address, what it raised."""
    raised: list[BaseException] = []

    def connect() -> None:
        try:
            if begin is not None:
                begin.wait(10)
            endpoint.connect([None, frame.encode_address("127.0.0.1", 1)], time.monotonic() + 10)
        except (BootstrapError, TransportError) as error:
            raised.append(error)

    with contextlib.closing(make(0, 2, np.zeros(WINDOW, np.uint8), connections=1)) as endpoint:
        thread = threading.Thread(target=connect)
        thread.start()
        try:
            yield frame.decode_address(endpoint.address()), raised
        finally:
            thread.join(15)
            assert not thread.is_alive()


def answer(peer: socket.socket, talk: Generator[bytes, bytes, object], challenge: bytes) -> None:
    """Rank 1's second half of the handshake, on the ``challenge`` it got: it is welcomed."""
    talk.send(None)  # type: ignore[arg-type]
    talk.send(challenge[: frame.PREFIX_BYTES])
    peer.sendall(talk.send(challenge[frame.PREFIX_BYTES :]))
    welcome = peer.recv(frame.PREFIX_BYTES + frame.WELCOME_BYTES, socket.MSG_WAITALL)
    assert frame.decode_prefix(welcome[: frame.PREFIX_BYTES])[1] == frame.KIND_WELCOME


class TestSecret:
    def test_a_wrong_secret_is_named_on_both_sides(self) -> None:
        windows = [np.zeros(WINDOW, np.uint8) for _ in range(2)]
        endpoints = [make(0, 2, windows[0]), make(1, 2, windows[1], secret=bytes(32))]
        raised = connect_all(endpoints, seconds=0.5)
        for rank, error in enumerate(raised):
            assert isinstance(error, BootstrapError)
            assert f"rank {1 - rank}" in str(error)
            assert "same job secret" in str(error)

    def test_the_acceptor_checks_too(self) -> None:
        """A connector that ignores the acceptor's proof and sends a wrong one of its own."""
        window = np.zeros(WINDOW, np.uint8)
        endpoint = make(0, 2, window)
        raised: list[BaseException] = []

        def connect() -> None:
            try:
                endpoint.connect([None, frame.encode_address("127.0.0.1", 1)], time.monotonic() + 0.5)
            except BootstrapError as error:
                raised.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        with socket.create_connection(frame.decode_address(endpoint.address()), timeout=5) as connection:
            connection.sendall(frame.encode_hello(identity(1).hello(0, 0)))
            assert len(connection.recv(frame.PREFIX_BYTES + frame.CHALLENGE_BYTES, socket.MSG_WAITALL)) > 0
            connection.sendall(frame.encode_proof(0, bytes(32)))
            prefix = connection.recv(frame.PREFIX_BYTES, socket.MSG_WAITALL)
            assert frame.decode_prefix(prefix)[1:] == (frame.KIND_VERDICT, frame.Verdict.WRONG_SECRET)
        thread.join()
        assert "rank 1" in str(raised[0])
        assert "same job secret" in str(raised[0])

    def test_playing_back_the_acceptors_own_proof_does_not_help(self) -> None:
        with contextlib.closing(make(0, 2, np.zeros(WINDOW, np.uint8))) as endpoint:
            thread = threading.Thread(target=self._wait, args=(endpoint,))
            thread.start()
            with socket.create_connection(frame.decode_address(endpoint.address()), timeout=5) as connection:
                connection.sendall(frame.encode_hello(identity(1).hello(0, 0)))
                wire = connection.recv(frame.PREFIX_BYTES + frame.CHALLENGE_BYTES, socket.MSG_WAITALL)
                _, proof = frame.decode_challenge(wire[frame.PREFIX_BYTES :])
                connection.sendall(frame.encode_proof(0, proof))
                prefix = connection.recv(frame.PREFIX_BYTES, socket.MSG_WAITALL)
                assert frame.decode_prefix(prefix)[2] == frame.Verdict.WRONG_SECRET
            thread.join()

    @staticmethod
    def _wait(endpoint: TcpEndpoint) -> None:
        with pytest.raises(BootstrapError, match="rank 1"):
            endpoint.connect([None, frame.encode_address("127.0.0.1", 1)], time.monotonic() + 0.5)

    def test_the_connector_checks_too(self) -> None:
        """Somebody who listens where rank 0 should, welcomes everybody and does not know the secret."""
        with socket.create_server(("127.0.0.1", 0)) as impostor:
            endpoint = make(1, 2, np.zeros(WINDOW, np.uint8), connections=1)

            def welcome() -> None:
                connection, _ = impostor.accept()
                with connection:
                    connection.sendall(frame.encode_challenge(bytes(32), bytes(32)))
                    connection.sendall(frame.encode_welcome(0, bytes(32)))
                    while connection.recv(4096):
                        pass

            thread = threading.Thread(target=welcome, daemon=True)
            thread.start()
            with pytest.raises(BootstrapError, match=r"rank 0 .*same job secret"):
                endpoint.connect([frame.encode_address(*impostor.getsockname()), None], time.monotonic() + 10)
            thread.join()

    def test_a_short_secret(self) -> None:
        with pytest.raises(ConfigError, match="secret has 5 bytes"):
            make(0, 2, np.zeros(64, np.uint8), secret=b"short")

    def test_the_secret_is_not_shown(self) -> None:
        assert SECRET.hex() not in repr(identity(0))
        assert repr(SECRET) not in repr(identity(0))


class TestStrangers:
    @pytest.mark.parametrize(
        "first", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00", b"UEPH", os.urandom(4096), frame.encode_proof(0, bytes(32))]
    )
    def test_a_stray_connection_disturbs_nobody(self, first: bytes) -> None:
        windows = [np.zeros(WINDOW, np.uint8) for _ in range(2)]
        endpoints = [make(rank, 2, window) for rank, window in enumerate(windows)]
        with contextlib.ExitStack() as stack:
            for endpoint in endpoints:
                stack.callback(endpoint.close)
                for _ in range(3):
                    address = frame.decode_address(endpoint.address())
                    stray = stack.enter_context(socket.create_connection(address, timeout=5))
                    stray.sendall(first)
            begun = time.monotonic()
            assert connect_all(endpoints) == [None, None]
            assert time.monotonic() - begun < 5

    def test_a_failed_claim_does_not_stop_the_real_rank(self) -> None:
        """Somebody claims to be rank 1 without the secret; then rank 1 itself comes."""
        windows = [np.zeros(WINDOW, np.uint8) for _ in range(2)]
        endpoints = [make(rank, 2, window) for rank, window in enumerate(windows)]
        with contextlib.ExitStack() as stack:
            for endpoint in endpoints:
                stack.callback(endpoint.close)
            stray = socket.create_connection(frame.decode_address(endpoints[0].address()), timeout=5)
            stack.callback(stray.close)
            stray.sendall(frame.encode_hello(identity(1).hello(0, 0)) + frame.encode_proof(0, bytes(32)))
            assert connect_all(endpoints) == [None, None]

    def test_silent_strangers_never_push_out_a_peer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A real rank 1 that is slow in its handshake keeps its place while strangers come and go."""
        monkeypatch.setattr(talks, "MAX_STRANGERS", 4)
        with waiting_rank() as (address, raised), contextlib.ExitStack() as stack:
            peer = stack.enter_context(socket.create_connection(address, timeout=5))
            talk = handshake.connect(identity(1, connections=1), 0, 0)
            peer.sendall(next(talk))
            challenge = peer.recv(frame.PREFIX_BYTES + frame.CHALLENGE_BYTES, socket.MSG_WAITALL)
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, timeout=5))
            time.sleep(0.3)  # all of them are accepted by now, and most were dropped again
            answer(peer, talk, challenge)
        assert raised == []

    def test_a_silent_stranger_is_dropped_long_before_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(talks, "ACCEPT_SECONDS", 0.05)
        with waiting_rank() as (address, raised), contextlib.ExitStack() as stack:
            stray = stack.enter_context(socket.create_connection(address, timeout=5))
            assert stray.recv(1) == b""  # the rank itself waits for ten seconds
            peer = stack.enter_context(socket.create_connection(address, timeout=5))
            talk = handshake.connect(identity(1, connections=1), 0, 0)
            peer.sendall(next(talk))
            challenge = peer.recv(frame.PREFIX_BYTES + frame.CHALLENGE_BYTES, socket.MSG_WAITALL)
            answer(peer, talk, challenge)
        assert raised == []

    def test_strangers_that_use_up_the_descriptors(self) -> None:
        """They are dropped for it; the rank behind them in the queue gets in."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as stack:
            # all sockets of the other side are there before the limit is: it is rank 0's alone
            address, raised = stack.enter_context(waiting_rank(accepting := threading.Event()))
            for _ in range(40):
                stack.enter_context(socket.create_connection(address, timeout=5))
            peer = stack.enter_context(socket.create_connection(address, timeout=5))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            most = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (most + 8, hard))
            accepting.set()
            talk = handshake.connect(identity(1, connections=1), 0, 0)
            peer.sendall(next(talk))
            challenge = peer.recv(frame.PREFIX_BYTES + frame.CHALLENGE_BYTES, socket.MSG_WAITALL)
            answer(peer, talk, challenge)
        assert raised == []

    def test_strangers_leave_descriptors_to_connect_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rank that asks for its peer again and again does not fail for the strangers it holds: one goes instead."""
        asked = 0

        class Scarce(socket.socket):
            """The third socket to connect with finds no descriptor: the strangers have been accepted by then."""

            def __init__(self, *arguments: int, **named: int) -> None:
                nonlocal asked
                asked += "fileno" not in named and len(arguments) < 4
                if asked == 3:
                    asked += 1
                    raise OSError(errno.EMFILE, "Too many open files")
                super().__init__(*arguments, **named)

        endpoint = make(1, 3, np.zeros(WINDOW, np.uint8), connections=1)
        with contextlib.closing(endpoint), contextlib.ExitStack() as stack:
            for _ in range(4):
                address = frame.decode_address(endpoint.address())
                stack.enter_context(socket.create_connection(address, timeout=5))
            monkeypatch.setattr(talks.socket, "socket", Scarce)
            nobody = frame.encode_address("127.0.0.1", 1)
            with pytest.raises(BootstrapError, match=r"rank 0: .*Connection refused"):
                endpoint.connect([nobody, None, nobody], time.monotonic() + 1)
            assert asked > 3

    def test_more_strangers_than_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(talks, "MAX_STRANGERS", 3)
        windows = [np.zeros(WINDOW, np.uint8) for _ in range(2)]
        endpoints = [make(rank, 2, window) for rank, window in enumerate(windows)]
        with contextlib.ExitStack() as stack:
            for endpoint in endpoints:
                stack.callback(endpoint.close)
            address = frame.decode_address(endpoints[0].address())
            for _ in range(20):
                stack.enter_context(socket.create_connection(address, timeout=5))
            assert connect_all(endpoints) == [None, None]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"ranks": 3}, "disagree on ranks"),
            ({"connections": 3}, "disagree on ranks, proxies, TCP connections"),
            ({"proxy": 1}, "disagree on ranks, proxies"),
            ({"job": b"another"}, "different jobs"),
        ],
    )
    def test_another_group_is_named(self, change: dict[str, object], words: str) -> None:
        windows = [np.zeros(WINDOW, np.uint8) for _ in range(2)]
        values: dict[str, object] = {"ranks": 2, **change}
        endpoints = [make(0, 2, windows[0]), make(1, window=windows[1], **values)]  # type: ignore[arg-type]
        raised = connect_all(endpoints, seconds=0.5)
        assert isinstance(raised[1], BootstrapError)
        assert words in str(raised[1])
        assert isinstance(raised[0], BootstrapError)
        assert "rank 1" in str(raised[0])


class TestConnecting:
    def test_nobody_answers(self) -> None:
        """BootstrapError at the deadline, naming the rank, the address and the reason."""
        with socket.create_server(("127.0.0.1", 0)) as unused:
            nobody = unused.getsockname()[1]
        endpoint = make(1, 3, np.zeros(WINDOW, np.uint8))
        begun = time.monotonic()
        address = frame.encode_address("127.0.0.1", nobody)
        with pytest.raises(BootstrapError) as caught:
            endpoint.connect([address, None, address], begun + 0.5)
        assert 0.4 < time.monotonic() - begun < 1.5
        for words in (
            "rank 0",
            str(nobody),
            "Connection refused",
            "rank 2: 2 connections from it did not come",
            "IFNAME",
        ):
            assert words in str(caught.value)

    def test_a_peer_that_accepts_and_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = make(1, 2, np.zeros(WINDOW, np.uint8))
            begun = time.monotonic()
            with pytest.raises(BootstrapError, match="rank 0"):
                endpoint.connect([frame.encode_address(*silent.getsockname()), None], begun + 0.5)
            assert time.monotonic() - begun < 1.5

    def test_a_peer_that_listens_late(self) -> None:
        """The connector retries until the other is there."""
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            address = reserved.getsockname()
        endpoint = make(1, 2, np.zeros(WINDOW, np.uint8))
        thread = threading.Thread(
            target=endpoint.connect, args=([frame.encode_address(*address), None], time.monotonic() + 10)
        )
        thread.start()
        time.sleep(0.3)
        with socket.create_server(address) as listener:
            for _ in range(CONNECTIONS):
                connection, _ = listener.accept()
                drive(connection, handshake.accept(identity(0), frozenset([1])))
                connection.close()
        thread.join()
        assert endpoint.describe(0).startswith("tcp, 2 connections")
        endpoint.close()

    def test_a_connection_in_the_backlog_of_a_late_peer_waits_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The peer's kernel has accepted: how long a connection may take to be made says nothing of its process."""
        monkeypatch.setattr(tcp_connect, "CONNECT_SECONDS", 0.05)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            endpoint = stack.enter_context(contextlib.closing(make(1, 2, np.zeros(WINDOW, np.uint8), connections=1)))
            thread = threading.Thread(
                target=endpoint.connect,
                args=([frame.encode_address(*listener.getsockname()), None], time.monotonic() + 10),
            )
            thread.start()
            time.sleep(0.3)  # several times as long
            connection, _ = listener.accept()
            stack.enter_context(connection)
            drive(connection, handshake.accept(identity(0, connections=1), frozenset([1])))
            thread.join(5)
            assert not thread.is_alive()
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept()

    def test_a_connection_that_breaks_during_the_handshake_is_made_again(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = make(1, 2, np.zeros(WINDOW, np.uint8), connections=1)
            thread = threading.Thread(
                target=endpoint.connect,
                args=([frame.encode_address(*listener.getsockname()), None], time.monotonic() + 10),
            )
            thread.start()
            for _ in range(2):
                connection, _ = listener.accept()
                connection.recv(8)
                connection.close()
            connection, _ = listener.accept()
            drive(connection, handshake.accept(identity(0, connections=1), frozenset([1])))
            thread.join()
            connection.close()
            endpoint.close()

    def test_an_address_of_another_transport(self) -> None:
        with pytest.raises(BootstrapError, match="address of rank 0"):
            make(1, 2, np.zeros(WINDOW, np.uint8)).connect([b"UEPM of shm", None], time.monotonic() + 1)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "fe80::1", ""])
    def test_a_host_that_peers_could_not_use(self, host: str) -> None:
        with pytest.raises(ConfigError):
            make(0, 2, np.zeros(WINDOW, np.uint8), host=host)

    def test_a_host_that_is_not_ours(self) -> None:
        with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
            make(0, 2, np.zeros(WINDOW, np.uint8), host="192.0.2.1")

    def test_nothing_stays_open(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with tcp_group(3, WINDOW, connections=4):
            assert len(os.listdir("/proc/self/fd")) > before
        windows = [np.zeros(WINDOW, np.uint8) for _ in range(2)]
        connect_all([make(0, 2, windows[0]), make(1, 2, windows[1], secret=bytes(32))], seconds=0.5)
        assert len(os.listdir("/proc/self/fd")) == before
