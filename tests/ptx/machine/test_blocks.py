"""What threads of a CTA do together, barriers and operations across lanes, with every way to do it wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx.machine.machine import Machine
from tests.ptx.machine.report import BadBarrier, BadParticipation, MachineError, Misaligned, OutsideShared, Trapped
from tests.ptx.memory.sequential import Sequential
from tests.ptx.memory.weak import Weak
from tests.ptx.texts import kernel, line_of, memory

#: each thread stores %r9 to its own 32 bits behind p0
STORE = "mul.wide.u32 %rd9, %r1, 4; add.s64 %rd9, %rd1, %rd9; st.global.b32 [%rd9], %r9;\n"


def run(body: str, threads: int = 32, seed: int = 1, parting: float = 0.3, shared: int = 0) -> np.ndarray:
    """What each thread has stored, int32."""
    words = memory(128)
    machine = Machine(seed, Sequential(), parting=parting)
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    machine.launch_later(0, kernel(body, threads, 2, weak=False), (1,), [words.ctypes.data, 0], shared)
    machine.run(limit_steps=20_000)
    return words.view(np.int32)[:threads]


def fails(error: type[MachineError], match: str, body: str, threads: int = 32, **options: int) -> None:
    with pytest.raises(error, match=match):
        run(body, threads, **options)


LANE = np.arange(32)


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("shfl.sync.idx.b32 %r9, %r1, 5, 31, -1;", np.full(32, 5)),
        ("shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1;", LANE ^ 16),
        ("shfl.sync.up.b32 %r9, %r1, 1, 0, -1;", np.maximum(LANE - 1, 0)),
        ("shfl.sync.down.b32 %r9, %r1, 3, 31, -1;", np.where(LANE < 29, LANE + 3, LANE)),
        # segments of eight lanes
        ("shfl.sync.idx.b32 %r9, %r1, 2, 6175, -1;", (LANE & 24) | 2),
        ("shfl.sync.down.b32 %r9, %r1, 3, 6175, -1;", np.where(LANE % 8 < 5, LANE + 3, LANE)),
        ("redux.sync.add.s32 %r9, %r1, -1;", np.full(32, 496)),
        ("redux.sync.max.u32 %r9, %r1, -1;", np.full(32, 31)),
        ("sub.s32 %r8, %r1, 9; redux.sync.min.s32 %r9, %r8, -1;", np.full(32, -9)),
        ("redux.sync.xor.b32 %r9, %r1, -1;", np.full(32, 0)),
        ("setp.gt.s32 %p1, %r1, 29; vote.sync.ballot.b32 %r9, %p1, -1;", np.full(32, -(1 << 30))),
        ("setp.gt.s32 %p1, %r1, 29; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", np.full(32, 1)),
        ("setp.gt.s32 %p1, %r1, 29; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", np.full(32, 0)),
        ("and.b32 %r8, %r1, 1; match.any.sync.b32 %r9, %r8, -1;", np.where(LANE & 1, -1431655766, 1431655765)),
        ("match.all.sync.b32 %r9|%p1, %r1, -1;", np.full(32, 0)),
    ],
)
def test_cross_lane(instruction: str, wanted: np.ndarray) -> None:
    for seed in range(3):
        assert run(instruction + "\n" + STORE, seed=seed).tolist() == wanted.tolist()


def test_a_shuffle_out_of_its_segment_says_so() -> None:
    body = "shfl.sync.up.b32 %r8|%p1, %r1, 1, 0, -1; selp.b32 %r9, 1, 0, %p1;\n" + STORE
    assert run(body).tolist() == [0] + [1] * 31


def test_halves_of_a_warp_reduce_apart() -> None:
    """Each half has its own mask, and they come there in any order."""
    body = """
setp.lt.u32 %p1, %r1, 16;
selp.b32 %r7, 0x0000ffff, 0xffff0000, %p1;
redux.sync.add.s32 %r9, %r1, %r7;
"""
    for seed in range(4):
        assert run(body + STORE, seed=seed, parting=0.6).tolist() == [120] * 16 + [376] * 16


def test_branches_meet_by_their_mask() -> None:
    """Both arms have an instruction of their own for the same shuffle."""
    body = """
setp.lt.u32 %p1, %r1, 16;
@%p1 bra $L0;
shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1;
bra $L1;
$L0:
shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1;
$L1:
"""
    assert run(body + STORE).tolist() == (LANE ^ 16).tolist()


def test_not_in_its_own_mask() -> None:
    fails(BadParticipation, r"lane \d+ is not in its own mask 0xffff", "redux.sync.add.s32 %r9, %r1, 0xffff;\n")


@pytest.mark.parametrize("seed", range(4))
def test_lanes_of_the_mask_have_exited(seed: int) -> None:
    body = "setp.eq.u32 %p1, %r1, 7;\n@%p1 ret;\nshfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;\n"
    fails(BadParticipation, rf"PTX line {line_of(body, 'shfl')}.* exited", body, seed=seed)


def test_lanes_of_the_mask_are_elsewhere() -> None:
    """Half of the warp waits for all at a shuffle, the other half at a reduction."""
    body = """
