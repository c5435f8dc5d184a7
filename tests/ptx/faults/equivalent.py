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
        then: part of the line behind the first of those, where another line says the same.
    """

    kernels: tuple[str, ...]
    kinds: tuple[str, ...]
    where: tuple[str, ...]
    why: str
    then: str = ""

    def holds(self, fault: Fault) -> bool:
        """Whether ``fault`` is one of them."""
        return (
            fault.short in self.kernels
            and fault.kind in self.kinds
            and any(
                self.then in behind and _fits(self.where, (*fault.texts, "")[first:])
                for first, behind in enumerate(fault.next_texts)
            )
        )


def _fits(where: Sequence[str], texts: Sequence[str]) -> bool:
    return len(where) <= len(texts) and all(
        part in text and bool(part) == bool(text) for part, text in zip(where, texts, strict=False)
    )


_SENDS = ("dispatch_send", "combine_send")
_ALL = (*_SENDS, "dispatch_recv", "combine_recv")
_ACQUIRES = ("acquire", "scope of an acquire")
_COUNT_OF_A_NOTICE = (
    "the flag of a notice or a message that was acquired covers its words; those of a later notice a mapped peer "
    "stores weakly, so that an acquire of them orders nothing, and a proxied peer is reached by commands that depend "
    "on the count"
)
#: Where counts of read messages are taken from a header or a notice.
_COUNTS = (("dispatched = acquire(header",), ("combined = acquire(header",))
_SLOT_OF_A_RING = (
    "what is put into a slot, or said of a full ring, stands behind a branch on the tail that was read, and GPUs "
    "store nothing on speculation; the proxy's tail depends on the slot; accesses of a slot are strong on both sides, "
    "so there is no race"
)
EQUIVALENT = (
    Equivalent(
        _ALL,
        ("acquire",),
        ("sticky_code(",),
        "the code alone ends the wait, or keeps a message back: nothing is read that was written before it",
    ),
    Equivalent(
        _ALL,
        _ORDER_OF_AN_ATOMIC,
        ("tl.atomic_xchg(int64s(verdict_address(",),
        "who finds the verdict set reads nothing that was written before it, and kernels that follow wait for all",
    ),
    Equivalent(
        _ALL,
        ("barrier",),
        ("tl.atomic_xchg(int64s(verdict_address(",),
        "Triton puts it for the order of the atomic, which nobody needs; one warp exchanges the result by shuffles",
    ),
    Equivalent(
        _ALL,
        _ACQUIRES,
        ("acquire(verdict_address(",),
        "the verdict alone counts, and is of programs of one GPU; what those who ended before have done was acquired "
        "by the arrival of the last",
    ),
    Equivalent(
        _ALL,
        ("acquire",),
        ("late, stream = messages_",),
        "the wait has failed: the count only says whom to name",
    ),
    Equivalent(
        ("combine_send", "combine_recv"),
        ("barrier",),
        ("parts = load_together(",),
        "it keeps the compiler from moving loads, and orders no threads",
    ),
    Equivalent(
        ("combine_send", "combine_recv"),
        ("barrier",),
        ("parts_ = load_together(",),
        "it keeps the compiler from moving loads, and orders no threads",
    ),
    *(
        Equivalent(
            _ALL,
            ("barrier",),
            (atomic,),
            "Triton puts it beside the atomic; one of the source's own stands before it and before what follows",
        )
        for atomic in (
            "tl.atomic_xchg(int64s(state_table(state, T.READY",
            "before = tl.atomic_add(int64s(counter)",
            "return tl.atomic_add(at, ",
        )
    ),
    Equivalent(
        _SENDS,
        ("barrier",),
        ("tl.atomic_max(int64s(head_at + 8)",),
        "Triton puts it for the order of the atomic, which nobody needs; one of the source's own stands before a "
        "command is put",
    ),
    Equivalent(
        _SENDS,
        ("barrier",),
        ("settle()", "put_commands("),
        "whoever puts a command has taken its slot and read the tail itself, since a lane is a thread; what the "
        "command is about was settled before",
        then="slot = ring + _SLOTS",
    ),
    Equivalent(
        _SENDS,
        ("barrier",),
        ("settle()", "good = _send_notice("),
        "the thread that stores the words of a notice, all of them numbers, is that of the first lane, which tells "
        "that they are there",
        then="peers, mine = one_lane(",
    ),
    Equivalent(
        _SENDS,
        ("barrier",),
        ("settle()", "good = _wait_acks("),
        "another one stands behind all that a look notes, but where it refuses a notice: then none follows",
    ),
    Equivalent(
        ("dispatch_send",),
        ("barrier",),
        ("settle()",),
        "another one stands before READY is told, and nobody reads before that where the message has its place",
        then="rows = int64s(route_table(route, R.COUNTS, peer))",
    ),
    Equivalent(
        _SENDS,
        ("barrier",),
        ("settle()", "write_header("),
        "another one stands before READY is told, and nobody reads behind that one what the peer was told",
    ),
    Equivalent(
        _SENDS,
        ("barrier",),
        ("settle()", "good = wait_messages(context, state, others"),
        "another one stands before READY is told, and nothing of the message is written before that",
    ),
    *(
        Equivalent(
            (kernel,),
            ("barrier",),
            ("settle()", *caller),
            "Triton puts another one between it and the atomic that counts the piece of work",
            then=then,
        )
        for kernel, caller, then in (
            ("combine_send", ("",), "if told:"),
            ("dispatch_send", ("",), "many = tl.load(int64s(route_table(route, R.COUNTS"),
            ("dispatch_send", (), "return finish_one("),
        )
    ),
    *(
        Equivalent(
            (kernel,),
            ("barrier",),
            ("settle()", caller),
            "Triton puts another one behind the atomic that finds the last program",
            then=then,
        )
        for kernel, caller, then in (
            ("combine_send", "", "number = peek(state + S.COMBINE_NUMBER)"),
            ("dispatch_send", "_close(", "number, local, ranks = "),
            ("dispatch_recv", "_close(", ""),
        )
    ),
    Equivalent(
        _ALL,
        ("barrier",),
        ("settle()", "tell_ready("),
        "Triton puts another one between it and the atomic",
    ),
    Equivalent(
        ("dispatch_recv",),
        ("barrier",),
        ("settle()", ""),
        "before a piece of work is counted: Triton puts another one between it and the atomic",
    ),
    *(
        Equivalent(
            ("combine_send",),
            (kind,),
            (line, "good = wait_messages(context, state, peers, live, live, _COMBINE, needed"),
            "what was in the space was received, and acquired then; that this message is here only says that no NIC "
            "repeats what came before",
        )
        for kind, line in (("acquire", "count, _ = messages_arrived("), ("barrier", "settle()"))
    ),
    Equivalent(
        ("combine_send",),
        ("barrier",),
        ("settle()", "good = _serve("),
        "another one stands before the first look at what a peer has said, which reads the place",
    ),
    Equivalent(
        ("combine_recv",),
        ("barrier",),
        ("settle()", "good = wait_messages("),
        "another one stands before what the peer has written is read",
    ),
    Equivalent(
        ("combine_recv",),
        ("barrier",),
        ("settle()", "ready = await_ready(context, state, ranks"),
        "another one stands before the rows are loaded",
    ),
    *(
        Equivalent(
            (kernel,),
            ("barrier",),
            ("settle()", "ready = await_ready(context, state, peers, peers"),
            "one peer alone is waited for: each thread acquires its word for itself, and none goes on that has not",
        )
        for kernel in ("dispatch_recv", "combine_send")
    ),
    Equivalent(
        ("dispatch_send",),
        ("release", "scope of a release"),
        ("report_address(context) + ERROR_IDS",),
        "the word says all, and the host sees every store of a kernel that has ended",
    ),
    Equivalent(_SENDS, ("acquire",), ("acquire_each(tails)",), _SLOT_OF_A_RING),
    Equivalent(_SENDS, _ORDER_OF_AN_ATOMIC, ("tl.atomic_max(int64s(head_at + 8)",), _SLOT_OF_A_RING),
    *(
        Equivalent(_SENDS, ("acquire",), where, _COUNT_OF_A_NOTICE)
        for where in (*_COUNTS, ("told, counted = acquire(",))
    ),
)


def reason_for(fault: Fault) -> str:
    """Why ``fault`` changes nothing; "" where it should be noticed."""
    if fault.doubled:
        return DOUBLED
    return next((one.why for one in EQUIVALENT if one.holds(fault)), "")
