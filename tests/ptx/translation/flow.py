"""Which registers hold something, and which are read later, at every place of a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .operands import Address, Operand, Pair, Register, Symbol, Vector
from .program import Instruction, Label, Program

__all__ = ["Flow", "Unwritten"]

#: Those that write no register, beside those whose first operand is an address.
_WITHOUT_RESULT = {
    "bra", "ret", "exit", "trap", "bar", "barrier", "membar", "fence", "nanosleep"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A register that is read where it may never have been written."""

    register: str
    instruction: Instruction

    def __str__(self) -> str:
        one = self.instruction
        return f"{self.register} may never have been written at PTX line {one.line}: {one.text}; from {one.source}"


@dataclass(frozen=True, slots=True)
class _Step:
    """Registers that an instruction reads, writes at all, and writes whatever its predicate is."""

    reads: frozenset[str]
    writes: frozenset[str]
    certain: frozenset[str]


def _registers(operand: Operand) -> Iterator[str]:
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Vector):
        for part in operand.parts:
            yield from _registers(part)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)
    elif isinstance(operand, Address):
        yield from _registers(operand.base)


def _step(one: Instruction) -> _Step:
    without = one.opcode in _WITHOUT_RESULT or isinstance(next(iter(one.operands), None), Address)
    results = () if without else one.operands[:1]
    inputs = one.operands[len(results) :]
    reads = {name for operand in inputs for name in _registers(operand)}
    if one.guard:
        reads.add(one.guard.name)
    writes = frozenset(name for operand in results for name in _registers(operand))
    return _Step(frozenset(reads), writes, frozenset() if one.guard else writes)


class Flow:
    """The blocks of a program, and what goes through them.

    Attributes:
        code: the program's instructions.
    """

    def __init__(self, program: Program) -> None:
        self.code = [one for one in program.code if isinstance(one, Instruction)]
        self._steps = [_step(one) for one in self.code]
        labels: dict[str, int] = {}
        starts, place = {0}, 0
        for one in program.code:
            if isinstance(one, Label):
                labels[one.name] = place
                starts.add(place)
            else:
                place += 1
                if one.opcode in ("bra", "ret", "exit"):
                    starts.add(place)
        self._starts = sorted(start for start in starts if start < len(self.code))
        ends = [*self._starts[1:], len(self.code)]
        self._blocks = [range(start, end) for start, end in zip(self._starts, ends, strict=True)]
        numbers = {block.start: number for number, block in enumerate(self._blocks)}
        self._next = [self._following(block, labels, numbers) for block in self._blocks]

    def _following(self, block: range, labels: dict[str, int], numbers: dict[int, int]) -> list[int]:
        last = self.code[block[-1]]
        places = []
        if last.opcode == "bra" and isinstance(last.operands[0], Symbol):
            places.append(labels.get(last.operands[0].name, len(self.code)))
        if last.opcode not in ("bra", "ret", "exit") or last.guard:
            places.append(block.stop)
        return [numbers[place] for place in places if place in numbers]

    def across(self, stops: Iterable[int]) -> set[str]:
        """Registers that must outlive the function: read after it was left at one of ``stops`` (places of
        :attr:`code`) or before they are written, or an operand or result there."""
        live = self._live()
        stopping = set(stops)
        found = set(self._before(0, live)) if self._blocks else set()
        for block, after in zip(self._blocks, live, strict=True):
            now = set(after)
            for place in reversed(block):
                step = self._steps[place]
                if place in stopping:
                    found |= now | step.reads | step.writes
                now = now - step.certain | step.reads
        return found

    def _before(self, number: int, live: list[set[str]]) -> set[str]:
        now = set(live[number])
        for place in reversed(self._blocks[number]):
            step = self._steps[place]
            now = now - step.certain | step.reads
        return now

    def _live(self) -> list[set[str]]:
        """Registers that are read after each block."""
        after: list[set[str]] = [set() for _ in self._blocks]
        before = [self._before(number, after) for number in range(len(self._blocks))]
        changed = True
        while changed:
            changed = False
            for number in reversed(range(len(self._blocks))):
                now = set().union(*(before[one] for one in self._next[number]))
                if now != after[number]:
                    after[number] = now
                    before[number] = self._before(number, after)
                    changed = True
        return after

    def unwritten(self, strict: bool = False) -> list[Unwritten]:
        """Reads of registers that a path leads to on which nothing has written them.

        One that only fills a half of a pair of which the other half alone is taken is none: the compiler widens so what
        it packs for sm_100.

        Every path counts, whether or not its branches can go that way together. What it cannot see: a value that comes
        from memory which nobody wrote, from a thread that takes no part in a shuffle or a reduction, or from an
        arithmetic that PTX leaves open.

        Args:
            strict: a write under a predicate counts for nothing, and a read under the same predicate is found although
                it is right. Triton 3.6 lets only the first lanes load what the warps of a block have found, and
                the others shuffle what their register happened to hold, which nobody looks at.
        """
        written = [step.certain if strict else step.writes for step in self._steps]
        everything = frozenset().union(*(step.reads for step in self._steps)) if self._steps else frozenset()
        missing: list[frozenset[str] | None] = [None] * len(self._blocks)
        if self._blocks:
            missing[0] = everything
        todo = list(range(len(self._blocks)))[:1]
        while todo:
            number = todo.pop()
            now = missing[number] or frozenset()
            now -= frozenset().union(*(written[place] for place in self._blocks[number]))
            for one in self._next[number]:
                before = missing[one]
                if before is None or not now <= before:
                    missing[one] = now | (before or frozenset())
                    todo.append(one)
        found = []
        for block, at in zip(self._blocks, missing, strict=True):
            now = set(at or ())
            for place in block:
                missed = sorted(now & self._steps[place].reads)
                found += [Unwritten(name, self.code[place]) for name in missed if not self._dropped(place, name)]
                now -= written[place]
        return found

    def _dropped(self, place: int, register: str) -> bool:
        """Whether the instruction only packs ``register`` into a pair, and whoever reads that drops this half."""
        packs = self.code[place]
        if packs.opcode != "mov" or len(packs.operands) != 2:
            return False
        whole, parts = packs.operands
        if not isinstance(whole, Register) or not isinstance(parts, Vector):
            return False
        halves = [
            index for index, part in enumerate(parts.parts) if isinstance(part, Register) and part.name == register
        ]
        readers = [one for one, step in zip(self.code, self._steps, strict=True) if whole.name in step.reads]
        return bool(readers) and all(
            one.opcode == "mov"
            and isinstance(one.operands[0], Vector)
            and not any(isinstance(one.operands[0].parts[half], Register) for half in halves)
            for one in readers
        )
