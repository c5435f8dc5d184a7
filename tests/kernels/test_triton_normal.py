"""The Triton kernels of normal mode in Triton's interpreter: ranks as processes, real proxies, the same oracle."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels import triton_normal_bodies as bodies
from tests.kernels.triton_bodies import PATHS
from tests.support.normal_cases import Case
from tests.support.ranks import Ranks

pytestmark = [
    pytest.mark.timeout(600),
    # not imported here: whether it is the interpreter is decided when it is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

SMALL = Case(tokens=(5, 3), experts=4, topk=2)
FP8 = Case(tokens=(9, 6), experts=4, topk=2, dtype=torch.float8_e4m3fn, seed=1)
FORMATS = [
    SMALL,
    Case(tokens=(0, 7), experts=8, topk=3, dtype=torch.float32, seed=2),
    Case(tokens=(40, 33), experts=6, topk=3, hidden=136, dtype=torch.float16, hot=0, seed=3),
    FP8,
]
#: No heap to speak of, and landing slots of a few rows: everything goes in rounds.
ROUNDS = {"heap_bytes": 4096, "round_bytes": 16384, "chunk_bytes": 4096}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    """Rank processes whose Triton is the interpreter."""
    pool = Ranks()
    yield pool
    pool.close()


def test_over_mapped_windows(interpreted: Ranks) -> None:
    cases = [SMALL, replace(FP8, tokens=(4, 3))]
    assert interpreted.run(2, bodies.against_the_oracle, PATHS["mapped"], cases, timeout=300) == [2, 2]


@pytest.mark.parametrize("operations", [(1 << 31) - 6, (1 << 32) - 6])
def test_after_months_of_operations(interpreted: Ranks, operations: int) -> None:
    """The number of an operation stands above the rows in one word."""
    found = interpreted.run(2, bodies.after_months, PATHS["mapped"], [SMALL] * 4, operations, timeout=300)
    assert found == [4, 4]


def test_beside_the_cpu_kernels(interpreted: Ranks) -> None:
    """The kernels of CPUs speak otherwise: all ranks say so before anything moves."""
    for text in interpreted.run(2, bodies.beside_the_cpu_kernels, PATHS["shm"], timeout=300):
        assert "the ranks were given different operations, nothing was sent" in text


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
def test_every_path_and_format(interpreted: Ranks, path: str) -> None:
    assert interpreted.run(2, bodies.against_the_oracle, PATHS[path], FORMATS, timeout=580) == [4, 4]


#: Two ranks of one host, one of another that no NIC reaches.
APART: dict[str, Any] = {"window": "auto", "transport": "shm", "node_ranks": 2, "hierarchy": "off"}


@pytest.mark.interpreter
def test_near_ranks_write_device_memory_where_far_ones_need_host_memory(interpreted: Ranks) -> None:
    """All tokens go to rank 0 and come back: no row for rank 1 was in host memory, none for rank 2 in device memory."""
    case = Case(tokens=(5, 3, 4), experts=6, topk=2, lost=0.0, hot=0)
    found = interpreted.run(3, bodies.in_two_windows, APART, [case], timeout=300)
    assert found == [[(True, True)], [(True, False)], [(False, True)]]


@pytest.mark.interpreter
@pytest.mark.parametrize("sizes", [{}, ROUNDS], ids=["heap", "rounds"])
def test_two_kinds_of_window_in_every_format(interpreted: Ranks, sizes: dict[str, Any]) -> None:
    cases = [replace(case, tokens=(*case.tokens, 6, 7), experts=12) for case in FORMATS]
    for found in interpreted.run(4, bodies.in_two_windows, {**APART, **sizes}, cases, timeout=580):
        assert len(found) == len(cases)


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["mapped", "shm"])
def test_rounds(interpreted: Ranks, path: str) -> None:
    """Landing slots of a few rows and a staging of small chunks, used many times in one operation."""
    cases = [Case(tokens=(30, 22), experts=4, topk=2), Case(tokens=(26, 0), experts=4, topk=2, hot=1)]
    assert interpreted.run(2, bodies.against_the_oracle, {**PATHS[path], **ROUNDS}, cases, timeout=580) == [2, 2]


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["mapped", "shm"])
def test_worst_case_and_cached(interpreted: Ranks, path: str) -> None:
    """What the host does not look at: the same rows as with a look, from a handle as well, and too small a promise."""
    interpreted.run(2, bodies.without_a_look, PATHS[path], timeout=580)


def test_what_lies_behind_the_rows_of_a_broken_promise_is_not_summed(interpreted: Ranks) -> None:
    interpreted.run(2, bodies.broken_promise, {**PATHS["mapped"], "timeout": 15.0}, timeout=580)


@pytest.mark.parametrize(
    "phase",
    ["dispatch", *(pytest.param(phase, marks=pytest.mark.interpreter) for phase in ("cached dispatch", "combine"))],
)
def test_a_launch_that_fails_is_named_by_what_follows(interpreted: Ranks, phase: str) -> None:
    """The peers may have its opening, which counts on its rows; of a capture they have nothing."""
    words = f"an earlier normal {phase} (RuntimeError: out of resources) was interrupted"
    for said in interpreted.run(2, bodies.failed_launch, PATHS["mapped"], phase, timeout=300):
        assert words in said


@pytest.mark.interpreter
def test_without_ids_and_alone(interpreted: Ranks) -> None:
    interpreted.run(2, bodies.without_ids, PATHS["mapped"], timeout=300)
    assert interpreted.run(1, bodies.against_the_oracle, PATHS["mapped"], [Case(tokens=(6,), experts=4)]) == [1]


def test_a_handle_is_its_tensors(interpreted: Ranks) -> None:
    interpreted.run(2, bodies.handles, PATHS["mapped"], timeout=300)


def test_a_layout_is_counted_once(interpreted: Ranks) -> None:
    for counted in interpreted.run(2, bodies.layouts, PATHS["mapped"], timeout=300):
        assert counted == {
            "of the last layout": 0,
            "of it again": 1,
            "of one that was written to": 0,
            "of ids that were written to": 1,
            "of ids whose writes are not counted": 0,
        }


@pytest.mark.interpreter
def test_biases_and_alignment(interpreted: Ranks) -> None:
    interpreted.run(2, bodies.biases, PATHS["mapped"], timeout=300)


def test_ranks_that_differ_go_on(interpreted: Ranks) -> None:
    """Other sizes on one rank: both say so, and the next operation works."""
    texts = interpreted.run(2, bodies.different, PATHS["mapped"], timeout=300)
    assert all("the ranks were given different operations, nothing was sent" in text for text in texts)


def test_a_dispatch_that_parts_leaves_no_handle_that_a_combine_agrees_on(interpreted: Ranks) -> None:
    for dispatch, combine in interpreted.run(2, bodies.parted, {**PATHS["mapped"], "timeout": 15.0}, timeout=300):
        assert "normal dispatch: the ranks were given different operations, nothing was sent" in dispatch
        assert "normal combine: the ranks were given different operations, nothing was sent" in combine


def test_a_dispatch_without_memory_has_not_begun(interpreted: Ranks) -> None:
    interpreted.run(2, bodies.short_of_memory, PATHS["mapped"], timeout=300)


@pytest.mark.interpreter
def test_rows_that_the_handle_does_not_know_are_refused(interpreted: Ranks) -> None:
    assert interpreted.run(2, bodies.other_rows, PATHS["mapped"], timeout=300)[0] == ("ProtocolError", 1)


@pytest.mark.interpreter
def test_a_silent_peer_is_named(interpreted: Ranks) -> None:
    kind, peer, text = interpreted.run(2, bodies.silent_peer, PATHS["mapped"], timeout=300)[0]
    assert (kind, peer) == ("PeerTimeout", 1)
    assert "normal notify" in text


@pytest.mark.interpreter
@pytest.mark.parametrize("counted", [True, False], ids=["of the layout", "counted again"])
@pytest.mark.parametrize("worst", [0, 16])
def test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on(
    interpreted: Ranks, worst: int, counted: bool
) -> None:
    texts = interpreted.run(2, bodies.bad_ids, PATHS["mapped"], worst, counted, timeout=300)
    assert "an expert id outside -1 .. 3, at position 3 of topk_idx" in texts[0]
    assert texts[1] == ""


@pytest.mark.interpreter
@pytest.mark.parametrize(("path", "ranks"), [("shm", 3), ("mapped", 4)])
def test_more_ranks(interpreted: Ranks, path: str, ranks: int) -> None:
    cases = [Case(tokens=(12, 0, 31, 7)[:ranks], experts=2 * ranks, topk=3, seed=7)]
    assert interpreted.run(ranks, bodies.against_the_oracle, PATHS[path], cases, timeout=580) == [1] * ranks


@pytest.mark.interpreter
def test_operations_that_nobody_waits_for_but_by_their_events(interpreted: Ranks) -> None:
    interpreted.run(2, bodies.asynchronous, PATHS["mapped"], (5, 3), (True,), timeout=300)


@pytest.mark.interpreter
def test_operations_after_an_event_run_beside_what_the_stream_was_given_since(interpreted: Ranks) -> None:
    interpreted.run(1, bodies.beside_other_work, PATHS["mapped"], timeout=300)


def test_a_graph_of_windows_that_are_gone_does_nothing_and_must_be_captured_again(interpreted: Ranks) -> None:
    interpreted.run(1, bodies.replay_in_windows_that_are_gone, PATHS["mapped"], timeout=300)


@pytest.mark.interpreter
def test_the_number_of_programs_can_be_set(interpreted: Ranks) -> None:
    """As many as there are channels, as the caller allows, and as is set; a handle keeps those of its dispatch."""
    assert interpreted.run(2, bodies.programs, PATHS["mapped"], timeout=300) == [[3, 2, 1]] * 2


@pytest.mark.interpreter
def test_both_modes_on_one_buffer(interpreted: Ranks) -> None:
    interpreted.run(2, bodies.both_modes, PATHS["shm"], timeout=580)
