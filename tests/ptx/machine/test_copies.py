"""Bulk copies and mbarriers: copies happen late and in pieces, and what a kernel does wrong is told by its line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx.machine.machine import Machine
from tests.ptx.machine.report import (
    BadMBarrier,
    DataRace,
    MachineError,
    Misaligned,
    NoEnd,
    OutsideShared,
    Unfinished,
    Unmapped,
)
from tests.ptx.memory.sequential import Sequential
from tests.ptx.memory.weak import Weak
from tests.ptx.texts import kernel, line_of, memory

#: Bytes of shared memory: 64 of rows, and mbarriers behind them.
SHARED = 96
MAKE = "mov.u32 %r8, 64; mov.u32 %r9, 0; mbarrier.init.shared.b64 [%r8], 1; fence.mbarrier_init.release.cluster;\n"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 64;\n"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd1], 64, [%r8];\n"
WAIT = "$L0: mbarrier.try_wait.parity.shared.b64 %p1, [%r8], 0; @!%p1 bra $L0;\n"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1+64], [%r9], 64;\n"
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;\n"
WHOLE = MAKE + EXPECT + LOAD + WAIT + STORE + DONE


def run(body: str, seed: int = 1, weak: bool = True, threads: int = 1, **habits: float) -> tuple[Machine, np.ndarray]:
    """One CTA; eight words from the first to the second part of memory, if ``body`` is right."""
    words = memory(16)
    words[:8] = np.arange(8) + 5
    machine = Machine(seed, Weak() if weak else Sequential(), **habits)
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    machine.launch_later(0, kernel(body, threads, weak=weak), (1,), [words.ctypes.data, 0], shared=SHARED)
    machine.run(limit_steps=3000)
    return machine, words


def fails(error: type[MachineError], body: str, match: str | None = None, weak: bool = True, threads: int = 1) -> None:
    with pytest.raises(error, match=match):
        run(body, weak=weak, threads=threads)


@pytest.mark.parametrize("weak", [True, False])
def test_there_and_back(weak: bool) -> None:
    for seed in range(4):
        _, words = run(WHOLE, seed, weak)
        assert words[8:].tolist() == words[:8].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]


def test_a_seed_is_one_run() -> None:
    first, again, other = (run(WHOLE, seed)[0] for seed in (3, 3, 4))
    assert first.digest() == again.digest() != other.digest()
    assert first.steps == again.steps


def test_a_copy_is_seen_in_pieces_and_in_any_order() -> None:
    """A thread that looks all the time finds some words of a copy and not others, on the strongest memory."""
    look = MAKE + EXPECT + "".join(f"st.shared.b64 [%r9+{16 * n}], 0;\n" for n in range(4)) + LOAD
    loads = "".join(f"ld.volatile.shared.b64 %rd{10 + n}, [%r9+{16 * n}];\n" for n in range(4))
    stores = "".join(f"st.global.b64 [%rd1+{64 + 8 * n}], %rd{10 + n};\n" for n in range(4))
    found = set()
    for seed in range(40):
        _, words = run(look + loads + WAIT + stores, seed, weak=False, copy_share=0.5)
        found.add(tuple(bool(word) for word in words[8:12]))
    assert (False, False, False, False) in found
    assert len(found) > 4


def test_copies_end_in_any_order() -> None:
    """Two groups: the second one may be over first, and a wait for all but one is over with the first alone."""
    body = "mov.u32 %r9, 0;\n" + "".join(f"st.shared.b64 [%r9+{8 * n}], {n};\n" for n in range(8))
    body += "fence.proxy.async;\n"
    one = "cp.async.bulk.global.shared::cta.bulk_group [%rd1+{}], [%r9+{}], 16; cp.async.bulk.commit_group;\n"
    body += one.format(64, 0) + one.format(80, 16) + "cp.async.bulk.wait_group 1;\n"
    body += "ld.volatile.global.b64 %rd5, [%rd1+72]; ld.volatile.global.b64 %rd6, [%rd1+88];\n"
    body += "cp.async.bulk.wait_group 0; st.global.b64 [%rd1], %rd5; st.global.b64 [%rd1+8], %rd6;\n"
    seconds = set()
    for seed in range(20):
        _, words = run(body, seed, weak=False)
        assert words[0] == 1
        seconds.add(int(words[1]))
    assert seconds == {0, 3}


@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("[%rd1], 64, [%r8]", "[%rd1+8], 64, [%r8]", Misaligned),
        ("[%r9], [%rd1], 64", "[%r9+8], [%rd1], 64", Misaligned),
        ("[%r9], [%rd1], 64", "[%r9], [%rd1], 56", Misaligned),
        ("[%r9], [%rd1], 64", "[%r9], [%rd1], 0", Misaligned),
        ("[%r9], [%rd1], 64", "[%r9+48], [%rd1], 64", OutsideShared),
        ("[%r9], [%rd1], 64", "[%r9+16], [%rd1], 64", BadMBarrier),
        ("[%rd1], 64, [%r8]", "[%rd1+80], 64, [%r8]", Unmapped),
        ("64, [%r8]", "64, [%r8+4]", Misaligned),
        ("64, [%r8]", "64, [%r8+32]", OutsideShared),
        ("64, [%r8]", "64, [%r8+8]", BadMBarrier),
    ],
)
def test_what_a_copy_must_not_name(before: str, after: str, error: type[MachineError], weak: bool) -> None:
    body = WHOLE.replace(LOAD, LOAD.replace(before, after))
    assert body != WHOLE
    fails(error, body, rf"thread 0: cp\.async\.bulk\S* \(PTX line {line_of(body, '::complete_tx')}\)", weak)


def test_counts_of_an_mbarrier() -> None:
    arrive = "mbarrier.arrive.shared.b64 _, [%r8];\n"
    fails(BadMBarrier, MAKE + MAKE.replace("fence", "//"), "there is one already")
    fails(BadMBarrier, MAKE.replace("[%r8], 1", "[%r8], 0"), "0 arrivals")
    fails(
        BadMBarrier, MAKE.replace("[%r8], 1", "[%r8], 2") + arrive.replace("];", "], 3;"), "3 arrivals at the mbarrier"
    )
    fails(BadMBarrier, MAKE + EXPECT + arrive, "1 arrivals at the mbarrier at offset 0x40, phase 0: 0 of 1")
    fails(BadMBarrier, MAKE + EXPECT.replace("64;", "1048576;"), "more than 1048575 bytes")
    fails(BadMBarrier, MAKE + WAIT.replace("], 0", "], 2"), "parity 2")
    fails(
        BadMBarrier, arrive.replace("%r8", "%r9").join(["mov.u32 %r9, 0;\n", ""]), "there is no mbarrier at offset 0x0"
    )
    run(MAKE + arrive * 3)


@pytest.mark.parametrize("weak", [True, False])
def test_bytes_that_nobody_expects(weak: bool) -> None:
    """The phase is over before the copy is, or never goes on as it should."""
    with pytest.raises(BadMBarrier, match=r"more bytes than were expected|of a copy of phase 0, which is over"):
        run(WHOLE.replace("_, [%r8], 64", "_, [%r8], 48"), weak=weak)


@pytest.mark.parametrize("weak", [True, False])
def test_a_phase_that_never_ends_is_named(weak: bool) -> None:
    body = WHOLE.replace("_, [%r8], 64", "_, [%r8], 80")
    fails(NoEnd, body, r"mbarrier at offset 0x40, phase 0: 0 of 1 arrivals and 16 bytes are missing", weak)


def test_no_access_of_an_mbarriers_bytes() -> None:
    fails(BadMBarrier, MAKE + "ld.shared.b32 %r3, [%r8+4];\n", r"ld\.shared\.b32.*4 bytes at offset 0x44 are of the")
    run(MAKE + "mbarrier.inval.shared.b64 [%r8]; st.shared.b32 [%r8+4], 1;\n")


@pytest.mark.parametrize("weak", [True, False])
def test_a_cta_that_ends_too_early(weak: bool) -> None:
    fails(Unfinished, MAKE + EXPECT + LOAD, "nobody has waited for the copies of phase 0", weak)
    fails(Unfinished, MAKE + EXPECT + LOAD + "mbarrier.inval.shared.b64 [%r8];\n", "nobody has waited", weak)
    stored = MAKE + EXPECT + LOAD + WAIT + STORE
    fails(Unfinished, stored + "cp.async.bulk.commit_group;\n", "1 of 1 are left", weak)
    fails(Unfinished, stored + "cp.async.bulk.wait_group 0;\n", "1 of 1 are left", weak)


@pytest.mark.parametrize("weak", [True, False])
def test_what_is_still_to_be_written_ends_with_the_kernel(weak: bool) -> None:
    for seed in range(4):
        _, words = run(WHOLE.replace("wait_group", "wait_group.read"), seed, weak)
        assert words[8:].tolist() == words[:8].tolist()


def test_reads_and_writes_beside_a_copy_race() -> None:
    written = "st.shared.b64 [%r9], 1; fence.proxy.async;\n"
    run(WHOLE.replace(EXPECT, written + EXPECT))
    for body in (
        WHOLE.replace(EXPECT, written + EXPECT).replace(WAIT, "ld.shared.b64 %rd5, [%r9];\n" + WAIT),
        WHOLE.replace(WAIT, "st.shared.b64 [%r9], 1;\n" + WAIT),
        WHOLE.replace(STORE, "st.shared.b64 [%r9], 1;\n" + STORE),
        WHOLE.replace(DONE, "st.shared.b64 [%r9], 1;\n" + DONE),
        WHOLE.replace(DONE, "ld.global.b64 %rd5, [%rd1+64];\n" + DONE),
        WHOLE.replace(EXPECT, EXPECT + "st.global.b64 [%rd1], 1;\n"),
        WHOLE.replace(WAIT, "st.global.b64 [%rd1], 1;\n" + WAIT),
    ):
        fails(DataRace, body, r"bulk copy \d")


def test_fences_are_of_one_kind_of_memory() -> None:
    shared, everywhere = "fence.proxy.async.shared::cta;\n", "fence.proxy.async.global;\n"
    written = "st.shared.b64 [%r9], 1;\n"
    run(WHOLE.replace(STORE, written + shared + STORE))
    fails(DataRace, WHOLE.replace(STORE, written + everywhere + STORE))
    far = "st.global.b64 [%rd1], 1;\n"
    run(WHOLE.replace(EXPECT, EXPECT + far + everywhere))
    run(WHOLE.replace(EXPECT, EXPECT + far + "fence.proxy.async;\n"))
    fails(DataRace, WHOLE.replace(EXPECT, EXPECT + far + shared))


@pytest.mark.parametrize("model", [Sequential, Weak])
def test_one_of_a_warp_is_elected(model: Callable[[], object]) -> None:
    """The same one each time, and which one follows from the seed."""
    body = """
elect.sync %r3|%p1, -1;
elect.sync _|%p2, -1;
selp.b32 %r4, 1, 0, %p1; selp.b32 %r5, 1, 0, %p2;
mad.lo.s32 %r6, %r4, 1000, %r3; mad.lo.s32 %r6, %r5, 10000, %r6;
mul.wide.u32 %rd3, %r1, 4; add.s64 %rd3, %rd1, %rd3; st.global.b32 [%rd3], %r6;
"""
    leaders = set()
    for seed in range(6):
        words = memory(16)
        machine = Machine(seed, model())
        machine.memory.register("words", words.ctypes.data, words.nbytes)
        code = kernel(body, 32, weak=machine.memory.every_access)
        machine.launch_later(0, code, (1,), [words.ctypes.data, 0])
        machine.run()
        found = words.view(np.int32)[:32]
        (leader,) = np.flatnonzero(found >= 10_000)
        assert found.tolist() == [int(leader) + 11_000 * (lane == leader) for lane in range(32)]
        leaders.add(int(leader))
    assert len(leaders) > 1
