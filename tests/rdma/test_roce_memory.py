"""``roce`` on in-memory NICs: the transport contract, and what only RC can get wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from tests.support.contract import Group, OpenGroup, Port, Traffic, TransportContract, pattern
from tests.support.memory_endpoints import connect, endpoint, open_endpoints
from tests.support.provider import provider_network as net
from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import BootstrapError, ConfigError, TransportError
from uccl_ep_serving.protocol.command import MAX_WRITE_BYTES
from uccl_ep_serving.proxy.transport.base import (
    ACCEPTED,
    ARRIVED,
    BUSY,
    DOWN,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_WRONG_SOURCE,
    SENT,
)
from uccl_ep_serving.proxy.transport.nic import roce_words as rc
from uccl_ep_serving.proxy.transport.nic import window as nic_window
from uccl_ep_serving.proxy.transport.nic.roce import NicPort, RoceRail
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.objects import Path, QueuePair


class TestRoceContract(TransportContract):
    """The contract on a polite network."""

    network: ClassVar[dict[str, float]] = {}
    settings = Settings()
    rails = 1
    max_write = MAX_WRITE_BYTES

    @pytest.fixture
    def open_group(self) -> OpenGroup:
        @contextlib.contextmanager
        def open_group(ranks: int, window_bytes: int) -> Iterator[Group]:
            network = MemoryNetwork(ranks, seed=7, rails=self.rails, **self.network)
            options = {"settings": self.settings, "max_write": self.max_write}
            with open_endpoints(network, ranks, window_bytes, **options) as (group, _):
                yield group
            assert network.word(net.OVERRUNS) == 0, "a completion queue was too small"
            assert network.word(net.NOT_READY) == 0, "an immediate found no receive"

        return open_group


class TestRoceContractOnASlowNetwork(TestRoceContract):
    """The contract while queue pairs stand still, payloads land in halves and completions come late."""

    network: ClassVar[dict[str, float]] = {"delay": 0.4, "linger": 0.5, "half": 0.5}
    max_write = 1 << 20


class TestRoceContractOverTwoQueuePairs(TestRoceContract):
    """The contract with writes dealt over two queue pairs, which keep no order between them."""

    network: ClassVar[dict[str, float]] = {"delay": 0.5, "linger": 0.2, "half": 0.3}
    settings = Settings(nic_qps=2)
    max_write = 1 << 20


class TestRoceContractOverThreeNics(TestRoceContract):
    """The contract with streams spread over three NICs, two queue pairs a peer on each, few bytes in flight."""

    network: ClassVar[dict[str, float]] = {"delay": 0.5, "linger": 0.2, "half": 0.3}
    settings = Settings(nic_qps=2, nic_bytes_in_flight=1 << 17)
    rails = 3
    max_write = 1 << 20


def _with_rail(address: dict[str, Any], **changes: object) -> bytes:
    """An address whose only rail is changed."""
    (rail,) = address["rails"]
    return msgspec.msgpack.encode({**address, "rails": [{**rail, **changes}]})


def imm(source: int, number: int) -> int:
    return source << 20 | 8 << 12 | number & 0xFFF


def poll_until(port: Port, kind: int, seconds: float = 5.0) -> list:
    """Events of ``port`` up to the first of ``kind``."""
    found: list = []
    deadline = time.monotonic() + seconds
    while not any(event.kind == kind for event in found):
        found += port.poll()
        assert time.monotonic() < deadline, f"no event of kind {kind}, only {found}"
    return found


def finish(traffic: Traffic, seconds: float = 10.0) -> None:
    """Poll everybody until what was posted is sent and has arrived."""
    deadline = time.monotonic() + seconds
    while any(not write.sent or not write.arrivals for write in traffic.writes):
        for port in traffic.ports:
            traffic.poll(port)
        assert time.monotonic() < deadline, f"stuck: {traffic.summary()}"


class TestCredits:
    def test_a_receiver_that_stands_still_makes_its_sender_busy(self) -> None:
        """No immediate ever finds the receiver without a receive, and all arrive once it polls again."""
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 4096) as (group, _):
            sender, receiver = Port(group, 0), Port(group, 1)
            posted = 0
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                status = sender.post(1, 0, 0, 64, imm(0, posted), posted)
                sender.flush()
                sender.poll()
                posted += status == ACCEPTED
                if posted == rc.LINK_RECEIVES and status == BUSY:
                    break
            assert posted == rc.LINK_RECEIVES
            assert network.word(net.NOT_READY) == 0
            arrived = 0
            while arrived < 3 * posted:
                arrived += sum(event.kind == ARRIVED for event in receiver.poll())
                if posted < 3 * rc.LINK_RECEIVES:
                    posted += sender.post(1, 0, 0, 64, imm(0, posted), posted) == ACCEPTED
                sender.flush()
                sender.poll()
                assert time.monotonic() < deadline + 10, (arrived, posted)
                if arrived == posted == 3 * rc.LINK_RECEIVES:
                    break
            assert network.word(net.NOT_READY) == 0

    def test_a_quarter_of_the_receives_used_is_a_credit(self) -> None:
        """The peer is told when receives are posted anew, not only when it is idle and written to for that."""
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 4096) as (group, endpoints):
            sender, receiver = Port(group, 0), Port(group, 1)
            # Without the writes to idle peers, which carry a credit too.
            endpoints[1]._state.context[rc.WATCHING] = 0
            receives = rc.LINK_RECEIVES
            sent = 0
            while sent < receives:
                chain = min(rc.POOL_SLOTS, receives - sent)
                for number in range(sent, sent + chain):
                    assert sender.post(1, 0, 0, 64, imm(0, number), number) == ACCEPTED
                sender.flush()
                sent += chain
                while chain > 0:
                    chain -= len(poll_until(sender, SENT))
            assert sender.post(1, 0, 0, 64, imm(0, sent), sent) == BUSY
            arrived = 0
            while arrived < receives // 4:
                arrived += len(poll_until(receiver, ARRIVED))
            for _ in range(4):
                receiver.poll()
            assert sender.post(1, 0, 0, 64, imm(0, sent), sent) == ACCEPTED

    def test_impossible_credits_are_a_fault_of_the_peer(self) -> None:
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 4096) as (group, endpoints):
            sender = Port(group, 0)
            endpoints[0]._state.credits_in[1] = 1 << 40
            endpoints[0]._state.links[1, rc.ALLOWED] = 0
            assert sender.post(1, 0, 0, 64, imm(0, 0), 0) == BUSY
            (fault,) = [event for event in poll_until(sender, FAULT) if event.kind == FAULT]
            assert (fault.value, fault.peer, fault.status) == (1 << 40, 1, FAULT_BAD_FRAME)
            assert sender.post(1, 0, 0, 64, imm(0, 0), 0) == -errno.ENOTCONN


class TestSignalling:
    def test_a_chain_is_one_doorbell_and_one_completion(self) -> None:
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 1 << 16) as (group, endpoints):
            traffic = Traffic(group)
            for number in range(40):
                traffic.add(0, 1, source=number * 64, target=number * 64, nbytes=64)
                assert traffic.try_post(number)
            context = endpoints[0]._state.context
            assert (context[rc.DOORBELLS], context[rc.SIGNALS]) == (0, 0)
            traffic.ports[0].flush()
            assert (context[rc.DOORBELLS], context[rc.SIGNALS]) == (1, 1)
            finish(traffic)

    def test_no_ticket_is_overwritten_before_its_write_was_reported(self) -> None:
        """One poll learns that a whole queue is over, and reports as many writes as there is room for in its events."""
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 4096) as (group, _):
            sender, receiver = Port(group, 0), Port(group, 1)
            sent: Counter[int] = Counter()
            posted, deadline = 0, time.monotonic() + 20
            while posted < 8 * rc.LINK_RECEIVES or len(sent) < posted:
                while posted < 8 * rc.LINK_RECEIVES and sender.post(1, 0, 0, 0, imm(0, posted), posted) == ACCEPTED:
                    posted += 1
                sender.flush()
                # all of them complete, and all receives are posted anew
                for _ in range(20):
                    receiver.poll()
                sent.update(event.value for event in sender.poll() if event.kind == SENT)
                assert time.monotonic() < deadline, f"{posted} posted, {len(sent)} sent"
            assert sent == dict.fromkeys(range(posted), 1)

    def test_a_long_chain_is_handed_over_in_parts(self) -> None:
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 1 << 16) as (group, endpoints):
            traffic = Traffic(group)
            for number in range(rc.POOL_SLOTS + 1):
                traffic.add(0, 1, source=0, target=0, nbytes=0)
                assert traffic.try_post(number)
            assert endpoints[0]._state.context[rc.DOORBELLS] == 1
            traffic.ports[0].flush()
            finish(traffic)

    def test_peers_write_the_window_and_the_credits_that_they_give(self) -> None:
        """What this rank says to others lies beside those, and is nobody else's to write."""
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 1 << 16) as (_, endpoints):
            state, found = endpoints[0]._state, []
            words = {"in": state.credits_in, "out": state.credits_out}
            for record in network._mrs.view(np.int64).reshape(-1, net.MR_RECORD // 8)[: network.word(net.MR_COUNT)]:
                start, nbytes, access = (int(record[at // 8]) for at in (net.MR_START, net.MR_BYTES, net.MR_ACCESS))
                open_to_peers = bool(access & codes.ACCESS_REMOTE_WRITE)
                found += [
                    (name, open_to_peers)
                    for name, one in words.items()
                    if start < one.ctypes.data + one.nbytes and one.ctypes.data < start + nbytes
                ]
            assert found == [("in", True), ("out", False)]


class TestFailure:
    def test_a_failed_write_ends_its_peer_and_says_why(self) -> None:
        """What completed before is SENT, what arrived before is delivered, then DOWN with words; then a new group."""
        network = MemoryNetwork(3)
        with open_endpoints(network, 3, 1 << 16) as (group, endpoints):
            traffic = Traffic(group)
            network.fail(network.queue_pairs(0)[0], 3, codes.REM_ACCESS_ERR)
            for number in range(6):
                traffic.add(0, 1, source=number * 64, target=number * 64, nbytes=64)
                assert traffic.try_post(number)
            traffic.ports[0].flush()
            found = poll_until(traffic.ports[0], DOWN)
            assert [event.value for event in found if event.kind == SENT] == [0, 1, 2]
            assert found[-1][:] == (DOWN, 0, 1, errno.EACCES)
            words = endpoints[0].describe(1)
            assert "roce, mem0 port 1, GID 1 (RoCE v2, 10.0.0.1)" in words
            assert "work completion status 10, remote access error" in words
            assert traffic.ports[0].post(1, 0, 0, 0, imm(0, 0), 0) == -errno.ENOTCONN
            # The others go on, and the peer learns of it because nobody answers it any more.
            traffic.add(0, 2, source=1024, target=0, nbytes=512)
            assert traffic.try_post(6)
            traffic.ports[0].flush()
            down = poll_until(traffic.ports[1], DOWN, 2.0)[-1]
            assert (down.peer, down.status) == (0, errno.ETIMEDOUT)
            assert "no acknowledgement from the peer" in endpoints[1].describe(0)
            poll_until(traffic.ports[0], SENT)
            poll_until(traffic.ports[2], ARRIVED)
        # In the same process, on the same devices.
        with open_endpoints(network, 3, 1 << 16) as (group, _):
            traffic = Traffic(group)
            traffic.add(0, 1, source=0, target=0, nbytes=64)
            traffic.run()

    def test_a_refused_work_request_ends_its_peer(self) -> None:
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 4096) as (group, endpoints):
            port = Port(group, 0)
            # Fewer slots than were asked for: the provider's queue is full before ours is.
            net_qp = network.queue_pairs(0)[0]
            network._set(net_qp, net.QP_SEND_SLOTS, 2)
            for number in range(4):
                assert port.post(1, 0, 0, 16, imm(0, number), number) == ACCEPTED
            port.flush()
            down = poll_until(port, DOWN)[-1]
            assert (down.peer, down.status) == (1, errno.ENOMEM)
            assert "refused a work request with errno 12" in endpoints[0].describe(1)

    def test_a_dropped_peer_cannot_write_any_more(self) -> None:
        """The queue pair is stopped in drop(): neither do its writes land, nor are our bytes read for it."""
        network = MemoryNetwork(2)
        with open_endpoints(network, 2, 4096) as (group, _):
            ports = [Port(group, rank) for rank in range(2)]
            group.windows[1][:] = 9
            for port in ports:
                # from one half to the other, so that what has landed is not what is read
                assert port.post(1 - port.rank, 0, 2048, 2048, imm(port.rank, 0), 0) == ACCEPTED
            ports[0].flush()
            ports[0].drop(1)
            ports[1].flush()
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                assert ports[0].poll() == []
                ports[1].poll()
            assert not group.windows[0].any()
            assert (group.windows[1] == 9).all()

    def test_a_peer_that_claims_another_rank_is_at_fault(self) -> None:
        network = MemoryNetwork(3)
        with open_endpoints(network, 3, 4096) as (group, _):
            ports = [Port(group, rank) for rank in range(3)]
            assert ports[1].post(0, 0, 0, 16, imm(2, 0), 0) == ACCEPTED
            ports[1].flush()
            fault = poll_until(ports[0], FAULT)[-1]
            assert (fault.peer, fault.status) == (1, FAULT_WRONG_SOURCE)


class TestDeviceMemory:
    """Windows in chunks, as dma-buf needs them; they overlap, so that every write lies in one of them at either end."""

    @pytest.fixture
    def open_chunked(self, monkeypatch: pytest.MonkeyPatch) -> OpenGroup:
        # monkeypatched: a chunk is 1 GiB, and a test must not need that much
        monkeypatch.setattr(nic_window, "CHUNK_SHIFT", 16)
        monkeypatch.setattr(nic_window, "OVERLAP_BYTES", 1 << 16)

        @contextlib.contextmanager
        def open_group(ranks: int, window_bytes: int) -> Iterator[tuple[MemoryNetwork, Group, list[np.ndarray]]]:
            """Connected endpoints, and the memory of their devices, in which whole windows lie."""
            network = MemoryNetwork(ranks, half=0.3)
            with open_endpoints(network, ranks, window_bytes, max_write=1 << 16) as (group, endpoints):
                devices = [np.zeros(window_bytes, np.uint8) for _ in range(ranks)]
                offers = []
                for one, device in zip(endpoints, devices, strict=True):
                    network.refuse["ibv_reg_mr"] = errno.EFAULT
                    offers.append(one.offer_device(device.ctypes.data, window_bytes, self.export))
                for rank, one in enumerate(endpoints):
                    one.accept_device([None if peer == rank else offer for peer, offer in enumerate(offers)])
                yield network, group, devices

        return open_group

    @staticmethod
    def export(start: int, nbytes: int) -> tuple[int, int]:
        return os.memfd_create("dma-buf"), 0

    @pytest.mark.parametrize("lengths", [(1 << 16, 4096), (4096, 1 << 16)], ids=["to shorter ones", "to longer ones"])
    def test_writes_across_chunks_of_a_rank_with_other_nics(
        self, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]
    ) -> None:
        """Or with another UCCL_EP_NIC_BYTES_IN_FLIGHT: its own writes are shorter, and those of its peers are not."""
        monkeypatch.setattr(nic_window, "CHUNK_SHIFT", 16)
        monkeypatch.setattr(nic_window, "OVERLAP_BYTES", 1 << 16)
        monkeypatch.setattr(nic_window, "WHOLE_BYTES", 1 << 16)
        network, windows = MemoryNetwork(2), [np.zeros(1 << 20, np.uint8) for _ in range(2)]
        ends = [endpoint(network, rank, windows[rank], ranks=2, max_write=lengths[rank]) for rank in range(2)]
        try:
            connect(ends)
            ports = [Port(Group(ends, windows, network.kill), rank) for rank in range(2)]
            nbytes = lengths[0]
            source, target = (3 << 16) - 16, (5 << 16) - 32
            windows[0][source : source + nbytes] = pattern(1, nbytes)
            assert ports[0].post(1, source, target, nbytes, imm(0, 0), 0) == ACCEPTED
            ports[0].flush()
            poll_until(ports[1], ARRIVED)
            assert np.array_equal(windows[1][target : target + nbytes], pattern(1, nbytes))
        finally:
            for one in ends:
                one.close()

    def test_writes_across_chunks_arrive_whole(self, open_chunked) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with open_chunked(2, 1 << 20) as (network, group, devices):
            # the chunks, the window in host memory, the credit words of peers and of this rank
            assert network.objects["mr"] == 2 * (16 + 3)
            assert len(os.listdir("/proc/self/fd")) == before, "a region needs its descriptor no more"
            rng = np.random.default_rng(3)
            for number in range(200):
                source, target = (int(rng.integers(0, (1 << 20) - (1 << 16)) // 16 * 16) for _ in range(2))
                nbytes = int(rng.choice([16, 4096, 1 << 16]))
                devices[0][source : source + nbytes] = pattern(number, nbytes)
                ports = [Port(group, rank) for rank in range(2)]
                assert ports[0].post(1, source, target, nbytes, imm(0, number), number) == ACCEPTED
                ports[0].flush()
                poll_until(ports[1], ARRIVED)
                assert np.array_equal(devices[1][target : target + nbytes], pattern(number, nbytes))
                poll_until(ports[0], SENT)
            assert network.word(net.IMMEDIATES) == 200

    def test_every_attempt_is_named_when_none_works(self) -> None:
        network = MemoryNetwork(2)
        one, device = endpoint(network, 0, np.zeros(4096, np.uint8), ranks=2), np.zeros(4096, np.uint8)
        network.refuse |= {"ibv_reg_mr": errno.EFAULT, "ibv_reg_dmabuf_mr": errno.EOPNOTSUPP}
        with pytest.raises(
            TransportError, match=r"nvidia-peermem.*ibv_reg_mr failed.*dma-buf.*ibv_reg_dmabuf_mr failed"
        ):
            one.offer_device(device.ctypes.data, device.nbytes, self.export)
        one.close()
        assert not +network.objects

    def test_half_registered_chunks_are_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nic_window, "CHUNK_SHIFT", 12)
        network = MemoryNetwork(2)
        one, device = endpoint(network, 0, np.zeros(4096, np.uint8), ranks=2), np.zeros(1 << 16, np.uint8)
        before = network.objects["mr"]
        network.refuse["ibv_reg_mr"] = errno.EFAULT
        made: list[int] = []

        def export(start: int, nbytes: int) -> tuple[int, int]:
            made.append(start)
            if len(made) == 3:
                network.refuse["ibv_reg_dmabuf_mr"] = errno.ENOMEM
            return self.export(start, nbytes)

        with pytest.raises(TransportError, match="GPUDirect works in no way"):
            one.offer_device(device.ctypes.data, device.nbytes, export)
        assert len(made) == 3
        assert network.objects["mr"] == before
        one.close()
        assert not +network.objects


class TestControlPath:
    def test_the_family_limits_what_is_in_flight(self) -> None:
        network = MemoryNetwork(2)
        network.traits[0].vendor = 0x14E4
        window = np.zeros(4096, np.uint8)
        one = endpoint(network, 0, window, ranks=2, sharers=2)
        assert one.capabilities.bytes_in_flight == (1536 << 10) // 2
        one.close()
        one = endpoint(network, 0, window, ranks=2, settings=Settings(nic_bytes_in_flight=8 << 20))
        assert one.capabilities.bytes_in_flight == 8 << 20
        one.close()

    def test_marks_are_those_of_the_family_or_of_the_settings(self) -> None:
        for settings, expected in ((Settings(), "TC 104, SL 3"), (Settings(nic_traffic_class=0), "TC 0, SL 3")):
            network = MemoryNetwork(2)
            network.traits[0].vendor = network.traits[1].vendor = 0x14E4
            with open_endpoints(network, 2, 4096, settings=settings) as (_, endpoints):
                assert expected in endpoints[0].describe(1)

    @pytest.mark.parametrize(
        ("vendor", "settings", "retries"),
        [(0x15B3, Settings(), 7), (0xFFFFFF, Settings(), 6), (0x15B3, Settings(nic_retries=0), 0)],
        ids=["a NIC", "soft-RoCE", "as set"],
    )
    def test_packets_are_sent_again_as_often_as_the_family_or_the_settings_say(
        self, vendor: int, settings: Settings, retries: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths: list[Path] = []
        connect = QueuePair.connect

        def noted(link: QueuePair, path: Path, *others: Any, **named: int) -> None:
            paths.append(path)
            connect(link, path, *others, **named)

        monkeypatch.setattr(QueuePair, "connect", noted)
        network = MemoryNetwork(2)
        network.traits[0].vendor = network.traits[1].vendor = vendor
        with open_endpoints(network, 2, 4096, settings=settings):
            assert {path.retries for path in paths} == {retries}

    def test_each_flag_of_a_link_is_a_bit_of_its_own(self) -> None:
        flags = (rc.DIRTY_LINK, rc.READY_LINK, rc.OWES, rc.RECEIVE_OVER)
        assert all(flag.bit_count() == 1 for flag in flags)
        assert len(set(flags)) == len(flags)

    def test_many_peers_have_shorter_queues_each(self) -> None:
        network = MemoryNetwork(1)
        network.traits[0].max_cqe = 8388607
        rail = RoceRail(network.library(0), NicPort("mem0"), Settings())
        depths = {links: rail.depths(links) for links in (1, 42, 43, 63, 255, 4095)}
        rail.close()
        assert depths[1] == depths[42] == (512, 1024)
        assert depths[43] == depths[63] == (256, 512)
        assert depths[255] == depths[4095] == (128, 256)

    def test_a_small_completion_queue_makes_links_shorter(self) -> None:
        network = MemoryNetwork(3)
        network.traits[0].max_cqe = 2 * (128 + 256)
        network.traits[1].max_qp_wr = 200
        with open_endpoints(network, 3, 1 << 16) as (group, endpoints):
            assert [int(one._state.context[rc.SEND_SLOTS]) for one in endpoints] == [128, 200, 512]
            assert [int(one._state.context[rc.RECEIVE_SLOTS]) for one in endpoints] == [256, 192, 1024]
            traffic = Traffic(group)
            for number in range(900):
                traffic.add(number % 3, (number + 1) % 3, source=0, target=0, nbytes=0)
            traffic.run()
            assert network.word(net.NOT_READY) == network.word(net.OVERRUNS) == 0
        network.traits[0].max_cqe = 16
        with pytest.raises(TransportError, match="too few for 2 connections"):
            endpoint(network, 0, np.zeros(4096, np.uint8), ranks=3)
        assert not +network.objects

    def test_bad_arguments_leave_nothing_open(self) -> None:
        network = MemoryNetwork(2)
        window = np.zeros(4096, np.uint8)
        with pytest.raises(ConfigError, match=r"mem0 has ports 1\.\.1, not 2"):
            endpoint(network, 0, window, ranks=2, port=2)
        with pytest.raises(ConfigError, match=r"peers \[0, 1\]"):
            endpoint(network, 0, window, ranks=2, peers=[0, 1])
        with pytest.raises(ConfigError, match="GID index that was set, 7"):
            endpoint(network, 0, window, ranks=2, settings=Settings(nic_gid_index=7))
        network.traits[0].state = codes.PORT_DOWN
        with pytest.raises(TransportError, match="port 1 is not active"):
            endpoint(network, 0, window, ranks=2)
        assert not +network.objects

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda a: b"", "is not the address of a roce endpoint"),
            (lambda a: msgspec.msgpack.encode({**a, "type": "roce 1"}), "is not the address of a roce endpoint"),
            (lambda a: msgspec.msgpack.encode(a)[:-1], "is not the address of a roce endpoint"),
            (lambda a: _with_rail(a, numbers={}), r"its \[0\] queue pairs"),
            (lambda a: _with_rail(a, psn=1 << 24), "is not the address of a roce endpoint"),
            (lambda a: _with_rail(a, gid=b"short"), "a GID of 5 bytes"),
            (lambda a: _with_rail(a, keys={"shift": 10, "keys": [1]}), "1 keys of a window"),
            (lambda a: msgspec.msgpack.encode({**a, "rails": []}), r"its \[\] queue pairs"),
            (lambda a: msgspec.msgpack.encode({**a, "proxy": 3}), "Start all ranks with the same settings"),
        ],
        ids=["empty", "other version", "cut", "no queue pair", "packet", "GID", "few keys", "no rail", "other proxy"],
    )
    def test_a_strange_address_is_refused_by_name(self, change, words: str) -> None:
        network = MemoryNetwork(2)
        ends = [endpoint(network, rank, np.zeros(4096, np.uint8), ranks=2) for rank in range(2)]
        changed = change(msgspec.msgpack.decode(ends[1].address()))
        with pytest.raises(BootstrapError, match=f"rank 0 connects to rank 1 over roce.*{words}"):
            ends[0].connect([None, changed], time.monotonic() + 5)
        for one in ends:
            one.close()
        assert not +network.objects

    def test_queue_pairs_begin_at_another_packet_in_each_epoch(self) -> None:
        """What a rank that was given up repeats is nothing that a queue pair with an old number waits for."""
        network = MemoryNetwork(2)
        psns = set()
        for _ in range(3):
            ends = [endpoint(network, rank, np.zeros(4096, np.uint8), ranks=2) for rank in range(2)]
            psns |= {msgspec.msgpack.decode(one.address())["rails"][0]["psn"] for one in ends}
            connect(ends)
            for one in ends:
                one.close()
        assert len(psns) > 3

    def test_a_refused_connection_names_the_peer_and_the_cause(self) -> None:
        network = MemoryNetwork(2)
        ends = [endpoint(network, rank, np.zeros(4096, np.uint8), ranks=2) for rank in range(2)]
        network.refuse["ibv_modify_qp"] = errno.ETIMEDOUT
        with pytest.raises(TransportError, match=r"mem0: connecting GID 1 .* to rank 1 .*check routes"):
            ends[0].connect([None, ends[1].address()], time.monotonic() + 5)
        for one in ends:
            one.close()


@pytest.mark.parametrize("flags", [0, codes.PORT_NEEDS_GRH], ids=["of one subnet", "that asks for the global header"])
def test_over_infiniband(flags: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By LID, with the header that the port asks for, in the partition that was set."""
    told: list[tuple[int, ...]] = []
    modify = QueuePair.modify

    def noted(self: QueuePair, attributes: Any, mask: int, doing: str) -> None:
        if mask & (codes.QP_AV | codes.QP_PKEY_INDEX):
            names = ("pkey_index",) if mask & codes.QP_PKEY_INDEX else ("ah_attr.dlid", "ah_attr.is_global")
            told.append(tuple(attributes[name] for name in names))
        modify(self, attributes, mask, doing)

    monkeypatch.setattr(QueuePair, "modify", noted)
    network = MemoryNetwork(2)
    for rank, traits in enumerate(network.traits):
        traits.link_layer, traits.flags, traits.lid = codes.LINK_INFINIBAND, flags, 5 + rank
    with open_endpoints(network, 2, 1 << 16, settings=Settings(nic_pkey_index=2)) as (group, _):
        traffic = Traffic(group)
        traffic.add(0, 1, 0, 0, 4096)
        traffic.run()
    assert told == [(2,), (2,), (6, flags), (5, flags)]
