"""The schedule: one seed, one actor at a time, streams in order, waits that end, and what does not end is told."""

from __future__ import annotations

import gc
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.ptx.machine.block import Block
from tests.ptx.machine.machine import Machine
from tests.ptx.machine.report import Deadlock, HostStuck, MachineError, NoEnd
from tests.ptx.memory.clocks import Agent
from tests.ptx.memory.sequential import Sequential
from tests.ptx.memory.weak import Weak
from tests.ptx.texts import kernel, line_of, memory

#: waits for the second word, then adds what it has got to the first
WAIT_THEN_ADD = """
$L0:
ld.acquire.sys.global.b64 %rd3, [%rd1+8];
setp.eq.s64 %p1, %rd3, 0;
@%p1 bra $L0;
setp.ne.s32 %p2, %r1, 0;
@%p2 bra $L1;
atom.global.sys.relaxed.add.u64 %rd4, [%rd1], %rd2;
$L1:
"""
TELL = """
setp.ne.s32 %p2, %r1, 0;
@%p2 bra $L1;
st.release.sys.global.b64 [%rd1+8], 1;
$L1:
"""


def two_ranks(seed: int, memory_model: object) -> tuple[Machine, np.ndarray]:
    """Rank 0 tells, rank 1 waits for it in two CTAs."""
    words = memory(8)
    machine = Machine(seed, memory_model, parting=0.3)
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    at = words.ctypes.data
    machine.host(0, lambda: machine.launch(0, kernel(TELL), (1,), [at, 0]))
    machine.host(1, lambda: machine.launch(1, kernel(WAIT_THEN_ADD), (2,), [at, 7]))
    machine.run(limit_steps=50_000)
    return machine, words


@pytest.mark.parametrize("model", [Sequential, Weak])
def test_ranks_meet_in_memory(model: type) -> None:
    _, words = two_ranks(1, model())
    assert words[:2].tolist() == [14, 1]


def test_a_seed_is_one_run() -> None:
    first, again, other = (two_ranks(seed, Weak(lag=0.1))[0] for seed in (3, 3, 4))
    assert first.digest() == again.digest() != other.digest()
    assert first.steps == again.steps


def test_a_seed_is_one_run_in_any_process() -> None:
    program = "from tests.ptx.machine.test_machine import *; print(two_ranks(3, Weak(lag=0.1))[0].digest())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == two_ranks(3, Weak(lag=0.1))[0].digest()


@pytest.mark.parametrize(("model", "kind"), [(Sequential, Block), (Sequential, Agent), (Weak, Block)])
def test_what_has_ended_takes_no_memory(model: type, kind: type) -> None:
    """Nobody looks for garbage while a machine runs: a cycle of references is kept to the end of that."""
    gc.collect()
    words, machine = memory(8), Machine(1, model())
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    program, counted = kernel(TELL), []

    def body() -> None:
        for _ in range(3):
            machine.launch(0, program, (4,), [words.ctypes.data, 0])
            counted.append(sum(type(one) is kind for one in gc.get_objects()))

    machine.host(0, body)
    machine.run(limit_steps=50_000)
    assert counted[0] == counted[-1]
    if kind is Block:
        assert counted[0] == 0


def test_lanes_of_a_warp_part() -> None:
    """Some run ahead of others between events, so that they take each other's turns."""
    body = "atom.global.gpu.relaxed.add.u64 %rd3, [%rd1], 1; mul.wide.u32 %rd4, %r1, 8; add.s64 %rd4, %rd1, %rd4;\n"
    body += "st.global.b64 [%rd4+8], %rd3;\n"
    orders = set()
    for seed in range(8):
        words = memory(40)
        machine = Machine(seed, Sequential(), parting=0.5)
        machine.memory.register("words", words.ctypes.data, words.nbytes)
        machine.launch_later(0, kernel(body, weak=False), (1,), [words.ctypes.data, 0])
        machine.run()
        assert sorted(words[1:33].tolist()) == list(range(32))
        orders.add(tuple(words[1:33].tolist()))
    assert len(orders) > 4


@pytest.mark.parametrize("shuffled", [False, True])
def test_programs_start_in_order_and_few_are_resident(shuffled: bool) -> None:
    body = "atom.global.gpu.relaxed.add.u64 %rd3, [%rd1], 1; mul.wide.u32 %rd4, %r2, 8; add.s64 %rd4, %rd1, %rd4;\n"
    body += "st.global.b64 [%rd4+8], %rd3;\n"
    words = memory(40)
    machine = Machine(5, Sequential(), resident=1, shuffled=shuffled)
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    machine.launch_later(0, kernel(body, threads=1, weak=False), (4, 8), [words.ctypes.data, 0])
    machine.run()
    assert int(words[0]) == 32
    machine = Machine(5, Sequential(), resident=1, shuffled=shuffled)
    words[:] = 0
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    machine.launch_later(0, kernel(body, threads=1, weak=False), (16,), [words.ctypes.data, 0])
    machine.run()
    started = np.argsort(words[1:17]).tolist()
    assert (started == list(range(16))) != shuffled


