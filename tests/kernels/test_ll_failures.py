"""How waits end when a peer is silent, lost, lying or masked: by name, in bounded time, nothing published after."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import FakeGroup
from tests.support.ll_cases import CASE, arguments, check_combined, expert_output, received_values, run_rank
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, PeerLost, PeerTimeout, ProtocolError, UcclEpError
from uccl_ep_serving.kernels.blocks import low_latency as block
from uccl_ep_serving.kernels.blocks.low_latency import RouteBlock
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.protocol.context import FAILURE_PEER_LOST
from uccl_ep_serving.protocol.message import (
    HEADER_BYTES,
    PAIRS_SHIFT,
    PLACE_SHIFT,
    LowLatencyHeader,
    Notice,
    counts_bytes,
)
from uccl_ep_serving.protocol.ring import HEAD
from uccl_ep_serving.protocol.streams import LL_DISPATCH, NOTICE, STREAMS
from uccl_ep_serving.proxy.transport.fake import Adversary


@pytest.mark.parametrize("kind", ["direct", "fake"])
def test_silent_peer_is_named(kind: str) -> None:
    """Rank 2 makes no combine: the others say so at the deadline, and publish nothing afterwards."""
    settings = Settings(timeout=0.5)

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        case = replace(CASE, ranks=3, experts=12)
        rows, count, handle, _, _ = low_latency.dispatch(**arguments(case, runtime.rank))
        if runtime.rank == 2:
            return
        y = expert_output(received_values(case, rows, count), runtime.rank)
        started = time.monotonic()
        with pytest.raises(PeerTimeout, match="rank 2 is silent") as caught:
            low_latency.combine(y, handle.topk_idx, handle.topk_weights, handle)
        assert 0.4 < time.monotonic() - started < 5
        error = caught.value
        assert (error.peer, error.channel, error.arrived, error.expected) == (2, 0, 0, 1)
        assert "low-latency combine recv" in error.phase
        with pytest.raises(PeerTimeout, match="rank 2"):
            low_latency.dispatch(**arguments(case, runtime.rank))

    if kind == "direct":
        DirectGroup(3, settings=settings).run(body)
    else:
        with FakeGroup(3, settings=settings) as group:
            group.run(body)


def test_peer_that_does_not_read_is_named_and_holds_up_nobody_else() -> None:
    """Rank 2 never calls its hook: dispatch 2 waits for it alone, ranks 0 and 1 have each other's message."""
    case = replace(CASE, ranks=3, experts=12)
    group = DirectGroup(3, settings=Settings(timeout=0.7))

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        hooks = [low_latency.dispatch(**arguments(case, runtime.rank), return_recv_hook=True)[4] for _ in range(2)]
        if runtime.rank == 2:
            return
        for hook in hooks:
            assert hook is not None
            hook()
        with pytest.raises(PeerTimeout, match="rank 2 is silent"):
            low_latency.dispatch(**arguments(case, runtime.rank))

    group.run(body)
    flags = [
        np.frombuffer(
            space._segment.bytes, dtype=np.int64, count=3 * STREAMS, offset=space.layout.direct_flags
        ).reshape(3, STREAMS)
        for space in group.spaces
    ]
    assert flags[0][1, LL_DISPATCH] == flags[1][0, LL_DISPATCH] == 2
    assert flags[2][0, LL_DISPATCH] == flags[2][1, LL_DISPATCH] == 1


@pytest.mark.parametrize("kind", ["direct", "fake"])
def test_poisoned_group_publishes_nothing(kind: str) -> None:
    """Once the sticky error is set, a send returns without a flag, a command or a consumed number."""

    def body(runtime: Any) -> list[int]:
        low_latency = LowLatency(runtime)
        low_latency.dispatch(**arguments(rank=runtime.rank))
        space = runtime.space
        before = sent_counts(space)
        # as when the error is set between the check and the kernel
        runtime.check = lambda phase: None
        assert space.fail(FAILURE_PEER_LOST, 1 - runtime.rank)
        with pytest.raises(PeerLost, match=f"rank {1 - runtime.rank} is lost"):
            low_latency.dispatch(**arguments(rank=runtime.rank))
        runtime.group.barrier.wait(10)
        assert sent_counts(space) == before
        with pytest.raises(UcclEpError, match="interrupted"):
            low_latency.dispatch(**arguments(rank=runtime.rank))
        return before

    def sent_counts(space: Any) -> list[int]:
        if kind == "direct":
            flags = np.frombuffer(
                space._segment.bytes, dtype=np.int64, count=2 * STREAMS, offset=space.layout.direct_flags
            )
            return flags.tolist()
        ring = group.services[space.rank].ring(LL_DISPATCH)
        return [ctypes.c_int64.from_address(ring + HEAD).value]

    if kind == "direct":
        assert max(DirectGroup(2).run(body)[0]) == 1
    else:
        with FakeGroup(2) as group:
            group.run(body)


