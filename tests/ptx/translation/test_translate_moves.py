"""Moving, comparing and choosing."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx.translation.event import CTAX, CTAY, LANE, NCTAX, PARAMS, PC, TID, WARP
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import Instructions, assemble, kernel_text
from tests.ptx.translation.program import WIDTHS

Comparison = Callable[[float, float], bool]
ORDERED: dict[str, Comparison] = {
    **{"eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
}
ALIASES = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


def integer_comparisons(kind: str) -> dict[str, Comparison]:
    both = {"eq": operator.eq, "ne": operator.ne}
    return both if kind[0] == "b" else both | ORDERED | (ALIASES if kind[0] == "u" else {})


@pytest.mark.parametrize("kind", [f"{kind}{bits}" for kind in "bus" for bits in (16, 32, 64)])
def test_integers_compared(kind: str) -> None:
    width = WIDTHS[kind]
    comparisons = integer_comparisons(kind)
    instructions = Instructions([f"setp.{name}.{kind} D, A, B" for name in comparisons], [kind, kind], "pred")
    assert assemble(instructions.text) == ""
    bits = [0, 1, 5, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    pairs = [(a, b) for a in bits for b in bits]
    signed = [tuple(one - (1 << width) if kind[0] == "s" and one >> (width - 1) else one for one in p) for p in pairs]
    results = instructions.run(*(np.array(column, np.uint64) for column in zip(*pairs, strict=True)))
    for (name, compare), result in zip(comparisons.items(), results, strict=True):
        assert result.tolist() == [int(compare(*pair)) for pair in signed], name


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_floats_compared(kind: str) -> None:
    """NaN is in no relation, except in those with a ``u``."""
    form = np.float32 if kind == "f32" else np.float64
    comparisons: dict[str, Comparison] = dict(ORDERED)
    comparisons["ne"] = lambda a, b: a < b or a > b
    for name in (*ORDERED, "ne"):
        comparisons[f"{name}u"] = lambda a, b, name=name: math.isnan(a + b) or comparisons[name](a, b)
    comparisons["num"] = lambda a, b: not (math.isnan(a) or math.isnan(b))
    comparisons["nan"] = lambda a, b: math.isnan(a) or math.isnan(b)
    instructions = Instructions([f"setp.{name}.{kind} D, A, B" for name in comparisons], [kind, kind], "pred")
    assert assemble(instructions.text) == ""
    values = [0.0, -0.0, 1.0, -1.0, 1e300, 5e-324, math.nan]
    values = values if kind == "f64" else values[:4] + values[6:]
    pairs = [(form(a), form(b)) for a in values for b in values]
    results = instructions.run(*(np.array(one, form).view(f"u{form().nbytes}") for one in zip(*pairs, strict=True)))
    for (name, compare), result in zip(comparisons.items(), results, strict=True):
        assert result.tolist() == [int(compare(float(a), float(b))) for a, b in pairs], name


def test_subnormal_numbers_compared_as_zeros() -> None:
    instructions = Instructions(["setp.eq.ftz.f32 D, A, B", "setp.eq.f32 D, A, B"], ["f32", "f32"], "pred")
    assert assemble(instructions.text) == ""
    flushed, exact = instructions.run(np.array([1, 0x80000001]), np.array([0, 0]))
    assert (flushed.tolist(), exact.tolist()) == ([1, 1], [0, 0])


def test_a_comparison_combined_with_a_predicate() -> None:
    """The second result is that of the opposite comparison."""
    combinations = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
    texts, expected = [], []
    a, b = np.array([1, 5, 1, 5]), np.array([3, 3, 3, 3])
    c = np.array([0, 0, 1, 1])
    for name, combine in combinations.items():
        for negated in (0, 1):
            third = f"{'!' * negated}C"
            texts += [f"setp.lt.{name}.s32 D, A, B, {third}", f"setp.lt.{name}.s32 E|D, A, B, {third}"]
            expected += [combine(np.array(holds, int), c ^ negated).tolist() for holds in (a < b, a >= b)]
    instructions = Instructions(texts, ["s32", "s32", "pred"], "pred")
    assert assemble(instructions.text) == ""
    assert [result.tolist() for result in instructions.run(a, b, c)] == expected


@pytest.mark.parametrize("kind", ["b16", "b32", "u64", "s64", "f32"])
def test_selection(kind: str) -> None:
    instructions = Instructions([f"selp.{kind} D, A, B, C"], [kind, kind, "pred"], kind)
    assert assemble(instructions.text) == ""
    (found,) = instructions.run(np.array([1, 2]), np.array([3, 4]), np.array([1, 0]))
    assert found.tolist() == [1, 4]


def test_vectors() -> None:
    """The first part is the lowest."""
    swap = ".reg .b32 %low{n}, %high{n}; mov.b64 {{%low{n}, %high{n}}}, A; mov.b64 D, {{%high{n}, %low{n}}}"
    quarters = ".reg .b16 %a{n}, %b{n}, %c{n}, %d{n}; mov.b64 {{%a{n}, %b{n}, %c{n}, %d{n}}}, A; "
    quarters += "mov.b64 D, {{%d{n}, %c{n}, %b{n}, %a{n}}}"
    texts = [swap.format(n=1), quarters.format(n=9), ".reg .b32 %one; mov.b64 {_, %one}, A; cvt.u64.u32 D, %one"]
    instructions = Instructions(texts, ["b64"], "b64")
    assert assemble(instructions.text) == ""
    found = [result.tolist() for result in instructions.run(np.array([0x1111222233334444], np.uint64))]
    assert found == [[0x3333444411112222], [0x4444333322221111], [0x11112222]]


def test_constants() -> None:
    texts = ["mov.b32 D, -1", "mov.b32 D, 0xffffffffffffffff", "mov.f32 D, 0f3F800000", "mov.b32 D, 0b101"]
    texts += ["mov.b32 D, 017", "mov.u32 D, 4000000000", "mov.b32 D, 7U"]
    instructions = Instructions(texts, [], "b32")
    assert assemble(instructions.text) == ""
    instructions = Instructions(texts, ["b32"], "b32")
    found = [int(result[0]) for result in instructions.run(np.array([0]))]
    assert found == [0xFFFFFFFF, 0xFFFFFFFF, 0x3F800000, 5, 15, 4000000000, 7]


def test_special_registers() -> None:
    slots = {"%tid.x": TID, "%laneid": LANE, "%warpid": WARP, "%ctaid.x": CTAX, "%ctaid.y": CTAY, "%nctaid.x": NCTAX}
    names = [*slots, "%ntid.x", "%ntid.y", "%tid.y"]
    lines = [".reg .b32 %r<9>;", ".reg .b64 %at;", "ld.param.u64 %at, [out];"]
    for number, name in enumerate(names):
        lines += [f"mov.u32 %r{number}, {name};", f"st.global.b32 [%at+{4 * number}], %r{number};"]
    text = kernel_text("\n".join(lines), threads=96)
    assert assemble(text) == ""
    kernel = Kernel(text, weak=False)
    found, state, event = np.zeros(9, np.uint32), np.zeros(kernel.nslots, np.uint64), np.ones(1, np.int32)
    state[list(slots.values())] = range(10, 16)
    parameters = np.array([found.ctypes.data], np.uint64)
    state[PARAMS] = parameters.ctypes.data
    lanes = np.zeros(1, np.int32)
    kernel.drive(state.ctypes.data, lanes.ctypes.data, 1, event.ctypes.data)
    assert (int(event[0]), int(state[PC])) == (0, 0)
    assert found.tolist() == [10, 11, 12, 13, 14, 15, 96, 1, 0]
