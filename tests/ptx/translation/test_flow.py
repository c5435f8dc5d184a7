"""Registers that nothing has written, and those that a thread's state must hold."""

from __future__ import annotations

from tests.ptx.translation.event import FIRST
from tests.ptx.translation.flow import Flow
from tests.ptx.translation.instructions import assemble, kernel_text
from tests.ptx.translation.program import Program, parse
from tests.ptx.translation.translate import translate, unknown

REGISTERS = ".reg .b32 %r<9>; .reg .b64 %a; .reg .pred %p<3>; ld.param.u64 %a, [out]; mov.u32 %r0, %tid.x; "
REGISTERS += "setp.eq.u32 %p0, %r0, 0;\n"


def program(body: str) -> Program:
    text = kernel_text(REGISTERS + body)
    assert assemble(text) == ""
    return parse(text)


def unwritten(body: str, strict: bool = False) -> list[tuple[str, str]]:
    return [(one.register, one.instruction.text) for one in Flow(program(body)).unwritten(strict)]


def test_one_side_of_a_branch_writes() -> None:
    body = "@%p0 bra $A; mov.b32 %r1, 1; $A: add.s32 %r2, %r1, %r0;"
    assert unwritten(body) == [("%r1", "add.s32 %r2, %r1, %r0")]
    assert unwritten(f"mov.b32 %r1, 0; {body}") == []
    (found,) = Flow(program(body)).unwritten()
    assert str(found).startswith("%r1 may never have been written at PTX line 10: add.s32 %r2, %r1, %r0; from ")


def test_a_predicate_may_not_hold() -> None:
    body = "@%p0 mov.b32 %r1, 1; st.global.b32 [%a], %r1;"
    assert unwritten(body, strict=True) == [("%r1", "st.global.b32 [%a], %r1")]
    assert unwritten(f"mov.b32 %r1, 0; {body}", strict=True) == []
    assert unwritten(body) == []


def test_around_a_loop() -> None:
    """The first time round nothing has written it."""
    body = "$L: add.s32 %r1, %r2, 1; mov.b32 %r2, 5; @%p0 bra $L;"
    assert unwritten(body) == [("%r2", "add.s32 %r1, %r2, 1")]


def test_what_is_read_anywhere() -> None:
    """As a predicate, an address, a part of a vector."""
    found = unwritten("@%p1 st.global.v2.b32 [%a], {%r1, %r2}; ret; add.s32 %r3, %r4, 1;")
    assert [name for name, _ in found] == ["%p1", "%r1", "%r2"]
    assert unwritten("exit;") == []


def test_a_half_that_everybody_drops_is_not_read() -> None:
    """As the compiler packs two numbers for sm_100 of which one is of no use."""
    pack = "mov.b64 %b0, {%r0, %r1}; "
    declared = ".reg .b64 %b<1>; "
    assert unwritten(declared + pack + "mov.b64 {%r2, _}, %b0; st.global.b32 [%a], %r2;") == []
    for taken in (
        "mov.b64 {_, %r2}, %b0;",
        "mov.b64 {%r2, %r3}, %b0;",
        "st.global.b64 [%a], %b0;",
    ):
        both = "mov.b64 {%r4, _}, %b0; " + taken
        assert unwritten(declared + pack + both) == [("%r1", "mov.b64 %b0, {%r0, %r1}")], taken


def test_what_a_kernel_is_told_of() -> None:
    text = kernel_text(REGISTERS + "add.s32 %r1, %r2, %r0;")
    assert [one.split(" may")[0] for one in unknown(text)] == ["%r2"]
    assert unknown(text.replace("%r2, %r0", "%r0, %r0")) == []
    assert ["unknown instruction" in one for one in unknown(text.replace("add.s32", "vadd4.s32"))] == [True]


def kept(body: str, weak: bool) -> set[str]:
    one = program(body)
    translation = translate(one, weak)
    places = [
        place
        for place, instruction in enumerate(Flow(one).code)
        if any(
            event.line == instruction.line and event.text == instruction.text for event in translation.events.values()
        )
        and (instruction.opcode == "bar" or weak)
    ]
    found = Flow(one).across(places)
    assert translation.nslots == FIRST + len(found)
    return found


def test_what_outlives_an_event() -> None:
    """What is read after it or by it, what it writes, and what nothing has written."""
    body = (
        "mov.b32 %r1, 1; mov.b32 %r2, 2; add.s32 %r3, %r1, %r2; bar.sync 0; add.s32 %r3, %r3, %r7; "
        "st.global.b32 [%a], %r3;"
    )
    assert kept(body, weak=False) == {"%a", "%r3", "%r7"}
    loaded = "mov.b32 %r1, 1; add.s32 %r2, %r1, 1; ld.global.b32 %r3, [%a]; add.s32 %r4, %r3, %r2; bar.sync %r4;"
    assert kept(loaded, weak=False) == {"%r4"}
    assert kept(loaded, weak=True) == {"%a", "%r2", "%r3", "%r4"}


def test_a_register_that_a_predicate_leaves_alone() -> None:
    """It keeps its value over the event, which the thread may not stop at."""
    body = "mov.b32 %r1, 1; @%p0 ld.volatile.global.b32 %r1, [%a]; bar.sync 0; st.global.b32 [%a], %r1;"
    assert kept(body, weak=True) >= {"%a", "%r1"}