setp.lt.u32 %p1, %r1, 16;
@%p1 bra $L0;
redux.sync.add.s32 %r9, %r1, -1;
ret;
$L0:
shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;
"""
    fails(BadParticipation, r"16 lanes: shfl[\s\S]*16 lanes: redux|16 lanes: redux[\s\S]*16 lanes: shfl", body)


def test_a_shuffle_reads_a_lane_outside_of_its_mask() -> None:
    body = "setp.gt.u32 %p1, %r1, 15;\n@%p1 ret;\nshfl.sync.bfly.b32 %r9, %r1, 16, 31, 0xffff;\n"
    fails(BadParticipation, r"reads lane \d+, which does not take part", body)


def test_a_barrier_orders_shared_memory() -> None:
    """Each thread reads what one of another warp has stored before."""
    body = """
shl.b32 %r3, %r1, 2;
st.shared.b32 [%r3], %r1;
bar.sync 0;
xor.b32 %r4, %r3, 128;
ld.shared.b32 %r9, [%r4];
"""
    for seed in range(4):
        assert run(body + STORE, threads=64, seed=seed, shared=256).tolist() == (np.arange(64) ^ 32).tolist()


def test_named_barriers_count_threads() -> None:
    """Two warps meet at barrier 1 while the third waits at barrier 2 for the first, which only arrives there."""
    body = """
shr.u32 %r3, %r1, 5;
setp.eq.u32 %p1, %r3, 2;
@%p1 bra $L2;
barrier.sync 1, 64;
setp.eq.u32 %p2, %r3, 1;
@%p2 bra $L3;
mov.u32 %r8, 0;
st.shared.b32 [%r8], 9;
barrier.arrive 2, 64;
bra $L3;
$L2:
barrier.sync 2, 64;
mov.u32 %r8, 0;
ld.shared.b32 %r9, [%r8];
"""
    for seed in range(4):
        assert run(body + STORE + "$L3:\n", threads=96, seed=seed, shared=16)[64:].tolist() == [9] * 32


def test_a_barrier_that_a_warp_never_reaches() -> None:
    body = "setp.gt.u32 %p1, %r1, 31;\n@%p1 ret;\nbar.sync 0;\n"
    fails(BadBarrier, r"barrier 0 waits for 64 threads, and only 32 have not exited[\s\S]*32 lanes: exited", body, 64)


def test_warps_wait_at_different_barriers() -> None:
    body = """
setp.gt.u32 %p1, %r1, 31;
@%p1 bra $L0;
bar.sync 1;
ret;
$L0:
bar.sync 2;
"""
    line = line_of(body, "bar.sync 1")
    fails(BadBarrier, rf"all threads wait[\s\S]*warp 0: 32 lanes: bar.sync \(PTX line {line}\)", body, 64)


def test_a_warp_that_comes_to_an_aligned_barrier_in_two_places() -> None:
    body = """
setp.lt.u32 %p1, %r1, 16;
@%p1 bra $L0;
bar.sync 0;
ret;
$L0:
bar.sync 0;
"""
    fails(BadBarrier, "32 of 32 lanes come to an aligned barrier, at", body)


def test_counts_that_differ() -> None:
    body = "shr.u32 %r3, %r1, 5; add.s32 %r3, %r3, 1; shl.b32 %r3, %r3, 5;\nbarrier.sync 1, %r3;\n"
    fails(BadBarrier, r"barrier 1 of \d+ threads, of \d+ for others", body, 96, parting=0)


def test_a_count_that_is_no_warp() -> None:
    fails(BadBarrier, "barrier 1 of 33 threads", "barrier.sync 1, 33;\n", 64)


def test_faults_of_the_compiled_code() -> None:
    fails(Misaligned, "misaligned address", "add.s64 %rd3, %rd1, 2;\nst.global.b32 [%rd3], 1;\n")
    fails(OutsideShared, "shared memory", "mov.u32 %r8, 64;\nst.shared.b32 [%r8], 1;\n", shared=64)
    fails(OutsideShared, "offset 0x40", "mov.u32 %r8, 60;\natom.shared.add.u32 %r3, [%r8+4], 1;\n", shared=64)
    fails(Trapped, "trap", "trap;\n")


@pytest.mark.parametrize("model", [Sequential, lambda: Weak(races="raise")])
def test_matrices_of_shared_memory(model: Callable[[], object]) -> None:
    """Eight rows of eight numbers of 16 bits: a lane has two of a row, another one gives the row's address."""
    body = """
and.b32 %r3, %r1, 7;
shl.b32 %r3, %r3, 4;
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r1};
bar.warp.sync -1;
shl.b32 %r4, %r1, 2;
ld.shared.b32 %r5, [%r4];
bar.warp.sync -1;
add.s32 %r5, %r5, 100;
st.shared.b32 [%r4], %r5;
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r3];
"""
    words = memory(16)
    machine = Machine(1, model())
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    every = machine.memory.every_access
    machine.launch_later(0, kernel(body + STORE, 32, weak=every), (1,), [words.ctypes.data, 0], shared=128)
    machine.run(limit_steps=20_000)
    assert words.view(np.int32).tolist() == (np.arange(32) + 100).tolist()


@pytest.mark.parametrize(
    "read", ["mov.u32 %r8, 0;\nld.shared.b32 %r9, [%r8];\n", "xor.b32 %r9, %r8, 5;\n"], ids=["shared", "register"]
)
def test_registers_and_shared_memory_hold_anything_at_first(read: str) -> None:
    """Who reads what it has not written gets another value by another seed."""
    assert len({int(run(read + STORE, seed=seed, shared=16)[0]) for seed in range(4)}) == 4
