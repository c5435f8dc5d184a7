"""Operations of several shapes in one window: in any order, on a hostile wire, without a step of all ranks between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.test_ll_orders import group_of
from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import FakeGroup
from tests.support.ll_cases import Case, arguments, check_combined, reserve, run_rank
from tests.support.ll_player import Player, program_of
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, ProtocolError
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.protocol.layout import WindowLayout
from uccl_ep_serving.proxy.transport.fake import Adversary

#: Many short rows, few long ones, many experts: each needs most of another region.
SHAPES = (
    Case(tokens=40, counts=(40, 3, 0), hidden=64, experts=6, topk=2),
    Case(tokens=3, counts=(3, 1), hidden=392, experts=12, topk=6, dtype=torch.float32),
    Case(tokens=4, counts=(0, 4), hidden=512, experts=24, topk=8, fp8=True, reduced=False),
)


def play_shapes(kind: str, programs: list[str], shapes: list[Case], seed: int = 0) -> None:
    """One program per rank, whose dispatches have the ``shapes`` in turn, in windows that are built once for each."""
    cases = [replace(one, ranks=len(programs)) for one in shapes]

    def body(runtime: Any) -> None:
        player = Player(LowLatency(runtime), runtime.rank, *cases)
        for case in cases:
            reserve(player.low_latency, case)
        epoch = runtime.epoch
        player.play(programs[runtime.rank])
        assert runtime.epoch == epoch

    with group_of(kind, len(programs), seed) as group:
        group.run(body)


@st.composite
def shape(draw: st.DrawFn) -> Case:
    """Sizes that one to three ranks can have."""
    experts = 6 * draw(st.integers(1, 4))
    tokens = draw(st.integers(1, 6))
    return Case(
        tokens=tokens,
        counts=tuple(draw(st.lists(st.integers(0, tokens), min_size=1, max_size=3))),
        hidden=8 * draw(st.integers(1, 40)),
        experts=experts,
        topk=draw(st.integers(1, min(8, experts))),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        reduced=draw(st.booleans()),
        routing=draw(st.sampled_from(["random", "holes", "last", "far", "twice", "same"])),
    )


@pytest.mark.parametrize("kind", ["direct", "fake"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    collectives=st.lists(st.integers(0, 2), min_size=4, max_size=14),
    seeds=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=3),
    shapes=st.lists(shape(), min_size=2, max_size=4),
)
def test_any_order_of_any_shapes(kind: str, collectives: list[int], seeds: list[int], shapes: list[Case]) -> None:
    play_shapes(kind, [program_of(seed, collectives) for seed in seeds], shapes, seeds[0])


@pytest.mark.parametrize("seed", range(2))
def test_late_repetitions(seed: int) -> None:
    """A NIC repeats writes of one shape when operations of the others have long followed it."""
    cases = [replace(one, ranks=3) for one in SHAPES]
    rounds = [replace(cases[number % 3], seed=number) for number in range(18)]
    inputs = [one.inputs() for one in rounds]
    late = Adversary(duplicate=0.5, linger=0.97)

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        for case in cases:
            reserve(low_latency, case)
        for one, tokens in zip(rounds, inputs, strict=True):
            check_combined(one, tokens, runtime.rank, run_rank(one, low_latency, runtime.rank, tokens))

    with FakeGroup(3, adversary=late, seed=seed, settings=Settings(timeout=30.0, channels=2)) as group:
        group.run(body)


def test_a_hundred_layers_of_alternating_shapes_rebuild_once_for_each() -> None:
    cases = [replace(one, ranks=2) for one in SHAPES]
    inputs = [one.inputs() for one in cases]

    def body(runtime: Any) -> list[int]:
        low_latency, epochs = LowLatency(runtime), []
        for layer in range(100):
            case, tokens = cases[layer % 3], inputs[layer % 3]
            check_combined(case, tokens, runtime.rank, run_rank(case, low_latency, runtime.rank, tokens))
            epochs.append(runtime.epoch)
        return epochs

    # none of them fits windows made for the others
    assert DirectGroup(2).run(body) == [[1, 2, *[3] * 98]] * 2


def test_windows_are_as_large_as_each_region_of_the_largest() -> None:
    cases = [replace(one, ranks=2) for one in SHAPES]

    def body(runtime: Any) -> WindowLayout:
        low_latency = LowLatency(runtime)
        for case in cases:
            reserve(low_latency, case)
        return runtime.layout

    def alone(case: Case) -> WindowLayout:
        def body(runtime: Any) -> WindowLayout:
            reserve(LowLatency(runtime), case)
            return runtime.layout

        return DirectGroup(2).run(body)[0]

    layouts = [alone(case) for case in cases]
    for together in DirectGroup(2).run(body):
        for region, *others in zip(together, *layouts, strict=True):
            assert region.nbytes == max(one.nbytes for one in others), region.name


def test_handles_and_combine_buffers_of_several_shapes_live_beside_each_other() -> None:
    """All dispatches first, then all combines, from the Buffer's own tensors."""
    cases = [replace(one, ranks=2, fp8=False) for one in SHAPES]

    def body(runtime: Any) -> None:
        low_latency, sent = LowLatency(runtime), []
        inputs = [one.inputs()[runtime.rank] for one in cases]
        for case in cases:
            reserve(low_latency, case)
        for case, mine in zip(cases, inputs, strict=True):
            weights = mine.topk_weights if case.reduced else None
            rows, _, handle, _, _ = low_latency.dispatch(
                mine.x,
                mine.topk_idx,
                case.tokens,
                case.experts,
                topk_weights=weights,
                use_fp8=False,
                # of scales alone
                round_scale=True,
                use_ue8m0=True,
            )
            assert handle[2:] == (case.tokens, case.hidden, case.experts)
            sent.append((rows, handle))
        buffers = [low_latency.next_combine_buffer(handle).copy_(rows) for rows, handle in sent]
        assert len({one.data_ptr() for one in buffers}) == len(buffers)
        for mine, y, (_, handle) in zip(inputs, buffers, sent, strict=True):
            assert low_latency.next_combine_buffer(handle).data_ptr() == y.data_ptr()
            out, _, _ = low_latency.combine(y, mine.topk_idx, mine.topk_weights, handle, zero_copy=True)
            weighed = mine.topk_weights.masked_fill(mine.topk_idx < 0, 0).sum(dim=1, keepdim=True)
            assert torch.allclose(out.float(), mine.x.float() * weighed, rtol=0.02, atol=0.02)

    DirectGroup(2).run(body)


