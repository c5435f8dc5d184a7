"""get_dispatch_layout against counting by hand, and the lists that dispatch builds from it."""

from __future__ import annotations

import re

import pytest
import torch
from direct_ranks import DirectGroup

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.kernels import normal_block as block
from uccl_ep_serving.kernels.cpu.normal_layout import row_lists
from uccl_ep_serving.normal import Normal


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


def test_row_lists_are_ascending_and_grouped_by_rank():
    marks = torch.rand(100, 5, generator=torch.Generator().manual_seed(1)) < 0.4
    marks[:, 3] = False
    rows = torch.empty(5, dtype=torch.int64)
    lists = torch.full((int(marks.sum()) + 1,), -7, dtype=torch.int32)
    row_lists(marks.data_ptr(), 100, 5, rows.data_ptr(), lists.data_ptr())
    assert rows.tolist() == marks.sum(dim=0).tolist()
    expected = [token for rank in range(5) for token in torch.nonzero(marks[:, rank]).flatten().tolist()]
    assert lists.tolist() == [*expected, -7]


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


def test_every_word_of_the_blocks_is_described_once_and_in_order():
    """Its docstring is the only description of the blocks, and the kernels trust the numbers."""
    described = re.findall(r"^    ([A-Z][A-Z0-9_]*(?:, [A-Z0-9_]+)?) +[HKP]\b", block.__doc__, re.MULTILINE)
    words = [word for line in described for word in line.split(", ")]
    start = words.index("ABSENT")
    for names, room in ((words[:start], block.OPERATION_WORDS), (words[start:], block.PEER_WORDS)):
        assert [getattr(block, name) for name in names] == list(range(len(names)))
        assert len(names) <= room
