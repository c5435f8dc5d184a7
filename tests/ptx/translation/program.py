"""From the text of a PTX module with one kernel to its instructions, each with the lines that it comes from. Functions
that it calls are read where it calls them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePath

from .calls import PARAMETER, Function, functions, parse_call
from .operands import Address, Operand, PtxError, Register, Symbol, parse_operand, split_operands

__all__ = ["Instruction", "Label", "Parameter", "Program", "parse"]

#: Bits of what a register or parameter of a type takes. A predicate takes a byte.
WIDTHS = {"pred": 8, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32x2": 64} | {
    f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64) if (kind, bits) != ("f", 8)
}
#: Parameters begin at multiples of so many bytes.
PARAMETER_STEP = 8
#: Dynamic shared memory begins at a multiple of so many bytes, or of more where it is declared so.
SHARED_STEP = 16


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the kernel.

    Attributes:
        offset: in the block of parameters, bytes: a multiple of :data:`PARAMETER_STEP`.
        nbytes: of it.
    """

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: ``"ld"``.
        modifiers: ``("global", "b32")``.
        guard: the predicate of ``@p``, or None.
        line: in the PTX text, from 1.
        source: line of the kernel's source, and of its callers: ``"words.py:65 (context.py:142, routing.py:257)"``.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str
    source: str

    @property
    def name(self) -> str:
        """With its modifiers."""
        return ".".join((self.opcode, *self.modifiers))

    def error(self, what: str) -> PtxError:
        """``what`` is wrong with it, for raising."""
        return PtxError(f"PTX line {self.line}: {self.text}: {what}; from {self.source or 'no known source line'}")


@dataclass(frozen=True, slots=True)
class Label:
    """A place to branch to."""

    name: str


