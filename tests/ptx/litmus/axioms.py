"""What PTX allows of a litmus test, by the axioms of its memory model.

The model machine (tests/ptx/memory/weak.py) executes rules of the project's own, and what PTX allows of each litmus
test is written there by hand. Here is the published model itself: chapter 8 of the PTX ISA, "Memory Consistency Model";
formally Lustig, Sahasrabuddhe, Giroux: A Formal Analysis of the NVIDIA PTX Memory Consistency Model, ASPLOS 2019. It
shares nothing with the machine. An outcome is allowed if a candidate execution that ends so satisfies every axiom.

A candidate execution says which write each read reads from, in which order ``fence.sc`` operations are, and in which
order the writes of each location. All are tried. Numbers in comments are sections of the ISA. As in the formal model,
an atomic operation is two events, its read and its write. A relation is a matrix, ``r[a, b]`` where ``a`` precedes
``b``; ``r @ s`` is a step of ``r`` and then one of ``s``.

The formal model knows no bulk copies and no mbarriers: :func:`allows` refuses them. All accesses to a place are of one
size, so single-copy atomicity (8.10.3) always holds. All are of the generic proxy, so proxies preserve all of base
causality order between accesses to one place (8.9.5). No thread uses a barrier twice.

Where the ISA may be read in two ways, the formal model decides: SC-per-location forbids cycles of morally strong steps,
also where not all pairs of the cycle are morally strong.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations, permutations, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tests.ptx.litmus.litmus import Litmus

Relation: TypeAlias = npt.NDArray[np.bool_]


class Axiom(enum.Enum):
    """8.10."""

    COHERENCE = "Coherence"
    FENCE_SC = "Fence-SC"
    ATOMICITY = "Atomicity"
    NO_THIN_AIR = "No-Thin-Air"
    SC_PER_LOCATION = "SC-per-location"
    CAUSALITY = "Causality"


#: 8.5: how much of rank and CTA a thread must share to be in a scope
_SCOPES = {"cta": 2, "gpu": 1, "gl": 1, "sys": 0}
_FENCES, _BARRIERS, _ATOMICS = ("fence", "membar"), ("barrier", "bar"), ("atom", "red")
#: parts of instructions' names that the tests have only with bulk copies, or not at all
_BEYOND = {"proxy", "shared", "cluster"}
#: what a compare-and-swap writes that fails
_NOTHING = -1


@dataclass(frozen=True, eq=False)
class _Event:
    """An operation of a thread, or the read or the write of an atomic one (8.4).

    Attributes:
        kind: read, write, fence or barrier.
        thread: its number; -1 of what memory holds at first.
        place: rank and CTA of the thread.
        words: the instruction's name: ``("st", "release", "gpu")``.
        location: what is accessed, with the number of the element of a vector; a barrier's number.
        register: of a read: what gets the value.
        operands: of a write: numbers and registers.
    """

    kind: str
    thread: int
    place: tuple[int, ...]
    words: tuple[str, ...]
    location: str = ""
    register: str = ""
    operands: tuple[str, ...] = ()

    @property
    def accesses(self) -> bool:
        return self.kind in ("read", "write")

    @property
    def scope(self) -> int | None:
        """None: it is weak. Volatile is relaxed of system scope (8.4.2), and atomic operations that do not say it are
        relaxed of the GPU's."""
        default = _SCOPES["sys"] if "volatile" in self.words else _SCOPES["gpu"] if self.words[0] in _ATOMICS else None
        return next((_SCOPES[word] for word in self.words if word in _SCOPES), default)

    @property
    def acquires(self) -> bool:
        """A fence acquires and releases, unless it says one of them."""
        return "release" not in self.words if self.kind == "fence" else bool({"acquire", "acq_rel"} & {*self.words})

    @property
    def releases(self) -> bool:
        return "acquire" not in self.words if self.kind == "fence" else bool({"release", "acq_rel"} & {*self.words})

    @property
    def sequential(self) -> bool:
        """``membar`` is another name of ``fence.sc``."""
        return self.kind == "fence" and ("sc" in self.words or self.words[0] == "membar")

    def includes(self, other: _Event) -> bool:
        """Whether it is strong, of a scope that ``other``'s thread is in."""
        return self.scope is not None and self.place[: self.scope] == other.place[: self.scope]


