"""Data races: conflicting accesses that nothing orders and that are not strong to each other (PTX ISA 8.7)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.ptx.machine.report import DataRace
from tests.ptx.memory.clocks import Agent
from tests.ptx.memory.histories import Cell, Message, Reading
from tests.ptx.memory.operation import Operation


@dataclass(frozen=True)
class Race:
    """Two accesses of the same bytes, the earlier one first."""

    where: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"data race at {self.where}:\n  {self.before}\n  {self.after}"


def access(agent: Agent, operation: Operation, step: int, what: str) -> str:
    """One access for a report: who, how, what, when."""
    return f"step {step}: {agent.name} {what} by {operation}"


class Races:
    """Collects races, each pair of instructions once.

    Args:
        raising: a race ends the run; else it is kept in ``found``.
    """

    def __init__(self, raising: bool) -> None:
        self.raising = raising
        self.found: list[Race] = []
        self._pairs: set[tuple[Operation, Operation]] = set()

    def with_write(
        self, cell: Cell, message: Message, mask: int, agent: Agent, operation: Operation, step: int
    ) -> None:
        """``agent`` reads or writes bytes of a write that it has not heard of."""
        if self._new(message.operation, operation):
            bytes_ = message.mask & mask
            before = access(
                message.agent, message.operation, message.step, f"wrote {hexadecimal(message.value, bytes_)}"
            )
            verb = "reads" if operation.kind == "load" else "writes"
            self._tell(cell, bytes_, before, access(agent, operation, step, f"{verb} it"))

    def with_read(
        self,
        cell: Cell,
        reader: Agent,
        reading: Reading,
        value: int,
        mask: int,
        agent: Agent,
        operation: Operation,
        step: int,
    ) -> None:
        """``agent`` overwrites what somebody has read, unknown to it: the read could have come later."""
        if self._new(reading.operation, operation):
            bytes_ = reading.mask & mask
            before = access(reader, reading.operation, reading.step, f"read {hexadecimal(value, bytes_)}")
            self._tell(cell, bytes_, before, access(agent, operation, step, "writes it"))

    def _new(self, before: Operation, after: Operation) -> bool:
        pair = before, after
        if pair in self._pairs:
            return False
        self._pairs.add(pair)
        return True

    def _tell(self, cell: Cell, mask: int, before: str, after: str) -> None:
        first = ((mask & -mask).bit_length() - 1) // 8
        where = f"{cell.region.name_of(cell.region.address + 8 * cell.index + first)}, {mask.bit_count() // 8} bytes"
        race = Race(where, before, after)
        self.found.append(race)
        if self.raising:
            raise DataRace(f"{race}\n{account(cell)}")


def hexadecimal(value: int, mask: int) -> str:
    """The bytes of ``mask`` in a cell's value."""
    shift = (mask & -mask).bit_length() - 1
    return f"{(value & mask) >> shift:#x}" if mask else "nothing"


def account(cell: Cell, limit: int = 12) -> str:
    """The last accesses of a cell: who wrote and read which value, how and when."""
    told = [
        (one.step, access(one.agent, one.operation, one.step, f"wrote {hexadecimal(one.value, one.mask)}"))
        for one in cell.history[-limit:]
    ] + [
        (one.step, access(agent, one.operation, one.step, f"read {hexadecimal(value, one.mask)}"))
        for (lanes, _, _), (one, value) in list(cell.readers.items())[-limit:]
        for agent in lanes[:limit]
    ]
    told.sort(key=lambda one: one[0])
    shown = (
        ""
        if cell.region.private or cell.shown == cell.history[-1].order
        else "\n  the host does not see the last of it yet"
    )
    return f"last accesses of {cell}:\n  " + "\n  ".join(line for _, line in told) + shown
