"""Rules of normal mode between nodes that kernels on a device hold, made removable, as in :mod:`device_mutants`."""

from __future__ import annotations

from tests.rules.kernel_mutants import Mutant

_STEPS = "tests/kernels/test_triton_node_steps.py::"
_FORWARD, _GATHER = "kernels/triton/normal_forward.py", "kernels/triton/normal_gather.py"
_SUMS = _STEPS + "test_a_node_sums_in_float32_and_rounds_once"
_BOARD = _STEPS + "test_a_board_that_breaks_the_format_names_its_forwarder"

NODE_MUTANTS = {
    "rows to be handed on are overwritten only when their node is done with them": Mutant(
        _FORWARD,
        "        least = tl.minimum(least, rows_at(state, at, rail, BACKEND))\n",
        "        least = least if HOST_REMOVED else tl.minimum(least, rows_at(state, at, rail, BACKEND))\n",
        _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
    ),
    "a landing slot is granted again only when its rows are consumed": Mutant(
        "kernels/triton/normal_grants.py",
        "    due = live & (left > 0) & ((turn < 2) | (consumed >= first - slot_rows))\n",
        "    due = live & (left > 0) & ((turn < 2) | (consumed >= first - slot_rows) | HOST_REMOVED)\n",
        _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
    ),
    "what a line said in an earlier operation is nothing": Mutant(
        "kernels/triton/normal_nodes.py",
        "tl.where(turn < number, 0, EVERYTHING))\n",
        "tl.where((turn < number) & (not HOST_REMOVED), 0, EVERYTHING))\n",
        _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
    ),
    "what a line says in a later operation is everything": Mutant(
        "kernels/triton/normal_nodes.py",
        "    turn, number = word >> _SHIFT, peek(state + W_NUMBER) + 1\n",
        "    turn, number = word >> _SHIFT, peek(state + W_NUMBER) + 1\n"
        "    turn = tl.minimum(turn, number) if HOST_REMOVED else turn\n",
        _STEPS + "test_a_slot_is_granted_again_when_the_node_is_done_with_it",
    ),
    "a forwarder shows only what has arrived": Mutant(
        _FORWARD,
        "        rows = tl.where(batch, arrived, 0)\n",
        "        rows = tl.where(batch | HOST_REMOVED, arrived + 1 - batch.to(tl.int64), 0)\n",
        _STEPS + "test_a_forwarder_shows_what_has_arrived",
    ),
    "a forwarder is done with a row only when it has kept its marks": Mutant(
        _FORWARD,
        "    return all_here & (looked | (is_rail(context, state, peers) == 0))\n",
        "    return all_here & (looked | (is_rail(context, state, peers) == 0) | HOST_REMOVED)\n",
        _STEPS + "test_a_forwarder_is_done_with_a_row_when_it_has_kept_its_marks",
    ),
    "an exchange is over only when all of a rail peer's rows are shown": Mutant(
        "kernels/triton/normal_node_advance.py",
        "        consumed = tl.where(far, shown, consumed)\n",
        "        consumed = tl.where(far, shown | HOST_REMOVED, consumed)\n",
        _STEPS + "test_an_exchange_is_over_when_everything_is_shown_and_taken",
    ),
    "what a board said in an earlier operation is not looked at": Mutant(
        _FORWARD,
        "    current = going & ((word >> _SHIFT) == peek(state + W_NUMBER) + 1)\n",
        "    current = going & (((word >> _SHIFT) == peek(state + W_NUMBER) + 1) | HOST_REMOVED)\n",
        _STEPS + "test_a_board_of_another_operation_says_nothing",
    ),
    "where a board says that rows lie is checked": Mutant(
        _FORWARD,
        "        broken = refuse_of(context, state, peers, fresh & bad, via, stream, got, want, BACKEND)\n",
        "        bad = bad & (not HOST_REMOVED)\n"
        "        broken = refuse_of(context, state, peers, fresh & bad, via, stream, got, want, BACKEND)\n",
        _BOARD,
    ),
    "a board shows no more rows than it tells of": Mutant(
        _FORWARD,
        "        broken = refuse_of(context, state, peers, current & (arrived > rows), via,",
        "        broken = refuse_of(context, state, peers, current & (arrived > rows) & (not HOST_REMOVED), via,",
        _BOARD,
    ),
    "a board shows no more rows than its two slots hold": Mutant(
        _FORWARD,
        "        rows = tl.minimum(rows, scanned + 2 *",
        "        rows = rows if HOST_REMOVED else tl.minimum(rows, scanned + 2 *",
        _BOARD,
    ),
    "a rank lists no more rows than its list holds": Mutant(
        _FORWARD,
        "    left = tl.minimum(peek(entry(context, state, N_PASS_RECV, far)) - passed, list_rows)\n",
        "    left = peek(entry(context, state, N_PASS_RECV, far)) - passed\n"
        "    left = left if HOST_REMOVED else tl.minimum(left, list_rows)\n",
        _STEPS + "test_a_rank_finds_its_rows_by_their_marks",
    ),
    "a rank takes no more rows than their source told of": Mutant(
        _FORWARD,
        "            mine = (one != 0) & (where < left)\n",
        "            mine = (one != 0) & ((where < left) | HOST_REMOVED)\n",
        _STEPS + "test_a_rank_finds_its_rows_by_their_marks",
    ),
    "marks are kept only where the handle has room": Mutant(
        _FORWARD,
        "                fits = inside & (kept + index < room)\n",
        "                fits = inside & ((kept + index < room) | HOST_REMOVED)\n",
        _STEPS + "test_a_rank_finds_its_rows_by_their_marks",
    ),
    "a source that marks fewer rows than it told of is named": Mutant(
        _FORWARD,
        "    lost = viewed & (scanned == rows) & (passed < passing)\n",
        "    lost = viewed & (scanned == rows) & (passed < passing) & (not HOST_REMOVED)\n",
        _STEPS + "test_a_forwarder_is_done_with_a_row_when_it_has_kept_its_marks",
    ),
    "expert ids of a row that is handed on are its node's": Mutant(
        _FORWARD,
        "                wrong = (expert < -1) | (expert >= size * tensors.local_experts)\n",
        "                wrong = ((expert < -1) | (expert >= size * tensors.local_experts)) & (not HOST_REMOVED)\n",
        _STEPS + "test_ids_that_the_node_has_not_name_their_source",
    ),
    "rows laid out for a forwarder are overwritten only when it has read them": Mutant(
        _GATHER,
        "    ready = tl.minimum(total, freed + held)\n",
        "    ready = total if HOST_REMOVED else tl.minimum(total, freed + held)\n",
        _STEPS + "test_rows_are_laid_out_only_where_the_forwarder_has_read",
    ),
    "a forwarder has read no more than was laid out": Mutant(
        _GATHER,
        "    freed = tl.minimum(rows_at(state, at, others, BACKEND), passed)\n",
        "    freed = rows_at(state, at, others, BACKEND)\n"
        "    freed = freed if HOST_REMOVED else tl.minimum(freed, passed)\n",
        _STEPS + "test_rows_are_laid_out_only_where_the_forwarder_has_read",
    ),
    "a forwarder sums a token only when all of its rows are laid out": Mutant(
        _GATHER,
        "        set_each(context, state, N_PACK_ROWS, peers, wanted & (late < 0), rows)\n",
        "        set_each(context, state, N_PACK_ROWS, peers, wanted & ((late < 0) | HOST_REMOVED), rows)\n",
        _STEPS + "test_a_batch_is_summed_when_all_of_its_rows_are_laid_out",
    ),
    "rows are free only when their sums are sent": Mutant(
        _GATHER,
        "    sent = get_each(context, state, N_SENT, rail, far)\n",
        "    sent = get_each(context, state, N_SENT, rail, far)\n"
        "    sent += get_each(context, state, N_PACK_ROWS, rail, far & HOST_REMOVED)\n",
        _STEPS + "test_rows_are_free_when_their_sums_are_sent",
    ),
    "nobody lays out, or waits for, rows whose marks were not kept": Mutant(
        "kernels/triton/normal_nodes.py",
        "    return counts + 4 * ((first + rails // size + tl.minimum(rows, kept)) * size + places)\n",
        "    rows = rows if HOST_REMOVED else tl.minimum(rows, kept)\n"
        "    return counts + 4 * ((first + rails // size + rows) * size + places)\n",
        _STEPS + "test_rows_whose_marks_were_not_kept_have_no_parts",
    ),
    "rows whose marks were not kept are not summed": Mutant(
        _GATHER,
        "            counting = index < tl.minimum(rows, kept)\n",
        "            counting = index < (rows if HOST_REMOVED else tl.minimum(rows, kept))\n",
        _STEPS + "test_of_rows_whose_marks_were_not_kept_the_sum_is_zero",
    ),
    "a node sums in float32 and rounds once": Mutant(
        "kernels/triton/normal_sum.py",
        "tl.where((found > 0)[:, None], total + part, part)",
        "tl.where((found > 0)[:, None], "
        "(total + part).to(tl.bfloat16).to(tl.float32) if HOST_REMOVED else total + part, part)",
        _SUMS,
    ),
    "a sum of one row is that row": Mutant(
        _GATHER,
        "                found = tl.zeros([shape.ROWS], tl.int32)\n",
        "                found = tl.zeros([shape.ROWS], tl.int32) + (1 if HOST_REMOVED else 0)\n",
        _SUMS,
    ),
    "a forwarder sums no more of its own rows than their source told of": Mutant(
        _GATHER,
        "wrong += (marked & (part >= tl.where(own, known, _EVERY))).to(tl.int32)\n",
        "wrong += (marked & (part >= tl.where(own, known, _EVERY)) & (not HOST_REMOVED)).to(tl.int32)\n",
        _STEPS + "test_a_source_that_marks_more_rows_than_it_told_of_is_named",
    ),
    "who keeps a grant waiting is named": Mutant(
        "kernels/triton/normal_advance.py",
        "    bad, on = tl.where(any_of(owed, BACKEND) != 0, owed, live),",
        "    bad, on = tl.where((any_of(owed, BACKEND) != 0) & (not HOST_REMOVED), owed, live),",
        _STEPS + "test_who_keeps_a_grant_waiting_is_named[True-4]",
    ),
    "who keeps a grant waiting is looked for among all ranks": Mutant(
        "kernels/triton/normal_node_advance.py",
        "        late = late | is_owed(context, state, peers, linked, BACKEND)\n",
        "        late = late | (is_owed(context, state, peers, linked, BACKEND) & (not HOST_REMOVED))\n",
        _STEPS + "test_who_keeps_a_grant_waiting_is_named[True-2]",
    ),
    "only rail peers tell of rows to be handed on": Mutant(
        "kernels/triton/normal_notify.py",
        "        bad = same & ((rail_rows < 0) | (rail_rows > most))\n",
        "        bad = same & ((rail_rows < 0) | (rail_rows > most)) & (not HOST_REMOVED)\n",
        _STEPS + "test_rows_over_the_rails_are_told_by_rail_peers[first]",
    ),
    "rows over a rail are those of the handle": Mutant(
        "kernels/triton/normal_notify.py",
        "        bad = same & (rail_rows != expected)\n",
        "        bad = same & (rail_rows != expected) & (not HOST_REMOVED)\n",
        _STEPS + "test_rows_over_the_rails_are_told_by_rail_peers[from a handle]",
    ),
    "a token crosses once to a node": Mutant(
        "kernels/triton/normal_layout.py",
        "                if rank % node_ranks == me % node_ranks:\n",
        "                if (rank % node_ranks == me % node_ranks) | HOST_REMOVED:\n",
        _STEPS + "test_a_token_crosses_once_to_a_node",
    ),
    "each source has landing slots of its own": Mutant(
        "kernels/triton/normal_place.py",
        "    lane = tl.where(far, size + peers // size, peers % size)\n",
        "    lane = peers if HOST_REMOVED else tl.where(far, size + peers // size, peers % size)\n",
        _STEPS + "test_rows_land_apart[6-2-rounds-dispatch]",
    ),
    "a handle keeps what came from near ranks": Mutant(
        "kernels/triton/normal_notify.py",
        "                came = tl.where(far, get_each(context, state, N_PASS_RECV, every, far), came)\n",
        "                came = 0 if HOST_REMOVED else came\n"
        "                came = tl.where(far, get_each(context, state, N_PASS_RECV, every, far), came)\n",
        _STEPS + "test_a_handle_keeps_what_came_from_each_rank",
    ),
    "the last kernel takes the turns that the host has not launched": Mutant(
        "kernels/triton/normal_node_finish.py",
        "        going = (peek(state + W_OPEN) == 1).to(tl.int32)\n",
        "        going = ((peek(state + W_OPEN) == 1) & (not HOST_REMOVED)).to(tl.int32)\n",
        _STEPS + "test_the_last_kernel_takes_the_turns_that_the_host_has_not_launched",
    ),
}
"""By what the rule says. Tests run in rank processes, which share the switch."""
