"""Orders, scopes and barriers whose loss changes nothing that the model machine could see, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.ptx.faults.edits import Fault

_ORDER_OF_AN_ATOMIC = ("release of an atomic", "acquire of an atomic", "both of an atomic")
DOUBLED = "another barrier stands beside it, and no access to memory in between"


@dataclass(frozen=True)
class Equivalent:
    """Faults that change nothing.

    Attributes:
        kernels: by their names in the source.
        kinds: of :data:`tests.ptx.faults.edits.KINDS`.
        where: parts of lines of the source, each of the line that calls the one before it; "" after that of the kernel.
        why: in one sentence.
    """

    kernels: tuple[str, ...]
    kinds: tuple[str, ...]
    where: tuple[str, ...]
    why: str

    def holds(self, fault: Fault) -> bool:
        """Whether ``fault`` is one of them."""
        return (
            fault.short in self.kernels
            and fault.kind in self.kinds
            and any(_fits(self.where, (*fault.texts, "")[first:]) for first in range(len(fault.texts)))
        )


def _fits(where: Sequence[str], texts: Sequence[str]) -> bool:
    return len(where) <= len(texts) and all(
        part in text and bool(part) == bool(text) for part, text in zip(where, texts, strict=False)
    )


_WAITING = ("route", "dispatch_arrival", "prepare_combine", "combine_arrival")
#: No access to memory that follows is a load of what the other side has written.
_STORES_ONLY = (
    "it lets own stores come after the other side's reads, and no store comes before a load here that decides on it "
    "(load buffering is not modelled)"
)
EQUIVALENT = (
    Equivalent(
        ("sum_rows", "unpack_rows"),
        _ORDER_OF_AN_ATOMIC,
        ("arrives_last(",),
        "the last program reads nothing that the others have stored, and kernels that follow wait for all of them",
    ),
    Equivalent(
        _WAITING,
        ("acquire",),
        ("sticky_code(",),
        "the code alone ends the wait: nothing is read that was written before it",
    ),
    Equivalent(
        ("pack_combine", "sum_rows"),
        ("barrier",),
        ("parts = load_together(",),
        "it keeps the compiler from moving loads, and orders no threads",
    ),
    Equivalent(
        _WAITING,
        ("barrier",),
        ("settle(BACKEND)", "wait_messages("),
        "each lane reads the message that it has acquired itself, and kernels that follow read the rest",
    ),
    Equivalent(
        ("prepare_combine",),
        ("barrier",),
        ("settle(BACKEND)", ""),
        "of up to 32 ranks the lane that reads a place is the one that has stored it",
    ),
    Equivalent(
        ("prepare_combine",),
        ("acquire",),
        ("messages_arrived(", "arrived = wait_messages("),
        "that the message is there frees space; what it holds is read by a later kernel, which acquires it itself",
    ),
    Equivalent(
        ("route", "prepare_combine"),
        ("acquire",),
        ("messages_completed(",),
        _STORES_ONLY,
    ),
    Equivalent(
        ("route", "prepare_combine"),
        ("acquire",),
        ("done = acquire_each(address, BACKEND)", "_send_notices("),
        _STORES_ONLY,
    ),
    Equivalent(
        ("route", "prepare_combine"),
        ("acquire",),
        ("acquire(ring + _TAIL, BACKEND)",),
        _STORES_ONLY,
    ),
    Equivalent(
        _WAITING,
        ("acquire", "scope of an acquire"),
        ("claim = acquire_each(",),
        "the flag of the message was acquired before; only a notice that lands on the one that is read needs it",
    ),
    Equivalent(
        _WAITING,
        ("acquire", "scope of an acquire"),
        ("claim_combine = acquire_each(",),
        "the flag of the message was acquired before; only a notice that lands on the one that is read needs it",
    ),
)
#: What no scene comes to, or where what it would change does not happen in one: by a part of a line of the source.
BEYOND = {
    "fail(": "only a failure comes to it",
    "fail_at(": "only a failure comes to it",
    "late, stream = messages_": "only a failure comes to it",
    "report_id(": "only an id of no expert comes to it",
    "sticky_code(": "only a failure stores the code",
    "acquire(ring + _TAIL": "only a full ring comes to it",
    "last = acquire_each(": "only a failure comes to it",
    "now = acquire_each(": "only a peer that has not taken four notices comes to it",
}


def beyond(fault: Fault) -> str:
    """Why no scene shows ``fault``; "" where one should."""
    return next((why for part, why in BEYOND.items() if any(part in text for text in fault.texts)), "")


def reason_for(fault: Fault) -> str:
    """Why ``fault`` changes nothing; "" where it should be noticed."""
    if fault.doubled:
        return DOUBLED
    return next((one.why for one in EQUIVALENT if one.holds(fault)), "")