def test_operations_of_different_shapes_name_each_other() -> None:
    """Windows have room for both, so that nobody asks anybody before the messages meet."""
    cases = [replace(one, ranks=2) for one in SHAPES[:2]]

    def body(runtime: Any) -> str:
        low_latency = LowLatency(runtime)
        for case in cases:
            reserve(low_latency, case)
        with pytest.raises(ProtocolError) as caught:
            low_latency.dispatch(**arguments(cases[runtime.rank], runtime.rank))
        return str(caught.value)

    words = (
        "T = 40, hidden 64, 6 experts, top-2, values of 2 bytes",
        "T = 3, hidden 392, 12 experts, top-6, values of 4 bytes",
    )
    for rank, text in enumerate(DirectGroup(2).run(body)):
        assert f"rank {1 - rank} sent an operation of another shape on low-latency dispatch, parity 0" in text
        assert f": {words[1 - rank]}. That of this rank has {words[rank]}." in text


def test_sizes_that_no_dispatch_can_have_are_not_reserved() -> None:
    good = {"tokens": 8, "hidden": 128, "experts": 8, "topk": 2, "dtype": torch.bfloat16}
    flags = {"use_fp8": True, "round_scale": False, "use_ue8m0": False, "with_topk_weights": False}
    wrong = [
        ({"tokens": 8193}, "reserve_low_latency: tokens per rank = 8193"),
        ({"hidden": 7.5}, "reserve_low_latency: hidden = 7.5 is no integer"),
        ({"experts": 9}, "multiple of 2 ranks"),
        ({"topk": 9}, "topk = 9"),
        ({"dtype": torch.int32}, "dtype must be bfloat16, float16 or float32, not torch.int32"),
        ({"hidden": 64}, "multiple of 128 for this FP8 format"),
        ({"use_ue8m0": True}, "needs round_scale=True"),
    ]

    def body(runtime: Any) -> int:
        low_latency = LowLatency(runtime)
        for change, words in wrong:
            with pytest.raises(ConfigError, match=words):
                low_latency.reserve(**{**good, **flags, **change})
        return runtime.epoch

    assert DirectGroup(2).run(body) == [0, 0]
