"""Rules of the NIC transports made removable: what posting and polling must do.

What the NIC itself holds to (that an immediate follows its payload) is none of these rules.
"""

from __future__ import annotations

from tests.rules.mutation import AFTER, ALWAYS, BEFORE, INSTEAD, NEVER, SKIP, Mutant, Rules

__all__ = ["NIC_MUTANTS"]

_MEMORY = "tests/rdma/test_roce_memory.py::"
_RAILS = "tests/rdma/test_roce_rails.py::"
_SRD = "tests/rdma/test_efa.py::"
_DEVICE = "tests/rdma/test_device_windows.py::"

NIC_MUTANTS = Rules(
    ("proxy/transport",),
    {
        "roce: an immediate goes out only when the peer has posted a receive for it": Mutant(
            ALWAYS,
            _MEMORY + "TestCredits::test_a_receiver_that_stands_still_makes_its_sender_busy",
        ),
        "roce: receives that were used are posted anew": Mutant(
            SKIP,
            _MEMORY + "TestCredits::test_a_receiver_that_stands_still_makes_its_sender_busy",
        ),
        "roce: receives that were posted are told to the peer": Mutant(
            SKIP,
            _MEMORY + "TestCredits::test_a_quarter_of_the_receives_used_is_a_credit",
        ),
        "roce: what a peer claims to have posted is checked": Mutant(
            NEVER,
            _MEMORY + "TestCredits::test_impossible_credits_are_a_fault_of_the_peer",
        ),
        "roce: no more work requests than the send queue holds": Mutant(
            NEVER,
            _MEMORY + "TestRoceContract::test_a_full_transport_says_busy_and_goes_on",
        ),
        "roce: the last of a chain asks for a completion": Mutant(
            NEVER,
            _MEMORY + "TestSignalling::test_a_chain_is_one_doorbell_and_one_completion",
        ),
        "roce: a write is over only when it has completed": Mutant(
            AFTER("retired = peek(link + 8 * rc.POSTED)"),
            _MEMORY + "TestFailure::test_a_failed_write_ends_its_peer_and_says_why",
        ),
        "roce: what completed before a failure is over": Mutant(
            NEVER,
            _MEMORY + "TestFailure::test_a_failed_write_ends_its_peer_and_says_why",
        ),
        "roce: what arrived before a failure is delivered before DOWN": Mutant(
            NEVER,
            _RAILS + "test_what_arrived_behind_another_peers_flushed_receives_is_delivered_before_down",
        ),
        "roce: queue pairs of a rail take turns of their own": Mutant(
            BEFORE("first = link_record(context, peer * peek(context + 8 * rc.PEER_LINKS))"),
            _RAILS + "test_queue_pairs_of_a_rail_take_turns_whatever_goes_to_the_other_rail",
        ),
        "efa: a receive names memory": Mutant(
            INSTEAD("0"),
            _SRD + "TestQueues::test_receives_are_posted_again_before_they_run_out",
        ),
        "roce: the source in an immediate is the rank of its queue pair": Mutant(
            NEVER,
            _MEMORY + "TestFailure::test_a_peer_that_claims_another_rank_is_at_fault",
        ),
        "roce: the NIC stops reading and writing for a peer that was dropped": Mutant(
            SKIP,
            _MEMORY + "TestFailure::test_a_dropped_peer_cannot_write_any_more",
        ),
        "roce: an idle peer is written to": Mutant(
            NEVER,
            _MEMORY + "TestRoceContract::test_a_vanished_peer_is_reported_down",
        ),
        "roce: a stream keeps to the NIC that both ends know": Mutant(
            INSTEAD("0"),
            _RAILS + "test_streams_are_spread_over_the_nics_and_keep_to_theirs",
        ),
        "roce: a NIC has no more in flight than its share": Mutant(
            NEVER,
            _RAILS + "TestBytesInFlight::test_a_nic_takes_no_more_than_its_share",
        ),
        "roce: one write always goes": Mutant(
            ALWAYS.of(0),
            _RAILS + "TestBytesInFlight::test_one_write_always_goes",
        ),
        "roce: what was under way to a lost peer weighs no more": Mutant(
            SKIP,
            _RAILS + "TestBytesInFlight::test_what_was_under_way_to_a_peer_that_is_gone_weighs_no_more",
        ),
        "roce: a write lies in one kind of memory": Mutant(
            NEVER.of(1),
            _DEVICE + "test_offsets_below_the_split_are_device_memory_at_both_ends",
        ),
        "efa: every write asks for a completion": Mutant(
            AFTER("poke32(qp + _WR_FLAGS, 0)"),
            _SRD + "TestOrder::test_writes_arrive_and_complete_in_any_order",
        ),
        "efa: nothing is polled inside a posting session": Mutant(
            INSTEAD("0"),
            _SRD + "TestFailures::test_a_write_without_payload_at_the_very_end_of_the_window",
        ),
        "efa: an immediate is believed only from its rank's queue pair": Mutant(
            ALWAYS.of(1),
            _SRD + "TestStrangers::test_they_are_counted_and_dropped",
        ),
        "efa: an immediate is believed only from its rank's address": Mutant(
            ALWAYS.of(1),
            _SRD + "TestStrangers::test_they_are_counted_and_dropped",
        ),
        "efa: no more writes than the peer's completion queue holds": Mutant(
            NEVER,
            _SRD + "TestCompletionQueue::test_a_receiver_that_sleeps_makes_its_senders_busy",
        ),
        "efa: a peer is told what was taken of its writes": Mutant(
            INSTEAD("True"),
            _SRD + "TestCompletionQueue::test_a_receiver_that_sleeps_makes_its_senders_busy",
        ),
        "efa: receives that were used are posted anew": Mutant(
            NEVER,
            _SRD + "TestQueues::test_receives_are_posted_again_before_they_run_out",
        ),
        "efa: a failed write is not over": Mutant(
            NEVER,
            _SRD + "TestFailures::test_a_failed_write_parts_from_its_peer_only",
        ),
        "efa: what fails in the NIC itself is no fault of a peer": Mutant(
            NEVER,
            _SRD + "TestFailures::test_a_fault_of_the_nic_itself_is_blamed_on_no_peer",
        ),
        "efa: a lost peer is reported once": Mutant(
            NEVER,
            _SRD + "TestFailures::test_failures_of_one_peer_are_one_loss",
        ),
        "efa: nothing is told of a dropped peer": Mutant(
            ALWAYS,
            _SRD + "TestFailures::test_nothing_is_heard_of_a_dropped_peer_that_is_alive",
        ),
        "efa: a write without payload names an address that the keys cover": Mutant(
            NEVER,
            _SRD + "TestFailures::test_a_write_without_payload_at_the_very_end_of_the_window",
        ),
        "efa: a write lies in one kind of memory": Mutant(
            NEVER.of(1),
            _DEVICE + "test_offsets_below_the_split_are_device_memory_at_both_ends",
        ),
        "efa: a write ends inside the window": Mutant(
            NEVER,
            _SRD + "TestFailures::test_impossible_writes_are_refused_before_anything_moves",
        ),
    },
)
