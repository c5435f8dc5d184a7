"""What follows from the ranks' proposals: the same on every rank, whichever proposals come first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from uccl_ep_serving.data_plane.agreement import Outcome, Proposal, decide, read_proposal
from uccl_ep_serving.errors import ProtocolError
from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan

NORMAL = NormalPlan(2, 16, heap=4096, rounds=4096, chunk=4096)
LONG = LowLatencyPlan(2, 64, 128, 8, 2, 2)
WIDE = LowLatencyPlan(2, 4, 1024, 8, 4, 4)


def proposal(**changes: Any) -> Proposal:
    return msgspec.structs.replace(Proposal(LONG, None, 0, 3, ()), **changes)


def decided(*proposals: Proposal, normal: NormalPlan = NORMAL) -> Outcome:
    """Of proposals that have travelled."""
    return decide(2, normal, {rank: read_proposal(rank, one.encode()) for rank, one in enumerate(proposals)})


def test_there_is_room_for_the_plan_and_for_all_before() -> None:
    assert decided(proposal(), proposal()) == Outcome("", torn=False, epoch=1, room=LONG.room)
    both = LONG.room.with_room_for(WIDE.room)
    assert both not in (LONG.room, WIDE.room)
    later = proposal(plan=WIDE, room=LONG.room, epoch=1)
    assert decided(later, later) == Outcome("", torn=False, epoch=2, room=both)
    # an operation of normal mode takes none of it away, and one rank may have failed to build the last windows
    assert decided(proposal(plan=None, room=both), proposal(plan=None, room=LONG.room)).room == both
    assert decided(proposal(plan=None), proposal(plan=None)).room is None


def test_who_wants_what_is_told_where_ranks_differ() -> None:
    outcome = decided(proposal(), proposal(plan=WIDE, begun=2))
    assert f"rank 0 began low latency with {LONG}; rank 1 began low latency with {WIDE}" in outcome.refusal
    assert (outcome.torn, outcome.room) == (True, None)
    assert "rank 1 began a normal-mode operation" in decided(proposal(), proposal(plan=None)).refusal


def test_windows_that_the_formats_do_not_hold_are_refused() -> None:
    huge = LowLatencyPlan(2, 8192, 1 << 20, 4096, 64, 4)
    assert "exceeds" in decided(proposal(plan=huge), proposal(plan=huge)).refusal
    other = LowLatencyPlan(4, 8, 128, 8, 2, 2)
    assert "room for 4 ranks in a window of 2" in decided(proposal(room=LONG.room), proposal(room=other.room)).refusal


def test_what_ranks_object_to_is_told_of_the_first_few() -> None:
    one = proposal(objection="no ring")
    assert decided(one, proposal()).refusal == "rank 0: no ring"
    many = dict.fromkeys(range(7), one)
    assert decide(2, NORMAL, many).refusal == "; ".join(f"rank {r}: no ring" for r in range(4)) + "; and 3 more ranks"


def test_a_data_plane_that_has_failed_on_one_rank_serves_none() -> None:
    failed = proposal(objection="another shape", failed=True)
    assert decided(proposal(), failed).torn
    assert not decided(proposal(), proposal()).torn


@pytest.mark.parametrize("region", ["dispatch_slot", "combine_send"])
@pytest.mark.parametrize("nbytes", [-128, 100])
def test_a_room_that_cannot_be_is_no_proposal(region: str, nbytes: int) -> None:
    sizes = {name: getattr(LONG.room, name) for name in LONG.room.__slots__}
    payload = msgspec.msgpack.encode(proposal(room={**sizes, region: nbytes}))
    with pytest.raises(ProtocolError, match=f"rank 1 sent something that is no proposal: {region} = {nbytes}"):
        read_proposal(1, payload)
