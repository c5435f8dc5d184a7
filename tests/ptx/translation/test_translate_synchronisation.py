"""What threads do together: the events that it is, and that each thread goes its own way between them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.translation.event import CTAX, PARAMS, PC, RANGES, TID, Event
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import assemble, kernel_text, run_threads

REGISTERS = ".reg .b32 %x, %y; .reg .b64 %z; .reg .pred %p, %q; mov.b32 %x, 7; mov.b64 %z, 8; setp.eq.b32 %p, %x, 7;\n"

#: Instruction, widths of its results, its operands.
EVENTS = [
    ("bar.sync 0;", [], [0]),
    ("bar.sync %x, 64;", [], [7, 64]),
    ("bar.arrive 1, 64;", [], [1, 64]),
    ("barrier.cta.sync.aligned 2;", [], [2]),
    ("bar.warp.sync -1;", [], [0xFFFFFFFF]),
    ("membar.sys;", [], []),
    ("fence.acq_rel.gpu;", [], []),
    ("shfl.sync.bfly.b32 %y|%q, %x, 4, 31, -1;", [32, 8], [7, 4, 31, 0xFFFFFFFF]),
    ("shfl.sync.idx.b32 %y, %x, %x, 0x1c1f, 0xffff;", [32], [7, 7, 0x1C1F, 0xFFFF]),
    ("shfl.sync.up.b32 %y|%q, %x, 1, 0, -1;", [32, 8], [7, 1, 0, 0xFFFFFFFF]),
    ("vote.sync.ballot.b32 %y, %p, -1;", [32], [1, 0xFFFFFFFF]),
    ("vote.sync.any.pred %q, !%p, %x;", [8], [0, 7]),
    ("match.any.sync.b32 %y, %x, -1;", [32], [7, 0xFFFFFFFF]),
    ("match.all.sync.b64 %y|%q, %z, -1;", [32, 8], [8, 0xFFFFFFFF]),
    ("redux.sync.min.s32 %y, %x, -1;", [32], [7, 0xFFFFFFFF]),
    ("redux.sync.xor.b32 %y, %x, -1;", [32], [7, 0xFFFFFFFF]),
    ("activemask.b32 %y;", [32], []),
    ("mov.u64 %z, %globaltimer;", [64], []),
    ("mov.u32 %y, %clock;", [32], []),
    ("nanosleep.u32 %x;", [], [7]),
]


def operand(states: np.ndarray, event: Event, number: int, predicate: bool) -> int:
    kind, value = event.args[number]
    if kind == "imm":
        return value
    return int(states[0, value]) & (1 if predicate else 0xFFFFFFFF)


@pytest.mark.parametrize(("text", "widths", "values"), EVENTS, ids=[text for text, *_ in EVENTS])
def test_events(text: str, widths: list[int], values: list[int]) -> None:
    whole = kernel_text(REGISTERS + text)
    assert assemble(whole) == ""
    kernel = Kernel(whole, weak=False)
    states, events = run_threads(kernel, 1, [0])
    event = kernel.events[int(events[0])]
    assert event.text == text[:-1]
    assert event.parts == tuple(text.split()[0].rstrip(";").split("."))
    assert [width for _, width in event.dests] == widths
    predicates = ["vote" in text and number == 0 for number in range(len(event.args))]
    found = [operand(states, event, number, predicate) for number, predicate in enumerate(predicates)]
    assert found == values


def test_each_thread_goes_its_own_way() -> None:
    """Lanes stop at different events, in any order, and go on from there with what the machine gave them."""
    text = kernel_text(
        """
        .reg .b32 %i, %left, %got;
        .reg .b64 %at, %by;
        .reg .pred %odd, %more;
        mov.u32 %i, %tid.x;
        and.b32 %left, %i, 1;
        setp.eq.u32 %odd, %left, 1;
        @%odd bra $ODD;
        shfl.sync.bfly.b32 %got, %i, 2, 31, 0x55555555;
        bra $END;
    $ODD:
        shfl.sync.bfly.b32 %got, %i, 4, 31, 0xaaaaaaaa;
    $END:
        add.s32 %got, %got, %i;
        ld.param.u64 %at, [out];
        mul.wide.u32 %by, %i, 4;
        add.s64 %at, %at, %by;
        st.global.b32 [%at], %got;
        """
    )
    assert assemble(text) == ""
    kernel = Kernel(text, weak=False)
    found = np.zeros(8, np.uint32)
    states, events = run_threads(kernel, 8, [found.ctypes.data])
    block = np.array([found.ctypes.data], np.uint64)
    states[:, PARAMS] = block.ctypes.data
    even, odd = sorted(set(events.tolist()))
    assert events.tolist() == [even, odd] * 4
    assert [kernel.events[one].args[1] for one in (even, odd)] == [("imm", 2), ("imm", 4)]
    for one in (even, odd):
        slot, _ = kernel.events[one].dests[0]
        states[events == one, slot] = 100 * one
    for lane in (5, 2, 7, 0, 1, 6, 3, 4):
        lanes = np.array([lane], np.int32)
        kernel.drive(states.ctypes.data, lanes.ctypes.data, 1, events.ctypes.data)
        assert found[lane] == 100 * (odd if lane % 2 else even) + lane
    assert events.tolist() == [0] * 8


def test_a_loop_with_an_event() -> None:
    """The same event again and again; registers live on in the state."""
    text = kernel_text(
        ".reg .b32 %n, %s; .reg .pred %p; .reg .b64 %t; mov.b32 %n, 0; mov.b32 %s, 0;\n"
        "$L: bar.sync 0; add.s32 %n, %n, 1; add.s32 %s, %s, %n; setp.lt.s32 %p, %n, 4; @%p bra $L;\n"
        "ld.param.u64 %t, [out]; st.global.b32 [%t], %s;"
    )
    assert assemble(text) == ""
    kernel = Kernel(text, weak=False)
    found, lanes = np.zeros(1, np.uint32), np.zeros(1, np.int32)
    block = np.array([found.ctypes.data], np.uint64)
    state, event = np.zeros((1, kernel.nslots), np.uint64), np.ones(1, np.int32)
    state[0, [PC, TID, CTAX, RANGES]], state[0, PARAMS] = 0, block.ctypes.data
    seen = []
    while event[0] and len(seen) < 9:
        kernel.drive(state.ctypes.data, lanes.ctypes.data, 1, event.ctypes.data)
        seen.append(int(event[0]))
    assert len(seen) == 5
    assert len(set(seen[:4])) == 1
    assert found[0] == 1 + 2 + 3 + 4
