"""Rules of the stream that live in kernels, and on the host, made removable."""

from __future__ import annotations

from tests.rules.mutation import ALWAYS, INSTEAD, NEVER, SKIP, Mutant, Rules

_LL_COUNTS = "tests/kernels/test_ll_counts.py::"
_LL_FAILURES = "tests/kernels/test_ll_failures.py::"
_LL_ORDERS = "tests/kernels/test_ll_orders.py::"
_PUBLISH = "tests/kernels/test_wait_publish.py::"
_NORMAL_ERRORS = "tests/kernels/test_normal_errors.py::"
_NORMAL_NODES = "tests/kernels/test_normal_nodes.py::"
_NORMAL_NODES_ERRORS = "tests/kernels/test_normal_nodes_errors.py::"
_NORMAL_PROXIED = "tests/kernels/test_normal_proxied.py::"
_NORMAL_ROUNDS = "tests/kernels/test_normal_rounds.py::"

MUTANTS = Rules(
    ("kernels/cpu", "uccl_ep_serving"),
    {
        "a receive waits for every unmasked peer": Mutant(
            NEVER,
            _LL_FAILURES + "test_silent_peer_is_named",
        ),
        "where order is asked for, a source is unpacked after those before it": Mutant(
            NEVER,
            "tests/kernels/test_ll_row_order.py::"
            "test_rows_of_a_late_source_stand_behind_unless_order_is_asked_for[True-None]",
        ),
        "the send kernel counts its message": Mutant(
            SKIP,
            _LL_COUNTS + "test_dispatch_send_waits_for_its_staging",
        ),
        "a dispatch slot is written again only when the peer has read it": Mutant(
            NEVER.of(0),
            _LL_FAILURES + "test_peer_that_does_not_read_is_named_and_holds_up_nobody_else",
        ),
        "dispatch staging is packed again only when its last writes completed": Mutant(
            ALWAYS,
            _LL_COUNTS + "test_dispatch_send_waits_for_its_staging",
        ),
        "a combine waits for the completion of the one before": Mutant(
            ALWAYS,
            _LL_COUNTS + "test_combine_send_waits_for_its_previous_message_to_complete",
        ),
        "combine space is written again only when the peer has freed it": Mutant(
            NEVER,
            _LL_COUNTS + "test_combine_send_waits_for_the_peers_space",
        ),
        "combine space is free only when every peer's next combine has arrived": Mutant(
            NEVER,
            _LL_COUNTS + "test_spaces_free",
        ),
        "a combine send leaves only when it has told its peers what is free": Mutant(
            NEVER,
            _LL_COUNTS + "test_combine_send_stays_while_the_word_waits_for_a_slot",
        ),
        "a notice slot is written again only when its last write completed": Mutant(
            NEVER,
            _LL_COUNTS + "test_notice_slot_is_used_again_only_when_complete",
        ),
        "a third dispatch in flight is refused": Mutant(
            NEVER,
            _LL_ORDERS + "test_third_in_flight_is_refused_before_anything_moves",
        ),
        "a third combine in flight is refused": Mutant(
            NEVER,
            _LL_ORDERS + "test_third_in_flight_is_refused_before_anything_moves",
        ),
        "a full ring takes nothing": Mutant(
            NEVER,
            _PUBLISH + "test_full_ring_reserves_nothing",
        ),
        "an operation opens only when every peer's notify has arrived": Mutant(
            NEVER,
            _NORMAL_ERRORS + "test_a_silent_peer_is_named_at_opening",
        ),
        "a notify slot is written again only when its last write completed": Mutant(
            NEVER,
            _NORMAL_PROXIED + "test_refused_operations_free_no_notify_slot_early",
        ),
        "landing space is granted again only when its rows are consumed": Mutant(
            NEVER,
            _NORMAL_ROUNDS + "test_a_landing_slot_is_granted_again_only_when_consumed",
        ),
        "a grant slot is written again only when its last write completed": Mutant(
            NEVER,
            _NORMAL_ROUNDS + "test_grant_slot_is_used_again_only_when_complete",
        ),
        "a grant is taken only when the writes of the one before last are over": Mutant(
            NEVER,
            _NORMAL_PROXIED + "test_a_repeat_of_one_grant_never_lands_in_the_next_but_one",
        ),
        "chunk staging is packed again only when its last write completed": Mutant(
            NEVER,
            _NORMAL_PROXIED + "test_smallest_ring_and_one_slot",
        ),
        "a dispatch says that its writes are over only when they completed": Mutant(
            NEVER,
            _NORMAL_PROXIED + "test_what_was_received_in_place_is_never_written_again",
        ),
        "rows in place are handed out only when their writes are over": Mutant(
            NEVER,
            _NORMAL_PROXIED + "test_what_was_received_in_place_is_never_written_again",
        ),
        "rows to be forwarded are overwritten only when their node is done with them": Mutant(
            INSTEAD("least"),
            _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[1]",
        ),
        "what a forwarder's progress board said in an earlier operation means nothing": Mutant(
            NEVER,
            _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[0]",
        ),
        "rows laid out for a forwarder are overwritten only when it has read them": Mutant(
            INSTEAD("min(rows, done + _STEP_ROWS)"),
            _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[0]",
        ),
        "a forwarder sums a token only when all of its rows are laid out": Mutant(
            NEVER,
            _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[1]",
        ),
        "a write outside the window is not published": Mutant(
            NEVER,
            _PUBLISH + "test_a_write_outside_the_window_is_refused_before_it_is_published",
        ),
        "a message of another shape is refused": Mutant(
            NEVER,
            "tests/kernels/test_ll_shapes.py::test_operations_of_different_shapes_name_each_other",
        ),
        "the number in a header is checked": Mutant(
            NEVER,
            _LL_FAILURES + "test_lying_dispatch_header_is_refused",
        ),
        "counts that a peer claims are checked": Mutant(
            NEVER,
            _LL_FAILURES + "test_lying_notice_is_refused",
        ),
        "where a grant lets rows land is checked": Mutant(
            NEVER,
            _NORMAL_ERRORS + "test_a_grant_outside_the_landing_area_is_refused",
        ),
        "where a progress board says that rows lie is checked": Mutant(
            NEVER,
            _NORMAL_NODES_ERRORS + "test_a_board_that_breaks_the_format_is_refused[2-4096]",
        ),
        "a forwarder sums no more of its own rows than their source told of": Mutant(
            NEVER,
            _NORMAL_NODES_ERRORS + "test_a_source_that_marks_more_rows_than_it_tells_of_is_named",
        ),
        "nothing is published after the sticky error": Mutant(
            NEVER,
            _PUBLISH + "test_nothing_is_published_after_the_sticky_error",
        ),
        "a wait ends when the sticky error is set": Mutant(
            NEVER,
            _PUBLISH + "test_wait_ends_when_the_sticky_error_is_set",
        ),
    },
)
