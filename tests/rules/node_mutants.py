"""Rules of normal mode between nodes that kernels on a device hold, made removable, as in :mod:`device_mutants`."""

from __future__ import annotations

from tests.rules.mutation import AFTER, ALWAYS, BEFORE, INSTEAD, NEVER, SKIP, Mutant, Rules

_STEPS = "tests/kernels/test_triton_node_steps.py::"
_SUMS = _STEPS + "test_a_node_sums_in_float32_and_rounds_once"
_BOARD = _STEPS + "test_a_board_that_breaks_the_format_names_its_forwarder"

NODE_MUTANTS = Rules(
    ("kernels/triton", "uccl_ep_serving"),
    {
        "rows to be forwarded are overwritten only when their node is done with them": Mutant(
            INSTEAD("least"),
            _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
        ),
        "a landing slot is granted again only when its rows are consumed": Mutant(
            ALWAYS.of(2),
            _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
        ),
        "what a line said in an earlier operation is nothing": Mutant(
            INSTEAD("EVERYTHING"),
            _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
        ),
        "what a line says in a later operation is everything": Mutant(
            INSTEAD("tl.where(stamped >= number, word & EVERYTHING, 0)"),
            _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
        ),
        "a forwarder shows only what has arrived": Mutant(
            INSTEAD("arrived + 1 - batch.to(tl.int64)"),
            _STEPS + "test_a_forwarder_shows_what_has_arrived",
        ),
        "a forwarder is done with a row only when it has kept its marks": Mutant(
            ALWAYS.of(1),
            _STEPS + "test_a_forwarder_is_done_with_a_row_when_it_has_kept_its_marks",
        ),
        "an exchange is over only when all of a rail peer's rows are shown": Mutant(
            ALWAYS,
            _STEPS + "test_an_exchange_is_over_when_everything_is_shown_and_taken",
        ),
        "what a progress board said in an earlier operation is not read": Mutant(
            ALWAYS.of(1),
            _STEPS + "test_a_board_of_another_operation_says_nothing",
        ),
        "where a progress board says that rows lie is checked": Mutant(
            NEVER,
            _BOARD,
        ),
        "a progress board shows no more rows than it tells of": Mutant(
            NEVER,
            _BOARD,
        ),
        "a progress board shows no more rows than its two slots hold": Mutant(
            INSTEAD("rows"),
            _BOARD,
        ),
        "a rank lists no more rows than its list holds": Mutant(
            INSTEAD("left"),
            _STEPS + "test_a_rank_finds_its_rows_by_their_marks",
        ),
        "a rank takes no more rows than their source told of": Mutant(
            ALWAYS.of(1),
            _STEPS + "test_a_rank_finds_its_rows_by_their_marks",
        ),
        "marks are kept only where the handle has room": Mutant(
            ALWAYS.of(1),
            _STEPS + "test_a_rank_finds_its_rows_by_their_marks",
        ),
        "a source that marks fewer rows than it told of is named": Mutant(
            NEVER,
            _STEPS + "test_a_forwarder_is_done_with_a_row_when_it_has_kept_its_marks",
        ),
        "expert ids of a row that is forwarded are its node's": Mutant(
            NEVER,
            _STEPS + "test_ids_that_the_node_has_not_name_their_source",
        ),
        "rows laid out for a forwarder are overwritten only when it has read them": Mutant(
            INSTEAD("total"),
            _STEPS + "test_rows_are_laid_out_only_where_the_forwarder_has_read",
        ),
        "a forwarder has read no more than was laid out": Mutant(
            INSTEAD("freed"),
            _STEPS + "test_rows_are_laid_out_only_where_the_forwarder_has_read",
        ),
        "a forwarder sums a token only when all of its rows are laid out": Mutant(
            ALWAYS.of(1),
            _STEPS + "test_a_batch_is_summed_when_all_of_its_rows_are_laid_out",
        ),
        "rows are free only when their sums are sent": Mutant(
            AFTER("sent += get_each(context, state, N_PACK_ROWS, rail, far)"),
            _STEPS + "test_rows_are_free_when_their_sums_are_sent",
        ),
        "nobody lays out, or waits for, rows whose marks were not kept": Mutant(
            INSTEAD("rows"),
            _STEPS + "test_rows_whose_marks_were_not_kept_have_no_parts",
        ),
        "rows whose marks were not kept are not summed": Mutant(
            INSTEAD("index < rows"),
            _STEPS + "test_of_rows_whose_marks_were_not_kept_the_sum_is_zero",
        ),
        "a node sums in float32 and rounds once": Mutant(
            INSTEAD("(total + part).to(tl.bfloat16).to(tl.float32)"),
            _SUMS,
        ),
        "a sum of one row is that row": Mutant(
            INSTEAD("tl.full([shape.ROWS], 1, tl.int32)"),
            _SUMS,
        ),
        "a forwarder sums no more of its own rows than their source told of": Mutant(
            SKIP,
            _STEPS + "test_a_source_that_marks_more_rows_than_it_told_of_is_named",
        ),
        "who keeps a grant waiting is named": Mutant(
            INSTEAD("live"),
            _STEPS + "test_who_keeps_a_grant_waiting_is_named[True-4]",
        ),
        "who keeps a grant waiting is searched for among all ranks": Mutant(
            SKIP,
            _STEPS + "test_who_keeps_a_grant_waiting_is_named[True-2]",
        ),
        "only rail peers tell of rows to be forwarded": Mutant(
            NEVER,
            _STEPS + "test_rows_over_the_rails_are_told_by_rail_peers[first]",
        ),
        "rows over a rail are those of the handle": Mutant(
            NEVER,
            _STEPS + "test_rows_over_the_rails_are_told_by_rail_peers[from a handle]",
        ),
        "a token crosses once to a node": Mutant(
            ALWAYS,
            _STEPS + "test_a_token_crosses_once_to_a_node",
        ),
        "each source has landing slots of its own": Mutant(
            INSTEAD("peers"),
            _STEPS + "test_rows_land_apart[6-2-rounds-dispatch]",
        ),
        "a handle keeps what came from near ranks": Mutant(
            BEFORE("came = 0"),
            _STEPS + "test_a_handle_keeps_what_came_from_each_rank",
        ),
        "the last kernel takes the steps that the host has not launched": Mutant(
            NEVER,
            _STEPS + "test_the_last_kernel_takes_the_steps_that_the_host_has_not_launched",
        ),
    },
)
"""By what the rule says. Tests run in rank processes, which share the switch."""
