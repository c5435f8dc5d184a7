"""``shm``: the transport contract, what a hostile peer can write into a mailbox, and the death of a real process."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.contract import Group, OpenGroup, Port, Traffic, TransportContract
from uccl_ep_serving.errors import BootstrapError, ConfigError
from uccl_ep_serving.protocol import mailbox
from uccl_ep_serving.protocol.command import MAX_WRITE_BYTES
from uccl_ep_serving.protocol.imm import Immediate, encode
from uccl_ep_serving.protocol.mailbox import WORD, mailbox_bytes
from uccl_ep_serving.proxy.transport import base
from uccl_ep_serving.proxy.transport.shm import ShmEndpoint, encode_address


class Fabric:
    """Windows and mailboxes of a group in this process; each rank's "process" is a child that only sleeps."""

    def __init__(self, ranks: int, window_bytes: int) -> None:
        self.windows = [np.zeros(window_bytes, np.uint8) for _ in range(ranks)]
        self.mailboxes = [np.zeros(mailbox_bytes(ranks, 1), np.uint8) for _ in range(ranks)]
        self.processes = [subprocess.Popen(["sleep", "300"]) for _ in range(ranks)]
        self.endpoints = [
            ShmEndpoint(
                rank,
                ranks,
                0,
                mailbox=self.mailboxes[rank].ctypes.data,
                peer_mailboxes=[box.ctypes.data if r != rank else 0 for r, box in enumerate(self.mailboxes)],
                peer_windows=[window.ctypes.data if r != rank else 0 for r, window in enumerate(self.windows)],
                window_bytes=window_bytes,
            )
            for rank in range(ranks)
        ]
        addresses = [encode_address(process.pid, ranks, 0, window_bytes) for process in self.processes]
        for rank, endpoint in enumerate(self.endpoints):
            endpoint.connect([a if r != rank else None for r, a in enumerate(addresses)], time.monotonic() + 5)

    def words(self, receiver: int, source: int) -> np.ndarray:
        """Slots of the ring from ``source`` in the mailbox of ``receiver``, as a peer could write them."""
        start = mailbox.ring_offset(len(self.windows), 0, source) + mailbox.SLOTS_OFFSET
        return self.mailboxes[receiver][start : start + 8 * mailbox.SLOTS].view(np.int64)

    def vanish(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def close(self) -> None:
        for rank, endpoint in enumerate(self.endpoints):
            endpoint.close()
            endpoint.close()
            self.vanish(rank)


@contextlib.contextmanager
def fabric(ranks: int, window_bytes: int = 4096) -> Iterator[tuple[Fabric, Group]]:
    made = Fabric(ranks, window_bytes)
    try:
        yield made, Group(made.endpoints, made.windows, made.vanish)
    finally:
        made.close()


class TestShmContract(TransportContract):
    @pytest.fixture
    def open_group(self) -> OpenGroup:
        @contextlib.contextmanager
        def opened(ranks: int, window_bytes: int) -> Iterator[Group]:
            with fabric(ranks, window_bytes) as (_, group):
                yield group

        return opened


def imm(source: int, number: int = 0) -> int:
    return encode(Immediate(source, 8, number, True))


class TestMailboxIsNotTrusted:
    @pytest.mark.parametrize(
        ("word", "status"),
        [
            (WORD.pack(lap=1, imm=imm(source=0)), base.FAULT_WRONG_SOURCE),
            (WORD.pack(lap=1, imm=imm(source=2)), base.FAULT_WRONG_SOURCE),
            (WORD.pack(lap=1, imm=imm(source=1), nbytes=MAX_WRITE_BYTES + 1), base.FAULT_TOO_LONG),
            (WORD.pack(lap=1, imm=imm(source=1)) | 1 << WORD.used, base.FAULT_BAD_FRAME),
            (-1, base.FAULT_BAD_FRAME),
        ],
    )
    def test_a_word_that_is_no_immediate_of_its_source(self, word: int, status: int) -> None:
        with fabric(3) as (made, group):
            receiver, honest = Port(group, 0), Port(group, 2)
            made.words(0, source=1)[0] = word
            (event,) = receiver.poll()
            assert (event.kind, event.peer, event.status & 15) == (base.FAULT, 1, status)
            made.words(0, source=1)[:] = WORD.pack(lap=1, imm=imm(source=1))
            assert receiver.poll() == [], "heard of once, then never again"
            assert honest.post(0, 0, 0, 16, imm(2), 1) == base.ACCEPTED
            assert [event.peer for event in receiver.poll()] == [2]

    @pytest.mark.parametrize("tail", [-2, mailbox.SLOTS + 1, 1 << 62])
    def test_a_tail_that_cannot_be(self, tail: int) -> None:
        with fabric(2) as (made, group):
            sender = Port(group, 0)
            for number in range(mailbox.SLOTS):
                assert sender.post(1, 0, 0, 0, imm(0, number), number) == base.ACCEPTED
            ring = mailbox.ring_offset(2, 0, 0)
            made.mailboxes[1][ring : ring + 8].view(np.int64)[0] = tail
            assert sender.post(1, 0, 0, 0, imm(0), 0) == base.BUSY
            events = []
            while not any(event.kind == base.FAULT for event in events):
                polled = sender.poll()
                assert polled
                events += polled
            assert sum(event.kind == base.SENT for event in events) <= mailbox.SLOTS
            assert sender.post(1, 0, 0, 0, imm(0), 0) < 0

    def test_stale_words_of_the_last_lap_are_not_taken(self) -> None:
        with fabric(2) as (_, group):
            traffic = Traffic(group)
            sender, receiver = traffic.ports
            for lap in range(3):
                for number in range(mailbox.SLOTS):
                    assert sender.post(1, 0, 0, 0, imm(0, number), number) == base.ACCEPTED
                arrived = 0
                while arrived < mailbox.SLOTS:
                    arrived += len(receiver.poll())
                    sender.poll()
                assert receiver.poll() == [], f"lap {lap}"


def test_proxies_do_not_hear_each_other() -> None:
    """Two proxies of two ranks on one pair of mailboxes: each gets what its twin posted."""
    windows = [np.zeros(4096, np.uint8) for _ in range(2)]
    boxes = [np.zeros(mailbox_bytes(2, 2), np.uint8) for _ in range(2)]
    endpoints = [
        ShmEndpoint(
            rank,
            2,
            proxy,
            mailbox=boxes[rank].ctypes.data,
            peer_mailboxes=[box.ctypes.data if r != rank else 0 for r, box in enumerate(boxes)],
            peer_windows=[window.ctypes.data if r != rank else 0 for r, window in enumerate(windows)],
            window_bytes=4096,
        )
        for rank in range(2)
        for proxy in range(2)
    ]
    for rank in range(2):
        for proxy in range(2):
            addresses: list[bytes | None] = [None, None]
            addresses[1 - rank] = endpoints[2 * (1 - rank) + proxy].address()
            endpoints[2 * rank + proxy].connect(addresses, time.monotonic() + 5)
    ports = [Port(Group(endpoints, [windows[0], windows[0], windows[1], windows[1]], None), i) for i in range(4)]
    for proxy in range(2):
        assert ports[proxy].post(1, 0, 64 * proxy, 64, imm(0, 7 + proxy), 0) == base.ACCEPTED
    for proxy in range(2):
        # the payload's bytes come along: the receiving proxy counts them
        arrived = [(event.kind, event.value, event.status) for event in ports[2 + proxy].poll()]
        assert arrived == [(base.ARRIVED, imm(0, 7 + proxy), 64)]
    for endpoint in endpoints:
        endpoint.close()


class TestPost:
    def test_outside_the_window(self) -> None:
        with fabric(2, 4096) as (made, group):
            sender = Port(group, 0)
            before = made.windows[1].copy()
            for target, nbytes in [(4096, 16), (4090, 16), (-16, 16), (1 << 62, 16)]:
                assert sender.post(1, 0, target, nbytes, imm(0), 0) < 0
            assert np.array_equal(made.windows[1], before)
            assert Port(group, 1).poll() == []

    def test_more_than_a_write_may_have(self) -> None:
        """The mailbox word has no room for a longer length; memory of these windows is never touched."""
        with fabric(2, MAX_WRITE_BYTES + 16) as (_, group):
            assert Port(group, 0).post(1, 0, 0, MAX_WRITE_BYTES + 16, imm(0), 0) < 0
            assert Port(group, 1).poll() == []

    def test_a_peer_that_was_never_connected(self) -> None:
        box, window = np.zeros(mailbox_bytes(2, 1), np.uint8), np.zeros(64, np.uint8)
        endpoint = ShmEndpoint(
            0, 2, 0, mailbox=box.ctypes.data, peer_mailboxes=[0, 0], peer_windows=[0, 0], window_bytes=64
        )
        assert Port(Group([endpoint], [window], lambda rank: None), 0).post(1, 0, 0, 0, imm(0), 0) < 0
        endpoint.close()


class TestConnect:
    def endpoint(self, **changes: object) -> ShmEndpoint:
        self.boxes = [np.zeros(mailbox_bytes(2, 1), np.uint8) for _ in range(2)]
        self.windows = [np.zeros(64, np.uint8) for _ in range(2)]
        values: dict[str, object] = {
            "mailbox": self.boxes[0].ctypes.data,
            "peer_mailboxes": [0, self.boxes[1].ctypes.data],
            "peer_windows": [0, self.windows[1].ctypes.data],
            "window_bytes": 64,
        }
        return ShmEndpoint(0, 2, 0, **{**values, **changes})  # type: ignore[arg-type]

    def test_another_shape(self) -> None:
        with pytest.raises(BootstrapError, match=r"rank 1.*window bytes.*128"):
            self.endpoint().connect([None, encode_address(os.getpid(), 2, 0, 128)], 0.0)

    def test_not_mapped(self) -> None:
        endpoint = self.endpoint(peer_windows=[0, 0])
        with pytest.raises(BootstrapError, match=r"rank 1.*not mapped.*UCCL_EP_TRANSPORT"):
            endpoint.connect([None, encode_address(os.getpid(), 2, 0, 64)], 0.0)

    def test_not_an_address(self) -> None:
        with pytest.raises(BootstrapError, match="not the address"):
            self.endpoint().connect([None, b"something else"], 0.0)

    def test_a_process_that_has_ended(self) -> None:
        process = subprocess.Popen(["sleep", "300"])
        address = encode_address(process.pid, 2, 0, 64)
        process.kill()
        process.wait()
        with pytest.raises(BootstrapError, match=rf"process {process.pid} has ended"):
            self.endpoint().connect([None, address], 0.0)

    def test_tables_of_the_wrong_length_or_alignment(self) -> None:
        with pytest.raises(ConfigError, match="2 ranks"):
            self.endpoint(peer_windows=[0])
        with pytest.raises(ConfigError, match="multiples of 8"):
            self.endpoint(mailbox=12345)


_CHILD = """
import mmap, sys, time
import numpy as np
from uccl_ep_serving.protocol.mailbox import mailbox_bytes
from uccl_ep_serving.proxy.transport.shm import ShmEndpoint
from tests.support.contract import Group, Port
box, window = (mmap.mmap(int(fd), 0) for fd in sys.argv[1:3])
mine, theirs = np.frombuffer(box, np.uint8), np.frombuffer(window, np.uint8)
half_box, half = mine.size // 2, theirs.size // 2
endpoint = ShmEndpoint(1, 2, 0, mailbox=mine.ctypes.data + half_box,
    peer_mailboxes=[mine.ctypes.data, 0], peer_windows=[theirs.ctypes.data, 0], window_bytes=half)
endpoint.connect([bytes.fromhex(sys.argv[3]), None], time.monotonic() + 5)
print(endpoint.address().hex(), flush=True)
port = Port(Group([endpoint, endpoint], [theirs[half:], theirs[half:]], None), 1)
port.window[:] = np.arange(half) % 251
number = 0
while number < 5000:
    if port.post(0, 0, 0, half, 1 << 20 | 8 << 12 | number % 2048, number) == 0:
        number += 1
    port.poll()
time.sleep(300)
"""


def test_two_processes_and_sigkill() -> None:
    """All immediates of a process arrive, also those posted just before SIGKILL; then DOWN, within a second."""
    window_bytes, box_bytes = 4096, -(-mailbox_bytes(2, 1) // 4096) * 4096
    with contextlib.ExitStack() as stack:
        fds = [os.memfd_create("test", 0), os.memfd_create("test", 0)]
        for fd, nbytes in zip(fds, (2 * box_bytes, 2 * window_bytes), strict=True):
            stack.callback(os.close, fd)
            os.ftruncate(fd, nbytes)
        boxes, windows = (np.frombuffer(mmap.mmap(fd, 0), np.uint8) for fd in fds)
        endpoint = ShmEndpoint(
            0,
            2,
            0,
            mailbox=boxes.ctypes.data,
            peer_mailboxes=[0, boxes.ctypes.data + box_bytes],
            peer_windows=[0, windows.ctypes.data + window_bytes],
            window_bytes=window_bytes,
        )
        stack.callback(endpoint.close)
        arguments = [*map(str, fds), endpoint.address().hex()]
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments], pass_fds=fds, stdout=subprocess.PIPE, text=True
        )
        stack.callback(child.wait)
        stack.callback(child.kill)
        assert child.stdout is not None
        endpoint.connect([None, bytes.fromhex(child.stdout.readline().strip())], time.monotonic() + 5)
        assert str(child.pid) in endpoint.describe(1)
        port = Port(Group([endpoint], [windows[:window_bytes]], lambda rank: None), 0)
        arrived = 0
        deadline = time.monotonic() + 30
        while arrived < 5000 - mailbox.SLOTS // 2:
            for event in port.poll():
                assert (event.kind, event.peer, event.value & 2047) == (base.ARRIVED, 1, arrived % 2048)
                arrived += 1
            assert time.monotonic() < deadline
        assert np.array_equal(windows[:window_bytes], np.arange(window_bytes) % 251)
        # The rest lies in the mailbox when the process dies.
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        down = False
        while not down:
            for event in port.poll():
                if event.kind == base.DOWN:
                    assert event.peer == 1
                    down = True
                else:
                    arrived += 1
            assert time.monotonic() < killed + 1.0, "no DOWN within a second"
        assert arrived == 5000
        assert port.post(1, 0, 0, 0, imm(0), 0) < 0
        assert port.poll() == []