def allows(test: Litmus, without: Collection[Axiom] = ()) -> bool:
    """Whether PTX allows the outcome of ``test``.

    Args:
        without: axioms that do not count.

    Raises:
        ValueError: there is something in it that the formal model does not know.
    """
    wanted = {name: int(value) for name, value in (one.split("=") for one in test.outcome.split())}
    instructions = [
        _elements(text.strip(), thread, place)
        for thread, (code, place) in enumerate(zip(test.threads, test.places, strict=True))
        for text in code.split(";")
    ]
    events = [*chain.from_iterable(chain.from_iterable(instructions))]
    named = {event.register for event in events} | {event.location.partition(".")[0] for event in events}
    meetings = [(event.thread, event.location) for event in events if event.kind == "barrier"]
    if not wanted.keys() <= named or len({*meetings}) < len(meetings):
        raise ValueError(f"{test.name}: an outcome of nothing, or a barrier that a thread uses twice")
    # 8.2.4: a vector is a set of scalar operations, executed in an unspecified order
    for orders in product(*map(permutations, instructions)):
        program = _Program([*chain.from_iterable(chain.from_iterable(orders))], wanted)
        if any(violated <= {*without} for violated in program.executions(Axiom.NO_THIN_AIR in without)):
            return True
    return False


def _elements(text: str, thread: int, place: tuple[int, int]) -> list[list[_Event]]:
    """The events of an instruction: of each element of a vector its own."""
    name, _, rest = text.partition(" ")
    words, operands = tuple(name.split(".")), tuple(one.strip() for one in rest.split(","))
    op, of = words[0], (thread, place, words)
    if _BEYOND.isdisjoint(words):
        if op in _FENCES:
            return [[_Event("fence", *of)]]
        if op in _BARRIERS:
            # how many threads meet there orders nothing
            return [[_Event("barrier", *of, operands[0])]]
        if op in _ATOMICS:
            register, operands = (operands[0], operands[1:]) if op == "atom" else ("", operands)
            at = f"{operands[0]}.0"
            return [[_Event("read", *of, at, register), _Event("write", *of, at, operands=operands[1:])]]
        if op == "ld":
            return [[_Event("read", *of, f"{operands[-1]}.{n}", register)] for n, register in enumerate(operands[:-1])]
        if op == "st":
            return [[_Event("write", *of, f"{operands[0]}.{n}", "", (one,))] for n, one in enumerate(operands[1:])]
    raise ValueError(f"the formal model does not know {text}")


def _closure(relation: Relation) -> Relation:
    """Its transitive closure."""
    closed = relation.copy()
    for middle in range(len(closed)):
        closed |= closed[:, middle, None] & closed[middle]
    return closed


def _orders(events: Sequence[int], related: Relation, first: Sequence[int] = ()) -> list[Relation]:
    """All transitive orders of ``first`` and then ``events`` that relate who is ``related``, and what follows."""
    found = {}
    for sequence in permutations(events):
        order = np.zeros_like(related)
        for a, b in combinations((*first, *sequence), 2):
            order[a, b] = related[a, b]
        order = _closure(order)
        found[order.tobytes()] = order
    return list(found.values())


