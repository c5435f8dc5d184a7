"""Reading PTX: names, lines, where a line comes from; and what is refused."""

from __future__ import annotations

import pytest

from tests.ptx.translation.instructions import assemble, kernel_text
from tests.ptx.translation.operands import Address, Immediate, PtxError, Register, Symbol
from tests.ptx.translation.program import Instruction, Label, parse
from tests.ptx.translation.translate import translate


def instructions(body: str, before: str = "") -> list[Instruction]:
    text = kernel_text(body, before=before)
    assert assemble(text) == ""
    return [one for one in parse(text).code if isinstance(one, Instruction)]


def test_parameters() -> None:
    """Each begins at a multiple of 8 bytes."""
    parameters = (
        ".param .u64 a, .param .u64 .ptr .global .align 16 b, .param .b8 c, .param .align 8 .b8 d[20], .param .f32 e"
    )
    text = kernel_text("ret;", parameters, threads=128)
    assert assemble(text) == ""
    program = parse(text)
    found = [(one.name, one.offset, one.nbytes) for one in program.parameters]
    assert found == [("a", 0, 8), ("b", 8, 8), ("c", 16, 1), ("d", 24, 20), ("e", 48, 4)]
    assert (program.parameter_bytes, program.name, program.threads, program.target) == (56, "tried", 128, "sm_100")


def test_registers_and_labels_of_a_scope() -> None:
    """A name between braces hides one of the same name outside, and is gone after them."""
    body = """
    .reg .b32 %x, one;
    .reg .pred %p;
    mov.b32 one, 1;
    setp.eq.b32 %p, one, 1;
    L: add.s32 one, one, 1;
    {
        .reg .b64 one;
        @%p bra L;
        { .reg .b32 two; mov.b32 two, 2; }
        .reg .b32 three;
        mov.b64 one, 5;
        mov.b32 three, 7;
        L: add.s64 one, one, 1;
    }
    @!%p bra L;
    mov.b32 %x, one;
    """
    text = kernel_text(body)
    assert assemble(text) == ""
    program = parse(text)
    labels = [one.name for one in program.code if isinstance(one, Label)]
    assert len(set(labels)) == len(labels) == 2
    branches = [one for one in program.code if isinstance(one, Instruction) and one.opcode == "bra"]
    assert [one.operands for one in branches] == [(Symbol(labels[1]),), (Symbol(labels[0]),)]
    assert [one.guard for one in branches] == [Register("%p"), Register("%p", negated=True)]
    written = [str(one.operands[0].name) for one in program.code if isinstance(one, Instruction) and one.guard is None]
    widths = [program.registers[name] for name in written]
    assert widths == [32, 8, 32, 32, 64, 32, 64, 32]
    assert written[0] == written[2]
    assert written[4] == written[6] != written[0]


def test_comments_and_lines() -> None:
    """A comment may hold anything; the line of an instruction is where it begins."""
    body = "// a; { mov\n.reg .b32 %r<2>; /* two\nlines; */ mov.b32 %r0, 1;\nmov.b32\n  %r1,\n  %r0; mov.b32 %r0, %r1;"
    text = kernel_text(body)
    first = text.splitlines().index("// a; { mov") + 1
    assert [one.line for one in instructions(body)] == [first + 2, first + 3, first + 5]
    assert instructions(body)[1].text == "mov.b32 %r1, %r0"


def test_where_a_line_comes_from() -> None:
    """The line, and through which calls."""
    before = '.file 1 "/a/kernels/route.py"\n.file 2 "/b" "words.py"'
    body = """
    .reg .b32 %r;
    .loc 1 20 4
    mov.b32 %r, 1;
    .loc 1 30 4
    .loc 2 7 12, function_name $L__name, inlined_at 1 30 4
    .loc 2 9 3, function_name $L__name, inlined_at 2 7 12
    mov.b32 %r, 2;
    $L__name: mov.b32 %r, 3;
    .loc 1 31 4
    mov.b32 %r, 4;
    """
    found = [one.source for one in parse(kernel_text(body, before=before)).code if isinstance(one, Instruction)]
    deep = "words.py:9 (words.py:7, route.py:30)"
    assert found == ["route.py:20", deep, deep, "route.py:31"]


