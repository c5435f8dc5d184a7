"""Rows of an expert: whole tiles, and no more than that takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.engines.expert_rows import whole_tiles


@given(tokens=st.integers(1, 8192), ranks=st.integers(1, 512))
def test_the_fewest_tokens_that_give_whole_tiles(tokens: int, ranks: int) -> None:
    room = whole_tiles(tokens, ranks)
    assert room >= tokens
    assert room * ranks % 256 == 0
    assert all(less * ranks % 256 for less in range(tokens, room))
