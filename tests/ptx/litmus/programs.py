"""A litmus test as PTX, and the outcomes that it reaches on the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from tests.ptx.litmus.litmus import Litmus
from tests.ptx.machine.machine import Machine
from tests.ptx.memory.weak import Weak
from tests.ptx.translation.host_code import Kernel

#: copies of a test that run in one launch, each on its own locations
COPIES = 16
LOCATIONS = "fghxyz"
REGISTERS = "abcde"
#: offsets in shared memory: of a place, and an mbarrier
SHARED = {"s": 0, "m": 64}
SHARED_BYTES = 72
#: what threads say to bulk copies of 16 bytes, and to the mbarrier that they tell
_COPIES = {
    "copy.in": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {}, {}, 16, {};",
    "copy.out": "cp.async.bulk.global.shared::cta.bulk_group {}, {}, 16;",
    "commit": "cp.async.bulk.commit_group;",
    "wait_group": "cp.async.bulk.wait_group 0;",
    "wait_group.read": "cp.async.bulk.wait_group.read 0;",
    "init": "mbarrier.init.shared.b64 {}, 1; fence.mbarrier_init.release.cluster;",
    "expect": "mbarrier.arrive.expect_tx.shared.b64 _, {}, 16;",
    "phase": "$M{n}: mbarrier.try_wait.parity.shared.b64 %p1, {}, 0; @!%p1 bra $M{n};",
    "phase.relaxed": "$M{n}: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p1, {}, 0; @!%p1 bra $M{n};",
    "st.shared": "st.shared.v2.b64 {0}, {{{1}, {1}}};",
    "ld.shared": "ld.shared.b64 {}, {};",
}
#: bytes between locations, and of one copy: its locations and its registers
STRIDE, WHOLE = 64, 1024


def _instruction(text: str, number: int) -> str:
    """One of a thread's, in full; its number makes a label its own."""
    op, _, rest = text.strip().partition(" ")
    parts = op.split(".")
    if parts[0] in ("fence", "membar", "barrier"):
        return f"{'.'.join(parts)}{' ' + rest if rest else ''};"
    words = [one.strip() for one in rest.split(",")]
    where = {name: f"[%rd1+{STRIDE * n}]" for n, name in enumerate(LOCATIONS)}
    where |= {name: f"[%r1+{offset}]" for name, offset in SHARED.items()}
    register = {name: f"%rd{10 + n}" for n, name in enumerate(REGISTERS)}
    named = [where.get(word, register.get(word, word)) for word in words]
    if op in _COPIES:
        return _COPIES[op].format(*named, n=number)
    if parts[0] in ("atom", "red"):
        kind = {"exch": "b64", "cas": "b64"}.get(parts[-1], "u64")
        return f"{parts[0]}.{'.'.join([*parts[1:-1], 'global', parts[-1], kind])} {', '.join(named)};"
    vector = [parts.pop()] if parts[-1] == "v2" else []
    mnemonic = ".".join([*parts, "global", *vector, "b64"]).replace(".weak", "")
    values = named[1:] if parts[0] == "st" else named[:-1]
    group = f"{{{', '.join(values)}}}" if vector else values[0]
    return f"{mnemonic} {named[0]}, {group};" if parts[0] == "st" else f"{mnemonic} {group}, {named[-1]};"


def ptx(test: Litmus) -> str:
    """The kernel that all ranks of a test launch: a thread finds its part by rank, CTA and lane."""
    places = test.places
    ctas = 1 + max(cta for _, cta in places)
    lanes = max(places.count(place) for place in places)
    code = []
    for number, (rank, cta) in enumerate(places):
        lane = places[:number].count((rank, cta))
        code += [f"setp.eq.u32 %p1, %r7, {(rank * ctas + cta) * lanes + lane};", f"@%p1 bra $T{number};"]
    code.append("ret;")
    for number, thread in enumerate(test.threads):
        code.append(f"$T{number}:")
        code += [_instruction(one, 100 * number + place) for place, one in enumerate(thread.split(";"))]
        written = [
            name for name in REGISTERS if any(name in one.replace(",", " ").split()[1:] for one in thread.split(";"))
        ]
        code += [
            f"st.global.b64 [%rd1+{512 + STRIDE * REGISTERS.index(name)}], %rd{10 + REGISTERS.index(name)};"
            for name in written
        ]
        code.append("ret;")
    lines = "\n".join(code)
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry litmus(.param .u64 .ptr .global .align 1 base, .param .u32 rank)
.reqntid {lanes}
{{
.reg .pred %p<2>;
.reg .b32 %r<8>;
.reg .b64 %rd<16>;
ld.param.b64 %rd1, [base];
ld.param.b32 %r1, [rank];
mov.u32 %r2, %ctaid.x;
div.u32 %r3, %r2, {ctas};
rem.u32 %r4, %r2, {ctas};
mad.lo.s32 %r5, %r1, {ctas}, %r4;
mov.u32 %r6, %tid.x;
mad.lo.s32 %r7, %r5, {lanes}, %r6;
mov.u32 %r1, 0;
mul.wide.u32 %rd2, %r3, {WHOLE};
add.s64 %rd1, %rd1, %rd2;
{lines}
}}
"""


@lru_cache
def kernel(test: Litmus) -> Kernel:
    return Kernel(ptx(test), weak=True)


def outcomes(test: Litmus, seeds: range, memory: Callable[[], Weak], enough: bool = True) -> Counter[bool]:
    """How often the outcome was reached, and how often not, over all copies of all ``seeds``.

    Args:
        enough: stop once it has been reached.
    """
    places = test.places
    ctas = 1 + max(cta for _, cta in places)
    wanted = [(name, int(value)) for name, value in (one.split("=") for one in test.outcome.split())]
    found: Counter[bool] = Counter()
    compiled = kernel(test)
    words = np.zeros(COPIES * WHOLE // 8 + 8, np.uint64)
    base = words.ctypes.data + (-words.ctypes.data) % 64
    skipped = (base - words.ctypes.data) // 8
    for seed in seeds:
        words[:] = 0
        machine = Machine(seed, memory(), resident=COPIES * ctas, burst=0.6)
        machine.memory.register("locations", base, COPIES * WHOLE)
        for rank in sorted({rank for rank, _ in places}):
            machine.launch_later(rank, compiled, (COPIES * ctas,), [base, rank], SHARED_BYTES * test.copies)
        machine.run(limit_steps=20_000)
        for copy in range(COPIES):
            at = skipped + copy * WHOLE // 8
            found[all(int(words[at + _word(name)]) == value for name, value in wanted)] += 1
        if enough and found[True]:
            break
    return found


def _word(name: str) -> int:
    place = STRIDE * LOCATIONS.index(name) if name in LOCATIONS else 512 + STRIDE * REGISTERS.index(name)
    return place // 8