def test_killed_rank_raises_peer_lost() -> None:
    case = replace(CASE, ranks=3, experts=12)

    with FakeGroup(3, settings=Settings(timeout=20.0)) as group:

        def body(runtime: Any) -> None:
            low_latency = LowLatency(runtime)
            low_latency.dispatch(**arguments(case, runtime.rank))
            runtime.group.barrier.wait(10)
            if runtime.rank == 1:
                group.fabric.kill(1)
                return
            started = time.monotonic()

            def go_on() -> None:
                for _ in range(3):
                    low_latency.dispatch(**arguments(case, runtime.rank))

            with pytest.raises(PeerLost, match="rank 1"):
                go_on()
            assert time.monotonic() - started < 5

        group.run(body)


def test_lost_write_ends_in_a_timeout_that_names_the_stream() -> None:
    """A wire that loses writes without a word: nothing is published early, and the deadline ends the wait."""
    with FakeGroup(2, adversary=Adversary(lose=0.5), seed=3, settings=Settings(timeout=0.5, channels=4)) as group:

        def body(runtime: Any) -> str:
            low_latency = LowLatency(runtime)
            inputs = CASE.inputs()
            try:
                for _ in range(20):
                    check_combined(CASE, inputs, runtime.rank, run_rank(CASE, low_latency, runtime.rank, inputs))
            except PeerTimeout as error:
                return str(error)
            return ""

        for rank, message in enumerate(group.run(body)):
            assert f"rank {1 - rank} is silent on" in message


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (LowLatencyHeader.TAG, 0),
        (LowLatencyHeader.NUMBER, 7),
        (LowLatencyHeader.ROWS, 9),
        (LowLatencyHeader.ROWS, -1),
        (LowLatencyHeader.CODING, 99),
        (LowLatencyHeader.PLAN, 1),
        (LowLatencyHeader.RETURN_OFFSET, 8),
        (LowLatencyHeader.RETURN_OFFSET, -64),
        (LowLatencyHeader.RETURN_OFFSET, 1 << 40),
        (LowLatencyHeader.CONSUMED_DISPATCH, 5),
        (LowLatencyHeader.CONSUMED_DISPATCH, -1),
        (LowLatencyHeader.CONSUMED_COMBINE, 5),
    ],
)
def test_lying_dispatch_header_is_refused(word: int, value: int) -> None:
    def forge(space: Any) -> None:
        slot = space.layout.ll_dispatch_recv + 1 * space.layout.low_latency.dispatch_slot
        poke_word(space, slot + 8 * word, value)

    forged_dispatch(forge)


_COUNTS = counts_bytes(CASE.experts // CASE.ranks)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 9),  # more rows than the message has, and than none
        (0, -1),
        (_COUNTS, 8),  # the token
        (_COUNTS, -1),
        (_COUNTS + 8, 4 << PLACE_SHIFT),  # an expert that lives nowhere here
        (_COUNTS + 8, 8),  # a position behind the expert's rows
        (_COUNTS + 8, -2),
    ],
)
def test_lying_counts_and_metas_are_refused(place: int, value: int) -> None:
    """Nothing is copied out of bounds."""

    def forge(space: Any) -> None:
        at = space.layout.ll_dispatch_recv + space.layout.low_latency.dispatch_slot + HEADER_BYTES + place
        space._segment.bytes[at : at + 4] = np.frombuffer(np.int32(value).tobytes(), dtype=np.uint8)

    forged_dispatch(forge)


@pytest.mark.parametrize("more", [-1, 1, 40])
def test_pairs_that_the_metas_do_not_have_are_refused(more: int) -> None:
    """In the expanded form a row returns for each of them."""

    def forge(space: Any) -> None:
        slot = space.layout.ll_dispatch_recv + space.layout.low_latency.dispatch_slot
        at = slot + 8 * LowLatencyHeader.ROWS
        word = int(space._segment.bytes[at : at + 8].view(np.int64)[0])
        poke_word(space, at, word + (more << PAIRS_SHIFT))

    forged_dispatch(forge, topk_weights=None)


def poke_word(space: Any, offset: int, value: int) -> None:
    space._segment.bytes[offset : offset + 8] = np.frombuffer(np.int64(value).tobytes(), dtype=np.uint8)


