"""Handles of normal mode are tensors: what keeps tensors keeps them. They are of a rank of a group, and no Buffer's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.bits import same_bits
from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import nodes
from tests.support.normal_cases import Case, check, dispatch, round_trip
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.handles import MADE_ON_DEVICE, About
from uccl_ep_serving.modes.normal_cpu import Normal

CASE = Case((20, 13), experts=8)
NODES = Case((20, 13, 0, 7), experts=8)

#: What keeps tensors, and what it gives back.
KEPT: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "list": list,
    "elsewhere and back": lambda handle: tuple(one.clone() for one in handle),
    "deepcopy": copy.deepcopy,
    # as what walks through containers builds them again
    "its own type": lambda handle: type(handle)(one for one in handle),
}


class Exchange(torch.autograd.Function):
    """Dispatch whose backward is a combine, of a handle that autograd has kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, normal: Any, inputs: Any, rank: int) -> torch.Tensor:
        rows, *_, handle, _ = dispatch(normal, inputs, rank)
        ctx.normal = normal
        ctx.save_for_backward(*handle)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.normal.combine(grads[0].contiguous(), ctx.saved_tensors)[0], None, None, None


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("case", [CASE, NODES], ids=["one node", "nodes"])
def test_a_handle_is_its_tensors(case: Case, kept: str) -> None:
    inputs = case.inputs()

    def body(runtime: Any) -> tuple[bool, bool]:
        normal, rank = Normal(runtime), runtime.rank
        first = round_trip(normal, inputs, rank)
        assert all(isinstance(one, torch.Tensor) for one in first.handle)
        handle = KEPT[kept](first.handle)
        again, *_, cached, _ = normal.dispatch(inputs.rows(rank), handle=handle)
        sums = [normal.combine(again, one)[0] for one in (first.handle, handle, cached)]
        return same_bits(again, first.rows), all(same_bits(one, sums[0]) for one in sums)

    if case is CASE:
        assert DirectGroup(2).run(body) == [(True, True)] * 2
    else:
        with nodes(4, 2) as group:
            assert group.run(body) == [(True, True)] * 4


@pytest.mark.parametrize("offload", [False, True])
def test_autograd_keeps_a_handle(offload: bool) -> None:
    inputs = CASE.inputs()

    def body(runtime: Any) -> bool:
        normal, rank = Normal(runtime), runtime.rank
        x = inputs.x[rank].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone() if offload else one, lambda one: one):
            rows = Exchange.apply(x, normal, inputs, rank)
        rows.sum().backward()
        copies = round_trip(normal, inputs, rank).handle.is_token_in_rank.sum(dim=1, keepdim=True)
        assert x.grad is not None
        return bool((x.grad == copies).all())

    assert DirectGroup(2).run(body) == [True, True]


def test_a_handle_outlives_its_buffer_on_the_same_ranks() -> None:
    """Frameworks build a larger Buffer for a wider layer, between a forward and its backward."""
    inputs = CASE.inputs()
    one, other = DirectGroup(2), DirectGroup(2)
    firsts = one.run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank))

    def body(runtime: Any) -> tuple[bool, bool]:
        normal, rank = Normal(runtime), runtime.rank
        first = firsts[rank]
        again = normal.dispatch(inputs.rows(rank), handle=first.handle)[0]
        return same_bits(again, first.rows), same_bits(
            normal.combine(again, first.handle)[0], normal.combine(again, dispatch(normal, inputs, rank)[4])[0]
        )

    assert other.run(body) == [(True, True)] * 2


def test_ranks_with_handles_of_different_buffers_are_refused_and_go_on() -> None:
    """Of the same epoch and number, in groups that were opened one after the other."""
    inputs = CASE.inputs()
    one, other = DirectGroup(2), DirectGroup(2)
    firsts = one.run(lambda runtime: dispatch(Normal(runtime), inputs, runtime.rank)[4])

    def body(runtime: Any) -> Any:
        normal, rank = Normal(runtime), runtime.rank
        mine = dispatch(normal, inputs, rank)[4]
        assert mine.about.origin[1:] == firsts[rank].about.origin[1:]
        with pytest.raises(ConfigError, match="the ranks were given different operations"):
            normal.dispatch(inputs.rows(rank), handle=mine if rank else firsts[rank])
        return round_trip(normal, inputs, rank)

    check(inputs, other.run(body))


def altered(handle: Sequence[torch.Tensor], **changes: int) -> tuple[torch.Tensor, ...]:
    about = About(*handle[0].tolist())._replace(**changes)
    return torch.tensor(about), *handle[1:]


def test_what_is_no_handle_of_this_rank_is_refused() -> None:
    inputs = CASE.inputs()
    handles = DirectGroup(2).run(lambda runtime: dispatch(Normal(runtime), inputs, runtime.rank)[4])

    def body(runtime: Any) -> Any:
        normal, rank = Normal(runtime), runtime.rank
        mine = tuple(dispatch(normal, inputs, rank)[4])
        for wrong in (
            (),
            mine[1:],
            mine[:2],
            (mine[0].to(torch.int32), *mine[1:]),
            (mine[0], mine[2], mine[1]),
            (*mine, mine[1]),
            (mine[0], mine[1], mine[2].T),
            (mine[0], 3, mine[2]),
            altered(mine, kind=MADE_ON_DEVICE),
            altered(mine, tokens=7),
            (mine[0], mine[1][:3], mine[2]),
            (mine[0], mine[1][: 2 * 2 + 1], mine[2]),
            (*mine, *mine[:2], mine[1], mine[2]),
            inputs.x[rank],
            None if rank else "handle",
        ):
            with pytest.raises(ConfigError, match="handle must come from a normal-mode dispatch on cpu, not"):
                normal.combine(inputs.rows(rank), wrong)
        with pytest.raises(ConfigError, match=f"comes from rank {1 - rank} of 2, and this is rank {rank} of 2"):
            normal.combine(inputs.rows(rank), handles[1 - rank])
        about, route, marks = altered(mine, rank=0, ranks=3)
        with pytest.raises(ConfigError, match="comes from rank 0 of 3"):
            normal.combine(inputs.rows(rank), (about, torch.zeros_like(route), marks.new_zeros(len(marks), 3)))
        with pytest.raises(ConfigError, match="tokens, x has 7"):
            normal.dispatch(inputs.rows(rank)[:7], handle=mine)
        with pytest.raises(ConfigError, match="takes no topk_idx"):
            normal.dispatch(inputs.rows(rank), handle=mine, topk_weights=inputs.topk_weights[rank])
        return round_trip(normal, inputs, rank)

    check(inputs, DirectGroup(2).run(body))


def test_a_layout_beside_a_handle_counts_for_nothing() -> None:
    inputs = CASE.inputs()

    def body(runtime: Any) -> bool:
        normal, rank = Normal(runtime), runtime.rank
        first = round_trip(normal, inputs, rank)
        counted = normal.get_dispatch_layout(torch.zeros_like(inputs.topk_idx[rank]), CASE.experts)
        again, _, _, per_expert, _, _ = normal.dispatch(
            inputs.rows(rank),
            handle=first.handle,
            num_tokens_per_rank=counted[0],
            num_tokens_per_expert=counted[2],
            is_token_in_rank=counted[3],
            num_worst_tokens=1,
        )
        assert per_expert == []
        return same_bits(again, first.rows)

    assert DirectGroup(2).run(body) == [True, True]