@dataclass(slots=True)
class Program:
    """A kernel.

    Attributes:
        parameters: in order.
        threads: of a block.
        registers: bits of each; predicates have 8, of which the lowest counts.
        shared: by variable in shared memory its offset, bytes. The dynamic one comes last.
        static_shared: bytes of shared memory that the text asks for; a launch adds what it asks for.
        code: instructions and labels.
    """

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    threads: int
    registers: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    code: list[Instruction | Label] = field(default_factory=list)

    @property
    def parameter_bytes(self) -> int:
        """Of the block of parameters."""
        last = self.parameters[-1] if self.parameters else Parameter("", 0, 0)
        return -(-(last.offset + last.nbytes) // PARAMETER_STEP) * PARAMETER_STEP


def parse(text: str) -> Program:
    """The one kernel in ``text``.

    Raises:
        PtxError: something in it is not understood, or there is not exactly one kernel.
    """
    plain = _without_comments(text)
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", plain))
    if len(entries) != 1:
        raise PtxError(f"{len(entries)} kernels, where one is understood")
    (entry,) = entries
    # CUDA C says how many there are at most, and is launched with so many
    threads = re.search(r"\.(?:req|max)ntid\s+([\d,\s]+)", entry[3])
    if not threads:
        raise PtxError(f"{entry[1]}: no .reqntid or .maxntid says how many threads a block has")
    target = re.search(r"\.target\s+(\w+)", plain)
    program = Program(
        entry[1],
        target[1] if target else "",
        _parameters(entry[2]),
        prod(int(one) for one in threads[1].split(",") if one.strip()),
    )
    body = _Body(program, _files(text), plain)
    body.variables(plain[: entry.start()])
    body.read(entry.end())
    body.close()
    return program


def _without_comments(text: str) -> str:
    """With as many lines."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)


def _files(text: str) -> dict[int, str]:
    """Names of the source files by number, without their directories."""
    found = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', text, flags=re.MULTILINE)
    return {int(number): PurePath(name or path).name for number, path, name in found}


def _parameters(text: str) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    offset = 0
    for one in filter(str.strip, text.split(",")):
        found = PARAMETER.fullmatch(one.strip())
        if not found or found[1] not in WIDTHS:
            raise PtxError(f"parameter {one.strip()!r}")
        nbytes = WIDTHS[found[1]] // 8 * int(found[3] or 1)
        parameters.append(Parameter(found[2], offset, nbytes))
        offset += -(-nbytes // PARAMETER_STEP) * PARAMETER_STEP
    return tuple(parameters)


@dataclass(slots=True)
class _Scope:
    """What may be named between two braces, each with the name that it has in the whole program.

    Attributes:
        passed: variables for what is passed to a function and comes back.
        end: of a function's body, the label behind it; else "".
    """

    suffix: str
    registers: dict[str, str]
    labels: dict[str, str]
    passed: dict[str, str] = field(default_factory=dict)
    end: str = ""


_Place = tuple[int, int, int]
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*?inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
#: A line for the debugger, the end of a line, a brace or the end of a statement or label.
_TOKEN = re.compile(r"^[ \t]*\.(?:loc|file)\b[^\n]*|\n|[{};]|(?<!:):(?!:)", re.MULTILINE)
_LABEL = re.compile(r"[{}]|(?<=[\s;{}])([\w$]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([\w$%.]+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)(?:\s+(.*))?")
_SHARED = re.compile(r"\.shared (?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d*)\])?")


class _Body:
    """Reads the statements of a kernel into its program."""

    def __init__(self, program: Program, files: dict[int, str], text: str) -> None:
        self.program = program
        self.files = files
        self.text = text
        self.functions = functions(text)
        self.scopes: list[_Scope] = []
        self.registers: dict[str, str] = {}
        self.opened = 0
        self.callers: dict[_Place, _Place | None] = {}
        #: lines of the source, and where the functions that are being read are called
        self.lines: tuple[str, ...] = ()
        self.called: tuple[str, ...] = ()
        self.dynamic, self.dynamic_step = "", SHARED_STEP

    def read(self, start: int, passed: dict[str, str] | None = None, end: str = "") -> None:
        """Statements from ``start`` to the brace that ends the kernel, or a function to which ``passed`` is passed and
        that returns to the label ``end``."""
        text, outside = self.text, len(self.scopes)
        line, place = text.count("\n", 0, start) + 1, start
        statement, first = "", line
        self._open(text, place)
        self.scopes[-1].passed, self.scopes[-1].end = passed or {}, end
        while len(self.scopes) > outside:
            token = _TOKEN.search(text, place)
            if not token:
                raise PtxError(f"{self.program.name}: the kernel does not end")
            words = text[place : token.start()]
            if not statement.strip():
                statement, first = "", line
            statement += words
            place, kind = token.end(), token[0]
            bare = statement.strip()
            if kind == "\n":
                line += 1
                statement += " "
            elif kind == ";":
                self._statement(" ".join(statement.split()), first)
                statement = ""
            elif kind == ":" and re.fullmatch(r"[\w$]+", bare):
                self.program.code.append(Label(self.scopes[-1].labels[bare]))
                statement = ""
            elif kind in "{}" and not bare:
                if kind == "{":
                    self._open(text, place)
                else:
                    self.scopes.pop()
                    self.registers = self.scopes[-1].registers if self.scopes else {}
            elif kind in "{}:":
                statement += kind
            elif ".loc" in kind:
                self._location(kind.strip())

    def _open(self, text: str, place: int) -> None:
        """A scope. Its labels are known from its beginning, its registers from where they are declared."""
        suffix = f".{self.opened}" if self.opened else ""
        self.opened += 1
        depth, labels = 1, {}
        for found in _LABEL.finditer(text, place):
            depth += {"{": 1, "}": -1}.get(found[0], 0)
            if not depth:
                break
            if depth == 1 and found[1]:
                labels[found[1]] = found[1] + suffix
        self.registers = dict(self.registers)
        self.scopes.append(_Scope(suffix, self.registers, labels))

    def close(self) -> None:
        """The whole kernel is read: labels of the debugger go, and the dynamic part of shared memory comes last."""
        program = self.program
        targets = {
            one.name
            for instruction in program.code
            if isinstance(instruction, Instruction)
            for one in instruction.operands
            if isinstance(one, Symbol)
        }
        program.code = [one for one in program.code if not isinstance(one, Label) or one.name in targets]
        if self.dynamic:
            program.shared[self.dynamic] = -(-program.static_shared // self.dynamic_step) * self.dynamic_step

    def _location(self, text: str) -> None:
        found = _LOC.match(text)
        if not found:
            raise PtxError(f"location {text!r}")
        file, line, column, *caller = (int(one) for one in found.groups() if one)
        place: _Place | None = (file, line, column)
        self.callers[file, line, column] = (caller[0], caller[1], caller[2]) if caller else None
        seen: set[_Place] = set()
        chain: dict[str, None] = {}
        while place and place not in seen:
            seen.add(place)
            chain[f"{self.files.get(place[0], place[0])}:{place[1]}"] = None
            place = self.callers.get(place)
        self.lines = (*chain, *self.called)

    @property
    def source(self) -> str:
        """Where the next instruction comes from, as :class:`Instruction` has it."""
        first, *others = self.lines or ("",)
        return first + (f" ({', '.join(others)})" if others else "")

    def variables(self, text: str) -> None:
        """What stands before the kernel."""
        for statement in text.split(";"):
            if ".shared" in statement:
                words = " ".join(statement[statement.index(".shared") :].split())
                self._shared(words, ".extern" in statement, f"before {self.program.name}")

    def _shared(self, text: str, external: bool, where: str) -> None:
        found = _SHARED.fullmatch(text)
        if not found or found[2] not in WIDTHS or (external and self.dynamic):
            raise PtxError(f"{where}: {text!r} declares nothing known, or a second dynamic variable")
        nbytes = WIDTHS[found[2]] // 8
        step = int(found[1] or nbytes)
        if external:
            self.dynamic, self.dynamic_step = found[3], max(step, SHARED_STEP)
        else:
            offset = -(-self.program.static_shared // step) * step
            self.program.shared[found[3]] = offset
            self.program.static_shared = offset + nbytes * int(found[4] or 1)

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            self._declare(text, line)
        elif text.startswith(".shared"):
            self._shared(text, False, f"PTX line {line}")
        elif text.startswith(".param"):
            found = PARAMETER.fullmatch(text)
            if not found:
                raise PtxError(f"PTX line {line}: {text!r} declares nothing known")
            self.scopes[-1].passed[found[2]] = found[2] + self.scopes[-1].suffix
        elif text.startswith(".pragma"):
            pass  # advice for the assembler
        elif text:
            self._instruction(text, line)

    def _declare(self, text: str, line: int) -> None:
        found = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        if not found or found[1] not in WIDTHS:
            raise PtxError(f"PTX line {line}: {text!r} declares nothing known")
        scope = self.scopes[-1]
        for name in map(str.strip, found[2].split(",")):
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            for one in [f"{many[1]}{number}" for number in range(int(many[2]))] if many else [name]:
                scope.registers[one] = one + scope.suffix
                self.program.registers[one + scope.suffix] = WIDTHS[found[1]]

    def _instruction(self, text: str, line: int) -> None:
        found = _INSTRUCTION.fullmatch(text)
        try:
            if not found:
                raise PtxError("no instruction")
            negated, guard, opcode, modifiers, rest = found.groups()
            if guard and guard not in self.registers:
                raise PtxError(f"predicate {guard!r} is not declared")
            called = self._called(rest or "", guard) if opcode == "call" else None
            operands = [] if called else [parse_operand(one, self.registers) for one in split_operands(rest or "")]
            if opcode in ("ld", "st") and modifiers.startswith(".param"):
                opcode, modifiers, operands = self._pass(opcode, modifiers, operands)
        except PtxError as error:
            raise PtxError(f"PTX line {line}: {text}: {error}; from {self.source or 'no known source line'}") from None
        if called:
            self._read_called(*called)
            return
        if opcode == "ret" and (end := next((scope.end for scope in reversed(self.scopes) if scope.end), "")):
            opcode, modifiers, operands = "bra", ".uni" * (not guard), [Symbol(end)]
        elif opcode == "bra":
            operands = [Symbol(self._label(one.name)) if isinstance(one, Symbol) else one for one in operands]
        self.program.code.append(
            Instruction(
                opcode,
                tuple(modifiers.split(".")[1:]),
                tuple(operands),
                Register(self.registers[guard], bool(negated)) if guard else None,
                line,
                text,
                self.source,
            )
        )

    def _label(self, name: str) -> str:
        """What the label is called in the whole program."""
        return next((scope.labels[name] for scope in reversed(self.scopes) if name in scope.labels), name)

    def _called(self, text: str, guard: str | None) -> tuple[Function, dict[str, str]]:
        """The function that is called, and what its variables are called in the whole program."""
        call = parse_call(text)
        function = self.functions.get(call.callee)
        if function is None or guard:
            raise PtxError("a call of a function without a body here, or under a predicate")
        if any(scope.end.startswith(f"{call.callee}.") for scope in self.scopes):
            raise PtxError("a function that calls itself")
        if len(call.arguments) != len(function.parameters) or bool(call.result) != bool(function.result):
            raise PtxError("a call that passes other than the function takes")
        passed = dict(zip(function.parameters, map(self._passed, call.arguments), strict=True))
        if function.result:
            passed[function.result] = self._passed(call.result)
        return function, passed

    def _read_called(self, function: Function, passed: dict[str, str]) -> None:
        """The body of a function, in place of its call."""
        end, before = f"{function.name}.{self.opened}", (self.lines, self.called, self.registers)
        self.called, self.registers = self.lines, {}
        self.read(function.body, passed, end)
        self.lines, self.called, self.registers = before
        self.program.code.append(Label(end))

    def _passed(self, name: str) -> str:
        """What a variable for something that is passed is called in the whole program; "" where there is none."""
        return next((scope.passed[name] for scope in reversed(self.scopes) if name in scope.passed), "")

    def _pass(self, opcode: str, modifiers: str, operands: list[Operand]) -> tuple[str, str, list[Operand]]:
        """A load or store of something that is passed, as a move to or from its register; of a kernel's parameter as it
        is."""
        address, other = (operands[1], operands[0]) if opcode == "ld" else (operands[0], operands[1])
        if not isinstance(address, Address) or not isinstance(address.base, Symbol):
            raise PtxError("an address of a parameter that is not known")
        name = self._passed(address.base.name)
        if not name:
            return opcode, modifiers, operands
        kind = modifiers.removeprefix(".param.")
        one, bits = f"{name}+{address.offset}", WIDTHS.get(kind, 0)
        if opcode == "st":
            self.program.registers.setdefault(one, bits)
        there = self.program.registers.get(one, 0)
        if bits < there and opcode == "ld":
            # the lower half
            return "cvt", f".u{bits}.u{there}", [other, Register(one)]
        if not bits or there != bits:
            raise PtxError(f"{kind} of something that is passed as {there} bits here")
        return "mov", f".{kind}", [other, Register(one)] if opcode == "ld" else [Register(one), other]
