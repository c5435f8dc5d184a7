"""The host and a GPU: stores that become visible late, releases that hold what came before, the host's own stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx.machine.machine import Machine
from tests.ptx.machine.report import DataRace
from tests.ptx.memory.weak import Weak
from tests.ptx.texts import kernel, memory

SEEDS = range(50)


def seen(stores: str, look: Callable[[np.ndarray], object], seeds: range = SEEDS) -> Counter[object]:
    """What the host sees when it looks at some time while a kernel executes ``stores``."""
    found: Counter[object] = Counter()
    for seed in seeds:
        words = memory(32)
        machine = Machine(seed, Weak(lag=0.3, races="ignore"), host_share=0.4)
        machine.memory.register("words", words.ctypes.data, words.nbytes)
        looks: list[object] = []

        def body(machine: Machine = machine, words: np.ndarray = words, looks: list[object] = looks) -> None:
            machine.launch_later(0, kernel(stores, 1), (1,), [words.ctypes.data, 0])
            while not machine.is_idle(0):
                looks.append(look(words))
                machine.wait_until(lambda: True, "its turn")
            machine.synchronise(0)
            assert words[0] == 1
            assert words[8] == 1

        machine.host(0, body)
        machine.run(limit_steps=20_000)
        found.update(set(looks))
    return found


def flag_then_data(words: np.ndarray) -> tuple[int, int]:
    flag = int(words[8])
    return flag, int(words[0])


@pytest.mark.parametrize(
    ("stores", "early"),
    [
        ("st.global.b64 [%rd1], 1;\nst.global.b64 [%rd1+64], 1;\n", True),
        ("st.global.b64 [%rd1], 1;\nst.relaxed.sys.global.b64 [%rd1+64], 1;\n", True),
        ("st.global.b64 [%rd1], 1;\nst.release.gpu.global.b64 [%rd1+64], 1;\n", True),
        ("st.global.b64 [%rd1], 1;\nst.release.sys.global.b64 [%rd1+64], 1;\n", False),
        ("st.global.b64 [%rd1], 1;\nfence.acq_rel.sys;\nst.relaxed.sys.global.b64 [%rd1+64], 1;\n", False),
        ("st.global.b64 [%rd1], 1;\nfence.acq_rel.gpu;\nst.relaxed.sys.global.b64 [%rd1+64], 1;\n", True),
        ("st.global.b64 [%rd1], 1;\nfence.acq_rel.sys;\nst.global.b64 [%rd1+64], 1;\n", True),
        ("st.global.b64 [%rd1], 1;\natom.global.sys.release.exch.b64 %rd3, [%rd1+64], 1;\n", False),
        ("st.global.b64 [%rd1], 1;\nmembar.sys;\nst.global.b64 [%rd1+64], 1;\n", False),
    ],
)
def test_the_flag_before_the_data(stores: str, early: bool) -> None:
    """Only what releases at system scope holds the data before the flag. The host always sees all in the end."""
    assert bool(seen(stores, flag_then_data)[1, 0]) == early


def test_stores_of_one_word_come_in_order() -> None:
    stores = "".join(
        f"st.relaxed.sys.global.b64 [%rd1{at}], {value};\n" for at, value in (("+64", 1), ("", 2), ("", 1))
    )
    runs = []
    seen(stores, lambda words: runs.append(int(words[0])))
    changes = "".join(str(one) for one in runs)
    assert "21" in changes
    assert "12" not in changes


def host_tells(look: str, between: str = "", races: str = "ignore", data: str = "ld") -> Counter[tuple[int, int]]:
    """A kernel waits for the host's flag, and then reads what the host wrote before it."""
    body = f"""
$L0:
{look}.global.b64 %rd3, [%rd1+64];
setp.eq.s64 %p1, %rd3, 0;
@%p1 bra $L0;
{between}
{data}.global.b64 %rd4, [%rd1];
st.global.b64 [%rd1+128], %rd4;
"""
    found: Counter[tuple[int, int]] = Counter()
    for seed in range(20):
        words = memory(32)
        machine = Machine(seed, Weak(lag=0.3, races=races))
        machine.memory.register("words", words.ctypes.data, words.nbytes)

        def host(machine: Machine = machine, words: np.ndarray = words, body: str = body) -> None:
            machine.launch_later(0, kernel(body, 1), (1,), [words.ctypes.data, 0])
            for at in (0, 8):
                words[at] = 1
                for _ in range(4):
                    machine.wait_until(lambda: True, "its turn")
            machine.synchronise(0)

        machine.host(0, host)
        machine.run(limit_steps=20_000)
        found[int(words[8]), int(words[16])] += 1
    return found


