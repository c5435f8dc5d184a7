"""get_dispatch_layout against counting by hand, and the lists that dispatch builds from it."""

from __future__ import annotations

import pytest
import torch

from tests.support.direct_ranks import DirectGroup
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.kernels.blocks import normal as block
from uccl_ep_serving.kernels.cpu.routing import layout, route_rows
from uccl_ep_serving.modes.normal_cpu import Normal


def one_rank_of(ranks: int, topk_idx: torch.Tensor, experts: int):
    group = DirectGroup(ranks)
    return group.run(lambda runtime: Normal(runtime).get_dispatch_layout(topk_idx, experts))[0]


def test_counts_and_marks_of_a_small_example():
    topk_idx = torch.tensor([[0, 1, 5], [-1, -1, -1], [3, 3, -1], [4, 2, 0]])
    per_rank, nodes, per_expert, in_rank, event = one_rank_of(3, topk_idx, 6)
    assert per_rank.tolist() == [2, 2, 2]
    assert per_rank.dtype == per_expert.dtype == torch.int32
    assert nodes is None  # all windows are mapped: one node
    assert per_expert.tolist() == [2, 1, 1, 2, 1, 1]
    assert in_rank.tolist() == [[True, False, True], [False] * 3, [False, True, False], [True] * 3]
    event.current_stream_wait()


