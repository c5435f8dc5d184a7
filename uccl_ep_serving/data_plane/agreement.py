"""What ranks tell each other before they rebuild their windows, and what follows from it on every rank.

Every rank decides from the same proposals, so all come to the same answer: the next data plane, or one refusal that
names who differs. Standard data only; the exchange itself is a gather of the control connections.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ..errors import ProtocolError
from ..protocol.layout import LowLatencyPlan, LowLatencyRoom, NormalPlan, WindowLayout

__all__ = ["SETUP", "Outcome", "Proposal", "decide", "read_proposal"]

#: Name of the step in which proposals are exchanged.
SETUP = "window layout"
#: Ranks whose objections are told; there may be thousands.
_MOST_NAMED = 4


class Proposal(msgspec.Struct, frozen=True):
    """What one rank wants.

    Attributes:
        plan: low-latency sizes that its next operation needs, None when that is a normal-mode one.
        room: that its windows have for low latency, None for none.
        epoch: of its data plane.
        begun: operations that it has begun in this epoch. Ranks make the same calls in the same order, so one that
            has begun more than another that is already here is in an operation that the other one will never join.
        masked: ranks that it has masked, ascending.
        objection: why it cannot, empty when it can.
        failed: nothing goes on in its data plane.
        apart: ranks have begun different operations in it, of which the latest of each will never end.
    """

    plan: LowLatencyPlan | None
    room: LowLatencyRoom | None
    epoch: int
    begun: int
    masked: tuple[int, ...]
    objection: str = ""
    failed: bool = False
    apart: bool = False

    def encode(self) -> bytes:
        """For the wire."""
        return msgspec.msgpack.encode(self)


def read_proposal(rank: int, payload: bytes) -> Proposal:
    """What ``rank`` sent. Raises ProtocolError when it is no proposal."""
    try:
        return msgspec.msgpack.decode(payload, type=Proposal)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"{SETUP}: rank {rank} sent something that is no proposal: {error}") from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer, the same on every rank.

    Attributes:
        refusal: why nothing is rebuilt, empty when it is.
        torn: ranks have begun different numbers of operations, or operations of different shapes: what the present
            data plane carries fits nobody, and the next operation must begin in a new one.
        epoch: number of the next data plane.
        room: that it has for low latency: for the plan and for all that its predecessors had room for, so that ranks
            whose operations alternate between shapes rebuild once for each.
    """

    refusal: str
    torn: bool
    epoch: int
    room: LowLatencyRoom | None


def _words(proposal: Proposal) -> str:
    return "a normal-mode operation" if proposal.plan is None else f"low latency with {proposal.plan}"


def _differences(proposals: Mapping[int, Proposal]) -> str:
    """Who wants what, ranks that want the same together."""
    groups: dict[str, list[str]] = {}
    for rank, proposal in proposals.items():
        groups.setdefault(_words(proposal), []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} began {what}" for what, ranks in groups.items()
    )


def decide(ranks: int, normal: NormalPlan, proposals: Mapping[int, Proposal]) -> Outcome:
    """The outcome of ``proposals`` (by rank, ascending, at least one) for windows of ``ranks`` ranks."""
    first = next(iter(proposals.values()))
    refusal = ""
    objections = [f"rank {rank}: {one.objection}" for rank, one in proposals.items() if one.objection]
    masks = {rank: list(one.masked) for rank, one in proposals.items()}
    if len(set(map(tuple, masks.values()))) > 1:
        refusal = (
            "the ranks have masked different ranks: "
            + ", ".join(f"rank {rank} has masked {masked}" for rank, masked in masks.items())
            + ". Next step: mask the same ranks on every rank"
        )
    elif objections:
        refusal = "; ".join(objections[:_MOST_NAMED])
        if len(objections) > _MOST_NAMED:
            refusal += f"; and {len(objections) - _MOST_NAMED} more ranks"
    elif any(one.plan != first.plan for one in proposals.values()):
        refusal = (
            f"the ranks disagree: {_differences(proposals)}. Next step: make the same calls with the same sizes on "
            "every rank"
        )
    room: LowLatencyRoom | None = None
    if not refusal:
        rooms = [one.room for one in proposals.values() if one.room]
        if first.plan:
            rooms.append(first.plan.room)
        try:
            room = functools.reduce(LowLatencyRoom.with_room_for, rooms) if rooms else None
            WindowLayout(ranks, room, normal)
        except ValueError as error:
            refusal = str(error)
    return Outcome(
        refusal,
        torn=len({(one.epoch, one.begun) for one in proposals.values()}) > 1
        or any(one.failed for one in proposals.values()),
        epoch=max(one.epoch for one in proposals.values()) + 1,
        room=room,
    )
