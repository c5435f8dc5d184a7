"""Faults that no interpreter of one thread after another sees: races, reads of nothing, addresses of nobody."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.machine.machine import Machine
from tests.ptx.machine.report import DataRace, MachineError, Uninitialised, Unmapped
from tests.ptx.memory.clocks import NOBODY
from tests.ptx.memory.histories import LONGEST, Cell, Message
from tests.ptx.memory.operation import INITIAL
from tests.ptx.memory.regions import Region
from tests.ptx.memory.weak import Weak
from tests.ptx.texts import kernel, line_of, memory

SEEDS = range(6)


def run(
    body: str,
    *,
    grid: int = 1,
    threads: int = 1,
    ranks: int = 1,
    seed: int = 0,
    races: str = "raise",
    fresh: bool = False,
) -> Machine:
    """Each rank launches ``body``; p0 is the memory, p1 the rank."""
    words = memory(64)
    machine = Machine(seed, Weak(races=races))
    machine.memory.register("words", words.ctypes.data, words.nbytes, fresh=fresh)
    for rank in range(ranks):
        machine.launch_later(rank, kernel(body, threads), (grid,), [words.ctypes.data, rank])
    machine.run(limit_steps=20_000)
    machine.kept = words  # type: ignore[attr-defined]
    return machine


def in_turn(first: str, second: str, tell: str, look: str) -> str:
    """CTA 0 executes ``first`` and tells; CTA 1 waits for that and executes ``second``."""
    return f"""