@pytest.mark.parametrize(("tokens", "topk", "experts", "ranks"), [(1, 1, 1, 1), (0, 4, 8, 2), (777, 8, 256, 8)])
def test_random_layouts(tokens: int, topk: int, experts: int, ranks: int):
    generator = torch.Generator().manual_seed(3)
    topk_idx = torch.randint(-1, experts, (tokens, topk), generator=generator)
    per_rank, _, per_expert, in_rank, _ = one_rank_of(ranks, topk_idx, experts)
    marks = torch.zeros(tokens, ranks, dtype=torch.bool)
    for token in range(tokens):
        for expert in topk_idx[token].tolist():
            if expert >= 0:
                marks[token, expert // (experts // ranks)] = True
    assert torch.equal(in_rank, marks)
    assert per_rank.tolist() == marks.sum(dim=0).tolist()
    assert per_expert.tolist() == torch.bincount(topk_idx[topk_idx >= 0], minlength=experts).tolist()


def _layout_of(topk_idx: torch.Tensor, experts: int, ranks: int) -> tuple[torch.Tensor, ...]:
    per_rank = torch.empty(ranks, dtype=torch.int32)
    per_expert = torch.empty(experts, dtype=torch.int32)
    in_rank = torch.empty(len(topk_idx), ranks, dtype=torch.bool)
    tensors = (topk_idx, per_rank, per_expert, in_rank)
    at, *found = (one.data_ptr() for one in tensors)
    assert layout(at, *topk_idx.shape, experts, ranks, *found) == -1
    return per_rank, per_expert, in_rank


def _route(
    topk_idx: torch.Tensor | None,
    per_rank: torch.Tensor,
    per_expert: torch.Tensor,
    in_rank: torch.Tensor,
    room: int,
) -> tuple[int, torch.Tensor, torch.Tensor]:
    tokens, ranks = in_rank.shape
    # behind the room one for every token of every rank: whatever is written beyond it is seen
    rows = torch.empty(ranks, dtype=torch.int64)
    lists = torch.full((room + tokens * ranks,), -7, dtype=torch.int32)
    tally = torch.full((2 * ranks + len(per_expert),), -1, dtype=torch.int64)
    ids, topk = (0, 0) if topk_idx is None else (topk_idx.data_ptr(), topk_idx.shape[1])
    marks, counts, chosen = (one.data_ptr() for one in (in_rank, per_rank, per_expert))
    found = route_rows(
        ids,
        tokens,
        topk,
        len(per_expert),
        ranks,
        marks,
        counts,
        chosen,
        tally.data_ptr(),
        rows.data_ptr(),
        lists.data_ptr(),
    )
    return found, rows, lists


@pytest.mark.parametrize("with_ids", [True, False])
def test_rows_are_ascending_and_grouped_by_rank(with_ids: bool):
    topk_idx = torch.randint(-1, 10, (100, 3), generator=torch.Generator().manual_seed(1))
    topk_idx[topk_idx // 2 == 3] = -1
    per_rank, per_expert, marks = _layout_of(topk_idx, 10, 5)
    total = int(marks.sum())
    found, rows, lists = _route(topk_idx if with_ids else None, per_rank, per_expert, marks, total)
    assert found == block.LAYOUT_RIGHT
    assert rows.tolist() == marks.sum(dim=0).tolist()
    expected = [token for rank in range(5) for token in torch.nonzero(marks[:, rank]).flatten().tolist()]
    assert lists[:total].tolist() == expected
    assert (lists[total:] == -7).all()


def _spoil(what: str, topk_idx: torch.Tensor, layout: tuple[torch.Tensor, ...]) -> None:
    per_rank, per_expert, marks = layout
    if what == "an id too large":
        topk_idx[7, 1] = 10
    elif what == "an id below -1":
        topk_idx[7, 1] = -2
    elif what == "a mark less":
        marks[tuple(torch.nonzero(marks)[20].tolist())] = False
    elif what == "a mark more":
        marks[tuple(torch.nonzero(~marks)[20].tolist())] = True
    elif what == "a mark moved":
        token = int(torch.nonzero(marks.sum(dim=1) == 1)[0])
        marks[token] = marks[token].roll(1)
    elif what == "an expert more":
        per_expert[9] += 1
    elif what == "a row more":
        per_rank[4] += 1
    elif what == "a row less":
        per_rank[0] -= 1
    elif what == "a row moved":
        per_rank[0] -= 1
        per_rank[1] += 1
    elif what == "negative rows":
        per_rank[2] = -1
    elif what == "more rows than tokens":
        per_rank[3] = 101
    elif what == "every token to every rank":
        per_rank[:], marks[:] = 100, True


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("an id too large", block.LAYOUT_BAD_ID),
        ("an id below -1", block.LAYOUT_BAD_ID),
        ("a mark less", block.LAYOUT_MARKS),
        ("a mark more", block.LAYOUT_MARKS),
        ("a mark moved", block.LAYOUT_MARKS),
        ("an expert more", block.LAYOUT_EXPERT_COUNTS),
        ("a row more", block.LAYOUT_RANK_COUNTS),
        ("a row less", block.LAYOUT_RANK_COUNTS),
        ("a row moved", block.LAYOUT_RANK_COUNTS),
        ("negative rows", block.LAYOUT_RANK_COUNTS),
        ("more rows than tokens", block.LAYOUT_RANK_COUNTS),
        ("every token to every rank", block.LAYOUT_RANK_COUNTS),
    ],
)
def test_a_layout_that_contradicts_itself_or_the_ids_is_found(what: str, found: int):
    """And nothing is written beyond the room that a right layout needs."""
    topk_idx = torch.randint(-1, 10, (100, 2), generator=torch.Generator().manual_seed(2))
    told = _layout_of(topk_idx, 10, 5)
    room = len(topk_idx) * 2
    _spoil(what, topk_idx, told)
    result, _, lists = _route(topk_idx, *told, room)
    assert result == found
    assert (lists[room:] == -7).all()


@pytest.mark.parametrize(
    ("topk_idx", "experts", "words"),
    [
        (torch.tensor([[0, 4]]), 4, r"topk_idx\[0, 1\] = 4"),
        (torch.tensor([[0], [-2]]), 4, r"topk_idx\[1, 0\] = -2"),
        (torch.tensor([[0]], dtype=torch.int32), 4, "int64"),
        (torch.tensor([0]), 4, "int64"),
        (torch.tensor([[0]]), 5, "multiple of the 2 ranks"),
        (torch.tensor([[0]]), 0, "multiple of the 2 ranks"),
    ],
)
def test_bad_ids_are_refused_by_name(topk_idx: torch.Tensor, experts: int, words: str):
    with pytest.raises(ConfigError, match=words):
        one_rank_of(2, topk_idx, experts)