def test_labels_that_nobody_branches_to_are_none() -> None:
    assert [type(one) for one in parse(kernel_text("$L__tmp0: ret; $L: bra.uni $L;")).code] == [
        *(Instruction, Label, Instruction)
    ]


def test_operands() -> None:
    found = instructions(
        ".reg .b32 %r<3>; .reg .b64 %rd; .reg .pred %p; mov.b64 %rd, 0; ld.global.b32 %r0, [ %rd + 0x10 ]; "
        "ld.global.b32 %r0, [%rd+-4]; add.f32 %r0, %r0, 0f3F800000; setp.eq.and.b32 %p, %r0, -0x2, !%p;"
    )
    assert found[1].operands[1] == Address(Register("%rd"), 16)
    assert found[2].operands[1] == Address(Register("%rd"), -4)
    assert found[3].operands[2] == Immediate(0x3F800000, "f32")
    assert found[4].operands[2:] == (Immediate(-2), Register("%p", negated=True))


REFUSED = [
    ("add.s64 %r0, %r1, %r2;", "%r1 has 32 bits where 64 are known"),
    ("add.s32 %rd0, %r1, %r2;", "%rd0 has 64 bits where 32 are known"),
    ("add.s32 %r0, %r1;", "2 operands where 3 are known"),
    ("add.s32 %r0, %r1, %r2, %r3;", "4 operands where 3 are known"),
    ("add.s32 %r0, %r1, %undeclared;", "%undeclared is no value of 32 bits"),
    ("add.s32 %r0, %r1, 0x100000000;", "4294967296 does not fit 32 bits"),
    ("add.s32 %r0, %r1, 0d3FF0000000000000;", "a number of f64 where 32 bits are known"),
    ("add.cc.s32 %r0, %r1, %r2;", ".cc where one of"),
    ("add.rz.f32 %r0, %r1, %r2;", ".rz where one of"),
    ("add.f16 %rs0, %rs1, %rs1;", ".f16 where one of"),
    ("add.s32.sat %r0, %r1, %r2;", "unknown modifier .sat"),
    ("mad.hi.sat.s32 %r0, %r1, %r2, %r3;", ".sat where one of"),
    ("fma.f32 %r0, %r1, %r2, %r3;", ".f32 where one of .rn"),
    ("mov.b32 %r0, {%rs0, %rs1, %rs0};", "a vector of 3"),
    ("mov.b32 %r0, %clock64;", "%clock64 has 64 bits"),
    ("mov.u32 %r0, %smid;", "is no value of 32 bits"),
    ("setp.lt.b32 %p0, %r0, %r1;", "comparison .lt of b32"),
    ("setp.lo.s32 %p0, %r0, %r1;", "comparison .lo of s32"),
    ("setp.eq.ftz.s32 %p0, %r0, %r1;", "unknown modifier .ftz"),
    ("setp.eq.s32 %r0, %r0, %r1;", "%r0 has 32 bits where 8 are known"),
    ("selp.b32 %r0, %r1, %r2, %r3;", "%r3 has 32 bits where 8 are known"),
    ("cvt.rna.tf32.f32 %r0, %r1;", ".rna where one of"),
    ("cvt.s32.f32 %r0, %r1;", "without a rounding to integers"),
    ("cvt.rn.f32.f16 %r0, %rs0;", "unknown modifier .rn"),
    ("cvt.rz.f16.f32 %rs0, %r0;", "with this rounding"),
    ("cvt.rn.bf16x2.e4m3x2 %r0, %rs0;", "conversion between these formats"),
    ("cvt.rn.e4m3x2.f32 %rs0, %r0, %r1;", "saturation as it is known"),
    ("lop3.b32 %r0, %r1, %r2, %r3, 256;", "a number of 8 bits"),
    ("ld.b32 %r0, [%rd0];", ".b32 where one of .global"),
    ("ld.local.b32 %r0, [%rd0];", ".local where one of .global"),
    ("ld.acquire.global.b32 %r0, [%rd0];", "an order without its scope"),
    ("ld.release.gpu.global.b32 %r0, [%rd0];", "the order of the other direction"),
    ("st.acquire.gpu.global.b32 [%rd0], %r0;", "the order of the other direction"),
    ("ld.global.L3::far.b32 %r0, [%rd0];", ".L3::far where one of"),
    ("ld.global.v2.b32 %r0, [%rd0];", "1 registers where 2 are known"),
    ("ld.global.b32 {%r0, %r1}, [%rd0];", "2 registers where 1 are known"),
    ("ld.global.b32 %r0, %rd0;", "where an address is known"),
    ("ld.global.b32 %r0, [%r1];", "%r1 has 32 bits where 64 are known"),
    ("ld.global.b32 %rs0, [%rd0];", "%rs0 has 16 bits where 32 are known"),
    ("ld.param.b32 %r0, [nothing];", "no parameter of this kernel"),
    ("ld.param.b64 %rd0, [out+4];", "beyond its end"),
    ("atom.global.add.b32 %r0, [%rd0], %r1;", ".add of b32"),
    ("atom.gpu.global.sys.add.u32 %r0, [%rd0], %r1;", ".sys where one of .add"),
    ("atom.global.exch.b32 %r0, [%rd0], %rd1;", "%rd1 has other than 32 bits"),
    ("bra $nowhere;", "no label of this kernel"),
    ("shfl.bfly.b32 %r0, %r1, 1, 31;", ".bfly where one of .sync"),
    ("shfl.sync.bfly.b64 %rd0, %rd1, 1, 31, -1;", ".b64 where one of .b32"),
    ("bar.red.popc.u32 %r0, 0, %p0;", ".red where one of"),
    ("shfl.sync.up.b32 _|%p0, %r1, 1, 0, -1;", "where a register is known"),
    ("redux.sync.add.b32 %r0, %r1, -1;", ".b32 where one of"),
    ("match.any.sync.b32 %r0|%p0, %r1, -1;", "only .all tells"),
    ("cp.async.ca.shared.global [%r0], [%rd0], 16;", "where one of .bulk is known"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r0}, {%r1}, {%r2}, {%r3};", "unknown instruction"),
    ("call (%r0), f, (%r1);", "a call that is not understood"),
    ("call f;", "a call of a function without a body here"),
    ("@%r0 bra $nowhere;", "no label of this kernel"),
    ("ADD %r0;", "no instruction"),
    ("ld.global.b32 %r0, [%rd0-4];", "address [%rd0-4]"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED, ids=[text for text, _ in REFUSED])
def test_what_is_refused(text: str, why: str) -> None:
    """By the line of the PTX, its text and the source line; never skipped."""
    registers = ".reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .b16 %rs<2>; .reg .pred %p<2>;"
    whole = kernel_text(f"{registers}\n.loc 1 65 3\n{text}", before='.file 1 "/at/words.py"')
    line = whole.splitlines().index(text) + 1
    with pytest.raises(PtxError) as error:
        translate(parse(whole), weak=False)
    said = str(error.value)
    assert said.startswith(f"PTX line {line}: {text[:-1]}: ")
    assert why in said
    assert said.endswith("; from words.py:65")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 kernels"),
        (kernel_text("ret;") + kernel_text("ret;"), "2 kernels"),
        (kernel_text("ret;").replace(".reqntid 32", ""), "no .reqntid"),
        (kernel_text("ret;", ".param .texref t"), "parameter '.param .texref t'"),
        (kernel_text(".reg .b128 %q; ret;"), "PTX line 9: '.reg .b128 %q' declares nothing known"),
        (kernel_text("ret;", before=".extern .shared .b8 a[]; .extern .shared .b8 b[];"), "a second dynamic variable"),
        (kernel_text("ret;").rstrip().removesuffix("}"), "tried: the kernel does not end"),
    ],
)
def test_modules_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(PtxError) as error:
        parse(text)
    assert why in str(error.value)