setp.eq.u32 %p1, %r2, 1;
@%p1 bra $L1;
{first}
{tell}.global.b64 [%rd1+64], 1;
ret;
$L1:
{look}.global.b64 %rd3, [%rd1+64];
setp.eq.s64 %p2, %rd3, 0;
@%p2 bra $L1;
{second}
"""


ST, LD = "st.global.b64 [%rd1], 7;", "ld.global.b64 %rd4, [%rd1];"
RELEASE, ACQUIRE = "st.release.gpu", "ld.acquire.gpu"


@pytest.mark.parametrize(("first", "second"), [(ST, LD), (ST, ST.replace("7", "8")), (LD, ST)])
@pytest.mark.parametrize(
    ("tell", "look", "ordered"),
    [
        (RELEASE, ACQUIRE, True),
        ("st.relaxed.gpu", ACQUIRE, False),
        (RELEASE, "ld.relaxed.gpu", False),
        ("st.release.cta", ACQUIRE, False),
    ],
)
def test_plain_accesses_of_two_ctas(first: str, second: str, tell: str, look: str, ordered: bool) -> None:
    """Write and read, write and write, read and write: each is a race exactly where nothing orders it."""
    body = in_turn(first, second, tell, look)
    for seed in SEEDS:
        if ordered:
            run(body, grid=2, seed=seed)
        else:
            with pytest.raises(DataRace):
                run(body, grid=2, seed=seed)


LOW, HIGH, HOST = "ld.global.b32 %r4, [%rd1];", "ld.global.b32 %r5, [%rd1+4];", "ld.relaxed.sys.global.b32 %r4, [%rd1];"


@pytest.mark.parametrize(
    ("reads", "write"),
    [
        (LOW + HIGH, "st.global.b32 [%rd1], 7;"),
        (HIGH + LOW, "st.global.b32 [%rd1], 7;"),
        # the strong one does not race, and the weak one does
        (LOW + HOST, "st.relaxed.sys.global.b32 [%rd1], 7;"),
    ],
)
def test_a_read_races_whatever_is_read_after_it(reads: str, write: str) -> None:
    body = in_turn(reads, write, "st.relaxed.gpu", "ld.relaxed.gpu")
    for seed in SEEDS:
        with pytest.raises(DataRace):
            run(body, grid=2, seed=seed)


def test_both_accesses_are_told() -> None:
    body = in_turn(ST, LD, "st.relaxed.gpu", ACQUIRE)
    with pytest.raises(DataRace) as found:
        run(body, grid=2, seed=3)
    told = str(found.value)
    assert "seed 3" in told
    assert "words+0x0, 8 bytes" in told
    assert f"rank 0 k CTA (0, 0) thread 0 wrote 0x7 by st.global.b64 (PTX line {line_of(body, ST)}" in told
    assert "last accesses of words+0x0" in told
    assert f"rank 0 k CTA (1, 0) thread 0 reads it by ld.global.b64 (PTX line {line_of(body, LD)}" in told


def test_races_can_be_kept() -> None:
    """Each pair of instructions once, and the run goes on."""
    machine = run(in_turn(ST, LD, "st.relaxed.gpu", ACQUIRE), grid=2, races="keep")
    assert len(machine.memory.races.found) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_are_told_apart(seed: int) -> None:
    """Threads that write each their own byte of a word do not race; two of them share the last one."""
    own = "cvt.u64.u32 %rd3, %r1; add.s64 %rd3, %rd1, %rd3; st.global.b8 [%rd3], 5;\n"
    run(own, threads=32, seed=seed)
    shared = "min.u32 %r3, %r1, 30; cvt.u64.u32 %rd3, %r3; add.s64 %rd3, %rd1, %rd3; st.global.b8 [%rd3], %r1;\n"
    with pytest.raises(DataRace, match=r"words\+0x1e, 1 bytes"):
        run(shared, threads=32, seed=seed)


def test_threads_of_a_cta_may_store_the_same_at_once() -> None:
    """Triton lets lanes that hold the same value store it; two values, or two instructions, race."""
    run("st.global.b64 [%rd1], %rd2;\n", threads=64)
    for body in ("cvt.u64.u32 %rd3, %r1;\nst.global.b64 [%rd1], %rd3;\n", "st.global.b64 [%rd1], 1;\n" * 2):
        with pytest.raises(DataRace):
            run(body, threads=64)


def test_strong_accesses_do_not_race() -> None:
    body = "atom.global.gpu.relaxed.add.u64 %rd3, [%rd1], 1;\nld.relaxed.gpu.global.b64 %rd4, [%rd1];\n"
    run(body, grid=4)


def test_strong_at_too_narrow_a_scope_is_a_race() -> None:
    """Relaxed at GPU scope is as good as plain for another rank."""
    body = "st.relaxed.gpu.global.b64 [%rd1], 1;\n"
    run(body, grid=2)
    with pytest.raises(DataRace):
        run(body, ranks=2)
    run(body.replace("gpu", "sys"), ranks=2)


@pytest.mark.parametrize("with_bar", [True, False])
def test_a_barrier_orders_plain_accesses(with_bar: bool) -> None:
    body = f"""
mul.wide.u32 %rd3, %r1, 8; add.s64 %rd3, %rd1, %rd3;
st.global.b64 [%rd3], 1;
{"bar.sync 0;" if with_bar else ""}
xor.b32 %r3, %r1, 32; mul.wide.u32 %rd4, %r3, 8; add.s64 %rd4, %rd1, %rd4;
ld.global.b64 %rd5, [%rd4];
"""
    for seed in SEEDS:
        if with_bar:
            run(body, threads=64, seed=seed)
        else:
            with pytest.raises(DataRace):
                run(body, threads=64, seed=seed)


def test_threads_of_a_warp_race_too_without_a_warp_barrier() -> None:
    body = """
setp.eq.u32 %p1, %r1, 0;
@%p1 st.global.b64 [%rd1], 1;
bar.warp.sync -1;
ld.global.b64 %rd5, [%rd1];
"""
    run(body, threads=32)
    with pytest.raises(DataRace):
        run(body.replace("bar.warp.sync -1;", ""), threads=32)


def joint(between: str, access: str) -> str:
    """All lanes of warp 0 store 7 in one place, and those of warp 1 store 1 in another; what each thread does then."""
    return f"""
