"""Kernels made wrong in their PTX: an order, a scope or a barrier taken away, wherever the text has one.

What one line of the kernel's source became is edited together, since the compiler repeats it: in loops that it unrolls,
in functions that it inlines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.ptx.product.compiled import Edit
from tests.ptx.translation.program import Instruction, parse

#: By kind: which instructions, and what is put for what in them; "" takes the instruction away.
KINDS: dict[str, tuple[str, str, str]] = {
    "release": (r"st\.release\.", ".release.", ".relaxed."),
    "scope of a release": (r"st\.release\.sys\.", ".sys.", ".gpu."),
    "acquire": (r"ld\.acquire\.", ".acquire.", ".relaxed."),
    "scope of an acquire": (r"ld\.acquire\.sys\.", ".sys.", ".gpu."),
    "both of an atomic": (r"atom\.\S*acq_rel", ".acq_rel.", ".relaxed."),
    "release of an atomic": (r"atom\.\S*acq_rel", ".acq_rel.", ".acquire."),
    "acquire of an atomic": (r"atom\.\S*acq_rel", ".acq_rel.", ".release."),
    "scope of an atomic": (r"atom\.\S*\.gpu\.", ".gpu.", ".cta."),
    "fence": (r"(fence|membar)\.", "", ""),
    "barrier": (r"(bar|barrier)\.sync\b", "", ""),
    "barrier of a warp": (r"bar\.warp\.sync\b", "", ""),
}


@dataclass(frozen=True)
class Fault:
    """One way to make a kernel wrong.

    Attributes:
        kernel: its name in the text.
        kind: of :data:`KINDS`.
        source: the line of the kernel's source, and of its callers.
        lines: of the text, from 1.
    """

    kernel: str
    kind: str
    source: str
    lines: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kernel}: without the {self.kind} of {self.source}"

    @property
    def edit(self) -> Edit:
        """Makes the kernel wrong."""
        _, old, new = KINDS[self.kind]
        return self._changing(lambda line: line.replace(old, new, 1) if old else re.sub(r"\S.*;", "", line, count=1))

    @property
    def trap(self) -> Edit:
        """Stops the kernel where it would be wrong: a run that passes all the same does not come there."""
        return self._changing(lambda line: f"trap; {line}")

    def _changing(self, change: object) -> Edit:
        def edit(name: str, text: str) -> str:
            if name != self.kernel:
                return text
            lines = text.split("\n")
            for number in self.lines:
                lines[number - 1] = change(lines[number - 1])  # type: ignore[operator]
            return "\n".join(lines)

        return edit


def faults_of(text: str) -> Iterator[Fault]:
    """Every way to make the kernel in ``text`` wrong."""
    program = parse(text)
    found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for one in program.code:
        if isinstance(one, Instruction):
            for kind, (which, _, _) in KINDS.items():
                if re.match(which, one.name):
                    found[kind, one.source].append(one.line)
    for (kind, source), lines in found.items():
        yield Fault(program.name, kind, source, tuple(lines))
