"""How kernels of low latency count what is read, as kernels of their own. Imported only where Triton is interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from tests.support.direct_ranks import DirectGroup
from uccl_ep_serving.gpu.memory import InterpretedMemory
from uccl_ep_serving.gpu.window import DeviceSpace
from uccl_ep_serving.kernels.blocks import low_latency as host
from uccl_ep_serving.kernels.blocks import low_latency_device as block
from uccl_ep_serving.kernels.triton.blocks import S
from uccl_ep_serving.kernels.triton.launch import Launch, Variant
from uccl_ep_serving.kernels.triton.ll_counts import mark_read, tell_dispatches_read
from uccl_ep_serving.kernels.triton.words import clock_ns
from uccl_ep_serving.native.pages import own_pages
from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan
from uccl_ep_serving.protocol.message import HEADER_BYTES, NOTICE_SLOTS, Notice
from uccl_ep_serving.protocol.ring import CAPACITY, ring_bytes
from uccl_ep_serving.protocol.streams import CREDIT

RANKS = 3
PLAN = LowLatencyPlan(RANKS, 4, 64, 6, 2, 2)


@triton.jit
def mark(state: tl.int64, number: tl.int64) -> None:
    """A dispatch is unpacked."""
    mark_read(state, S.DISPATCH_READ, S.DISPATCH_AHEAD, number)


@triton.jit
def acknowledge(context: tl.int64, state: tl.int64) -> None:
    """Before a dispatch, what the programs that serve a peer each do."""
    peer = tl.program_id(0).to(tl.int64)
    tell_dispatches_read(context, state, peer, clock_ns())


@contextlib.contextmanager
def _rank_0() -> Iterator[tuple[DirectGroup, DeviceSpace, block.DeviceState]]:
    """Of three ranks that map each other's windows."""
    group = DirectGroup(RANKS, NormalPlan(RANKS, 8, heap=4096, rounds=RANKS * 4096, chunk=4096))
    group.build(PLAN.room)
    # nobody takes commands out, and with all windows mapped nobody puts any in
    ring = own_pages(ring_bytes(16)).view(np.int64)
    ring[CAPACITY // 8] = 16
    for stream in range(CREDIT):
        group.spaces[0].set_ring(stream, ring.ctypes.data)
    space = DeviceSpace(group.spaces[0], InterpretedMemory(), None)
    try:
        yield group, space, block.DeviceState(group.spaces[0].layout, 1, torch.device("cpu"))
    finally:
        space.close()


def read_after(order: list[int]) -> list[int]:
    """Dispatches that count as read, after the hook of each."""
    found = []
    with _rank_0() as (_, _, state):
        for number in order:
            Launch(Variant(mark, {}), (1, 1, 1), (state.address, number)).run()
            found.append(int(state.words[host.DISPATCH_READ]))
    return found


def told(acked: list[int]) -> list[list[int]]:
    """What ranks 1 and 2 are told before dispatch 3, when they know of so many that are read: by rank the words of the
    first notice, the count of dispatches that are read last; nothing where there is none."""

    def notice(group: DirectGroup, rank: int) -> npt.NDArray[np.int64]:
        at = group.spaces[rank].layout.notice_recv  # of rank 0, in its first slot
        return group.spaces[rank].window_bytes[at : at + NOTICE_SLOTS * HEADER_BYTES].view(np.int64)

    with _rank_0() as (group, space, state):
        state.words[host.DISPATCH_NUMBER], state.words[host.DISPATCH_READ] = 3, 3
        for peer, count in enumerate(acked, start=1):
            state.words[block.state_word("SENT_ACK_DISPATCH", peer)] = count
        variant = Variant(acknowledge, {})
        Launch(variant, (RANKS, 1, 1), (space.context, state.address)).run()
        notices = [notice(group, rank) for rank in (1, 2)]
        return [
            [int(words[Notice.NUMBER]), int(words[Notice.CONSUMED_DISPATCH])]
            if words[Notice.TAG] == Notice.TAG_VALUE
            else []
            for words in notices
        ]