shr.u32 %r3, %r1, 5;
mul.wide.u32 %rd3, %r3, 8; add.s64 %rd3, %rd1, %rd3;
setp.eq.u32 %p1, %r3, 0;
mov.b64 %rd4, 1;
@%p1 mov.b64 %rd4, 7;
st.global.b32 [%rd3], %rd4;
{between}
{access}
"""


def test_what_a_whole_warp_stores_in_one_place_is_a_write_of_each_lane() -> None:
    own, both = "ld.global.b32 %r4, [%rd3];", "ld.global.b32 %r4, [%rd1];"
    for seed in SEEDS:
        run(joint("", own), threads=64, seed=seed)
        run(joint("bar.sync 0;", both), threads=64, seed=seed)
        with pytest.raises(DataRace):
            run(joint("", both), threads=64, seed=seed)
        with pytest.raises(DataRace):
            run(joint("", "xor.b32 %r4, %r1, 1;\nst.global.b32 [%rd3], %r4;"), threads=64, seed=seed)


@pytest.mark.parametrize("lane", [0, 31])
def test_any_lane_of_a_warp_tells_what_all_have_stored_in_one_place(lane: int) -> None:
    first = f"st.global.b64 [%rd1], 7;\nsetp.eq.u32 %p3, %r1, {lane};"
    for tell in ("@%p3 st.release.gpu", "@%p3 st.relaxed.gpu"):
        # who waits in CTA 1 reads a cell that all lanes of CTA 0 have written, and overwrites it
        body = in_turn(first, LD + "bar.warp.sync -1;" + ST.replace("7", "8"), tell, ACQUIRE)
        for seed in SEEDS:
            if "release" in tell:
                run(body, grid=2, threads=32, seed=seed)
            else:
                with pytest.raises(DataRace):
                    run(body, grid=2, threads=32, seed=seed)


@pytest.mark.parametrize("last", ["st.global.b32 [%rd1], 2;", "st.global.b64 [%rd1], 2;"])
def test_what_a_thread_writes_beside_other_bytes_tells_it_nothing_of_these(last: str) -> None:
    body = in_turn(
        "st.global.b32 [%rd1], 7;", f"st.global.b32 [%rd1+4], 1;\n{last}", "st.relaxed.gpu", "ld.relaxed.gpu"
    )
    for seed in SEEDS:
        with pytest.raises(DataRace, match="wrote 0x7"):
            run(body, grid=2, seed=seed)


def test_halves_that_the_host_has_not_seen_are_shown_with_what_was_beside_them() -> None:
    words = memory(1)
    cell = Cell(Region("words", words.ctypes.data, words.nbytes, True, False), 0)
    halves = (1 << 32) - 1, (1 << 32) - 1 << 32

    def write(count: int) -> None:
        for number in range(count):
            order = cell.history[-1].order + 1.0
            cell.append(Message(0, halves[number % 2], NOBODY, -1, INITIAL, order, 0))

    write(2 * LONGEST)
    assert len(cell.history) == 2 * LONGEST + 1
    cell.shown = cell.history[-1].order
    write(LONGEST)
    assert len(cell.history) == 2 * LONGEST + 1


def shared(between: str, seed: int, memory_model: Weak) -> np.ndarray:
    """Two warps: each thread stores to shared memory, and loads what one of the other warp has stored."""
    body = f"""