def test_a_stream_is_in_order() -> None:
    """The second kernel finds what the first has written, without any order said by it, in any memory."""
    copy = "ld.global.b64 %rd3, [%rd1]; add.s64 %rd3, %rd3, 1; st.global.b64 [%rd1], %rd3;\n"
    for seed in range(5):
        words = memory(8)
        machine = Machine(seed, Weak(lag=0.05))
        machine.memory.register("words", words.ctypes.data, words.nbytes)

        def body(machine: Machine = machine, words: np.ndarray = words) -> None:
            for _ in range(4):
                machine.launch_later(0, kernel(copy, threads=1), (1,), [words.ctypes.data, 0])
            machine.synchronise(0)
            assert words[0] == 4
            words[0] = 10
            machine.launch(0, kernel(copy, threads=1), (1,), [words.ctypes.data, 0])
            assert words[0] == 11

        machine.host(0, body)
        machine.run()


def test_the_clock_is_the_machines() -> None:
    """Sleep and deadlines take no real time, and a kernel's clock is the same as the host's."""
    words = memory(8)
    machine = Machine(1, Weak())
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    seen = []

    def body() -> None:
        begin = machine.monotonic()
        machine.sleep(100.0)
        seen.append(machine.monotonic() - begin)
        assert not machine.wait_until(lambda: False, "what never comes", timeout_s=30.0)
        machine.launch(
            0,
            kernel("mov.u64 %rd3, %globaltimer;\nst.global.b64 [%rd1], %rd3;\n", threads=1),
            (1,),
            [words.ctypes.data, 0],
        )
        seen.append(machine.monotonic() - int(words[0]) / 1e9)

    machine.host(0, body)
    start = time.monotonic()
    machine.run()
    assert time.monotonic() - start < 10
    assert 100 <= seen[0] < 101
    assert 0 < seen[1] < 1


@pytest.mark.parametrize("again", ["", "st.global.b64 [%rd1+8], 1;\nbar.sync 0;\n"])
def test_a_deadline_in_a_kernel_comes(again: str) -> None:
    """The kernel gives up after 100 s of a machine on which nothing else happens; what it does in each round of its
    loop is waiting too."""
    body = f"""
mov.u64 %rd3, %globaltimer;
add.s64 %rd3, %rd3, 100000000000;
$L0:
{again}mov.u64 %rd4, %globaltimer;
setp.lt.u64 %p1, %rd4, %rd3;
@%p1 bra $L0;
st.global.b64 [%rd1], 1;
"""
    words = memory(8)
    machine = Machine(1, Weak(), patience=50)
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    machine.launch_later(0, kernel(body, threads=1), (1,), [words.ctypes.data, 0])
    machine.run(limit_steps=10_000)
    assert words[0] == 1


def test_a_proxy_and_hosts_take_turns() -> None:
    words = memory(8)
    machine = Machine(2, Weak(lag=0.1))
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    met = []

    def proxy() -> bool:
        """Answers a kernel's flag by the one that another waits for."""
        if words[2] and not words[1]:
            words[1] = 1
            return True
        return False

    def body(rank: int) -> None:
        machine.barrier("start", 2)
        met.append(rank)
        if rank:
            machine.launch(1, kernel(WAIT_THEN_ADD), (1,), [words.ctypes.data, 5])
        else:
            machine.launch(
                0, kernel("st.release.sys.global.b64 [%rd1+16], 1;\n", threads=1), (1,), [words.ctypes.data, 0]
            )
        machine.barrier("end", 2)

    machine.actor("proxy", proxy)
    for rank in (0, 1):
        machine.host(rank, lambda rank=rank: body(rank))  # type: ignore[misc]
    machine.run(limit_steps=50_000)
    assert words[0] == 5
    assert sorted(met) == [0, 1]


def test_what_never_ends_says_where_it_is() -> None:
    words = memory(8)
    machine = Machine(9, Weak())
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    machine.launch_later(0, kernel(WAIT_THEN_ADD), (1,), [words.ctypes.data, 5])
    with pytest.raises(NoEnd) as found:
        machine.run(limit_steps=500)
    line = line_of(WAIT_THEN_ADD, "ld.acquire")
    assert "seed 9, step 501" in str(found.value)
    assert f"PTX line {line}" in str(found.value)


def test_nobody_can_go_on() -> None:
    machine = Machine(1, Weak())
    machine.host(0, lambda: machine.wait_until(lambda: False, "a word from rank 1"))
    with pytest.raises(Deadlock, match="host thread of rank 0: waits for a word from rank 1"):
        machine.run()


def test_a_host_thread_that_keeps_its_turn() -> None:
    machine = Machine(1, Weak(), host_limit_s=0.1)
    machine.host(0, lambda: time.sleep(0.8))
    with pytest.raises(HostStuck, match=r"rank 0 has kept its turn[\s\S]*time\.sleep\(0\.8\)"):
        machine.run()


def test_what_a_body_raises_is_raised_with_the_seed() -> None:
    machine = Machine(6, Weak())

    def fails() -> None:
        machine.sleep(1.0)
        raise ValueError("rows differ")

    machine.host(0, fails)
    machine.host(1, lambda: machine.wait_until(lambda: False, "rank 0"))
    with pytest.raises(ValueError, match="rows differ") as found:
        machine.run()
    assert "seed 6, step" in found.value.__notes__[0]


def test_only_host_threads_wait() -> None:
    with pytest.raises(MachineError, match=r"give its body to Machine\.host"):
        Machine(1, Weak()).sleep(1.0)
