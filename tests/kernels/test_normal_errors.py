"""Bad input to normal mode is refused by name before anything moves; silence ends in an error that names the peer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.direct_ranks import DirectGroup
from tests.support.normal_cases import Case, check, dispatch, round_trip
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, PeerTimeout, ProtocolError, UcclEpError
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol.context import FAILURE_PEER_LOST
from uccl_ep_serving.protocol.layout import NormalPlan
from uccl_ep_serving.protocol.message import GRANT_SLOTS, HEADER_BYTES, NormalGrant, NormalNotify
from uccl_ep_serving.protocol.streams import NORMAL_GRANT, NORMAL_NOTIFY

CASE = Case((20, 30), experts=8)
ROW = torch.randn(20, 256).bfloat16()
FP8 = torch.zeros(20, 256).to(torch.float8_e4m3fn)


def valid(normal: Normal, topk_idx: torch.Tensor) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(topk_idx, 8)
    return {
        "x": ROW,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(20, 4),
    }


def without_ids(*counts: int) -> dict[str, Any]:
    return {"topk_idx": None, "topk_weights": None, "num_tokens_per_expert": torch.tensor(counts, dtype=torch.int32)}


BAD_DISPATCH: dict[str, tuple[dict[str, Any], str]] = {
    "x is no tensor": ({"x": 5}, "must be a tensor"),
    "one dimension": ({"x": torch.zeros(16)}, r"\[tokens, hidden\]"),
    "hidden of no 16 bytes": ({"x": torch.zeros(20, 9).bfloat16()}, "no multiple of 16"),
    "strided x": ({"x": torch.zeros(256, 20).bfloat16().t()}, "contiguous"),
    "integer x": ({"x": torch.zeros(20, 256, dtype=torch.int32)}, "bfloat16"),
    "float64 x": ({"x": torch.zeros(20, 256, dtype=torch.float64)}, "bfloat16"),
    "float8 without scales": ({"x": FP8}, "scales"),
    "scales of bfloat16 rows": ({"x": (ROW, torch.zeros(20, 2))}, "float8_e4m3"),
    "scales of another shape": ({"x": (FP8, torch.zeros(20, 3))}, r"float32\[20, 2\]"),
    "scales of another dtype": ({"x": (FP8, torch.zeros(20, 2).double())}, r"float32\[20, 2\]"),
    "hidden of no 128 values": ({"x": (FP8[:, :192].contiguous(), torch.zeros(20, 1))}, "multiple of 128"),
    "x elsewhere": ({"x": ROW.to("meta")}, "x is on meta"),
    "scales elsewhere": ({"x": (FP8, torch.zeros(20, 2, device="meta"))}, "scales is on meta"),
    "ids elsewhere": ({"topk_idx": torch.zeros(20, 4, dtype=torch.int64, device="meta")}, "topk_idx is on meta"),
    "marks elsewhere": ({"is_token_in_rank": torch.zeros(20, 2, dtype=torch.bool, device="meta")}, "on meta"),
    "no layout": ({"num_tokens_per_rank": None}, "get_dispatch_layout"),
    "no mask": ({"is_token_in_rank": None}, "get_dispatch_layout"),
    "ids without weights": ({"topk_weights": None}, "go together"),
    "weights without ids": ({"topk_idx": None}, "go together"),
    "int32 ids": ({"topk_idx": torch.zeros(20, 4, dtype=torch.int32)}, "int64"),
    "ids of other tokens": ({"topk_idx": torch.zeros(19, 4, dtype=torch.int64)}, "20 tokens"),
    "weights of another shape": ({"topk_weights": torch.ones(20, 3)}, "topk_weights"),
    "bfloat16 weights": ({"topk_weights": torch.ones(20, 4).bfloat16()}, "topk_weights"),
    "an id out of range": ({"topk_idx": torch.full((20, 4), 8)}, r"topk_idx\[0, 0\] = 8"),
    "counts of other ids": ({"topk_idx": torch.full((20, 4), -1)}, "num_tokens_per_expert"),
    "a wrong count": ({"num_tokens_per_rank": torch.tensor([1, 1], dtype=torch.int32)}, "contradicts"),
    "counts of three ranks": ({"num_tokens_per_rank": torch.zeros(3, dtype=torch.int32)}, r"int32\[2\]"),
    "a mask of other tokens": ({"is_token_in_rank": torch.zeros(19, 2, dtype=torch.bool)}, r"bool\[20, 2\]"),
    "a mask that forgets": ({"is_token_in_rank": torch.zeros(20, 2, dtype=torch.bool)}, "is_token_in_rank"),
    "a negative count of an own expert": (without_ids(-7, 1, 1, 1, 1, 1, 1, 1), "cannot be of"),
    "a negative count of another's expert": (without_ids(1, 1, 1, 1, 1, 1, 1, -1), "cannot be of"),
    "a count beyond all ids": (without_ids(1, 1, 1, 1, 1 << 20, 1, 1, 1), "cannot be of"),
    "experts no multiple of ranks": ({"num_tokens_per_expert": torch.zeros(7, dtype=torch.int32)}, "multiple of 2"),
    "counts in a list": ({"num_tokens_per_rank": [1, 1]}, "must be a tensor, not list"),
    "an alignment of words": ({"expert_alignment": "4"}, "no integer"),
    "half a worst case": ({"num_worst_tokens": 3.5}, "no integer"),
    "alignment 0": ({"expert_alignment": 0}, "expert_alignment"),
    "negative worst case": ({"num_worst_tokens": -1}, "num_worst_tokens"),
    "a handle that is none": ({"handle": (1, 2)}, "handle"),
}


@pytest.mark.parametrize(("change", "words"), BAD_DISPATCH.values(), ids=BAD_DISPATCH.keys())
def test_dispatch_refuses(change: dict[str, Any], words: str):
    """One rank errs, is told so, corrects itself; its peer, which waits meanwhile, never notices."""
    inputs = CASE.inputs()

    def body(runtime):
        normal = Normal(runtime)
        if runtime.rank == 0:
            arguments = valid(normal, inputs.topk_idx[0]) | change
            x = arguments.pop("x")
            with pytest.raises(ConfigError, match=words):
                normal.dispatch(x, **arguments)
        return round_trip(normal, inputs, runtime.rank)

    check(inputs, DirectGroup(2).run(body))


def test_a_layout_may_be_strided():
    """Views of a larger tensor, as a caller has who keeps the layouts of several batches together."""
    inputs = CASE.inputs()

    def body(runtime):
        normal = Normal(runtime)
        arguments = valid(normal, inputs.topk_idx[0])
        whole, *_ = normal.dispatch(**arguments)
        strided = {
            name: torch.stack([one, torch.zeros_like(one)], -1)[..., 0] if name != "x" else one
            for name, one in arguments.items()
        }
        again, *_ = normal.dispatch(**strided)
        assert torch.equal(again, whole)
        return round_trip(normal, inputs, runtime.rank)

    check(inputs, DirectGroup(2).run(body))


BAD_COMBINE: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "other rows": (lambda x: {"x": x[:-1]}, "rows that the dispatch"),
    "float8": (lambda x: {"x": x.to(torch.float8_e4m3fn)}, "combine takes"),
    "strided": (lambda x: {"x": x.t().contiguous().t()}, "contiguous"),
    "weights of other rows": (lambda x: {"topk_weights": torch.ones(3, 4)}, "topk_weights"),
    "weights of another dtype": (lambda x: {"topk_weights": torch.ones(len(x), 4).double()}, "topk_weights"),
    "bias elsewhere": (lambda x: {"bias": torch.ones(20, 256, device="meta")}, "bias is on meta"),
    "weights elsewhere": (lambda x: {"topk_weights": torch.ones(len(x), 4, device="meta")}, "on meta"),
    "bias of another shape": (lambda x: {"bias": torch.ones(3, 256).bfloat16()}, "bias"),
    "bias of another dtype": (lambda x: {"bias": torch.ones(20, 256)}, "bias"),
    "three biases": (lambda x: {"bias": (ROW, ROW, ROW)}, "normal combine: bias must be one tensor or two"),
    "a bias that is wrong beside none": (lambda x: {"bias": (None, torch.ones(3, 256))}, "bias must be torch.bfloat16"),
    "no handle": (lambda x: {"handle": None}, "handle"),
}


@pytest.mark.parametrize(("change", "words"), BAD_COMBINE.values(), ids=BAD_COMBINE.keys())
def test_combine_refuses(change: Callable[[torch.Tensor], dict[str, Any]], words: str):
    inputs = CASE.inputs()

    def body(runtime):
        normal = Normal(runtime)
        received, *_, handle, _ = dispatch(normal, inputs, runtime.rank)
        if runtime.rank == 0:
            arguments = {"x": received, "handle": handle} | change(received)
            with pytest.raises(ConfigError, match=words):
                normal.combine(arguments.pop("x"), arguments.pop("handle"), **arguments)
        normal.combine(received, handle)
        return round_trip(normal, inputs, runtime.rank)

    check(inputs, DirectGroup(2).run(body))


@pytest.mark.parametrize("experts", [8.0, "8", None, 8.5, torch.tensor(8.0)])
def test_a_layout_refuses_experts_that_are_no_integer(experts: Any):
    normal = DirectGroup(1).run(Normal)[0]
    with pytest.raises(ConfigError, match=r"num_experts = .* is no integer"):
        normal.get_dispatch_layout(CASE.inputs().topk_idx[0], experts)
    plain, numpys = (normal.get_dispatch_layout(CASE.inputs().topk_idx[0], one) for one in (8, np.int64(8)))
    assert torch.equal(plain[2], numpys[2])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"hidden": 256}, {"hidden": 128}),
        ({"experts": 9}, {"experts": 12}),
        ({"topk": 2}, {"topk": 3}),
        ({"dtype": torch.bfloat16}, {"dtype": torch.float16}),
    ],
)
def test_ranks_that_disagree_all_refuse_and_go_on(mine: dict[str, Any], theirs: dict[str, Any]):
    """Rank 2 differs from ranks 0 and 1: all three are told, nothing moves, and the next operation works."""
    base = {"tokens": (9, 8, 7), "experts": 9, "topk": 2}
    inputs = [Case(**(base | mine)).inputs(), Case(**(base | theirs)).inputs()]

    def body(runtime):
        normal = Normal(runtime)
        outcomes = [round_trip(normal, inputs[0], runtime.rank)]
        for _ in range(2):
            with pytest.raises(ConfigError, match="different operations") as caught:
                dispatch(normal, inputs[runtime.rank == 2], runtime.rank)
            named = [rank for rank in range(3) if f"rank {rank} a " in str(caught.value)]
            assert named == ([0, 1, 2] if runtime.rank == 2 else [runtime.rank, 2])
            outcomes.append(round_trip(normal, inputs[0], runtime.rank))
        return outcomes

    for outcomes in zip(*DirectGroup(3).run(body), strict=True):
        check(inputs[0], outcomes)


def test_ranks_that_use_handles_of_different_dispatches_refuse():
    one, two = Case((20, 30), experts=8, seed=1).inputs(), Case((20, 30), experts=8, seed=2).inputs()

    def body(runtime):
        normal, rank = Normal(runtime), runtime.rank
        first, second = dispatch(normal, one, rank), dispatch(normal, two, rank)
        wrong = first if rank else second
        with pytest.raises(ConfigError, match="handle differ"):
            normal.combine(wrong[0], wrong[4])
        return normal.combine(first[0], first[4])[0].shape

    assert DirectGroup(2).run(body) == [(20, 256), (30, 256)]


@pytest.mark.parametrize(
    ("plan", "setting"),
    [
        (NormalPlan(2, 64, heap=1 << 20, rounds=1 << 20, chunk=4096), "UCCL_EP_CHUNK_BYTES"),
        (NormalPlan(2, 64, heap=1 << 20, rounds=8192, chunk=1 << 20), "UCCL_EP_ROUND_BYTES"),
    ],
)
def test_rows_too_large_for_the_window_name_the_setting(plan: NormalPlan, setting: str):
    inputs = Case((2, 2), hidden=2048, experts=8).inputs()

    def body(runtime):
        with pytest.raises(ConfigError, match=setting):
            dispatch(Normal(runtime), inputs, runtime.rank)

    DirectGroup(2, plan).run(body)


def test_more_rows_than_the_promised_worst_case():
    """Only rank 0 gets too many; the others and later operations are not disturbed."""
    inputs = Case((30, 30), experts=8, hot=0).inputs()

    def body(runtime):
        normal = Normal(runtime)
        if runtime.rank == 0:
            with pytest.raises(ConfigError, match="num_worst_tokens = 40"):
                dispatch(normal, inputs, 0, num_worst_tokens=40)
        else:
            dispatch(normal, inputs, 1, num_worst_tokens=40)
        return round_trip(normal, inputs, runtime.rank)

    check(inputs, DirectGroup(2).run(body))


SHORT = Settings(timeout=0.3)


def test_a_silent_peer_is_named_at_opening():
    inputs = Case((9, 9, 9), experts=6).inputs()

    def body(runtime):
        if runtime.rank == 2:
            return None
        normal = Normal(runtime)
        with pytest.raises(PeerTimeout, match="rank 2 is silent on normal notify") as caught:
            dispatch(normal, inputs, runtime.rank)
        # the failure is sticky
        with pytest.raises(PeerTimeout):
            dispatch(normal, inputs, runtime.rank)
        return caught.value

    for error in DirectGroup(3, settings=SHORT).run(body, seconds=10)[:2]:
        assert (error.peer, error.arrived, error.expected) == (2, 0, 1)
        assert "opening" in error.phase


def test_a_peer_that_falls_silent_in_the_middle_is_named():
    """Rank 1 is stopped after it has opened the operation: rank 0 misses its grant or its rows."""
    inputs = Case((9, 9), experts=6, lost=0.0).inputs()
    stopped = threading.Event()

    def body(runtime):
        normal = Normal(runtime)
        if runtime.rank == 1:

            def stop(form):
                stopped.set()
                raise KeyboardInterrupt

            normal._exchange.run = stop
            with pytest.raises(KeyboardInterrupt):
                dispatch(normal, inputs, 1)
            return None
        with pytest.raises(PeerTimeout) as caught:
            dispatch(normal, inputs, 0)
        assert stopped.is_set()
        return caught.value

    error = DirectGroup(2, settings=SHORT).run(body)[0]
    assert error.peer == 1
    assert error.phase == "normal dispatch"
    assert error.expected == 1


@pytest.mark.parametrize(
    ("tokens", "missing"), [((9, 0), "normal grant"), ((0, 9), "normal dispatch")], ids=["a grant", "rows"]
)
def test_what_a_silent_peer_owes_is_named(tokens: tuple[int, int], missing: str):
    """Rank 1 stops after the opening: rank 0 has only rows to send, or only rows to receive."""
    inputs = Case(tokens, experts=2, topk=2, lost=0.0).inputs()

    def body(runtime):
        normal = Normal(runtime)
        if runtime.rank == 1:
            normal._exchange.run = lambda form: None
            with contextlib.suppress(UcclEpError):
                dispatch(normal, inputs, 1)
            return None
        with pytest.raises(PeerTimeout, match=f"rank 1 is silent on {missing}") as caught:
            dispatch(normal, inputs, 0)
        return caught.value

    error = DirectGroup(2, settings=SHORT).run(body, seconds=10)[0]
    assert (error.peer, error.arrived, error.expected) == (1, 0, 1)


def test_a_lost_peer_ends_the_wait_at_once():
    inputs = CASE.inputs()
    group = DirectGroup(2, settings=Settings(timeout=60.0))

    def body(runtime):
        if runtime.rank == 1:
            return
        threading.Timer(0.1, runtime.space.fail, (FAILURE_PEER_LOST, 1)).start()
        with pytest.raises(UcclEpError, match="rank 1 is lost"):
            dispatch(Normal(runtime), inputs, 0)

    group.run(body)


def words_at(runtime, offset: int, count: int) -> np.ndarray:
    window = runtime.space._segment.bytes
    return window[offset : offset + 8 * count].view(np.int64)


def flags(runtime, source: int, stream: int) -> np.ndarray:
    return words_at(runtime, runtime.layout.direct_flags + (source * 256 + stream) * 8, 1)


@pytest.mark.parametrize(
    ("word", "value"),
    [(NormalNotify.TAG, 7), (NormalNotify.NUMBER, 5), (NormalNotify.ROWS, -1), (NormalNotify.ROWS, 1 << 40)],
)
def test_a_notify_that_breaks_the_format(word: int, value: int):
    """A forged notify of rank 1, equal to a real one except for one word, is refused by rank 0."""
    inputs = CASE.inputs()
    group = DirectGroup(2, settings=SHORT)

    def body(runtime):
        if runtime.rank == 1:
            return
        normal = Normal(runtime)
        real = normal._exchange.begin

        def begin(form, tokens):
            real(form, tokens)
            notify = words_at(runtime, runtime.layout.notify_recv + runtime.layout.normal.notify, 8)
            notify[:] = (NormalNotify.TAG_VALUE, 0, 0, 0, form.digest, form.row_bytes, form.meta_bytes, 0)
            notify[word] = value
            flags(runtime, 1, NORMAL_NOTIFY)[0] = 1

        normal._exchange.begin = begin
        with pytest.raises(ProtocolError, match="rank 1 sent what the formats forbid on normal notify"):
            dispatch(normal, inputs, 0)

    group.run(body)


def test_a_grant_outside_the_landing_area_is_refused():
    """Rank 0 plays both sides of the opening, then rank 1's grant names an offset below the landing area."""
    inputs = Case((9, 0), experts=2, topk=2, lost=0.0).inputs()
    group = DirectGroup(2, settings=SHORT)

    def body(runtime):
        if runtime.rank == 1:
            return
        normal = Normal(runtime)
        real = normal._exchange.begin

        def begin(form, tokens):
            real(form, tokens)
            layout = runtime.layout
            notify = words_at(runtime, layout.notify_recv + layout.normal.notify, 8)
            notify[:] = (NormalNotify.TAG_VALUE, 0, 0, 0, form.digest, form.row_bytes, form.meta_bytes, 0)
            flags(runtime, 1, NORMAL_NOTIFY)[0] = 1
            grant = words_at(runtime, layout.grant_recv + GRANT_SLOTS * HEADER_BYTES, 8)
            grant[:] = (NormalGrant.TAG_VALUE, 0, 0, 9, 4096, layout.normal_heap, 9, 0)
            flags(runtime, 1, NORMAL_GRANT)[0] = 1

        normal._exchange.begin = begin
        before = group.spaces[1]._segment.bytes.copy()
        with pytest.raises(ProtocolError, match="rank 1 sent what the formats forbid on normal grant: got 0x1000"):
            dispatch(normal, inputs, 0)
        after = group.spaces[1]._segment.bytes
        changed = np.flatnonzero(before != after)
        # only the notify and its flag went out
        limit = group.spaces[1].layout.grant_recv
        assert changed.size
        assert changed.max() < limit

    group.run(body)