@pytest.mark.parametrize(
    ("look", "between", "stale"),
    [
        ("ld.acquire.sys", "", False),
        ("ld.acquire.gpu", "", True),
        ("ld.relaxed.sys", "", True),
        ("ld.relaxed.sys", "fence.acq_rel.sys;", False),
        ("ld.volatile", "", True),
        ("ld", "", True),
    ],
)
def test_what_the_host_wrote_before_its_flag(look: str, between: str, stale: bool) -> None:
    found = host_tells(look, between)
    assert bool(found[1, 0]) == stale
    assert found[1, 1]


def test_a_plain_look_at_the_hosts_flag_is_a_race() -> None:
    with pytest.raises(DataRace, match="by a store of the host"):
        host_tells("ld", races="raise")
    host_tells("ld.acquire.sys", races="raise")


def test_the_host_overwrites_what_a_kernel_may_still_read() -> None:
    """It has to wait for the kernel, or for a word that says the kernel has read it."""
    for told in (False, True):
        body = (
            f"ld.global.b64 %rd3, [%rd1];\n{'st.release.sys' if told else 'st.relaxed.sys'}.global.b64 [%rd1+64], 1;\n"
        )
        words = memory(32)
        machine = Machine(3, Weak(lag=0.1))
        machine.memory.register("words", words.ctypes.data, words.nbytes)

        def host(machine: Machine = machine, words: np.ndarray = words, body: str = body) -> None:
            machine.launch_later(0, kernel(body, 1), (1,), [words.ctypes.data, 0])
            machine.wait_until(lambda: words[8] == 1, "the kernel's word")
            words[0] = 9
            machine.synchronise(0)
            words[0] = 10

        machine.host(0, host)
        if told:
            machine.run()
        else:
            with pytest.raises(DataRace, match=r"read 0x0 by ld[\s\S]*the host writes it"):
                machine.run()


def test_a_proxy_passes_on_what_it_was_told() -> None:
    """Rank 0 releases a command to its proxy; the proxy writes to rank 1, whose kernel acquires that."""
    for seed in range(20):
        words = memory(32)
        machine = Machine(seed, Weak(lag=0.2))
        machine.memory.register("words", words.ctypes.data, words.nbytes)

        def proxy(words: np.ndarray = words) -> bool:
            if words[8] and not words[16]:
                words[16] = 1
                return True
            return False

        machine.actor("proxy", proxy)
        send = "st.global.b64 [%rd1], 1;\nst.release.sys.global.b64 [%rd1+64], 1;\n"
        receive = """
$L0:
ld.acquire.sys.global.b64 %rd3, [%rd1+128];
setp.eq.s64 %p1, %rd3, 0;
@%p1 bra $L0;
ld.global.b64 %rd4, [%rd1];
st.global.b64 [%rd1+192], %rd4;
"""
        machine.launch_later(0, kernel(send, 1), (1,), [words.ctypes.data, 0])
        machine.launch_later(1, kernel(receive, 1), (1,), [words.ctypes.data, 0])
        machine.run(limit_steps=20_000)
        assert words[24] == 1


def test_the_host_writes_half_of_what_a_kernel_reads_the_other_half_of() -> None:
    """Words of four bytes, side by side, are none of each other's business."""
    words = memory(8)
    halves = words.view(np.uint32)
    machine = Machine(1, Weak(), host_share=0.5)
    machine.memory.register("words", words.ctypes.data, words.nbytes)
    load = "ld.global.b32 %r3, [%rd1];\n"

    def host() -> None:
        machine.launch_later(0, kernel(load * 20, 1), (1,), [words.ctypes.data, 0])
        while not machine.is_idle(0):
            halves[1] += 1
            machine.wait_until(lambda: True, "its turn")
        machine.synchronise(0)

    machine.host(0, host)
    machine.run()
    assert halves[1] > 1


