"""Copies past the caches: the bytes, the fence before what is published, and normal mode with nothing but them."""

from __future__ import annotations

import platform
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.combinations import diagonal
from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import FakeGroup
from tests.support.normal_cases import Case, check, round_trip
from uccl_ep_serving.kernels.blocks import normal as block
from uccl_ep_serving.kernels.cpu import normal_receive, normal_rows
from uccl_ep_serving.modes import row_exchange
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.native import copy as native_copy
from uccl_ep_serving.native.atomics import store64
from uccl_ep_serving.native.compiler import optimised
from uccl_ep_serving.native.copy import last_cache_bytes, stream, stream_fence
from uccl_ep_serving.native.jit import compiled
from uccl_ep_serving.native.machine import target_machine
from uccl_ep_serving.protocol.layout import NormalPlan
from uccl_ep_serving.protocol.message import NormalNotify

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 needs more than the release store")


@pytest.mark.parametrize("nbytes", [0, 1, 16, 48, 63, 64, 65, 128, 144, 14336])
@pytest.mark.parametrize("target", [0, 1, 16, 48, 63])
@pytest.mark.parametrize("source", [0, 2, 16, 33])
def test_exactly_the_bytes_are_copied(nbytes: int, target: int, source: int) -> None:
    rng = np.random.default_rng(nbytes)
    memory = rng.integers(0, 256, 2 * 16384, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    to, of = start + 64 + target, start + 16384 + source
    expected = memory.copy()
    expected[to : to + nbytes] = expected[of : of + nbytes]
    stream(memory.ctypes.data + to, memory.ctypes.data + of, nbytes)
    assert np.array_equal(memory, expected)


def assembly(function: Any) -> str:
    """Machine code of a compiled ``function``."""
    return str(target_machine().emit_assembly(optimised({"entry": function})))


@X86
def test_the_fence_stands_between_the_copy_and_the_flag() -> None:
    @compiled
    def publish(target: int, source: int, nbytes: int, flag: int) -> None:
        stream(target, source, nbytes)
        stream_fence()
        store64(flag, 0x1234567)

    code = assembly(publish)
    copied, fenced, stored = (re.search(text, code) for text in (r"\bv?movnt", r"\bsfence", r"\$19088743"))
    assert copied is not None
    assert fenced is not None
    assert stored is not None
    assert copied.start() < fenced.start() < stored.start()


@X86
@pytest.mark.parametrize("function", [normal_rows.pack_rows, normal_receive.unpack], ids=["pack", "unpack"])
def test_whoever_streams_rows_fences_before_returning(function: Any) -> None:
    """Their callers publish: a flag, or that rows are consumed and their space may be granted again."""
    assert re.search(r"\bsfence", assembly(function))


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(kind, STREAMED) of every operation placed, in any order of the ranks."""
    found: list[tuple[int, int]] = []
    place = row_exchange.RowExchange.place

    def noted(exchange: Any, form: Any, capacity: int) -> Any:
        placement = place(exchange, form, capacity)
        found.append((form.kind, int(exchange.operation[block.STREAMED])))
        return placement

    monkeypatch.setattr(row_exchange.RowExchange, "place", noted)
    return found


@pytest.mark.parametrize(
    ("dtype", "heap", "ranks"), diagonal([torch.bfloat16, torch.float8_e4m3fn], [64 << 20, 0], [1, 2, 4])
)
def test_normal_mode_past_the_caches(
    monkeypatch: pytest.MonkeyPatch, placed: list[tuple[int, int]], dtype: torch.dtype, heap: int, ranks: int
) -> None:
    """Both ways of receiving, with rows that are no whole lines."""
    monkeypatch.setattr(row_exchange, "last_cache_bytes", lambda: 0)
    hidden = 1152 if dtype == torch.float8_e4m3fn else 1160
    inputs = Case(tuple(40 + 7 * rank for rank in range(ranks)), hidden=hidden, experts=ranks * 4, dtype=dtype).inputs()
    group = DirectGroup(ranks, NormalPlan(ranks, 256, heap=heap, rounds=1 << 20, chunk=64 << 10))
    check(inputs, group.run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank)))
    assert {streamed for kind, streamed in placed if kind != NormalNotify.OPERATION_COMBINE} == {1}
    # a combine of one rank moves nothing: it sums its own rows where they are
    assert {streamed for kind, streamed in placed if kind == NormalNotify.OPERATION_COMBINE} == {int(ranks > 1)}


@pytest.mark.parametrize(("spare", "streamed"), [(0, 0), (-1, 1)], ids=["what fits the cache", "a byte more"])
def test_what_all_ranks_write_must_fit_the_cache(
    monkeypatch: pytest.MonkeyPatch, placed: list[tuple[int, int]], spare: int, streamed: int
) -> None:
    # top-k = all experts: every token goes to both ranks, so each rank receives 80 rows
    inputs = Case((40, 40), hidden=1024, experts=4, topk=4, lost=0.0).inputs()
    monkeypatch.setattr(row_exchange, "last_cache_bytes", lambda: 2 * 80 * 2048 + spare)
    DirectGroup(2).run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank))
    assert [how for kind, how in placed if kind == NormalNotify.OPERATION_DISPATCH] == [streamed] * 2


def test_ranks_behind_proxies_do_not_write_into_this_hosts_caches(
    monkeypatch: pytest.MonkeyPatch, placed: list[tuple[int, int]]
) -> None:
    """The same rows, of which only this rank's own come through its cache."""
    inputs = Case((40, 40), hidden=1024, experts=4, topk=4, lost=0.0).inputs()
    monkeypatch.setattr(row_exchange, "last_cache_bytes", lambda: 80 * 2048)
    with FakeGroup(2) as group:
        group.run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank))
    assert [how for kind, how in placed if kind == NormalNotify.OPERATION_DISPATCH] == [0, 0]


def test_the_last_cache_is_the_largest(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(("32K", "32K", "1024K", "24576K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}/size").write_text(size + "\n")
    monkeypatch.setattr(native_copy, "_CACHES", tmp_path)
    assert last_cache_bytes.__wrapped__() == 24 << 20
    monkeypatch.setattr(native_copy, "_CACHES", tmp_path / "none")
    assert last_cache_bytes.__wrapped__() == 32 << 20

    def no_descriptor(pattern: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(native_copy, "_CACHES", SimpleNamespace(glob=no_descriptor))
    assert last_cache_bytes.__wrapped__() == 32 << 20
