"""Kernels made wrong in their PTX: an order, a scope or a barrier taken away, wherever the text has one.

What one line of the kernel's source became is edited together, since the compiler repeats it: in loops that it unrolls,
in functions that it inlines.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from tests.ptx.product.compiled import Edit
from tests.ptx.translation.program import Instruction, Label, parse
from tests.support.source_tree import ROOT
from uccl_ep_serving.kernels.triton.kernel import PREFIX

#: By kind: which instructions, and what is put for what in them; "" takes the instruction away.
KINDS: dict[str, tuple[str, str, str]] = {
    "release": (r"st\.release\.", ".release.", ".relaxed."),
    "scope of a release": (r"st\.release\.sys\.", ".sys.", ".gpu."),
    "acquire": (r"ld\.acquire\.", ".acquire.", ".relaxed."),
    "scope of an acquire": (r"ld\.acquire\.sys\.", ".sys.", ".gpu."),
    "scope of an acquire on the device": (r"ld\.acquire\.gpu\.", ".gpu.", ".cta."),
    "release that an atomic is": (r"atom\.\S*\.release\.", ".release.", ".relaxed."),
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
        digest: of the text: other sizes make other ones, which stay as they are.
        version: digest of its code, the same wherever the sources lie.
    """

    kernel: str
    kind: str
    source: str
    lines: tuple[int, ...]
    digest: int
    version: str
    #: each of its barriers stands beside another one that stays, with no access to memory in between
    doubled: bool = False

    @property
    def short(self) -> str:
        """The kernel's name in the source."""
        return self.kernel.removeprefix(PREFIX)

    @property
    def texts(self) -> tuple[str, ...]:
        """What stands on the line of the source, and on those of its callers: that outlasts a move of lines."""
        return tuple(_line_of(*place) for place in self._places)

    @property
    def next_texts(self) -> tuple[str, ...]:
        """What stands behind each of these lines, less comments: that tells lines apart that are the same."""
        return tuple(_line_behind(*place) for place in self._places)

    @property
    def _places(self) -> list[tuple[str, int]]:
        return [_split(frame) for frame in re.findall(r"[\w.]+:\d+", self.source)]

    def __str__(self) -> str:
        return f"{self.kernel}: without the {self.kind} of {self.source}"

    @property
    def edit(self) -> Edit:
        """Makes the kernel wrong."""
        _, old, new = KINDS[self.kind]
        return self._changing(lambda line: line.replace(old, new, 1) if old else re.sub(r"\S.*;", "", line, count=1))

    def _changing(self, change: object) -> Edit:
        def edit(name: str, text: str) -> str:
            if name != self.kernel or zlib.crc32(text.encode()) != self.digest:
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
    sources: dict[tuple[str, str], str] = {}
    for one in program.code:
        if isinstance(one, Instruction):
            for kind, (which, _, _) in KINDS.items():
                if re.match(which, one.name):
                    place = kind, _without_repeats(one.source)
                    sources.setdefault(place, one.source)
                    found[place].append(one.line)
    for (kind, place), lines in found.items():
        source = sources[kind, place]
        doubled = kind == "barrier" and all(is_doubled(program.code, line, lines) for line in lines)
        yield Fault(program.name, kind, source, tuple(lines), zlib.crc32(text.encode()), _version(text), doubled)


def _version(text: str) -> str:
    # lines of the source count, by which faults are told apart; paths and what debuggers want stand behind
    return f"{zlib.crc32(text.partition('.file')[0].encode()):08x}"


def _without_repeats(source: str) -> str:
    """``source`` without the lines on which a wait for READY reads it: the last time it acquires what it had before."""
    frames = re.findall(r"[\w.]+:\d+", source)
    return " ".join(frame for frame in frames if "_ready_words(" not in _line_of(*_split(frame)))


def _split(frame: str) -> tuple[str, int]:
    file, _, number = frame.partition(":")
    return file, int(number)


def is_doubled(code: Sequence[Instruction | Label], line: int, gone: Sequence[int]) -> bool:
    """Whether all threads that come to the barrier on ``line`` come to another one, not on a line of ``gone``, just
    before or just after it, and access no memory in between."""
    at = next(place for place, one in enumerate(code) if isinstance(one, Instruction) and one.line == line)
    return any(_meets_a_barrier(code[at + 1 :] if step > 0 else code[:at][::-1], gone) for step in (1, -1))


def _meets_a_barrier(rest: Sequence[Instruction | Label], gone: Sequence[int]) -> bool:
    for one in rest:
        if isinstance(one, Label) or one.opcode in ("bra", "ret", "exit", "trap"):
            return False
        if one.name == "bar.sync" and one.line not in gone:
            return one.guard is None
        if one.opcode in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "call") and "param" not in one.modifiers:
            return False
    return False


def _line_of(file: str, number: int) -> str:
    """Of a file of our kernels; of Triton's library the file's name."""
    lines = _lines(file)
    return lines[number - 1].strip() if lines else file


def _line_behind(file: str, number: int) -> str:
    lines = (line.strip() for line in _lines(file)[number:])
    return next((line for line in lines if line and not line.startswith("#")), "")


@cache
def _lines(file: str) -> list[str]:
    path = ROOT / "kernels" / "triton" / file
    return path.read_text().splitlines() if path.exists() else []
