"""What ranks tell each other has been read, step by step: one rank whose only peer is the test."""

from __future__ import annotations

import time

import numpy as np
import pytest

from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.kernels.blocks import low_latency as block
from uccl_ep_serving.kernels.blocks.low_latency import RouteBlock, StateBlock
from uccl_ep_serving.kernels.cpu.ll_combine import combine_send
from uccl_ep_serving.kernels.cpu.ll_dispatch import dispatch_send
from uccl_ep_serving.kernels.cpu.ll_message import mark_read, send_notice, spaces_free
from uccl_ep_serving.protocol.command import decode
from uccl_ep_serving.protocol.context import STATUS_OK, STATUS_PENDING
from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan, WindowLayout
from uccl_ep_serving.protocol.message import DTYPE_BF16, FORM_REDUCED, NOTICE_SLOTS, Notice
from uccl_ep_serving.protocol.ring import CAPACITY, HEAD, SLOTS, ring_bytes
from uccl_ep_serving.protocol.streams import CREDIT, LL_COMBINE, LL_DISPATCH, MAX_CHANNELS, NOTICE, STREAMS

PEER = 1


class Bench:
    """Rank 0 of two or three. Others are reached through a ring nobody empties; their counts are set by the test.

    Attributes:
        arrived, completed: by stream, of rank 1. of_peers: [rank, arrived or completed, stream].
    """

    def __init__(self, ranks: int = 2) -> None:
        plan = LowLatencyPlan(ranks, 4, 64, 2 * ranks, 2, 2)
        layout = WindowLayout(ranks, plan, NormalPlan(ranks, 16, heap=4096, rounds=4096, chunk=4096))
        self.ranks = ranks
        self.segment = Segment.create("bench", layout.nbytes)
        self.space = KernelSpace(0, ranks, 1, self.segment, layout, 1.0)
        self.of_peers = np.zeros((ranks, 2, STREAMS), dtype=np.int64)
        self.arrived, self.completed = self.of_peers[PEER]
        for peer in range(1, ranks):
            self.space.connect_proxied(
                peer,
                lambda peer, stream: self.of_peers[peer, 0, stream:].ctypes.data,
                lambda peer, stream: self.of_peers[peer, 1, stream:].ctypes.data,
            )
        self.ring = np.zeros(ring_bytes(64) // 8, dtype=np.int64)
        self.ring[CAPACITY // 8] = 64
        for stream in range(CREDIT):
            self.space.set_ring(stream, self.ring.ctypes.data)
        self.state = StateBlock(layout)
        self.route = RouteBlock(plan, 0, FORM_REDUCED)
        for table in (block.RECEIVED, block.RETURN_ROWS, block.RETURN_TO, block.RETURN_BASE):
            self.route.table(table)[:] = 0
        self.route.table(block.RETURN_FORM)[:] = FORM_REDUCED
        self.ticket = np.zeros(1, dtype=np.int64)
        self.rows = np.zeros(64, dtype=np.int16)

    def peer_table(self, table: int) -> np.ndarray:
        start = block.PEER_TABLES + table * self.ranks
        return self.state.words[start : start + self.ranks]

    def own_flags(self) -> np.ndarray:
        """Counts of the messages that rank 0 has sent to itself."""
        start = self.space.layout.direct_flags
        return self.segment.bytes[start : start + 8 * STREAMS].view(np.int64)

    def commands(self) -> list[tuple[int, int]]:
        """(stream, offset in this rank's window) of everything posted."""
        words = self.ring[SLOTS // 8 :]
        posted = [decode(int(words[2 * i]), int(words[2 * i + 1])) for i in range(int(self.ring[HEAD // 8]))]
        return [(command.stream, command.source) for command in posted]

    def combine(self) -> int:
        return combine_send(
            self.space.context,
            self.state.address,
            self.route.address,
            self.ticket.ctypes.data,
            self.space.progress,
            self.rows.ctypes.data,
            128,
            128,
            DTYPE_BF16,
            time.monotonic_ns() + 5_000_000,
        )

    def dispatch(self) -> int:
        """Send no token to anybody: headers only."""
        return dispatch_send(
            self.space.context,
            self.state.address,
            self.route.address,
            self.space.progress,
            self.rows.ctypes.data,
            128,
            128,
            128,
            0,
            0,
            DTYPE_BF16,
            time.monotonic_ns() + 5_000_000,
        )

    def at_combine_2(self) -> None:
        """Combines 0 and 1 are sent, 0 is read; rank 1 has said that its space of combine 0 is free."""
        self.state.words[block.COMBINE_NUMBER] = 2
        self.state.words[block.COMBINE_READ] = 1
        self.peer_table(block.COMBINE_PACKED)[:] = 2
        self.peer_table(block.RECV_ACK_COMBINE)[PEER] = 1
        self.own_flags()[[LL_COMBINE, LL_COMBINE + MAX_CHANNELS]] = 1
        self.completed[[LL_COMBINE, LL_COMBINE + MAX_CHANNELS]] = 1
        self.arrived[LL_COMBINE] = 1


def test_combine_send_stays_until_it_has_told_the_peer() -> None:
    """Rank 1's notice overtook its combine 1 on the wire: this rank may send, but not yet say that its space is free.

    If it left, rank 1 would wait for that word while this rank waits for rank 1's rows.
    """
    bench = Bench()
    bench.at_combine_2()
    assert bench.combine() == STATUS_PENDING
    # the rows are out, only the word is missing, and the wait is blamed on what holds it back
    assert [stream for stream, _ in bench.commands()] == [LL_COMBINE]
    assert bench.space._progress[:4].tolist() == [PEER, LL_COMBINE + MAX_CHANNELS, 0, 1]
    bench.arrived[LL_COMBINE + MAX_CHANNELS] = 1
    assert bench.combine() == STATUS_OK
    (_, (stream, source)) = bench.commands()
    assert stream == NOTICE
    notice = bench.segment.bytes[source : source + 64].view(np.int64)
    assert notice[Notice.TAG] == Notice.TAG_VALUE
    assert notice[Notice.CONSUMED_COMBINE] == 1
    assert bench.peer_table(block.SENT_ACK_COMBINE)[PEER] == 1
    assert bench.state.words[block.COMBINE_NUMBER] == 3


def test_combine_send_stays_while_the_word_waits_for_a_slot() -> None:
    """Rows are out, the space is free, and every notice slot may still be read by the NIC: leaving now would let rank 1
    wait for that word until this rank's next call."""
    bench = Bench()
    bench.at_combine_2()
    assert bench.combine() == STATUS_PENDING
    bench.arrived[LL_COMBINE + MAX_CHANNELS] = 1
    bench.peer_table(block.NOTICES_SENT)[PEER] = NOTICE_SLOTS
    assert bench.combine() == STATUS_PENDING
    assert [stream for stream, _ in bench.commands()] == [LL_COMBINE]
    assert bench.state.words[block.COMBINE_NUMBER] == 2
    bench.completed[NOTICE] = 1
    assert bench.combine() == STATUS_OK
    assert [stream for stream, _ in bench.commands()] == [LL_COMBINE, NOTICE]


def test_dispatch_send_waits_for_its_staging() -> None:
    """Dispatch 2 is packed where dispatch 0 was: a NIC may still read, and repeat, what lies there."""
    bench = Bench()
    bench.state.words[block.DISPATCH_NUMBER] = 2
    bench.state.words[block.DISPATCH_READ] = 2
    bench.peer_table(block.DISPATCH_PACKED)[:] = 2
    bench.peer_table(block.RECV_ACK_DISPATCH)[:] = 2
    bench.peer_table(block.SENT_ACK_DISPATCH)[:] = 2
    for table in (block.COUNTS, block.PAIRS, block.STARTS):
        bench.route.table(table)[:] = 0
    assert bench.dispatch() == STATUS_PENDING
    assert bench.commands() == []
    assert bench.space._progress[:4].tolist() == [PEER, LL_DISPATCH, 0, 1]
    bench.completed[LL_DISPATCH] = 1
    assert bench.dispatch() == STATUS_OK
    assert [stream for stream, _ in bench.commands()] == [LL_DISPATCH]
    assert bench.state.words[block.DISPATCH_NUMBER] == 3


def test_combine_send_waits_for_its_previous_message_to_complete() -> None:
    bench = Bench()
    bench.at_combine_2()
    bench.arrived[LL_COMBINE + MAX_CHANNELS] = 1
    bench.completed[LL_COMBINE + MAX_CHANNELS] = 0
    assert bench.combine() == STATUS_PENDING
    # the peer is told meanwhile, nothing else is sent
    assert [stream for stream, _ in bench.commands()] == [NOTICE]
    bench.completed[LL_COMBINE + MAX_CHANNELS] = 1
    assert bench.combine() == STATUS_OK
    assert [stream for stream, _ in bench.commands()] == [NOTICE, LL_COMBINE]


def test_combine_send_blames_the_peer_whose_nic_still_reads() -> None:
    """Rank 1 has not told that its space is free, and may wait for rank 2 itself."""
    bench = Bench(ranks=3)
    bench.at_combine_2()
    bench.peer_table(block.RECV_ACK_COMBINE)[PEER] = 0
    assert bench.combine() == STATUS_PENDING
    assert bench.space._progress[:4].tolist() == [2, LL_COMBINE + MAX_CHANNELS, 0, 1]


def test_combine_send_waits_until_no_nic_reads_its_staging() -> None:
    """All combines are packed in one place: what went to rank 2 may lie where the message to rank 1 is packed."""
    bench = Bench(ranks=3)
    bench.state.words[block.COMBINE_NUMBER] = 1
    bench.peer_table(block.COMBINE_PACKED)[:] = 1
    bench.own_flags()[LL_COMBINE] = 1
    bench.completed[LL_COMBINE] = 1
    assert bench.combine() == STATUS_PENDING
    assert bench.commands() == []
    assert bench.space._progress[:4].tolist() == [2, LL_COMBINE, 0, 1]
    bench.of_peers[2, 1, LL_COMBINE] = 1
    assert bench.combine() == STATUS_OK
    assert [stream for stream, _ in bench.commands()] == 2 * [LL_COMBINE + MAX_CHANNELS]


def test_combine_send_waits_for_the_peers_space() -> None:
    bench = Bench()
    bench.at_combine_2()
    bench.arrived[LL_COMBINE + MAX_CHANNELS] = 1
    bench.peer_table(block.RECV_ACK_COMBINE)[PEER] = 0
    assert bench.combine() == STATUS_PENDING
    assert [stream for stream, _ in bench.commands()] == [NOTICE]
    assert bench.space._progress[:4].tolist() == [PEER, NOTICE, 0, 1]


@pytest.mark.parametrize(
    ("read", "even", "odd", "free"),
    [(0, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1, 2), (2, 2, 2, 2), (3, 2, 2, 3), (3, 2, 1, 2)],
)
def test_spaces_free(read: int, even: int, odd: int, free: int) -> None:
    """Free: read here, and followed by the peer's next message."""
    bench = Bench()
    bench.own_flags()[[LL_COMBINE, LL_COMBINE + MAX_CHANNELS]] = 9
    bench.arrived[LL_COMBINE], bench.arrived[LL_COMBINE + MAX_CHANNELS] = even, odd
    bench.state.words[block.COMBINE_READ] = read
    assert spaces_free(bench.space.context, bench.state.address, bench.space.progress) == free


def test_notice_slot_is_used_again_only_when_complete() -> None:
    bench = Bench()
    address = bench.state.address, bench.space.progress
    for number in range(NOTICE_SLOTS):
        assert send_notice(bench.space.context, *address, PEER, 0) == STATUS_OK
        assert bench.peer_table(block.NOTICES_SENT)[PEER] == number + 1
    assert send_notice(bench.space.context, *address, PEER, 0) == STATUS_PENDING
    assert len(bench.commands()) == NOTICE_SLOTS
    bench.completed[NOTICE] = 1
    assert send_notice(bench.space.context, *address, PEER, 0) == STATUS_OK
    sources = [source for _, source in bench.commands()]
    assert len(set(sources)) == NOTICE_SLOTS
    assert sources[0] == sources[NOTICE_SLOTS]


@pytest.mark.parametrize(
    ("order", "counts"), [([0, 1, 2], [1, 2, 3]), ([1, 0, 2], [0, 2, 3]), ([0, 2, 1, 3], [1, 1, 3, 4])]
)
def test_read_counts_are_prefixes(order: list[int], counts: list[int]) -> None:
    bench = Bench()
    seen = []
    for number in order:
        mark_read(bench.state.address, block.COMBINE_READ, block.COMBINE_AHEAD, number)
        seen.append(int(bench.state.words[block.COMBINE_READ]))
    assert seen == counts