def forged_dispatch(forge: Any, **options: Any) -> None:
    """Rank 1's first message to rank 0 is changed by ``forge`` between its arrival and its receipt."""
    group = DirectGroup(2)

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        hook = low_latency.dispatch(**{**arguments(rank=runtime.rank), **options}, return_recv_hook=True)[4]
        assert hook is not None
        runtime.group.barrier.wait(10)
        if runtime.rank == 0:
            forge(runtime.space)
            with pytest.raises(ProtocolError, match="rank 1 sent what the formats forbid"):
                hook()
            with pytest.raises(ProtocolError):
                low_latency.dispatch(**arguments(rank=0))

    group.run(body)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (LowLatencyHeader.TAG, 0),
        (LowLatencyHeader.NUMBER, 7),
        (LowLatencyHeader.ROWS, 3),
        (LowLatencyHeader.CODING, 1),
        (LowLatencyHeader.PLAN, 1),
        (LowLatencyHeader.CONSUMED_COMBINE, 9),
    ],
)
def test_lying_combine_header_is_refused(word: int, value: int) -> None:
    group = DirectGroup(2)

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        rows, count, handle, _, _ = low_latency.dispatch(**arguments(rank=runtime.rank))
        y = expert_output(received_values(CASE, rows, count), runtime.rank)
        hook = low_latency.combine(y, handle.topk_idx, handle.topk_weights, handle, return_recv_hook=True)[2]
        assert hook is not None
        runtime.group.barrier.wait(10)
        if runtime.rank == 0:
            # rank 0 is its own first destination: rank 1's rows follow its own
            own_rows = int((handle.topk_idx < 4).any(dim=1).sum())
            base = -(-(HEADER_BYTES + own_rows * 256) // 64) * 64
            poke_word(runtime.space, runtime.space.layout.ll_combine_recv + base + 8 * word, value)
            with pytest.raises(ProtocolError, match=r"rank 1 sent (what the formats forbid|rows of float16 on)"):
                hook()

    group.run(body)


def test_lying_notice_is_refused() -> None:
    """A notice that claims more than was sent would let this rank overwrite what nobody has read."""
    group = DirectGroup(2, settings=Settings(timeout=5.0))

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        hooks = [low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)[4] for _ in range(2)]
        if runtime.rank == 1:
            return
        for hook in hooks:
            assert hook is not None
            hook()
        space = runtime.space
        notice = space.layout.notice_recv + 4 * HEADER_BYTES
        poke_word(space, notice + 8 * Notice.TAG, Notice.TAG_VALUE)
        poke_word(space, notice + 8 * Notice.CONSUMED_DISPATCH, 3)
        poke_word(space, space.layout.direct_flags + 8 * (STREAMS + NOTICE), 1)
        with pytest.raises(ProtocolError, match="rank 1 sent what the formats forbid on notice"):
            low_latency.dispatch(**arguments(rank=0))

    group.run(body)


def test_masked_rank_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rank 2 masked its tokens and experts are left out, and nobody waits for it."""

    class UsedMemory(RouteBlock):
        """Its tables hold what was there before, as memory that is allocated anew may."""

        def __init__(self, *sizes: Any) -> None:
            super().__init__(*sizes)
            self.words[block.ROUTE_TABLES : block.ROUTE_TABLES + block._ROUTE_TABLE_COUNT * self._ranks] = -1

    monkeypatch.setattr(block, "RouteBlock", UsedMemory)
    case = replace(CASE, ranks=3, experts=12, reduced=False)
    inputs = case.inputs()
    group = DirectGroup(3, settings=Settings(timeout=5.0))

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        low_latency.dispatch(**arguments(case, runtime.rank))
        if runtime.rank == 2:
            return
        runtime.mask[2] = 1
        given = inputs[runtime.rank]
        for _ in range(4):
            rows, count, handle, _, _ = low_latency.dispatch(
                given.x, given.topk_idx, case.tokens, case.experts, use_fp8=False
            )
            assert not (handle.layout_range[:, 2] & 0xFFFFFFFF).any()
            y = expert_output(received_values(case, rows, count), runtime.rank)
            assert not any(
                handle.route.table(table)[2]
                for table in (block.RECEIVED, block.RETURN_ROWS, block.RETURN_TO, block.RETURN_FORM)
            )
            combined, _, _ = low_latency.combine(y, given.topk_idx, given.topk_weights, handle)
            kept = (given.topk_idx // 4 != 2) * given.topk_weights.double()
            want = given.x.double() * ((1 + 0.25 * given.topk_idx.double()) * kept).sum(dim=1, keepdim=True)
            assert torch.allclose(combined.double(), want, rtol=2e-2, atol=1e-3)

    group.run(body)


def interrupted(runtime: Any, action: Any) -> None:
    """Run ``action``, which must wait, with Ctrl-C in its first pause."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    watch, runtime.space.watch = runtime.space.watch, interrupt
    # the check at the start of an operation watches too
    runtime.check = lambda phase: None
    try:
        with pytest.raises(KeyboardInterrupt):
            action()
    finally:
        runtime.space.watch = watch
        del runtime.check


