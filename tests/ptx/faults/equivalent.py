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
_SENDING = ("route", "prepare_combine")
_FAILING = (*_WAITING, "count_rows")
_COUNT_OF_A_HEADER = (
    "the flag of that message was acquired before, and its header stays until this rank says that it has read it"
)
_COUNT_OF_A_NOTICE = (
    "the flag of a notice that was acquired covers its words; those of a later one a mapped peer stores weakly, so "
    "that an acquire of them orders nothing, and a proxied peer is reached by commands that depend on the count"
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
        _FAILING,
        _ORDER_OF_AN_ATOMIC,
        ("tl.atomic_xchg(int64s(verdict_address(",),
        "who finds the verdict set reads nothing that was written before it, and kernels that follow wait for all",
    ),
    Equivalent(
        _FAILING,
        ("barrier",),
        ("tl.atomic_xchg(int64s(verdict_address(",),
        "Triton puts it for the order of the atomic, which nobody needs; one warp exchanges the result by shuffles",
    ),
    Equivalent(
        ("dispatch_arrival", "prepare_combine", "combine_arrival"),
        ("scope of an atomic",),
        ("tl.atomic_xchg(int64s(verdict_address(",),
        "the kernel is one program",
    ),
    Equivalent(
        ("route", "count_rows"),
        ("acquire", "scope of an acquire"),
        ("acquire(verdict_address(",),
        "the verdict alone counts, and is of programs of one GPU",
    ),
    Equivalent(
        _WAITING,
        ("acquire",),
        ("late, stream = messages_",),
        "the wait has failed: the count only says whom to name",
    ),
    Equivalent(
        _SENDING,
        ("acquire",),
        ("last = acquire_each(",),
        "the wait has failed: the count is only told",
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
    *(
        Equivalent(
            _SENDING,
            ("barrier",),
            ("settle(BACKEND)", caller),
            "each lane reads what it has acquired or stored itself, and tells of what it has stored itself",
        )
        for caller in ("_send_notices(", "_listen(", "_read_acks(", "_wait_acks(")
    ),
    Equivalent(
        ("route",),
        ("release", "scope of a release"),
        ("report_address(context) + ERROR_IDS",),
        "the word says all, and the host sees every store of a kernel that has ended",
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
        _SENDING,
        ("acquire",),
        ("acquire(ring + _TAIL, BACKEND)",),
        "what is put into a slot depends on the tail that was read, and the proxy's tail on the slot: out of thin air "
        "comes no value; both sides' accesses of a slot are strong, so there is no race",
    ),
    *(
        Equivalent(kernels, kinds, (claim, *where), why)
        for claim in ("claim = acquire_each(", "claim_combine = acquire_each(")
        for kernels, kinds, where, why in (
            (("dispatch_arrival", "combine_arrival"), ("acquire", "scope of an acquire"), (), _COUNT_OF_A_HEADER),
            (_SENDING, ("acquire", "scope of an acquire"), ("peers, here, header",), _COUNT_OF_A_HEADER),
            (_SENDING, ("acquire",), ("take_acks(", "_read_acks("), _COUNT_OF_A_NOTICE),
        )
    ),
)


def reason_for(fault: Fault) -> str:
    """Why ``fault`` changes nothing; "" where it should be noticed."""
    if fault.doubled:
        return DOUBLED
    return next((one.why for one in EQUIVALENT if one.holds(fault)), "")