shl.b32 %r3, %r1, 2;
st.shared.b32 [%r3], %r1;
{between}
xor.b32 %r4, %r3, 128;
ld.shared.b32 %r9, [%r4];
mul.wide.u32 %rd9, %r1, 4; add.s64 %rd9, %rd1, %rd9; st.global.b32 [%rd9], %r9;
"""
    words = memory(32)
    machine = Machine(seed, memory_model)
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    machine.launch_later(0, kernel(body, 64), (2,), [words.ctypes.data, 0], shared=256)
    machine.run(limit_steps=20_000)
    return words.view(np.int32)


def test_shared_memory_is_watched_too() -> None:
    for seed in range(3):
        assert shared("bar.sync 0;", seed, Weak(races="keep")).tolist() == (np.arange(64) ^ 32).tolist()
        with pytest.raises(MachineError, match=r"shared memory of rank 0 k CTA \(\d, 0\)\+0x") as found:
            shared("", seed, Weak())
        assert isinstance(found.value, DataRace | Uninitialised)


def test_shared_memory_that_no_thread_has_written() -> None:
    body = "shl.b32 %r3, %r1, 2;\nadd.s32 %r3, %r3, 4;\nst.shared.b32 [%r3], %r1;\nld.shared.b32 %r4, [%r3+-4];\n"
    words = memory(8)
    for model, fails in ((Weak(), True), (Weak(shared_fresh=False), False)):
        machine = Machine(1, model)
        machine.launch_later(0, kernel(body, 1), (1,), [words.ctypes.data, 0], shared=64)
        if fails:
            with pytest.raises(Uninitialised, match="shared memory of rank 0 k CTA"):
                machine.run()
        else:
            machine.run()


def test_memory_that_nobody_has_written() -> None:
    body = "st.global.b32 [%rd1], 1;\nld.global.b32 %r3, [%rd1];\nld.global.b64 %rd4, [%rd1];\n"
    run(body)
    with pytest.raises(Uninitialised) as found:
        run(body, fresh=True)
    told = str(found.value)
    assert f"PTX line {line_of(body, 'ld.global.b64')}" in told
    assert "last accesses of words+0x0" in told
    assert "wrote 0x1 by st.global.b32" in told


def test_what_the_host_has_written_is_written() -> None:
    words = memory(8)
    machine = Machine(1, Weak())
    machine.memory.register("words", words.ctypes.data, words.nbytes, fresh=True)

    def body() -> None:
        words[0] = 5
        machine.launch(0, kernel(LD + "\n", 1), (1,), [words.ctypes.data, 0])

    machine.host(0, body)
    machine.run()


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ("ld.global.b64 %rd3, [%rd1+512];\n", "0 bytes behind the end of words"),
        ("st.global.b32 [%rd1+-8], 1;\n", "8 bytes before words"),
        ("atom.global.add.u32 %r3, [%rd1+4096], 1;\n", "3584 bytes behind the end of words"),
    ],
)
def test_an_address_of_nobody(body: str, where: str) -> None:
    for races in ("raise", "ignore"):
        with pytest.raises(Unmapped, match=rf"rank 0 k CTA \(0, 0\) thread 0: .*PTX line \d+.*{where}"):
            run(body, races=races)


def test_an_account_of_a_cell() -> None:
    """For a result that is wrong without any rule being broken."""
    body = "st.global.b64 [%rd1], %rd2;\natom.global.sys.acq_rel.add.u64 %rd3, [%rd1], 3;\n"
    body += "ld.volatile.global.b64 %rd4, [%rd1];\n"
    machine = run(body)
    told = machine.memory.account(machine.kept.ctypes.data).splitlines()  # type: ignore[attr-defined]
    assert told[0] == "last accesses of words+0x0:"
    for line, wanted in zip(
        told[2:], ("wrote 0x0 by st.global.b64", "wrote 0x3 by atom", "read 0x3 by ld.vol"), strict=True
    ):
        assert wanted in line
    assert "no access" in machine.memory.account(8)


def test_sizes_mix() -> None:
    """A word read at once may have its halves from different stores, each of them whole."""
    body = """
setp.eq.u32 %p1, %r2, 1;
@%p1 bra $L1;
st.relaxed.gpu.global.b32 [%rd1], 1;
st.relaxed.gpu.global.b32 [%rd1+4], 1;
ret;
$L1:
ld.relaxed.gpu.global.b64 %rd3, [%rd1];
st.global.b64 [%rd1+128], %rd3;
"""
    runs = (run(body, grid=2, seed=seed, races="ignore") for seed in range(60))
    found = {int(machine.kept[16]) for machine in runs}  # type: ignore[attr-defined]
    assert found == {0, 1, 1 << 32, 1 << 32 | 1}