def test_interrupted_receipt_can_be_repeated() -> None:
    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        inputs = CASE.inputs()
        check_combined(CASE, inputs, runtime.rank, run_rank(CASE, low_latency, runtime.rank, inputs))
        if runtime.rank == 1:
            runtime.group.barrier.wait(10)
        rows, count, handle, _, hook = low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)
        assert hook is not None
        if runtime.rank == 0:
            interrupted(runtime, hook)
            runtime.group.barrier.wait(10)
        hook()
        y = expert_output(received_values(CASE, rows, count), runtime.rank)
        combined, _, _ = low_latency.combine(y, handle.topk_idx, handle.topk_weights, handle)
        check_combined(CASE, inputs, runtime.rank, combined)

    DirectGroup(2).run(body)


def test_interrupted_receipt_that_nobody_can_repeat_ends_the_group() -> None:
    """Without a hook: what follows says so, instead of asking for the hook."""

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        low_latency.dispatch(**arguments(rank=runtime.rank))
        if runtime.rank == 1:
            return
        interrupted(runtime, lambda: low_latency.dispatch(**arguments(rank=0)))
        for _ in range(3):
            with pytest.raises(UcclEpError, match=r"an earlier low-latency dispatch \(KeyboardInterrupt\) was"):
                low_latency.dispatch(**arguments(rank=0))

    DirectGroup(2).run(body)


@pytest.mark.parametrize("kind", ["direct", "fake"])
def test_dropped_hooks_free_their_slots(kind: str) -> None:
    """Of dispatches, on one rank, the other, both; of combines on both. What comes after is right."""

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        inputs = CASE.inputs()
        for turn in range(8):
            hook = low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)[4]
            assert hook is not None
            if turn % 4 not in (runtime.rank, 2):
                hook()
            del hook
        for _ in range(4):
            rows, count, handle, _, _ = low_latency.dispatch(**arguments(rank=runtime.rank))
            y = expert_output(received_values(CASE, rows, count), runtime.rank)
            low_latency.combine(y, handle.topk_idx, handle.topk_weights, handle, return_recv_hook=True)
        check_combined(CASE, inputs, runtime.rank, run_rank(CASE, low_latency, runtime.rank, inputs))

    if kind == "direct":
        DirectGroup(2).run(body)
    else:
        with FakeGroup(2) as group:
            group.run(body)


def test_a_handle_whose_hook_was_dropped_is_combined_once_its_rows_were_received() -> None:
    """Not at first: what the experts then gave was of no rows."""

    def body(runtime: Any) -> None:
        low_latency, inputs = LowLatency(runtime), CASE.inputs()
        rows, count, handle, _, hook = low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)
        del hook
        given = handle.topk_idx, handle.topk_weights, handle
        with pytest.raises(ConfigError, match="was not received, so that x is not made of its rows"):
            low_latency.combine(rows, *given)
        y = expert_output(received_values(CASE, rows, count), runtime.rank)
        check_combined(CASE, inputs, runtime.rank, low_latency.combine(y, *given)[0])

    DirectGroup(2).run(body)


def test_a_hook_that_is_kept_still_holds_its_slot() -> None:
    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        hooks = [low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)[4] for _ in range(2)]
        with pytest.raises(ConfigError, match="call its recv hook first"):
            low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)
        for hook in hooks:
            assert hook is not None
            hook()
        low_latency.dispatch(**arguments(rank=runtime.rank))

    DirectGroup(2).run(body)


def test_weights_may_be_changed_once_combine_has_returned() -> None:
    case = replace(CASE, reduced=False)

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        inputs = case.inputs()
        given = inputs[runtime.rank]
        rows, count, handle, _, _ = low_latency.dispatch(**{**arguments(case, runtime.rank), "topk_weights": None})
        y = expert_output(received_values(case, rows, count), runtime.rank)
        weights = given.topk_weights.clone()
        combined, _, hook = low_latency.combine(y, given.topk_idx, weights, handle, return_recv_hook=True)
        weights.fill_(0.0)
        assert hook is not None
        hook()
        check_combined(case, inputs, runtime.rank, combined)

    DirectGroup(2).run(body)


def test_interrupted_send_ends_the_group() -> None:
    """Half a message cannot be taken back: what follows is refused by name instead of going out of step."""

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        hooks = [low_latency.dispatch(**arguments(rank=runtime.rank), return_recv_hook=True)[4] for _ in range(2)]
        if runtime.rank == 1:
            return
        for hook in hooks:
            assert hook is not None
            hook()
        # rank 1 has read nothing: a third dispatch waits for it
        interrupted(runtime, lambda: low_latency.dispatch(**arguments(rank=0)))
        with pytest.raises(UcclEpError, match="interrupted"):
            low_latency.dispatch(**arguments(rank=0))

    DirectGroup(2).run(body)
