"""Routing: one entry per (token, destination), in token order, and where every contribution comes back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.direct_ranks import DirectGroup
from uccl_ep_serving.kernels.cpu.routing import first_bad_id, route

Ids = npt.NDArray[np.int64]


def routed(
    ids: Ids, ranks: int, local_experts: int, reduced: bool, masked: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[int], Ids]:
    """(token list by rank, pairs by rank, returns) of the kernel."""
    space = DirectGroup(ranks).spaces[0]
    space.mask[list(masked)] = 1
    tokens, topk = ids.shape
    starts, counts, pairs = (np.full(ranks, -7, dtype=np.int64) for _ in range(3))
    order = np.full(max(tokens * min(topk, ranks), 1), -7, dtype=np.int32)
    returns = np.full((tokens, topk), -7, dtype=np.int64)
    arrays = (starts, counts, pairs, order, returns)
    route(space.context, ids.ctypes.data, tokens, topk, local_experts, int(reduced), *(a.ctypes.data for a in arrays))
    lists = [order[starts[rank] : starts[rank] + counts[rank]].tolist() for rank in range(ranks)]
    return lists, pairs.tolist(), returns


def expected(
    ids: Ids, ranks: int, local_experts: int, reduced: bool, masked: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[int], Ids]:
    """The same in plain Python."""
    lists: list[list[int]] = [[] for _ in range(ranks)]
    pairs = [0] * ranks
    returns = np.full(ids.shape, -1, dtype=np.int64)
    for token, row in enumerate(ids.tolist()):
        owners = [e // local_experts if e >= 0 and e // local_experts not in masked else -1 for e in row]
        of_expert: dict[int, int] = {}
        for slot, owner in enumerate(owners):
            if owner < 0:
                continue
            pair = pairs[owner]
            if len(row) > local_experts:
                pair = of_expert.setdefault(row[slot], pair)
            if not reduced:
                returns[token, slot] = owner << 32 | pair
            pairs[owner] = max(pairs[owner], pair + 1)
        chosen = sorted(set(owners) - {-1})
        for place, owner in enumerate(chosen):
            if reduced:
                returns[token, place] = owner << 32 | len(lists[owner])
            lists[owner].append(token)
    return lists, pairs, returns


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_against_plain_python(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    local_experts = data.draw(st.integers(1, 4))
    topk = data.draw(st.integers(1, min(8, ranks * local_experts)))
    tokens = data.draw(st.integers(0, 12))
    ids = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(-1, ranks * local_experts - 1), min_size=topk, max_size=topk),
                min_size=tokens,
                max_size=tokens,
            )
        ),
        dtype=np.int64,
    ).reshape(tokens, topk)
    masked = tuple(data.draw(st.sets(st.integers(1, ranks - 1), max_size=2))) if ranks > 1 else ()
    reduced = data.draw(st.booleans())
    lists, pairs, returns = routed(ids, ranks, local_experts, reduced, masked)
    want_lists, want_pairs, want_returns = expected(ids, ranks, local_experts, reduced, masked)
    assert lists == want_lists
    assert pairs == want_pairs
    # for as many rows a rank has room in what it packs for this one, see LowLatencyPlan.room
    assert all(many <= len(tokens) * min(topk, local_experts) for many, tokens in zip(pairs, lists, strict=True))
    assert returns.tolist() == want_returns.tolist()


@pytest.mark.parametrize(
    ("ids", "position"),
    [([[0, 7]], -1), ([[-1, -1]], -1), ([[0, 8]], 1), ([[0, 1], [-2, 3]], 2), ([[1 << 40, 0]], 0), ([], -1)],
)
def test_first_bad_id(ids: list[list[int]], position: int) -> None:
    array = np.array(ids, dtype=np.int64)
    assert first_bad_id(array.ctypes.data, array.size, 8) == position
