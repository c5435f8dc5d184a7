"""Rules of the tcp transport made removable: when a frame is complete, and where a stream goes on after a break."""

from __future__ import annotations

from tests.rules.mutation import AFTER, INSTEAD, NEVER, SKIP, Mutant, Rules

__all__ = ["TCP_MUTANTS"]

_MEND = "tests/proxy/test_tcp_mend.py::"

TCP_MUTANTS = Rules(
    ("proxy",),
    {
        "a frame over tcp is complete when the peer has it whole": Mutant(
            AFTER("_complete(context, link, sent)"),
            _MEND + "test_a_write_is_complete_when_the_peer_has_it_whole",
        ),
        "a peer has no more frames than were sent": Mutant(
            NEVER,
            _MEND + "test_more_than_was_sent_has_not_arrived",
        ),
        "what the peer has not is sent again, from its count": Mutant(
            SKIP,
            _MEND + "TestNothingIsLost::test_a_busy_wire[reset-plain]",
        ),
        "only whole frames are counted": Mutant(
            INSTEAD("peek(link + 8 * tcp.IN_NUMBER) + (1 if peek(link + 8 * tcp.IN_HEADER) > 0 else 0)"),
            _MEND + "test_only_whole_frames_are_counted",
        ),
        "what is dropped is not connected again": Mutant(
            SKIP,
            _MEND + "TestItCosts::test_a_peer_that_has_done_with_this_rank_says_so",
        ),
        "nothing of a header is believed before its MAC is checked": Mutant(
            NEVER,
            _MEND + "TestNothingIsLost::test_a_changed_header_that_is_sealed",
        ),
        "no byte of a payload reaches the window before its MAC is checked": Mutant(
            NEVER,
            _MEND + "TestNothingIsLost::test_a_garbled_wire_that_is_sealed",
        ),
    },
)
