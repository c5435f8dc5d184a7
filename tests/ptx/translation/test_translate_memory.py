"""Loads and stores, the events that they are, and their faults."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.ptx.translation.event import COUNT, FAULT, PARAMS, PC, RANGES, SHARED, SHARED_BYTES, TID
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import Array, assemble, kernel_text
from tests.ptx.translation.ranges import Ranges, process_ranges

BEFORE = '.file 1 "/at/words.py"\n' + ".extern .shared .align 16 .b8 dynamic[];\n.shared .align 8 .b8 fixed[24];"


class Thread:
    """One thread of a kernel with the parameters ``from`` and ``to``, run until its next event."""

    def __init__(self, body: str, memory: Array, target: Array, weak: bool = False, shared: int = 64) -> None:
        self.text = kernel_text(
            f".reg .b64 %f, %t; ld.param.u64 %f, [from]; ld.param.u64 %t, [to];\n{body}",
            ".param .u64 from, .param .u64 to",
            BEFORE,
        )
        assert assemble(self.text) == ""
        self.kernel = Kernel(self.text, weak)
        self.shared = np.arange(shared, dtype=np.uint8)
        self.parameters = np.array([memory.ctypes.data, target.ctypes.data], np.uint64)
        self.ranges = Ranges(
            [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in (memory, target) if one.nbytes]
        )
        self.state = np.random.default_rng(5).integers(0, 1 << 64, self.kernel.nslots, dtype=np.uint64)
        self.state[[PC, TID, COUNT]] = 0
        self.state[[SHARED, SHARED_BYTES]] = self.shared.ctypes.data, shared
        self.state[[PARAMS, RANGES]] = self.parameters.ctypes.data, self.ranges.address

    def run(self) -> int:
        event, lanes = np.full(1, 99, np.int32), np.zeros(1, np.int32)
        self.kernel.drive(self.state.ctypes.data, lanes.ctypes.data, 1, event.ctypes.data)
        return int(event[0])


@pytest.mark.parametrize("kind", ["b8", "u8", "s8", "b16", "u16", "s16", "b32", "s32", "u32", "b64", "s64"])
def test_a_wider_register_is_filled(kind: str) -> None:
    """By the sign of signed types; a store takes the lower bits."""
    width = int(kind[1:])
    memory, target = np.array([0xF1E2D3C4B5A69788], np.uint64), np.array([0, 0], np.uint64)
    body = f".reg .b64 %x; ld.global.{kind} %x, [%f]; st.global.b64 [%t], %x; st.global.{kind} [%t+8], %x;"
    thread = Thread(body, memory, target)
    assert thread.run() == 0
    value = 0xF1E2D3C4B5A69788 & ((1 << width) - 1)
    filled = value - (1 << width) if kind[0] == "s" and value >> (width - 1) else value
    assert target.tolist() == [filled % (1 << 64), value]


@pytest.mark.parametrize(("vector", "kind"), [("v2", "b32"), ("v4", "b32"), ("v2", "b64"), ("v4", "b16"), ("v2", "b8")])
def test_vectors(vector: str, kind: str) -> None:
    count, width = int(vector[1:]), int(kind[1:])
    register = f"b{max(16, width)}"
    names = ", ".join(f"%x{number}" for number in range(count))
    backwards = ", ".join(f"%x{number}" for number in reversed(range(count)))
    memory = np.arange(1, count + 1).astype(f"u{width // 8}")
    target = np.zeros_like(memory)
    body = f".reg .{register} %x<{count}>; ld.global.{vector}.{kind} {{{names}}}, [%f+0];"
    thread = Thread(f"{body} st.global.{vector}.{kind} [%t], {{{backwards}}};", memory, target)
    assert thread.run() == 0
    assert target.tolist() == memory[::-1].tolist()


def test_a_load_into_its_own_address() -> None:
    memory, target = np.array([11, 22], np.uint64), np.zeros(2, np.uint64)
    body = ".reg .b64 %x; ld.global.v2.b64 {%f, %x}, [%f]; st.global.v2.b64 [%t], {%f, %x};"
    assert Thread(body, memory, target).run() == 0
    assert target.tolist() == [11, 22]


def test_shared_memory() -> None:
    """Fixed variables come first, the dynamic one at the next multiple of 16."""
    memory, target = np.array([0x1122334455667788], np.uint64), np.zeros(2, np.uint64)
    body = (
        ".reg .b64 %x, %y; .reg .b32 %a; ld.global.b64 %x, [%f]; mov.u32 %a, dynamic; st.shared.b64 [%a+8], %x; "
        "st.shared.b32 [fixed+4], %a; ld.shared.b64 %y, [dynamic+8]; st.global.b64 [%t], %y; "
        "ld.shared::cta.b64 %y, [fixed]; st.global.b64 [%t+8], %y;"
    )
    thread = Thread(body, memory, target)
    assert thread.kernel.program.static_shared == 24
    assert thread.run() == 0
    assert target.tolist() == [0x1122334455667788, 32 << 32 | 0x03020100]
    assert thread.shared[40:48].tobytes() == memory.tobytes()


def test_the_last_bytes() -> None:
    """Of shared memory and of a mapped range."""
    memory, target = np.arange(4, dtype=np.uint64), np.zeros(2, np.uint64)
    body = (
        ".reg .b64 %x; ld.shared.b64 %x, [dynamic+24]; st.global.b64 [%t], %x; "
        "ld.global.b64 %x, [%f+24]; st.global.b64 [%t+8], %x;"
    )
    assert Thread(body, memory, target).run() == 0
    assert target.tolist() == [int.from_bytes(range(56, 64), "little"), 3]


def test_predicates() -> None:
    """Where one does not hold, nothing is done, and the register keeps what it had."""
    memory, target = np.array([5, 6], np.uint64), np.zeros(3, np.uint64)
    body = (
        ".reg .pred %p; .reg .b64 %x, %y; mov.b64 %x, 1; mov.b64 %y, 2; setp.eq.b64 %p, %x, 1; "
        "@%p ld.global.b64 %x, [%f]; @!%p ld.global.b64 %y, [%x]; @%p st.global.b64 [%t], %x; "
        "st.global.b64 [%t+8], %y; @!%p st.global.b64 [%t+16], %y; @%p bra $END; st.global.b64 [%t+16], %x; $END: ret;"
    )
    thread = Thread(body, memory, target)
    assert thread.run() == 0
    assert target.tolist() == [5, 2, 0]


def test_executed_instructions_are_counted() -> None:
    """Every one that is reached, whether its predicate holds or not."""
    body = ".reg .pred %p; .reg .b32 %i; mov.b32 %i, 0; $L: add.s32 %i, %i, 1; setp.lt.s32 %p, %i, 5; @%p bra $L; ret;"
    thread = Thread(body, np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    assert thread.run() == 0
    assert thread.state[COUNT] == 2 + 1 + 3 * 5 + 1


FAULTS = [
    ("ld.global.b32 %x, [%f+2];", "misaligned address", lambda f: f + 2),
    ("st.global.v4.b32 [%f+8], {%x, %x, %x, %x};", "misaligned address", lambda f: f + 8),
    ("ld.global.b32 %x, [%f+64];", "address that is not mapped", lambda f: f + 64),
    ("ld.global.b32 %x, [%f+-4];", "address that is not mapped", lambda f: f - 4),
    ("st.global.b32 [%z], %x;", "address that is not mapped", lambda f: 8),
    ("ld.shared.b32 %x, [dynamic+30];", "misaligned address", lambda f: 62),
    ("ld.shared.b32 %x, [dynamic+32];", "offset outside of shared memory", lambda f: 64),
    ("st.shared.v2.b32 [dynamic+-40], {%x, %x};", "offset outside of shared memory", lambda f: (1 << 64) - 8),
    ("trap;", "trap", lambda f: 0),
]


@pytest.mark.parametrize(("text", "cause", "where"), FAULTS, ids=[text for text, *_ in FAULTS])
def test_faults(text: str, cause: str, where) -> None:  # type: ignore[no-untyped-def]
    """Named with the kernel, the thread, the PTX and where it comes from; nothing was accessed, nothing goes on."""
    memory, target = np.arange(16, dtype=np.uint32), np.zeros(1, np.uint32)
    around = np.zeros(1 << 12, np.uint8)
    inside = around[(-around.ctypes.data) % 64 + 64 :][:64]
    inside[:] = memory.view(np.uint8)
    body = f".reg .b32 %x; mov.b32 %x, 7; .reg .b64 %z; mov.b64 %z, 8;\n.loc 1 65 3\n{text}\nst.global.b32 [%t], %x;"
    thread = Thread(body, inside, target)
    number = thread.run()
    assert number < 0
    line = thread.text.splitlines().index(text) + 1
    said = thread.kernel.fault(-number, thread.state.tolist())
    at = where(inside.ctypes.data)
    assert int(thread.state[FAULT]) == at
    blocks = r"block \(\d+, \d+, \d+\)"
    expected = (
        rf"tried: {blocks}, thread 0: {cause} {at:#x} at PTX line {line}: {re.escape(text[:-1])}; from words.py:65"
    )
    assert re.fullmatch(expected, said)
    assert not target.any()
    assert not around[: inside.ctypes.data - around.ctypes.data].any()


def test_ranges() -> None:
    """What touches is one range; the one found last is tried first, and another one after it."""
    table = Ranges([(300, 400), (100, 200), (200, 250), (380, 390)])
    assert [table.holds(at, 8) for at in (92, 100, 196, 242, 243, 300, 392, 393)] == [
        *(False, True, True, True, False, True, True, False)
    ]
    memory, target = np.arange(8, dtype=np.uint64), np.zeros(8, np.uint64)
    body = ".reg .b64 %x; " + " ".join(
        f"ld.global.b64 %x, [%f+{8 * i}]; st.global.b64 [%t+{8 * i}], %x;" for i in range(8)
    )
    assert Thread(body, memory, target).run() == 0
    assert target.tolist() == memory.tolist()
    assert process_ranges().holds(memory.ctypes.data, 64)
    assert not process_ranges().holds(0, 1)


WEAK = [
    ("ld.global.b32 %x, [%f+4];", ("ld.global.b32", 1, 0, 4, 4)),
    ("ld.global.v2.b64 {%y, %z}, [%f];", ("ld.global.v2.b64", 2, 0, 0, 16)),
    ("st.global.v4.b32 [%t], {%x, 3, %x, 4};", ("st.global.v4.b32", 0, 4, 0, 16)),
    ("ld.global.L1::no_allocate.b32 %x, [%f];", ("ld.global.L1::no_allocate.b32", 1, 0, 0, 4)),
]
ORDERED = [
    ("ld.acquire.sys.global.b64 %y, [%f];", ("ld.acquire.sys.global.b64", 1, 0, 0, 8)),
    ("ld.relaxed.gpu.global.b32 %x, [%f];", ("ld.relaxed.gpu.global.b32", 1, 0, 0, 4)),
    ("ld.volatile.global.b64 %y, [%f];", ("ld.volatile.global.b64", 1, 0, 0, 8)),
    ("st.release.sys.global.v2.b64 [%t], {%y, %z};", ("st.release.sys.global.v2.b64", 0, 2, 0, 16)),
    ("ld.mmio.relaxed.sys.global.b32 %x, [%f];", ("ld.mmio.relaxed.sys.global.b32", 1, 0, 0, 4)),
    ("st.volatile.shared.b32 [dynamic+4], %x;", ("st.volatile.shared.b32", 0, 1, 4, 4)),
    ("ld.global.cv.b32 %x, [%f];", ("ld.global.cv.b32", 1, 0, 0, 4)),
    ("atom.global.gpu.acq_rel.add.u32 %x, [%f], 5;", ("atom.global.gpu.acq_rel.add.u32", 1, 1, 0, 4)),
    ("atom.acquire.sys.global.cas.b64 %y, [%f+8], %y, %z;", ("atom.acquire.sys.global.cas.b64", 1, 2, 8, 8)),
    ("atom.global.relaxed.gpu.exch.b32 _, [%f], %x;", ("atom.global.relaxed.gpu.exch.b32", 1, 1, 0, 4)),
    ("red.relaxed.gpu.global.max.s32 [%f], %x;", ("red.relaxed.gpu.global.max.s32", 0, 1, 0, 4)),
]


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize(("text", "expected"), WEAK + ORDERED, ids=[text for text, _ in WEAK + ORDERED])
def test_events(text: str, expected: tuple[str, int, int, int, int], weak: bool) -> None:
    """What others see the order of is one always, plain accesses to global memory on weak memory alone."""
    body = ".reg .b32 %x; .reg .b64 %y, %z; mov.b32 %x, 7; mov.b64 %y, 8; mov.b64 %z, 9;\n"
    thread = Thread(body + text, np.zeros(4, np.uint64), np.zeros(4, np.uint64), weak)
    number = thread.run()
    if not weak and any(text == plain for plain, _ in WEAK):
        assert number == 0
        return
    assert thread.state[PC] == number
    event = thread.kernel.events[number]
    assert event.address
    found = (event.op, len(event.dests), len(event.args), event.address[1], event.nbytes)
    base = event.address[0]
    if base[0] == "imm":
        found = (*found[:3], base[1] + event.address[1] - 32, event.nbytes)
    else:
        assert int(thread.state[base[1]]) in thread.parameters.tolist()
    assert found == expected
    assert [dest == (-1, 0) for dest in event.dests] == [("_," in text)] * len(event.dests)
    values = [int(thread.state[n]) & 0xFF if how == "slot" else n for how, n in event.args]
    numbers = {"%x": 7, "%y": 8, "%z": 9}
    written = re.findall(r"%[xyz]|\b[345]\b(?=[,};])", text.split("[")[1].split("]")[1] if event.args else "")
    assert values == [numbers.get(one) or int(one) for one in written]
    assert thread.run() == 0


@pytest.mark.parametrize("guard", ["", "@%p "])
def test_what_the_machine_loads_is_what_is_read(guard: str) -> None:
    """Not what the register is known to have had before."""
    memory, target = np.zeros(1, np.uint32), np.zeros(2, np.uint32)
    body = (
        ".reg .b32 %x, %y; .reg .pred %p; mov.b32 %x, 5; add.s32 %y, %x, 1; setp.eq.b32 %p, %y, 6; "
        f"{guard}ld.volatile.global.b32 %x, [%f]; st.global.b32 [%t], %x; st.global.b32 [%t+4], %y;"
    )
    thread = Thread(body, memory, target)
    (slot, _), *_ = thread.kernel.events[thread.run()].dests
    thread.state[slot] = 0x1234
    assert thread.run() == 0
    assert target.tolist() == [0x1234, 6]


def test_what_the_machine_loads_is_signed_here() -> None:
    """It writes as many bits as the register has; the upper ones are filled after that."""
    memory, target = np.zeros(1, np.uint8), np.zeros(1, np.uint32)
    body = ".reg .b32 %x; ld.volatile.global.s8 %x, [%f]; st.global.b32 [%t], %x;"
    thread = Thread(body, memory, target)
    (slot, _), *_ = thread.kernel.events[thread.run()].dests
    thread.state[slot] = 0x55FE
    assert thread.run() == 0
    assert target[0] == 0xFFFFFFFE
