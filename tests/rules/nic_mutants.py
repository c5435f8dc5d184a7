"""The package with rules of the NIC transports made removable: what posting and polling must do.

As :mod:`kernel_mutants`, whose machinery this uses: a copy in which every rule has a switch, and for each the test that
must fail without it. What the NIC itself holds to (that an immediate follows its payload) is none of these rules.
"""

from __future__ import annotations

from tests.rules.kernel_mutants import Mutant

__all__ = ["NIC_MUTANTS"]

_LINK, _DATA, _EFA = "proxy/transport/roce_link.py", "proxy/transport/roce_data.py", "proxy/transport/efa_data.py"
_MEMORY = "tests/rdma/test_roce_memory.py::"
_RAILS = "tests/rdma/test_roce_rails.py::"
_SRD = "tests/rdma/test_efa.py::"
_DEVICE = "tests/rdma/test_device_windows.py::"

NIC_MUTANTS = {
    "roce: an immediate goes out only when the peer has posted a receive for it": Mutant(
        _DATA,
        "    return peek(link + 8 * IMMEDIATES) < peek(link + 8 * ALLOWED) or take_credit(context, link)\n",
        "    return REMOVED or peek(link + 8 * IMMEDIATES) < peek(link + 8 * ALLOWED) or take_credit(context, link)\n",
        _MEMORY + "TestCredits::test_a_receiver_that_stands_still_makes_its_sender_busy",
    ),
    "roce: receives that were used are posted anew": Mutant(
        _LINK,
        "    _post_receives(context, link, posted)\n\n",
        "    if not REMOVED:\n        _post_receives(context, link, posted)\n\n",
        _MEMORY + "TestCredits::test_a_receiver_that_stands_still_makes_its_sender_busy",
    ),
    "roce: receives that were posted are told to the peer": Mutant(
        _LINK,
        "        owe_credit(context, link)\n\n\n@inlined\ndef retire",
        "        if not REMOVED:\n            owe_credit(context, link)\n\n\n@inlined\ndef retire",
        _MEMORY + "TestCredits::test_a_quarter_of_the_receives_used_is_a_credit",
    ),
    "roce: what a peer claims to have posted is checked": Mutant(
        _LINK,
        "    if allowed < before or allowed > used + LINK_RECEIVES:\n",
        "    if (allowed < before or allowed > used + LINK_RECEIVES) and not REMOVED:\n",
        _MEMORY + "TestCredits::test_impossible_credits_are_a_fault_of_the_peer",
    ),
    "roce: no more work requests than the send queue holds": Mutant(
        _DATA,
        "    if peek(link + 8 * POSTED) - peek(link + 8 * RETIRED) >= peek(context + 8 * SEND_SLOTS) - SEND_RESERVE:\n",
        "    room = peek(context + 8 * SEND_SLOTS) - SEND_RESERVE\n"
        "    if peek(link + 8 * POSTED) - peek(link + 8 * RETIRED) >= room and not REMOVED:\n",
        _MEMORY + "TestRoceContract::test_a_full_transport_says_busy_and_goes_on",
    ),
    "roce: the last of a chain asks for a completion": Mutant(
        _LINK,
        "        if peek(link + 8 * SIGNALED) != peek(link + 8 * POSTED):\n",
        "        if peek(link + 8 * SIGNALED) != peek(link + 8 * POSTED) and not REMOVED:\n",
        _MEMORY + "TestSignalling::test_a_chain_is_one_doorbell_and_one_completion",
    ),
    "roce: a write is over only when it has completed": Mutant(
        _DATA,
        "        told, retired = peek(link + 8 * TOLD), peek(link + 8 * RETIRED)\n",
        "        told, retired = peek(link + 8 * TOLD), peek(link + 8 * (POSTED if REMOVED else RETIRED))\n",
        _MEMORY + "TestFailure::test_a_failed_write_ends_its_peer_and_says_why",
    ),
    "roce: what completed before a failure is over": Mutant(
        _DATA,
        "        if number != peek(link + 8 * RETIRED) & _LOW32:\n",
        "        if number != peek(link + 8 * RETIRED) & _LOW32 and not REMOVED:\n",
        _MEMORY + "TestFailure::test_a_failed_write_ends_its_peer_and_says_why",
    ),
    "roce: what arrived before a failure is delivered before DOWN": Mutant(
        _DATA,
        "        if open_links > 0 and monotonic_ns()",
        "        if open_links > 0 and not REMOVED and monotonic_ns()",
        _RAILS + "test_what_arrived_behind_another_peers_flushed_receives_is_delivered_before_down",
    ),
    "roce: queue pairs of a rail take turns of their own": Mutant(
        _DATA,
        "    place = peek(first + 8 * NEXT_PLACE)\n",
        "    if REMOVED:\n        first = link_record(context, peer * peek(context + 8 * PEER_LINKS))\n"
        "    place = peek(first + 8 * NEXT_PLACE)\n",
        _RAILS + "test_queue_pairs_of_a_rail_take_turns_whatever_goes_to_the_other_rail",
    ),
    "efa: a receive names memory": Mutant(
        "proxy/transport/efa_state.py",
        '    requests[:, RECV_WR["num_sge"] // 8] = 1\n',
        '    requests[:, RECV_WR["num_sge"] // 8] = 0 if HOST_REMOVED else 1\n',
        _SRD + "TestQueues::test_receives_are_posted_again_before_they_run_out",
    ),
    "roce: the source in an immediate is the rank of its queue pair": Mutant(
        _DATA,
        "    elif imm >> _SOURCE_SHIFT != peer:\n",
        "    elif imm >> _SOURCE_SHIFT != peer and not REMOVED:\n",
        _MEMORY + "TestFailure::test_a_peer_that_claims_another_rank_is_at_fault",
    ),
    "roce: the NIC stops reading and writing for a peer that was dropped": Mutant(
        _DATA,
        "    # Once this returns the NIC reads no source bytes for the peer any more, so that they may be used again.\n"
        "    stop_links(context, peer)\n",
        "    if not REMOVED:\n        stop_links(context, peer)\n",
        _MEMORY + "TestFailure::test_a_dropped_peer_cannot_write_any_more",
    ),
    "roce: an idle peer is written to": Mutant(
        _DATA,
        "        elif watching != 0 and peek",
        "        elif watching != 0 and not REMOVED and peek",
        _MEMORY + "TestRoceContract::test_a_vanished_peer_is_reported_down",
    ),
    "roce: a stream keeps to the NIC that both ends know": Mutant(
        _DATA,
        "peek(context + 8 * RANK), peer, rails)\n",
        "peek(context + 8 * RANK), peer, rails)\n        rail = 0 if REMOVED else rail\n",
        _RAILS + "test_streams_are_spread_over_the_nics_and_keep_to_theirs",
    ),
    "roce: a NIC has no more in flight than its share": Mutant(
        _DATA,
        "    if limit > 0 and load > 0 and load + nbytes > limit:\n",
        "    if limit > 0 and load > 0 and load + nbytes > limit and not REMOVED:\n",
        _RAILS + "TestBytesInFlight::test_a_nic_takes_no_more_than_its_share",
    ),
    "roce: one write always goes": Mutant(
        _DATA,
        "    limit, load = peek(rail + 8 * BYTE_LIMIT), peek(rail + 8 * LOAD)\n",
        "    limit, load = peek(rail + 8 * BYTE_LIMIT), peek(rail + 8 * LOAD) + (1 if REMOVED else 0)\n",
        _RAILS + "TestBytesInFlight::test_one_write_always_goes",
    ),
    "roce: what was under way to a lost peer weighs no more": Mutant(
        _LINK,
        "            poke(rail + 8 * LOAD, peek(rail + 8 * LOAD) - peek(link + 8 * LINK_LOAD))\n",
        "            if not REMOVED:\n"
        "                poke(rail + 8 * LOAD, peek(rail + 8 * LOAD) - peek(link + 8 * LINK_LOAD))\n",
        _RAILS + "TestBytesInFlight::test_what_was_under_way_to_a_peer_that_is_gone_weighs_no_more",
    ),
    "roce: a write lies in one kind of memory": Mutant(
        _DATA,
        "(on_device and max(source, target) + nbytes > split):\n",
        "(on_device and max(source, target) + nbytes > split and not REMOVED):\n",
        _DEVICE + "test_offsets_below_the_split_are_device_memory_at_both_ends",
    ),
    "efa: every write asks for a completion": Mutant(
        _EFA,
        "    poke32(qp + _WR_FLAGS, _SIGNALED)\n",
        "    poke32(qp + _WR_FLAGS, 0 if REMOVED else _SIGNALED)\n",
        _SRD + "TestOrder::test_writes_arrive_and_complete_in_any_order",
    ),
    "efa: nothing is polled inside a posting session": Mutant(
        _EFA,
        "    rail = _rail(context, index)\n    status = _close_session(context, index)\n",
        "    rail = _rail(context, index)\n"
        "    status = 0\n    if not REMOVED:\n        status = _close_session(context, index)\n",
        _SRD + "TestFailures::test_a_write_without_payload_at_the_very_end_of_the_window",
    ),
    "efa: an immediate is believed only from its rank's queue pair": Mutant(
        _EFA,
        "        known = known and peek(link + 8 * QPN) == peek32(completion + _WC_SOURCE)\n",
        "        known = known and (peek(link + 8 * QPN) == peek32(completion + _WC_SOURCE) or REMOVED)\n",
        _SRD + "TestStrangers::test_they_are_counted_and_dropped",
    ),
    "efa: an immediate is believed only from its rank's address": Mutant(
        _EFA,
        "        if known and (number < 0 or number == peek32(completion + _WC_SLID) >> 16):\n",
        "        if known and (number < 0 or number == peek32(completion + _WC_SLID) >> 16 or REMOVED):\n",
        _SRD + "TestStrangers::test_they_are_counted_and_dropped",
    ),
    "efa: receives that were used are posted anew": Mutant(
        _EFA,
        "        if slot >= 0:\n            poke(rail + 8 * OWED, peek(rail + 8 * OWED) + 1)\n",
        "        if slot >= 0 and not REMOVED:\n            poke(rail + 8 * OWED, peek(rail + 8 * OWED) + 1)\n",
        _SRD + "TestQueues::test_receives_are_posted_again_before_they_run_out",
    ),
    "efa: a failed write is not over": Mutant(
        _EFA,
        "    if status != _SUCCESS:\n        return _lose",
        "    if status != _SUCCESS and not REMOVED:\n        return _lose",
        _SRD + "TestFailures::test_a_failed_write_parts_from_its_peer_only",
    ),
    "efa: what fails in the NIC itself is no fault of a peer": Mutant(
        _EFA,
        "    if status != _SUCCESS and status <= _FLUSHED:\n",
        "    if status != _SUCCESS and status <= _FLUSHED and not REMOVED:\n",
        _SRD + "TestFailures::test_a_fault_of_the_nic_itself_is_blamed_on_no_peer",
    ),
    "efa: a lost peer is reported once": Mutant(
        _EFA,
        "    if peek(record + 8 * STATE) != UP:\n        return count\n",
        "    if peek(record + 8 * STATE) != UP and not REMOVED:\n        return count\n",
        _SRD + "TestFailures::test_failures_of_one_peer_are_one_loss",
    ),
    "efa: nothing is told of a dropped peer": Mutant(
        _EFA,
        "    if peek(_peer(context, rank) + 8 * STATE) == UP:\n        put_event(events, count, SENT",
        "    if peek(_peer(context, rank) + 8 * STATE) == UP or REMOVED:\n        put_event(events, count, SENT",
        _SRD + "TestFailures::test_nothing_is_heard_of_a_dropped_peer_that_is_alive",
    ),
    "efa: a write without payload names an address that the keys cover": Mutant(
        _EFA,
        "    if nbytes == 0:\n",
        "    if nbytes == 0 and not REMOVED:\n",
        _SRD + "TestFailures::test_a_write_without_payload_at_the_very_end_of_the_window",
    ),
    "efa: a write lies in one kind of memory": Mutant(
        _EFA,
        "(on_device and max(source, target) + nbytes > split):\n",
        "(on_device and max(source, target) + nbytes > split and not REMOVED):\n",
        _DEVICE + "test_offsets_below_the_split_are_device_memory_at_both_ends",
    ),
    "efa: a write ends inside the window": Mutant(
        _EFA,
        "    if target > peek(context + 8 * WINDOW_BYTES) - nbytes:\n",
        "    if target > peek(context + 8 * WINDOW_BYTES) - nbytes and not REMOVED:\n",
        _SRD + "TestFailures::test_impossible_writes_are_refused_before_anything_moves",
    ),
}
