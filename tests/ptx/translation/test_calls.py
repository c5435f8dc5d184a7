"""Functions of a kernel: read where they are called, with what is passed and what comes back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import assemble, kernel_text, run_threads
from tests.ptx.translation.operands import PtxError
from tests.ptx.translation.program import Instruction, parse

#: A function of two numbers that returns their sum, or 7 where the second is 0, and the lower half of the first.
FUNCTION = """
.func (.param .align 8 .b8 func_retval0[16]) both(
    .param .b64 both_param_0,
    .param .b32 both_param_1
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<5>;
    .loc 2 40 1
    ld.param.b64 %rd1, [both_param_0];
    ld.param.b32 %r1, [both_param_1];
    ld.param.b32 %r2, [both_param_0];
    setp.eq.b32 %p1, %r1, 0;
    cvt.u64.u32 %rd2, %r1;
    add.s64 %rd3, %rd1, %rd2;
    st.param.b32 [func_retval0+8], %r2;
    @%p1 bra $L__none;
    st.param.b64 [func_retval0], %rd3;
    ret;
$L__none:
    mov.b64 %rd3, 7;
    st.param.b64 [func_retval0], %rd3;
    ret;
}
"""
DECLARED = """
.func (.param .align 8 .b8 func_retval0[16]) both(
    .param .b64 both_param_0,
    .param .b32 both_param_1
)
;
.file 1 "/at/sends.py"
.file 2 "/at/adds.py"
"""


def call(number: int, first: str, second: str) -> str:
    """Into %rd1 and %r1."""
    return f"""
    {{ // callseq {number}, 0
    .param .b64 param0;
    .param .b32 param1;
    .param .align 8 .b8 retval0[16];
    st.param.b64 [param0], {first};
    st.param.b32 [param1], {second};
    call.uni (retval0), both, (param0, param1);
    ld.param.b64 %rd1, [retval0];
    ld.param.b32 %r1, [retval0+8];
    }} // callseq {number}
    """


BODY = f"""
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    .loc 1 20 1
    ld.param.b64 %rd4, [out];
    mov.u32 %r3, %tid.x;
    mul.wide.u32 %rd5, %r3, 16;
    add.s64 %rd4, %rd4, %rd5;
    mov.b64 %rd2, 0x500000003;
    {call(0, "%rd2", "%r3")}
    st.global.b32 [%rd4+8], %r1;
    mov.b32 %r2, 100;
    {call(1, "%rd1", "%r2")}
    st.global.b64 [%rd4], %rd1;
    ret;
"""
TEXT = kernel_text(BODY, before=DECLARED) + FUNCTION


def test_what_is_passed_and_comes_back() -> None:
    """Of two calls, with other values in each thread; a function returns at two places."""
    assert assemble(TEXT) == ""
    found = np.zeros((32, 2), np.uint64)
    _, events = run_threads(Kernel(TEXT, weak=False), 32, [found.ctypes.data])
    assert not events.any()
    large = 0x500000003
    assert found[:, 0].tolist() == [(large + thread if thread else 7) + 100 for thread in range(32)]
    assert (found[:, 1] & 0xFFFFFFFF).tolist() == [3] * 32


def test_where_its_lines_come_from() -> None:
    """Its own lines of the text and of the source, and those of the call."""
    program = parse(TEXT)
    inner = [one for one in program.code if isinstance(one, Instruction) and one.source.startswith("adds.py")]
    assert {one.source for one in inner} == {"adds.py:40 (sends.py:20)"}
    place = TEXT.splitlines().index("    setp.eq.b32 %p1, %r1, 0;") + 1
    assert [one.line for one in inner if one.opcode == "setp"] == [place, place]
    last = [one for one in program.code if isinstance(one, Instruction)][-1]
    assert (last.opcode, last.source) == ("ret", "sends.py:20")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("call.uni (retval0), both, (param0, param1)", "call.uni (retval0), both, (param0)", "passes other than"),
        ("call.uni (retval0), both, (param0, param1)", "call.uni both, (param0, param1)", "passes other than"),
        ("call.uni (retval0), both", "call.uni (retval0), %rd4", "not understood"),
        ("call.uni (retval0), both", "call.uni (retval0), other", "without a body here"),
        ("ld.param.b64 %rd1, [retval0]", "ld.param.b64 %rd1, [retval0+8]", "b64 of something that is passed as 32"),
        ("ld.param.b64 %rd1, [retval0]", "ld.param.b64 %rd1, [retval0+4]", "b64 of something that is passed as 0"),
        ("mov.b64 %rd3, 7;", "call.uni (func_retval0), both, (both_param_0, both_param_1);", "calls itself"),
    ],
)
def test_what_is_refused(old: str, new: str, why: str) -> None:
    assert old in TEXT
    with pytest.raises(PtxError, match=why) as error:
        parse(TEXT.replace(old, new))
    assert str(error.value).count("PTX line") == 1
