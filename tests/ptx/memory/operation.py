"""What an event does to memory, decoded once: an access or a fence, its width, its order and its scope."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol


class Scope(enum.IntEnum):
    """Whose accesses an operation is strong to; a weak access has none."""

    NONE = 0
    CTA = 1
    GPU = 2
    SYS = 3


class MemoryEvent(Protocol):
    """What is read of an event of the translator."""

    op: str
    nbytes: int
    line: int
    source: str

    @property
    def parts(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One instruction.

    ``nbytes`` counts all elements of a vector; ``line`` is of the PTX, ``source`` of the Triton kernel.
    """

    text: str
    kind: str
    nbytes: int
    scope: Scope
    acquire: bool = False
    release: bool = False
    #: ``fence.sc`` and ``membar``
    sequential: bool = False
    #: a reduction (``red``) is no part of an acquire pattern (PTX ISA 8.11.1)
    reduces: bool = False
    line: int = 0
    source: str = ""
    #: as every operation that says its scope
    strong: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strong", self.scope != Scope.NONE)

    def __str__(self) -> str:
        at = f" (PTX line {self.line}{f', {self.source}' if self.source else ''})" if self.line else ""
        return self.text + at


# A cluster is one CTA here: no kernel of the project launches more.
_SCOPES = {"cta": Scope.CTA, "cluster": Scope.CTA, "gpu": Scope.GPU, "gl": Scope.GPU, "sys": Scope.SYS}


def decode(event: MemoryEvent) -> Operation:
    """The operation of an event ``ld``, ``st``, ``atom``, ``red``, ``fence`` or ``membar``.

    PTX ISA 8.5: ``volatile`` is ``relaxed.sys``; what is said of caches orders nothing; ``atom`` and ``red`` are
    relaxed, at GPU scope where they say no other; ``membar`` is ``fence.sc``; a ``fence`` is ``acq_rel`` unless it says
    another order.
    """
    parts = set(event.parts[1:])
    kind = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic"}.get(event.parts[0], "fence")
    scope = next((scope for name, scope in _SCOPES.items() if name in parts), Scope.NONE)
    if "volatile" in parts:
        scope = Scope.SYS
    if kind == "atomic" and scope == Scope.NONE:
        scope = Scope.GPU
    whole = kind == "fence" and "acquire" not in parts and "release" not in parts
    both = "acq_rel" in parts or whole
    return Operation(
        event.op,
        kind,
        event.nbytes,
        scope,
        acquire=both or "acquire" in parts,
        release=both or "release" in parts,
        sequential=kind == "fence" and (event.parts[0] == "membar" or "sc" in parts),
        reduces=event.parts[0] == "red",
        line=event.line,
        source=event.source,
    )


#: of messages that no instruction wrote
INITIAL = Operation("the value at the start", "store", 8, Scope.SYS)
#: x86 stores are strong, at system scope, and release what came before them
HOST_STORE = Operation("a store of the host", "store", 8, Scope.SYS, release=True)
#: what a NIC reads, in any order
HOST_LOAD = Operation("a read of the host's or a NIC's", "load", 8, Scope.NONE)