@pytest.mark.parametrize(
    ("look", "told"), [("ld.acquire.sys", True), ("ld.relaxed.sys", False), ("ld.acquire.gpu", False)]
)
def test_who_overwrites_what_a_nic_reads_must_have_heard_of_it(look: str, told: bool) -> None:
    """A kernel stores a word, and the next one stores it again once the host says that it was read."""
    first = "st.global.b64 [%rd1], 1;\n"
    wait = f"$L1:\n{look}.global.b64 %rd3, [%rd1+64];\nsetp.eq.u64 %p1, %rd3, 0;\n@%p1 bra $L1;\n"
    again = wait + "st.global.b64 [%rd1], 2;\n"
    raced = 0
    for seed in range(10):
        words = memory(32)
        machine = Machine(seed, Weak(races="keep"), host_share=0.4)
        machine.memory.register("words", words.ctypes.data, words.nbytes)

        def body(machine: Machine = machine, words: np.ndarray = words) -> None:
            machine.launch(0, kernel(first, 1), (1,), [words.ctypes.data, 0])
            machine.launch_later(0, kernel(again, 1), (1,), [words.ctypes.data, 0])
            machine.sleep(1e-6)
            machine.memory.host_read(words.ctypes.data, 8)
            words[8] = 1
            machine.synchronise(0)

        machine.host(0, body)
        machine.run(limit_steps=20_000)
        raced += any("a NIC's" in str(race) for race in machine.memory.races.found)
    assert bool(raced) == (not told)


def test_nobody_writes_what_a_nic_is_reading() -> None:
    """Whatever the kernel has heard of meanwhile: the host tells it of something else between two reads of one word."""
    wait = "$L1:\nld.acquire.sys.global.b64 %rd3, [%rd1+64];\nsetp.eq.u64 %p1, %rd3, 0;\n@%p1 bra $L1;\n"
    for stored, raced in ((0, True), (32, False)):
        words = memory(32)
        machine = Machine(0, Weak(races="keep"), host_share=0.4)
        machine.memory.register("words", words.ctypes.data, words.nbytes)

        def body(machine: Machine = machine, words: np.ndarray = words, stored: int = stored) -> None:
            store = f"st.global.b64 [%rd1+{stored}], 2;\n"
            machine.launch_later(0, kernel(wait + store, 1), (1,), [words.ctypes.data, 0])
            begun = machine.memory.host_read(words.ctypes.data, 16)
            words[8] = 1
            machine.synchronise(0)
            machine.memory.host_read(words.ctypes.data, 16, begun)

        machine.host(0, body)
        machine.run(limit_steps=20_000)
        assert any("a NIC's" in str(race) for race in machine.memory.races.found) == raced


@pytest.mark.parametrize("stores", ["st.global.b32 [%rd1], 1;", "st.global.b32 [%rd1], 1;\nst.global.b32 [%rd1+4], 1;"])
def test_a_store_of_the_host_races_with_each_word_that_it_covers(stores: str) -> None:
    """It writes the low one, of which it has not heard, whatever was stored beside it since."""
    words = memory(32)
    machine = Machine(0, Weak(races="keep", lag=0.5))
    machine.memory.register("words", words.ctypes.data, words.nbytes)

    def body() -> None:
        machine.launch_later(
            0, kernel(f"{stores}\nst.relaxed.sys.global.b64 [%rd1+64], 1;", 1), (1,), [words.ctypes.data, 0]
        )
        machine.wait_until(lambda: words[8] == 1 and words[0] & 1 == 1, "the stores", timeout_s=10.0)
        words.view(np.int32)[0] = 5
        machine.synchronise(0)

    machine.host(0, body)
    machine.run(limit_steps=20_000)
    assert machine.memory.races.found


def test_no_deadline_comes_before_a_store_that_is_late() -> None:
    """A kernel stores and waits for the host, which answers what it sees, while time goes faster."""
    for seed in range(10):
        words = memory(32)
        machine = Machine(seed, Weak(lag=1e-9), patience=50)
        machine.memory.register("words", words.ctypes.data, words.nbytes)
        wait = "$L1:\nld.acquire.sys.global.b64 %rd3, [%rd1+64];\nsetp.eq.u64 %p1, %rd3, 0;\n@%p1 bra $L1;\n"

        def body(machine: Machine = machine, words: np.ndarray = words, wait: str = wait) -> bool:
            machine.launch_later(0, kernel("st.global.b64 [%rd1], 1;\n" + wait, 1), (1,), [words.ctypes.data, 0])
            seen = machine.wait_until(lambda: words[0] == 1, "the store", timeout_s=10.0)
            words[8] = 1
            machine.synchronise(0)
            return seen

        thread = machine.host(0, body)
        machine.run(limit_steps=20_000)
        assert thread.result
