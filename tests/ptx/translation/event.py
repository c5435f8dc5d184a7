"""What a thread's state consists of, and the events that it stops at."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CAUSES",
    "COUNT",
    "CTAX",
    "CTAY",
    "CTAZ",
    "FAULT",
    "FAULT_CAUSE",
    "FIRST",
    "LANE",
    "NCTAX",
    "NCTAY",
    "NCTAZ",
    "PARAMS",
    "PC",
    "RANGES",
    "SHARED",
    "SHARED_BYTES",
    "TID",
    "WARP",
    "Event",
    "Operand",
]

#: Slots of 64 bits that every kernel has, before those of its registers.
#: PC: 0 at the beginning, then the event at which the thread stands.
#: TID, LANE, WARP: of the thread in its block; CTAX to NCTAZ: the block's place, and the grid.
#: SHARED, SHARED_BYTES: address and size of the block's shared memory.
#: PARAMS: address of the block of parameters (Program.parameters).
#: RANGES: address of the table of mapped memory (ranges.py), or 0: then no address is held to it.
#: COUNT: instructions executed. FAULT, FAULT_CAUSE: the address at which the thread stopped, and why.
(
    PC,
    TID,
    LANE,
    WARP,
    CTAX,
    CTAY,
    CTAZ,
    NCTAX,
    NCTAY,
    NCTAZ,
    SHARED,
    SHARED_BYTES,
    PARAMS,
    RANGES,
    COUNT,
    FAULT,
    FAULT_CAUSE,
) = range(17)
FIRST = 17
#: By FAULT_CAUSE, what is wrong with the address in FAULT.
CAUSES = ("", "misaligned address", "address that is not mapped", "offset outside of shared memory", "trap")
MISALIGNED, UNMAPPED, OUTSIDE, TRAP = range(1, 5)

#: ("slot", its number) or ("imm", the value). A predicate is the lowest bit of its slot.
Operand = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Event:
    """What a thread stops at, so that the machine carries it out: operands are read from slots, results written there.

    The predicate of the instruction was true; where it was not, the thread did not stop.

    Attributes:
        number: what the compiled code returns; its negative says that the thread stopped at a fault there.
        op: the instruction with its modifiers, ``"ld.acquire.sys.global.b64"``, and ``parts`` of it.
        dests: slots and widths in bits of the results, in order; slot -1 where it is not wanted.
        args: in the order of the instruction, without the address.
        address: register or number, and what is added to it; None where there is none. In shared memory it counts
            from the beginning of that of the block.
        nbytes: that are loaded or stored by a thread.
        line: of the PTX text.
        source: line of the kernel's source, and of its callers.
    """

    number: int
    op: str
    parts: tuple[str, ...]
    dests: tuple[tuple[int, int], ...] = ()
    args: tuple[Operand, ...] = ()
    address: tuple[Operand, int] | None = None
    nbytes: int = 0
    line: int = 0
    text: str = ""
    source: str = ""