class _Program:
    """Events, those of a thread in its order, and the relations between them that are the same in each execution."""

    def __init__(self, code: list[_Event], wanted: dict[str, int]) -> None:
        locations = sorted({event.location for event in code if event.accesses})
        # 8.2.6: each location is written before any thread starts
        initial = [_Event("write", -1, (), ("st",), location, operands=("0",)) for location in locations]
        self.events, self.wanted = initial + code, wanted
        self.reads = [n for n, event in enumerate(self.events) if event.kind == "read"]
        writes = [n for n, event in enumerate(self.events) if event.kind == "write"]
        self.writes_of = {at: [n for n in writes if self.events[n].location == at] for at in locations}
        self.registers = {(self.events[n].thread, self.events[n].register): n for n in self.reads}
        pairs = self._pairs
        self.same = same = np.eye(len(self.events), dtype=bool)
        # 8.9.1 program order; and what is written at first is so before any thread starts
        self.program = program = np.triu(pairs(lambda a, b: a.thread == b.thread != -1), 1)
        self.start = pairs(lambda a, b: a.thread == -1 != b.thread)
        # 8.2.1: who overlaps does so completely, because all locations are of one size
        self.overlap = overlap = pairs(lambda a, b: a.accesses and b.accesses and a.location == b.location)
        # 8.7 morally strong: of one thread, or each strong, of a scope with the other's thread; two accesses overlap
        self.strong = program | program.T | pairs(lambda a, b: a.includes(b) and b.includes(a))
        self.strong &= overlap | pairs(lambda a, b: not (a.accesses and b.accesses))
        # the read of an atomic operation is the event before its write
        self.atomic = program & np.eye(len(same), k=1, dtype=bool)
        self.atomic &= pairs(lambda _, b: b.kind == "write" and b.words[0] in _ATOMICS)
        # what is written may depend on what was read
        self.depends = self.atomic | (program & pairs(lambda a, b: a.register != "" and a.register in b.operands))
        # 8.8 release pattern: a release operation and the same or a later strong write there, or a fence and a later
        # strong write. Acquire pattern: a strong read, not of a reduction (8.11.1), and the same or a later acquire
        # operation there, or a later fence
        pattern = (overlap & (same | program)) | (program & pairs(lambda a, b: "fence" in (a.kind, b.kind)))
        self.release = pattern & pairs(lambda a, b: a.releases and b.kind == "write" and b.scope is not None)
        self.acquire = pattern & pairs(lambda a, b: a.kind == "read" and a.scope is not None and b.acquires)
        self.acquire &= pairs(lambda a, _: a.words[0] != "red")
        # 8.9.4: a barrier operation synchronizes with another one of the same barrier that waits
        self.barrier = ~same & pairs(lambda a, b: a.kind == b.kind == "barrier" and "arrive" not in b.words)
        self.barrier &= pairs(lambda a, b: (a.place, a.location) == (b.place, b.location))

    def _pairs(self, holds: Callable[[_Event, _Event], bool]) -> Relation:
        return np.array([[holds(a, b) for b in self.events] for a in self.events])

    def executions(self, thin_air: bool) -> Iterator[set[Axiom]]:
        """Of each candidate execution with the outcome that is wanted: the axioms that it violates.

        Args:
            thin_air: also of those that violate No-Thin-Air.
        """
        fences = [n for n, event in enumerate(self.events) if event.sequential]
        for reads_from, values in self._sources(thin_air):
            # 8.9.2 observation order: morally strong reads of a write, directly or through atomic operations
            observed = reads_from & self.strong
            observation = observed @ (self.same | _closure(self.atomic @ observed))
            # 8.9.4: a release pattern synchronizes with an acquire pattern whose read observes its write, if the first
            # operation of the one and the last of the other are morally strong
            patterns = self.strong & (self.release @ observation @ self.acquire)
            # 8.9.3 Fence-SC order: of each two morally strong fence.sc, which synchronize in it (8.9.4)
            for fence_sc in _orders(fences, self.strong):
                # 8.9.5 base causality order, causality order
                base = _closure(self.start | self.program | patterns | self.barrier | fence_sc)
                cause = base | (observation @ base)
                for coherence in self._coherence_orders(cause, values):
                    if self._ends_as_wanted(coherence, values):
                        yield self._violated(reads_from, fence_sc, cause, coherence)

    def _violated(self, reads_from: Relation, fence_sc: Relation, cause: Relation, coherence: Relation) -> set[Axiom]:
        # 8.9.7 communication order: from a write to its reads, coherence order, from a read to what overwrote its write
        overwritten = reads_from.T @ coherence
        communication = reads_from | coherence | overwritten
        written = coherence.any(axis=0)
        one_location = (communication & self.strong) | (self.program & self.overlap)
        violated = {
            # 8.10.1: a write that precedes one of the same location in causality order does so in coherence order
            Axiom.COHERENCE: cause & self.overlap & np.outer(written, written) & ~coherence,
            # 8.10.2: Fence-SC order does not contradict causality order
            Axiom.FENCE_SC: fence_sc & cause.T,
            # 8.10.3: no morally strong write comes between what an atomic operation reads and what it writes
            Axiom.ATOMICITY: ((overwritten & self.strong) @ (coherence & self.strong)) & self.atomic,
            # 8.10.4: no value depends on itself
            Axiom.NO_THIN_AIR: self.same & _closure(reads_from | self.depends),
            # 8.10.5: morally strong communication does not contradict program order of one location
            Axiom.SC_PER_LOCATION: self.same & _closure(one_location),
            # 8.10.6: nobody reads what comes later in causality order, or something older than what comes earlier in it
            Axiom.CAUSALITY: (reads_from | overwritten) & cause.T,
        }
        return {axiom for axiom, where in violated.items() if where.any()}

    def _sources(self, thin_air: bool) -> Iterator[tuple[Relation, dict[int, int]]]:
        """Which write each read reads from, where registers end as wanted; and the values of reads and of writes."""
        for chosen in product(*(self.writes_of[self.events[read].location] for read in self.reads)):
            reads_from = np.zeros_like(self.same)
            reads_from[chosen, self.reads] = True
            if thin_air or not _closure(reads_from | self.depends).diagonal().any():
                values = self._values(dict(zip(self.reads, chosen, strict=True)))
                registers = {self.events[read].register: values.get(read) for read in self.reads}
                if values and all(registers.get(name, value) == value for name, value in self.wanted.items()):
                    yield reads_from, values

    def _values(self, source: dict[int, int]) -> dict[int, int]:
        """Of reads, and of writes that happen, where reads read from ``source``. Empty where no values fit."""
        accesses, values = [n for n, event in enumerate(self.events) if event.accesses], dict[int, int]()
        # what depends on itself may be anything: what is wanted
        for guesses in ({}, self.wanted):
            guessed = {n: guesses[name] for n in self.reads if (name := self.events[n].register) in guesses}
            values, before = guessed | values, -1
            while before != len(values):
                before = len(values)
                for n in accesses:
                    with suppress(KeyError):
                        values[n] = values[n] if n in values else self._value(n, source, values)
        fits = len(values) == len(accesses) and all(values[n] == self._value(n, source, values) for n in accesses)
        happens = {n: value for n, value in values.items() if value != _NOTHING}
        return happens if fits and happens.keys() >= {*self.reads} else {}

    def _value(self, n: int, source: dict[int, int], values: dict[int, int]) -> int:
        """Of a read or write, from other ones."""
        event = self.events[n]
        if event.kind == "read":
            return values[source[n]]
        said = [int(one) if one.isdigit() else values[self.registers[event.thread, one]] for one in event.operands]
        if event.words[-1] == "add":
            return values[n - 1] + said[0]
        if event.words[-1] == "cas":
            return said[1] if values[n - 1] == said[0] else _NOTHING
        return said[0]

    def _coherence_orders(self, cause: Relation, values: dict[int, int]) -> Iterator[Relation]:
        """8.9.6: partial orders, of writes of a location that are morally strong or related in causality order. The
        initial one is first: Coherence says so."""
        options = []
        for initial, *writes in self.writes_of.values():
            happen = [n for n in writes if n in values]
            options.append(_orders(happen, self.strong | cause | cause.T, [initial]))
        for orders in product(*options):
            yield np.logical_or.reduce(orders)

    def _ends_as_wanted(self, coherence: Relation, values: dict[int, int]) -> bool:
        """Who reads a location after all threads may read any write that nothing follows (8.9.4, 8.10.6)."""
        return all(
            any(values[n] == value for n in self.writes_of[f"{name}.0"] if n in values and not coherence[n].any())
            for name, value in self.wanted.items()
            if f"{name}.0" in self.writes_of
        )
