"""LLVM's language for one kernel while it is being written: blocks, registers, events and faults."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from .event import COUNT, CTAX, CTAY, CTAZ, FAULT, FAULT_CAUSE, FIRST, LANE, NCTAX, NCTAY, NCTAZ, PC, TID, WARP, Event
from .event import Operand as Slot
from .operands import Address, Immediate, Operand, Register, Sink, Symbol, Vector
from .program import Instruction, Label, Program

__all__ = ["Code", "Modifiers"]

#: Special registers by name: a slot, or a number.
SPECIAL = {
    "%tid.x": TID,
    "%laneid": LANE,
    "%warpid": WARP,
    "%ctaid.x": CTAX,
    "%ctaid.y": CTAY,
    "%ctaid.z": CTAZ,
    "%nctaid.x": NCTAX,
    "%nctaid.y": NCTAY,
    "%nctaid.z": NCTAZ,
}


class Modifiers:
    """The modifiers of an instruction, taken one after another; whatever nobody takes is an error."""

    def __init__(self, one: Instruction) -> None:
        self._one = one
        self._left = list(one.modifiers)

    def maybe(self, *names: str) -> str:
        """The next one, if it is one of ``names``, else nothing."""
        return self._left.pop(0) if self._left and self._left[0] in names else ""

    def one_of(self, *names: str) -> str:
        """The next one, which is one of ``names``.

        Raises:
            PtxError: it is not.
        """
        found = self.maybe(*names)
        if not found:
            given = f".{self._left[0]}" if self._left else "the end"
            raise self._one.error(f"{given} where one of {', '.join(f'.{name}' for name in names)} is known")
        return found

    def end(self) -> None:
        """Raises PtxError where there is another one."""
        if self._left:
            raise self._one.error(f"unknown modifier .{self._left[0]}")


class Code:
    """The function that runs a thread until its next event.

    Values are names or numbers of LLVM's language. A register is an integer of its width, a predicate i8 of 0 or 1.

    Attributes:
        weak: every access to memory is an event.
        events: by number.
        stops: the events that threads go on after, by number the place of the instruction; the others are faults.
        slots: of the registers that outlive the function.
        locals: LLVM's variables for the others.
        labels: of the program.
        instruction, place: the one that is being translated, and where among them it stands.
    """

    def __init__(self, program: Program, weak: bool, stored: Collection[str]) -> None:
        self.program, self.weak = program, weak
        self.lines: list[str] = []
        self.events: dict[int, Event] = {}
        self.slots = {name: FIRST + number for number, name in enumerate(stored)}
        self.locals: dict[str, str] = {}
        self.labels = {one.name for one in program.code if isinstance(one, Label)}
        self.stops: dict[int, int] = {}
        self.place = -1
        self.scratch = 0
        self.instruction: Instruction | None = None
        self._names = 0
        self._known: dict[str, str] = {}
        self._uncounted = 0
        self._closed = True

    @property
    def nslots(self) -> int:
        """Of a thread's state."""
        return FIRST + len(self.slots) + self.scratch

    # Text

    def fresh(self, prefix: str = "v") -> str:
        """A name that no other value or block has."""
        self._names += 1
        return f"{prefix}{self._names}"

    def emit(self, line: str) -> None:
        """A line that has no value."""
        self.lines.append(f"  {line}")
        self._closed = line.startswith(("br ", "ret "))

    def value(self, expression: str) -> str:
        """The name of what ``expression`` is."""
        name = f"%{self.fresh()}"
        self.emit(f"{name} = {expression}")
        return name

    def begin(self, block: str, known: dict[str, str] | None = None) -> None:
        """A block; the one before it goes on here if nothing else ends it.

        Args:
            known: values of registers, where the block has one predecessor alone.
        """
        if not self._closed:
            self.emit(f"br label %{block}")
        self.lines.append(f"{block}:")
        self._known = dict(known or {})
        self._closed = False

    def count(self) -> None:
        """One more instruction is executed, if this block is."""
        if self._closed:
            self.begin(self.fresh("dead"))
        self._uncounted += 1

    def settle(self) -> None:
        """Add what was executed since the last time, before the block ends."""
        if self._uncounted:
            at = self.slot(COUNT)
            total = self.value(f"add i64 {self.value(f'load i64, ptr {at}')}, {self._uncounted}")
            self.emit(f"store i64 {total}, ptr {at}")
            self._uncounted = 0

    # Registers

    def slot(self, number: int) -> str:
        """Address of a slot."""
        return self.value(f"getelementptr i64, ptr %s, i64 {number}")

    def _variable(self, name: str) -> str:
        """Address of a register."""
        if name in self.slots:
            return self.slot(self.slots[name])
        return self.locals.setdefault(name, f"%r{len(self.locals)}")

    def error(self, what: str) -> Exception:
        """``what`` is wrong with this instruction, for raising."""
        assert self.instruction
        return self.instruction.error(what)

    def width(self, operand: Operand) -> int:
        """Bits of a register."""
        if not isinstance(operand, Register) or operand.negated:
            raise self.error(f"{operand} where a register is known")
        return self.program.registers[operand.name]

    def read(self, operand: Operand, bits: int, wider: bool = False) -> str:
        """An operand as an integer of ``bits``.

        Args:
            wider: a register may have more bits; the lower ones count.

        Raises:
            PtxError: a register of another width, or no value.
        """
        if isinstance(operand, Register):
            width = self.width(operand)
            if width != bits and not (wider and width > bits):
                raise self.error(f"{operand.name} has {width} bits where {bits} are known")
            value = self._known.get(operand.name)
            if value is None:
                value = self.value(f"load i{width}, ptr {self._variable(operand.name)}")
                self._known[operand.name] = value
            return value if width == bits else self.value(f"trunc i{width} {value} to i{bits}")
        return self._constant(operand, bits)

    def _constant(self, operand: Operand, bits: int) -> str:
        if isinstance(operand, Immediate):
            if operand.kind == "int":
                # constants have 64 bits: a negative one may be written without its sign
                value = operand.value - (1 << 64) if operand.value >> 63 == 1 else operand.value
                if not -(1 << (bits - 1)) <= value < 1 << bits:
                    raise self.error(f"{operand.value} does not fit {bits} bits")
            elif bits != {"f32": 32, "f64": 64}[operand.kind]:
                raise self.error(f"a number of {operand.kind} where {bits} bits are known")
            return str(operand.value & ((1 << bits) - 1))
        if isinstance(operand, Symbol):
            if operand.name in SPECIAL and bits == 32:
                return self.value(f"load i32, ptr {self.slot(SPECIAL[operand.name])}")
            if operand.name in ("%ntid.x", "%ntid.y", "%ntid.z", "%tid.y", "%tid.z") and bits == 32:
                return str(self.program.threads if operand.name == "%ntid.x" else int(operand.name.startswith("%ntid")))
            if operand.name in self.program.shared:
                return str(self.program.shared[operand.name])
        raise self.error(f"{operand} is no value of {bits} bits that is known")

    def write(self, operand: Operand, value: str, bits: int, signed: bool | None = None) -> None:
        """Set a register.

        Args:
            signed: how a wider register is filled; None: there must be none.
        """
        if isinstance(operand, Sink):
            return
        width = self.width(operand)
        if width != bits:
            if signed is None or width < bits:
                raise self.error(f"{operand} has {width} bits where {bits} are known")
            value = self.value(f"{'sext' if signed else 'zext'} i{bits} {value} to i{width}")
        assert isinstance(operand, Register)
        self.emit(f"store i{width} {value}, ptr {self._variable(operand.name)}")
        self._known[operand.name] = value

    def predicate(self, operand: Operand) -> str:
        """A predicate as i1."""
        if isinstance(operand, Immediate):
            return "true" if operand.value else "false"
        if not isinstance(operand, Register):
            raise self.error(f"{operand} where a predicate is known")
        value = self.value(f"trunc i8 {self.read(Register(operand.name), 8)} to i1")
        return self.value(f"xor i1 {value}, true") if operand.negated else value

    def set_predicate(self, operand: Operand, value: str) -> None:
        """Set a predicate to an i1."""
        if not isinstance(operand, Sink):
            self.write(operand, self.value(f"zext i1 {value} to i8"), 8)

    @staticmethod
    def vector(operand: Operand) -> tuple[Operand, ...]:
        """The parts of a vector, or the operand alone."""
        return operand.parts if isinstance(operand, Vector) else (operand,)

    # Control

    def guarded(self, predicate: Register) -> tuple[str, dict[str, str]]:
        """Begin what is executed only where ``predicate`` holds; how :meth:`join` ends it."""
        self.settle()
        holds, after, inside = self.predicate(predicate), self.fresh("after"), self.fresh("do")
        before = dict(self._known)
        self.emit(f"br i1 {holds}, label %{inside}, label %{after}")
        self.begin(inside, before)
        return after, before

    def join(self, after: str, before: dict[str, str]) -> None:
        """End what :meth:`guarded` began. What was set or stopped inside is not known after it."""
        known = {name: value for name, value in before.items() if self._known.get(name) == value}
        self.settle()
        self.begin(after, known)

    def branch(self, block: str, predicate: Register | None) -> None:
        """Go to ``block`` where ``predicate`` holds, or always."""
        self.settle()
        if predicate is None:
            self.emit(f"br label %{block}")
            return
        holds, after, before = self.predicate(predicate), self.fresh("after"), dict(self._known)
        self.emit(f"br i1 {holds}, label %{block}, label %{after}")
        self.begin(after, before)

    def leave(self) -> None:
        """The thread exits."""
        self.settle()
        self.emit("ret i32 0")

    def finish(self) -> None:
        """A thread that comes to the end of the text exits."""
        if not self._closed:
            self.leave()

    @staticmethod
    def block_of(label: str) -> str:
        """Name of the block at a label."""
        return "L" + re.sub(r"\W", "_", label)

    # Events

    def operand(self, operand: Operand, bits: int = 32) -> Slot:
        """Where the machine finds an operand."""
        if isinstance(operand, Register) and not operand.negated:
            return ("slot", self.slots[operand.name])
        if isinstance(operand, Immediate):
            return ("imm", int(self._constant(operand, bits)))
        if isinstance(operand, Symbol) and operand.name in self.program.shared:
            return ("imm", self.program.shared[operand.name])
        value = self.predicate(operand) if isinstance(operand, Register) else self.read(operand, bits)
        return ("slot", self.keep(value, 1 if isinstance(operand, Register) else bits))

    def keep(self, value: str, bits: int) -> int:
        """A slot of its own for a value that stands in no register."""
        number = self.nslots
        self.scratch += 1
        wide = value if bits == 64 else self.value(f"zext i{bits} {value} to i64")
        self.emit(f"store i64 {wide}, ptr {self.slot(number)}")
        return number

    def event(
        self,
        dests: Sequence[Operand] = (),
        args: Sequence[Slot] = (),
        address: Operand | None = None,
        nbytes: int = 0,
    ) -> None:
        """Stop here; go on after the machine has carried this instruction out."""
        where = None
        if address is not None:
            base, offset = self.address(address)
            where = (self.operand(base, 64), offset)
        slots = tuple((-1, 0) if isinstance(one, Sink) else self._result(one) for one in dests)
        number = self._record(slots, tuple(args), where, nbytes)
        self.stops[number] = self.place
        self.settle()
        self.emit(f"store i64 {number}, ptr {self.slot(PC)}")
        self.emit(f"ret i32 {number}")
        self.begin(f"resume{number}")

    def _result(self, operand: Operand) -> tuple[int, int]:
        width = self.width(operand)
        assert isinstance(operand, Register)
        return self.slots[operand.name], width

    def _record(
        self, dests: tuple[tuple[int, int], ...], args: tuple[Slot, ...], address: tuple[Slot, int] | None, nbytes: int
    ) -> int:
        one = self.instruction
        assert one
        number = len(self.events) + 1
        name = one.name
        parts = (one.opcode, *one.modifiers)
        self.events[number] = Event(number, name, parts, dests, args, address, nbytes, one.line, one.text, one.source)
        return number

    def address(self, operand: Operand) -> tuple[Register | Symbol, int]:
        """Base and offset.

        Raises:
            PtxError: no address.
        """
        if not isinstance(operand, Address):
            raise self.error(f"{operand} where an address is known")
        return operand.base, operand.offset

    def fault(self, bad: str, cause: int, at: str, number: int = 0) -> int:
        """Stop for good where ``bad``, at address ``at``.

        Args:
            number: of the fault of this instruction, where it has one already.

        Returns:
            Its number.
        """
        number = number or self._record((), (), None, 0)
        faulty, good, known = self.fresh("bad"), self.fresh("good"), dict(self._known)
        self.emit(f"br i1 {bad}, label %{faulty}, label %{good}")
        self.begin(faulty)
        uncounted, self._uncounted = self._uncounted, 0
        self.emit(f"store i64 {at}, ptr {self.slot(FAULT)}")
        self.emit(f"store i64 {cause}, ptr {self.slot(FAULT_CAUSE)}")
        self.emit(f"ret i32 {-number}")
        self._uncounted = uncounted
        self.begin(good, known)
        return number
