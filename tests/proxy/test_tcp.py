"""``tcp``: the transport contract over real sockets, frames that lie, peers that break off, stall or flood."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.contract import OpenGroup, Port, Traffic, TransportContract
from tests.support.tcp_peers import CONNECTIONS, WINDOW, played, raw, raw_count, tcp_group
from uccl_ep_serving.protocol import frame
from uccl_ep_serving.protocol.command import MAX_WRITE_BYTES
from uccl_ep_serving.protocol.imm import Immediate, encode
from uccl_ep_serving.proxy.transport import base
from uccl_ep_serving.proxy.transport.tcp_words import QUEUE_SLOTS


class TestTcpContract(TransportContract):
    @pytest.fixture
    def open_group(self) -> OpenGroup:
        return tcp_group


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_ipv6() -> None:
    with tcp_group(2, WINDOW, host="::1") as group:
        traffic = Traffic(group)
        for i in range(20):
            traffic.add(0, 1, source=i * 64, target=i * 64, nbytes=64)
        traffic.run()
        assert "[::1]" in group.endpoints[0].describe(1)


@pytest.mark.parametrize("connections", [1, 5, 16])
def test_any_number_of_connections(connections: int) -> None:
    with tcp_group(2, WINDOW, connections=connections) as group:
        ports = [Port(group, rank) for rank in range(2)]
        streams = list(range(8, 40))
        for stream in streams:
            assert ports[0].post(1, 0, 0, 16, encode(Immediate(0, stream, 0, True)), stream, stream) == base.ACCEPTED
        ports[0].flush()
        arrived: list[int] = []
        deadline = time.monotonic() + 10
        while len(arrived) < len(streams):
            arrived += [event.value for event in ports[1].poll()]
            ports[0].poll()
            assert time.monotonic() < deadline
        assert sorted(arrived) == [encode(Immediate(0, stream, 0, True)) for stream in streams]


def test_a_stream_stays_in_order_whatever_the_sizes() -> None:
    """Frames that end inside a header, inside a payload and at the end of the staging buffer."""
    rng = np.random.default_rng(1)
    with tcp_group(2, 8 << 20) as group:
        traffic = Traffic(group)
        offset = 0
        for _ in range(400):
            nbytes = int(rng.choice([0, 1, 31, 33, 4095, 9000, 65_521]))
            traffic.add(0, 1, source=offset, target=offset, nbytes=nbytes)
            offset += nbytes
        traffic.run()
        assert [number for _, number in traffic.order] == list(range(400))


class TestFramesAreNotTrusted:
    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (b"GET /index.html HTTP/1.1\r\nHost: x\r\n", base.FAULT_BAD_FRAME),
            (raw(magic=frame.FRAME_MAGIC + (1 << 24)), base.FAULT_BAD_FRAME),
            (raw(length=MAX_WRITE_BYTES + 1), base.FAULT_TOO_LONG),
            (raw(length=(1 << 64) - 16), base.FAULT_TOO_LONG),
            (raw(number=1), base.FAULT_NUMBER),
            (raw(target=WINDOW - 8), base.FAULT_OUTSIDE_WINDOW),
            (raw(target=WINDOW + 16, length=0), base.FAULT_OUTSIDE_WINDOW),
            (raw(target=(1 << 64) - 16), base.FAULT_OUTSIDE_WINDOW),
            (raw(length=WINDOW + 16), base.FAULT_OUTSIDE_WINDOW),
            (raw(imm=encode(Immediate(0, 8, 0, True))), base.FAULT_WRONG_SOURCE),
            (raw(imm=encode(Immediate(4095, 8, 0, True))), base.FAULT_WRONG_SOURCE),
        ],
    )
    def test_a_bad_header(self, header: bytes, status: int) -> None:
        """One FAULT, nothing written, that connection closed, the others of the group untouched."""
        with played(3) as peer:
            peer.sockets[0].sendall(header + b"\xff" * 4096)
            (event,) = peer.events(1)
            assert (event.kind, event.peer, event.status & 15) == (base.FAULT, 1, status)
            assert not peer.windows[0].any()
            peer.sockets[0].settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert peer.sockets[0].recv(1) == b""
            healthy = Port(peer.group, 2)
            assert healthy.post(0, 0, 0, 16, encode(Immediate(2, 8, 0, True)), 7) == base.ACCEPTED
            healthy.flush()
            assert [(e.kind, e.peer) for e in peer.events(1)] == [(base.ARRIVED, 2)]
            assert peer.port.poll() == []

    def test_good_frames_before_a_bad_one_count(self) -> None:
        with played() as peer:
            good = b"".join(raw(number=n, target=16 * n) + bytes([n + 1]) * 16 for n in range(3))
            peer.sockets[0].sendall(good + raw(number=3, target=WINDOW))
            assert [e.kind for e in peer.events(4)] == [base.ARRIVED] * 3 + [base.FAULT]
            assert peer.windows[0][:64].tolist() == [1] * 16 + [2] * 16 + [3] * 16 + [0] * 16

    def test_a_byte_at_a_time(self) -> None:
        with played() as peer:
            for byte in raw() + bytes(range(16)):
                assert peer.port.poll() == []
                peer.sockets[1].sendall(bytes([byte]))
                time.sleep(0.001)
            assert [(e.kind, e.peer, e.status) for e in peer.events(1)] == [(base.ARRIVED, 1, 16)]
            assert peer.windows[0][:16].tolist() == list(range(16))

    @pytest.mark.parametrize("sent", [1, 31, 32, 4000])
    def test_closed_in_the_middle_of_a_frame(self, sent: int) -> None:
        """DOWN, once, and no ARRIVED for what is not whole."""
        with played() as peer:
            for connection in peer.sockets:
                connection.sendall((raw(length=8192) + b"\x01" * 8192)[:sent])
                connection.close()
            (event,) = peer.events(1, seconds=1.0)
            assert (event.kind, event.peer) == (base.DOWN, 1)
            assert event.status > 0
            missing = 32 - sent if sent < 32 else 8192 - (sent - 32)
            assert event.value == missing
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                assert peer.port.poll() == []

    @pytest.mark.parametrize("how", ["close", "shutdown", "reset"])
    def test_one_connection_of_several_ends(self, how: str) -> None:
        """DOWN within a second though the other still looks alive, and what was sent before is delivered first."""
        with played() as peer:
            peer.sockets[1].sendall(raw() + bytes(16))
            if how == "shutdown":
                peer.sockets[0].shutdown(socket.SHUT_WR)
            else:
                if how == "reset":
                    peer.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.sockets[0].close()
            assert [e.kind for e in peer.events(2, seconds=1.0)] == [base.ARRIVED, base.DOWN]
            assert peer.port.post(1, 0, 0, 16, encode(Immediate(0, 8, 0, True)), 0) < 0


def test_a_loss_that_waits_behind_what_others_sent_is_no_failure_to_post() -> None:
    """It would be taken for one of this rank itself, which the others then go on without."""
    with tcp_group(3, WINDOW) as group:
        port, other = Port(group, 0), Port(group, 1)
        assert port.poll() == []
        group.endpoints[2].close()
        assert port.poll() == []
        time.sleep(0.3)  # nobody listens there any more
        sent = [other.post(0, 0, 0, 0, encode(Immediate(1, 8, number, True)), number, 8) for number in range(200)]
        assert sent == [base.ACCEPTED] * 200
        other.flush()
        time.sleep(0.1)
        arrived, told, deadline = 0, False, time.monotonic() + 5.0
        while not told:
            events = port.poll()
            arrived += sum(event.kind == base.ARRIVED for event in events)
            told = any((event.kind, event.peer) == (base.DOWN, 2) for event in events)
            answer = port.post(2, 0, 0, 16, encode(Immediate(0, 8, 0, True)), 0, 8)
            assert told or answer in (base.ACCEPTED, base.BUSY), f"{answer} after {arrived} arrivals"
            assert time.monotonic() < deadline
        while arrived < 200:
            other.poll()
            arrived += len(port.poll())
            assert time.monotonic() < deadline
        assert port.post(2, 0, 0, 16, encode(Immediate(0, 8, 1, True)), 1, 8) < 0


def test_losses_are_told_in_their_order() -> None:
    """A rank dies, another gives up because of it: whoever looks late must blame the first."""
    with tcp_group(4, WINDOW) as group:
        port = Port(group, 0)
        assert port.poll() == []
        for rank in (3, 1):
            group.endpoints[rank].close()
            time.sleep(0.01)
        told: list[int] = []
        deadline = time.monotonic() + 1.0
        while len(told) < 2:
            told += [event.peer for event in port.poll() if event.kind == base.DOWN]
            assert time.monotonic() < deadline, f"told of {told}"
        assert told == [3, 1]


class TestSlowPeers:
    def test_a_peer_that_never_reads_holds_nobody(self) -> None:
        """Posts to it end in BUSY; another rank's traffic flows meanwhile; when it reads, all of it flows out."""
        with played(3) as peer:
            posted = 0
            sent = 0
            until = time.monotonic() + 5
            while time.monotonic() < until and posted - sent < QUEUE_SLOTS:
                status = peer.port.post(1, 0, 0, 32768, encode(Immediate(0, 8, posted % 2048, True)), posted)
                posted += status == base.ACCEPTED
                peer.port.flush()
                sent += sum(event.kind == base.SENT for event in peer.port.poll())
            assert posted - sent == QUEUE_SLOTS, "the queue never filled"
            assert peer.port.post(1, 0, 0, 0, encode(Immediate(0, 8, 0, True)), 0) == base.BUSY
            other_stream = 24
            assert frame.connection_of(other_stream, CONNECTIONS) != frame.connection_of(8, CONNECTIONS)
            imm = encode(Immediate(0, other_stream, 0, True))
            assert peer.port.post(1, 0, 0, 0, imm, 0, other_stream) == base.ACCEPTED, "its other connection is free"
            there = Port(peer.group, 2)
            arrived = 0
            deadline = time.monotonic() + 10
            for number in range(200):
                imm = encode(Immediate(0, 8, number, True))
                while peer.port.post(2, 0, 0, 4096, imm, number) != base.ACCEPTED:
                    peer.port.poll()
                peer.port.flush()
                peer.port.poll()
                arrived += len(there.poll())
                assert time.monotonic() < deadline
            while arrived < 200:
                peer.port.poll()
                arrived += len(there.poll())
                assert time.monotonic() < deadline
            # It wakes up: everything flows out again, in order and whole.
            data = bytearray()
            peer.sockets[0].settimeout(0.01)
            while sent < posted or len(data) < posted * (32 + 32768):
                with contextlib.suppress(TimeoutError):
                    data += peer.sockets[0].recv(1 << 20)
                    peer.sockets[0].sendall(raw_count(len(data) // (32 + 32768)))
                peer.port.flush()
                sent += sum(event.kind == base.SENT and event.peer == 1 for event in peer.port.poll())
                assert time.monotonic() < deadline
            for number in range(0, posted, 37):
                start = number * (32 + 32768)
                assert frame.decode_frame(bytes(data[start : start + 32])).number == number

    def test_a_flooding_peer_holds_nobody(self) -> None:
        with played(3) as peer:
            stop = threading.Event()

            def flood() -> None:
                number = 0
                while not stop.is_set():
                    block = b"".join(raw(length=0, number=n) for n in range(number, number + 1000))
                    with contextlib.suppress(OSError):
                        peer.sockets[0].sendall(block)
                    number += 1000

            thread = threading.Thread(target=flood)
            thread.start()
            try:
                there = Port(peer.group, 2)
                for number in range(50):
                    assert there.post(0, 0, 0, 16, encode(Immediate(2, 8, number, True)), number) == base.ACCEPTED
                there.flush()
                seen = 0
                deadline = time.monotonic() + 10
                while seen < 50:
                    events = peer.port.poll()
                    assert all(event.kind == base.ARRIVED for event in events)
                    seen += sum(event.peer == 2 for event in events)
                    assert time.monotonic() < deadline
            finally:
                stop.set()
                peer.sockets[0].close()
                thread.join()
