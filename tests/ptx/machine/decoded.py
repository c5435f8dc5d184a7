"""What kind of event each of a kernel's events is, looked up once."""

from __future__ import annotations

from typing import Any

from tests.ptx.memory.operation import Operation, Scope, decode

#: of which the lanes in a mask meet
MEETING = {"shfl", "redux", "vote", "match", "elect", "ldmatrix", "stmatrix"}
#: of which all lanes meet, without saying so
WHOLE_WARP = {"ldmatrix", "stmatrix"}


class Decoded:
    """One event of a kernel.

    Attributes:
        kind: "load", "store", "atomic", "fence", "meet" (lanes of a warp), "barrier" (warps of a CTA), "clock",
            "nap", "active", "copies" (bulk copies and their groups), "mbarrier" or "proxy" (a fence for bulk copies).
        reading: of a bulk copy, whose ``operation`` is to write.
        bits: of one element of an access.
        shared: the address is an offset in the CTA's shared memory.
        reached: some thread has come to it.
    """

    __slots__ = (
        "address",
        "args",
        "bits",
        "dests",
        "event",
        "kind",
        "nbytes",
        "number",
        "op",
        "operation",
        "parts",
        "reached",
        "reading",
        "shared",
        "signed",
    )

    def __init__(self, event: Any) -> None:
        self.event = event
        self.reached = False
        self.number: int = event.number
        self.op: str = event.op
        self.parts: list[str] = [one for one in event.parts if one != "cta" or event.parts[0] not in ("bar", "barrier")]
        self.dests: tuple[tuple[int, int], ...] = event.dests
        self.args: tuple[tuple[str, int], ...] = event.args
        self.address = event.address
        self.nbytes: int = event.nbytes
        self.kind = self._kind()
        self.shared = any(one.startswith("shared") for one in self.parts)
        self.operation: Operation | None = None
        self.signed = self.parts[-1][:1] == "s"
        self.bits = 8 * self.nbytes
        if self.parts[0] in WHOLE_WARP:
            kind = "load" if self.parts[0] == "ldmatrix" else "store"
            self.operation = Operation(event.op, kind, 4, Scope.NONE, line=event.line, source=event.source)
        if self.kind == "copies":
            self.reading, self.operation = (
                Operation(event.op, kind, 16, Scope.NONE, line=event.line, source=event.source)
                for kind in ("load", "store")
            )
        if self.kind in ("load", "store", "atomic", "fence"):
            self.operation = decode(event)
            elements = len(self.dests) if self.kind == "load" else len(self.args) if self.kind == "store" else 1
            self.bits = 8 * self.nbytes // max(1, elements)

    def _kind(self) -> str:
        name = self.parts[0]
        if name in ("bar", "barrier"):
            return "meet" if self.parts[1] == "warp" else "barrier"
        if name in MEETING:
            return "meet"
        if name == "mov":
            return "clock"
        if name == "fence" and self.parts[1] in ("proxy", "mbarrier_init"):
            return "proxy"
        kinds = {
            "ld": "load",
            "st": "store",
            "atom": "atomic",
            "red": "atomic",
            "fence": "fence",
            "membar": "fence",
            "nanosleep": "nap",
            "activemask": "active",
            "cp": "copies",
            "mbarrier": "mbarrier",
        }
        return kinds.get(name, "unknown")

    @property
    def where(self) -> str:
        """For reports."""
        source = f", {self.event.source}" if self.event.source else ""
        return f"{self.op} (PTX line {self.event.line}{source})"
