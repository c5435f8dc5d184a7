"""Window sizes stay sane from two ranks to the most that the formats allow."""

from __future__ import annotations

import pytest

from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.protocol.layout import PAGE, LowLatencyPlan, WindowLayout

_ROW = 7168 * 2 + 512  # DeepSeek-V3 in bf16 with its meta


@pytest.mark.parametrize("ranks", [1, 2, 8, 17, 64, 256, 1024, 4096])
def test_staging_is_bounded_and_rounds_hold_a_chunk(ranks: int) -> None:
    plan = normal_plan(ranks, Settings(), 0)
    assert plan.chunk >= 8 * _ROW
    assert plan.round_slot >= plan.chunk
    layout = WindowLayout(ranks, None, plan)
    assert layout["normal_send"].nbytes <= max(256 << 20, ranks * plan.depth * (128 << 10))
    assert layout.nbytes < 8 << 30


def test_a_prefill_of_eight_ranks_stays_in_the_heap() -> None:
    """4,096 tokens to every one of eight ranks, and back with their weights: nothing goes in rounds."""
    assert normal_plan(8, Settings(), 0).heap >= 8 * 4096 * _ROW


def test_settings_win_where_they_fit() -> None:
    settings = Settings(chunk_bytes=2 * PAGE, round_bytes=64 * PAGE, heap_bytes=PAGE, chunk_depth=2)
    plan = normal_plan(8, settings, 0)
    assert (plan.chunk, plan.rounds, plan.heap) == (settings.chunk_bytes, settings.round_bytes, settings.heap_bytes)
    assert plan.depth == settings.chunk_depth
    # the heap that the caller of Buffer asks for, in whole pages
    assert normal_plan(8, settings, 2 * PAGE + 1).heap == 3 * PAGE
    # rounds hold two chunks of each rank, each with a page for its meta
    crowded = normal_plan(64, settings, 0)
    assert (crowded.chunk, crowded.rounds) == (settings.chunk_bytes, 2 * 64 * (2 * PAGE + PAGE))


def test_a_decode_window_of_32_ranks_is_smaller_than_deepeps() -> None:
    """Dispatch: a slot per (source, token) instead of per (expert, source, token); 256 experts over 32 ranks."""
    plan = LowLatencyPlan(32, 128, 7168, 256, 8, 2)
    deepep = 256 * 128 * (7168 * 2 + 16)
    assert plan.ranks * plan.room.dispatch_slot < deepep / 7.5
    assert plan.room.combine_recv < 128 * 8 * 7168 * 2 * 1.01
