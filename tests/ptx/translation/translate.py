"""A program of PTX as a function of LLVM that runs one thread until its next event.

The function finds the registers in the thread's state, leaves them there, and goes on where the thread stood. So every
thread has its own course: nothing here knows of warps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from . import conversions, ranges
from .asynchronous import ASYNCHRONOUS
from .bits import BITS
from .code import Code
from .conversions import CONVERSIONS
from .event import PARAMS, PC, SHARED, Event
from .floats import FLOATS
from .flow import Flow
from .integers import INTEGERS
from .memory import MEMORY
from .moves import MOVES
from .operands import PtxError
from .program import Instruction, Label, Program, parse
from .synchronisation import SYNCHRONISATION

__all__ = ["Translation", "translate", "unknown"]

_ALIKE = INTEGERS.keys() & FLOATS.keys()
_LOWERINGS = ASYNCHRONOUS | BITS | CONVERSIONS | MEMORY | MOVES | SYNCHRONISATION | INTEGERS | FLOATS

_FUNCTION = """
define internal i32 @step(ptr noalias %s) {{
entry:
{variables}
  %pc.p = getelementptr i64, ptr %s, i64 {pc}
  %pc = load i32, ptr %pc.p
  %shared.p = getelementptr i64, ptr %s, i64 {shared}
  %shared = load ptr, ptr %shared.p
  %params.p = getelementptr i64, ptr %s, i64 {params}
  %params = load ptr, ptr %params.p
  switch i32 %pc, label %start [
{cases}
  ]
{lines}
}}

define void @drive(ptr %base, ptr %lanes, i32 %n, ptr %out) {{
entry:
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i32 %i, %n
  br i1 %more, label %body, label %end
body:
  %lane.p = getelementptr i32, ptr %lanes, i32 %i
  %lane = load i32, ptr %lane.p
  %wide = sext i32 %lane to i64
  %at = mul i64 %wide, {nbytes}
  %s = getelementptr i8, ptr %base, i64 %at
  %event = call i32 @step(ptr %s)
  %out.p = getelementptr i32, ptr %out, i64 %wide
  store i32 %event, ptr %out.p
  %next = add i32 %i, 1
  br label %loop
end:
  ret void
}}
"""


@dataclass(frozen=True, slots=True)
class Translation:
    """A program in LLVM's language.

    Attributes:
        ir: a module with the function ``drive``.
        events: by number.
        nslots: 64-bit slots of a thread's state.
    """

    ir: str
    events: dict[int, Event]
    nslots: int


def translate(program: Program, weak: bool) -> Translation:
    """``program`` for one thread at a time.

    Args:
        weak: every access to memory is an event.

    Raises:
        PtxError: an instruction, modifier or operand is not known.
    """
    flow = Flow(program)
    # once to learn where threads stop, and again with only those registers kept that are needed after that
    stops = _lowered(program, weak, program.registers).stops.values()
    across = flow.across(stops)
    code = _lowered(program, weak, [name for name in program.registers if name in across])
    function = _FUNCTION.format(
        variables="\n".join(
            f"  {variable} = alloca i{program.registers[name]}" for name, variable in code.locals.items()
        ),
        pc=PC,
        shared=SHARED,
        params=PARAMS,
        cases="\n".join(f"    i32 {number}, label %resume{number}" for number in code.stops),
        lines="\n".join(code.lines),
        nbytes=8 * code.nslots,
    )
    return Translation(conversions.PRELUDE + ranges.PRELUDE + function, code.events, code.nslots)


def unknown(text: str) -> list[str]:
    """What of a kernel's PTX would not run here, and which registers it reads where nothing may have written them."""
    try:
        program = parse(text)
        _lowered(program, False, program.registers)
    except PtxError as error:
        return [str(error)]
    return [str(one) for one in Flow(program).unwritten()]


def _lowered(program: Program, weak: bool, stored: Collection[str]) -> Code:
    code = Code(program, weak, stored)
    code.begin("start")
    for one in program.code:
        if isinstance(one, Label):
            code.settle()
            code.begin(code.block_of(one.name))
        else:
            code.place += 1
            _instruction(code, one)
    code.finish()
    return code


def _instruction(code: Code, one: Instruction) -> None:
    code.instruction = one
    lower = _LOWERINGS.get(one.opcode)
    if one.opcode in _ALIKE and not any(name.startswith("f") for name in one.modifiers):
        lower = INTEGERS[one.opcode]
    if lower is None:
        raise one.error("unknown instruction")
    code.count()
    if one.guard is None or one.opcode == "bra":
        lower(code, one)
        return
    after, before = code.guarded(one.guard)
    lower(code, one)
    code.join(after, before)
