"""Single steps of normal mode between nodes on a device, in Triton's interpreter: what a rank makes of what it reads.

Each test says what the other ranks have written and looks at what one step makes of it, so it needs no other process;
whole operations are in ``test_triton_normal_nodes.py``. ``node_mutants.py`` takes the rules out that these tests hold.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernels import node_step_bodies as bodies
from tests.support.ranks import Ranks
from uccl_ep_serving.protocol import context as ctx
from uccl_ep_serving.protocol import relay

pytestmark = [
    pytest.mark.timeout(600),
    # not imported here: whether it is the interpreter is decided when it is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Runs a body in one process whose Triton is the interpreter; what it returns."""
    pool = Ranks()
    yield lambda body, *arguments: pool.run(1, body, *arguments, timeout=580)[0]
    pool.close()


def test_a_slot_is_granted_again_when_the_node_is_done_with_it(interpreted: Run) -> None:
    interpreted(bodies.regrant)


def test_a_forwarder_shows_what_has_arrived(interpreted: Run) -> None:
    interpreted(bodies.show)


def test_a_forwarder_is_done_with_a_row_when_it_has_kept_its_marks(interpreted: Run) -> None:
    interpreted(bodies.taken)


def test_an_exchange_is_over_when_everything_is_shown_and_taken(interpreted: Run) -> None:
    interpreted(bodies.over)


def test_a_board_of_another_operation_says_nothing(interpreted: Run) -> None:
    interpreted(bodies.old_board)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (relay.ROWS, -1),
        (relay.ROWS, 1 << 40),
        (relay.ROW_OFFSET, 4096),
        (relay.ROW_OFFSET, 1 << 40),
        (relay.META_OFFSET, -64),
        (relay.SLOT_ROWS, 0),
        (relay.SLOT_ROWS, 1 << 40),
        (relay.SLOT_STRIDE, -16),
        (relay.SLOT_STRIDE, 1 << 40),
        (relay.ARRIVED, 10),
        # two slots hold four each
        (relay.ARRIVED, 9),
        # more than the area of rounds can hold of this rank's peers
        (relay.SLOT_ROWS, 500),
    ],
)
def test_a_board_that_breaks_the_format_names_its_forwarder(interpreted: Run, word: int, value: int) -> None:
    assert interpreted(bodies.forged_board, word, value) == (ctx.FAILURE_PROTOCOL, 2)


def test_a_rank_finds_its_rows_by_their_marks(interpreted: Run) -> None:
    interpreted(bodies.listed)


@pytest.mark.parametrize(("wrong", "blamed"), [(-1, -1), (1, -1), (4, 0), (-2, 0)])
def test_ids_that_the_node_has_not_name_their_source(interpreted: Run, wrong: int, blamed: int) -> None:
    """Of four experts of the node the last two are this rank's."""
    assert interpreted(bodies.passed_rows, wrong) == ([[-1, 0], [1, -1]], blamed)


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("nodes", [False, True])
def test_who_keeps_a_grant_waiting_is_named(interpreted: Run, nodes: bool, lanes: int) -> None:
    """Not the first of the ranks, nor one of the first that are looked at together."""
    assert interpreted(bodies.owed, nodes, lanes) == (ctx.FAILURE_PEER_TIMEOUT, 3)


def test_what_of_a_peer_is_missing_is_told_in_messages(interpreted: Run) -> None:
    """Rows before a grant: who sends none may wait for them itself."""
    named = ctx.FAILURE_PEER_TIMEOUT
    assert interpreted(bodies.missing) == [((named, 3), (2, 3)), ((named, 2), (1, 2))]


def test_who_has_not_taken_what_was_shown_is_named_with_its_rows(interpreted: Run) -> None:
    """Rank 0 cannot send more before: it is not to blame."""
    assert interpreted(bodies.laggard) == ((ctx.FAILURE_PEER_TIMEOUT, 3), (4, 8))


def test_a_forwarder_that_does_not_read_is_named_with_its_rows(interpreted: Run) -> None:
    assert interpreted(bodies.unread) == ((ctx.FAILURE_PEER_TIMEOUT, 2), (2, 5))


def test_rows_of_a_combine_in_the_heap_are_not_unpacked_in_between(interpreted: Run) -> None:
    assert interpreted(bodies.in_heap) == [1, 0]


def test_rows_are_laid_out_only_where_the_forwarder_has_read(interpreted: Run) -> None:
    interpreted(bodies.room)


def test_a_batch_is_summed_when_all_of_its_rows_are_laid_out(interpreted: Run) -> None:
    interpreted(bodies.sums)


def test_rows_are_free_when_their_sums_are_sent(interpreted: Run) -> None:
    interpreted(bodies.freed)


def test_a_node_sums_in_float32_and_rounds_once(interpreted: Run) -> None:
    """bfloat16 forgets a 1 beside 256; a single row keeps the sign of its zero."""
    found, blamed = interpreted(bodies.summed)
    assert [str(value) for value in found] == ["258.0", "-0.0", "256.0"]
    assert blamed == -1


def test_rows_whose_marks_were_not_kept_have_no_parts(interpreted: Run) -> None:
    interpreted(bodies.unkept)


def test_of_rows_whose_marks_were_not_kept_the_sum_is_zero(interpreted: Run) -> None:
    found, blamed = interpreted(bodies.summed, 3, 2)
    assert [str(value) for value in found] == ["258.0", "-0.0", "0.0"]
    assert blamed == -1


def test_a_source_that_marks_more_rows_than_it_told_of_is_named(interpreted: Run) -> None:
    """Rank 0 marks three rows for rank 3, which knows of two: what lies behind its rows is not summed."""
    found, blamed = interpreted(bodies.summed, 2)
    assert found == [258.0, 0.0, 1.0]
    assert blamed == 0


@pytest.mark.parametrize("first", [True, False], ids=["first", "from a handle"])
def test_rows_over_the_rails_are_told_by_rail_peers(interpreted: Run, first: bool) -> None:
    def heard(*rail_rows: int) -> tuple[int, int]:
        return tuple(interpreted(bodies.heard, first, list(rail_rows)))

    assert heard(3, 0, 0, 0)[0] == 0
    for rows, peer in (((-1, 0, 0, 0), 0), ((3, 1, 0, 0), 1), ((3, 0, 0, 1), 3)):
        assert heard(*rows) == (ctx.FAILURE_PROTOCOL, peer)
    assert heard(4, 0, 0, 0)[0] == (0 if first else ctx.FAILURE_PROTOCOL)


def test_a_handle_keeps_what_came_from_each_rank(interpreted: Run) -> None:
    interpreted(bodies.opened)


def test_the_last_kernel_takes_the_steps_that_the_host_has_not_launched(interpreted: Run) -> None:
    interpreted(bodies.finished)


def test_a_token_crosses_once_to_a_node(interpreted: Run) -> None:
    interpreted(bodies.lists)


@pytest.mark.parametrize("combine", [False, True], ids=["dispatch", "combine"])
@pytest.mark.parametrize("heap", [True, False], ids=["heap", "rounds"])
@pytest.mark.parametrize(("ranks", "node_ranks"), [(6, 2), (18, 9)])
def test_rows_land_apart(interpreted: Run, ranks: int, node_ranks: int, heap: bool, combine: bool) -> None:
    interpreted(bodies.placed, ranks, node_ranks, combine, heap)
