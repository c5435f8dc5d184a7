"""The Triton kernels of low-latency mode in Triton's interpreter: ranks as processes, real proxies, the same oracle."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels import triton_bodies
from tests.kernels.triton_bodies import PATHS
from tests.support.ll_cases import Case
from tests.support.ll_replay import FORMS
from tests.support.ranks import Ranks

pytestmark = [
    pytest.mark.timeout(600),
    # not imported here: whether it is the interpreter is decided when it is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

WIRE_FORMATS: list[Case] = [
    Case(topk=3, counts=(8, 5)),
    Case(topk=3, reduced=False, routing="holes"),
    Case(fp8=True, hidden=256, topk=2, reduced=False),
    Case(fp8=True, hidden=512, round_scale=True, ue8m0=True, counts=(0, 7)),
]
#: Few programs, because the interpreter takes milliseconds for each.
QUICK: list[Case] = [
    Case(tokens=4, experts=4, topk=2, counts=(4, 3)),
    Case(tokens=4, experts=4, topk=2, reduced=False, fp8=True, counts=(4, 3)),
    Case(tokens=4, experts=4, topk=2, fp8=True, hidden=512, round_scale=True, ue8m0=True, counts=(0, 4)),
]
MORE: list[Case] = [
    Case(dtype=torch.float16),
    Case(dtype=torch.float32, reduced=False),
    Case(fp8=True, dtype=torch.float32, hidden=384),
    Case(fp8=True, round_scale=True),
    Case(routing="none"),
    Case(routing="one", reduced=False),
    Case(routing="twice"),
    Case(routing="twice", reduced=False),
    Case(experts=4, topk=3, routing="same", reduced=False),
    Case(experts=4, topk=4, routing="twice", reduced=False, fp8=True),
    Case(routing="far", hidden=136),
    Case(tokens=1, counts=(1,)),
    Case(counts=(0,)),
    Case(tokens=40, counts=(40, 17), topk=6, experts=24),
]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    """Rank processes whose Triton is the interpreter."""
    pool = Ranks()
    yield pool
    pool.close()


def of_ranks(cases: list[Case], ranks: int) -> list[Case]:
    """The same cases for another number of ranks."""
    return [Case(**{**case.__dict__, "ranks": ranks, "experts": case.experts * ranks // 2}) for case in cases]


def test_formats_over_mapped_windows(interpreted: Ranks) -> None:
    assert interpreted.run(2, triton_bodies.against_the_oracle, PATHS["mapped"], QUICK, timeout=300) == [3, 3]


@pytest.mark.parametrize("programs", [2, pytest.param(8, marks=pytest.mark.interpreter)])
def test_programs_share_rows_and_blocks_of_rows(interpreted: Ranks, programs: int) -> None:
    """Tokens of two programs and rows of two blocks: few programs take all of them in steps, more take a block each."""
    sizes: dict[str, Any] = {"tokens": 20, "counts": (20, 17), "hidden": 1280, "experts": 4, "topk": 2}
    cases = [Case(**sizes), Case(**sizes, reduced=False, fp8=True)]
    assert interpreted.run(2, triton_bodies.with_programs, PATHS["mapped"], programs, cases, timeout=300) == [2, 2]


def test_through_the_proxies(interpreted: Ranks) -> None:
    assert interpreted.run(2, triton_bodies.against_the_oracle, PATHS["shm"], QUICK[:1], timeout=300) == [1, 1]


#: Two ranks of one host, one of another that no NIC reaches; host and device memory hold what either brings.
APART: dict[str, Any] = {"window": "auto", "transport": "shm", "node_ranks": 2}


def test_near_ranks_keep_device_memory_where_far_ones_need_host_memory(interpreted: Ranks) -> None:
    """The messages of ranks of a host land in device memory, those of another in host memory; all rows are right."""
    found = interpreted.run(3, triton_bodies.in_two_windows, APART, of_ranks(QUICK[:1], 3), timeout=300)
    assert found == [(0b011, 0b100), (0b011, 0b100), (0b100, 0b011)]


@pytest.mark.interpreter
def test_two_kinds_of_window_in_every_wire_format(interpreted: Ranks) -> None:
    cases = of_ranks([*QUICK, *WIRE_FORMATS], 4)
    for transport in ("shm", "tcp"):
        overrides = {**APART, "transport": transport, "proxies": 2, "channels": 3}
        found = interpreted.run(4, triton_bodies.in_two_windows, overrides, cases, timeout=580)
        assert found == [(0b0011, 0b1100)] * 2 + [(0b1100, 0b0011)] * 2


def test_windows_that_one_rank_cannot_open(interpreted: Ranks) -> None:
    """GPUs without peer access: by default all ranks take windows in host memory, and else all say whose it is."""
    body, case = triton_bodies.windows_that_one_rank_cannot_open, QUICK[0]
    assert interpreted.run(2, body, "auto", case, timeout=300) == ["", ""]
    for words in interpreted.run(2, body, "device", case, timeout=300):
        assert "sharing device windows: rank 1: peer access is not supported" in words


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("mode", "path", "late"),
    [
        ("low latency", "shm", 0),
        ("low latency", "shm", 1),
        # in normal mode nobody begins before all have compiled together
        ("normal", "mapped", 0),
        *((mode, "ipc", -1) for mode in ("low latency", "normal", "reserve")),
    ],
)
def test_memory_that_one_rank_cannot_pin_is_named_on_all(interpreted: Ranks, mode: str, path: str, late: int) -> None:
    """Who waits for it is released long before its deadline, and the next operation of all is right."""
    body = triton_bodies.memory_that_one_rank_cannot_pin
    for text in interpreted.run(2, body, PATHS[path], mode, late, timeout=300):
        assert text.startswith("window layout: rank 1")
        assert ": cannot pin memory: ulimit -l" in text
        assert "The group stays usable" in text


def test_what_no_graph_captures_is_refused(interpreted: Ranks) -> None:
    interpreted.run(1, triton_bodies.captures, PATHS["mapped"], timeout=300)


def test_the_combine_buffer_has_the_dtype_of_the_tokens(interpreted: Ranks) -> None:
    interpreted.run(1, triton_bodies.combine_buffers, PATHS["mapped"], timeout=300)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_launch_that_failed_is_named_by_what_follows(interpreted: Ranks, phase: str) -> None:
    (text,) = interpreted.run(1, triton_bodies.failed_launch, PATHS["mapped"], phase, timeout=300)
    assert text.startswith(f"an earlier low-latency {phase} (RuntimeError: out of resources) was interrupted")


@pytest.mark.parametrize(
    ("mode", "path"),
    [
        ("modes", "mapped"),
        *(
            pytest.param(mode, path, marks=pytest.mark.interpreter)
            for mode, path in (
                ("low latency", "mapped"),
                ("modes", "shm"),
                ("shapes", "mapped"),
                ("normal", "mapped"),
                ("low latency", "shm"),
                ("normal", "shm"),
                ("low latency", "ipc"),
            )
        ),
    ],
)
def test_different_calls_are_named_at_once_on_every_rank(interpreted: Ranks, path: str, mode: str) -> None:
    """A kernel that waits for a rank which wants other windows, or is in the other mode, ends long before its deadline,
    with the reason."""
    for text, seconds in interpreted.run(2, triton_bodies.disagreement, PATHS[path], mode, timeout=300):
        if mode == "shapes":
            assert "rank 0: rank 1 sent an operation of another shape" in text
            assert "T = 4, hidden 256, " in text
            assert "That of this rank has T = 4, hidden 128, " in text
        elif mode == "modes":
            assert "in a low-latency operation" in text
            assert "in an operation of normal mode" in text
        else:
            assert "the ranks disagree: rank 0 began" in text
            assert mode == "normal" or "hidden=128" in text  # a rank in normal mode has no plan
            assert "rank 1 began" in text
            assert "hidden=256" in text
        assert "The group stays usable" in text
        assert seconds < 20.0  # the deadline is 60 s


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["shm", "tcp", "ipc"])
def test_every_path(interpreted: Ranks, path: str) -> None:
    """Twice each: the second message of a parity, and counts that headers carried."""
    cases = [WIRE_FORMATS[0], WIRE_FORMATS[0], WIRE_FORMATS[0]]
    assert interpreted.run(2, triton_bodies.against_the_oracle, PATHS[path], cases, timeout=300) == [3, 3]


@pytest.mark.interpreter
def test_one_wire_with_the_cpu_kernels(interpreted: Ranks) -> None:
    """Rank 0 runs Numba's kernels, rank 1 Triton's: every byte of the formats must agree."""
    cases = [WIRE_FORMATS[0], WIRE_FORMATS[1]]
    assert interpreted.run(2, triton_bodies.beside_the_cpu_kernels, PATHS["shm"], cases, timeout=300) == [2, 2]


@pytest.mark.interpreter
def test_overlapped_micro_batches(interpreted: Ranks) -> None:
    interpreted.run(2, triton_bodies.overlapped, PATHS["shm"], timeout=300)


@pytest.mark.interpreter
def test_two_buffers_in_flight(interpreted: Ranks) -> None:
    interpreted.run(2, triton_bodies.two_buffers, PATHS["shm"], timeout=300)


@pytest.mark.interpreter
def test_smallest_ring(interpreted: Ranks) -> None:
    """A ring that holds exactly one operation: every lap of it, and waits for room."""
    tight = {**PATHS["shm"], "proxies": 1, "channels": 1, "ring_slots": 2}
    assert interpreted.run(2, triton_bodies.against_the_oracle, tight, [WIRE_FORMATS[0]] * 3, timeout=300) == [3, 3]


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["mapped", "shm"])
def test_a_silent_peer_is_named(interpreted: Ranks, path: str) -> None:
    found: dict[str, Any] = interpreted.run(2, triton_bodies.silent_peer, PATHS[path], timeout=300)[0]
    assert (found["kind"], found["peer"]) == ("PeerTimeout", 1)
    assert "rank 1 is silent" in found["text"]
    assert "low-latency dispatch, parity 1" in found["text"]
    assert found["seconds"] >= 3.0
    # the error is sticky, and nothing is sent as if it were valid
    assert found["again"] == "PeerTimeout"
    assert found["published"] == 0


@pytest.mark.interpreter
def test_a_graph_of_windows_that_are_gone_does_nothing_and_must_be_captured_again(interpreted: Ranks) -> None:
    for text in interpreted.run(2, triton_bodies.replay_in_windows_that_are_gone, PATHS["mapped"], timeout=300):
        assert "the windows were rebuilt since graphs were captured" in text
        assert "capture the graphs again" in text


def test_replays_without_the_host(interpreted: Ranks) -> None:
    """As of a captured graph: other tokens and other routing in the same tensors, numbers and parities go on."""
    assert interpreted.run(2, triton_bodies.replays, PATHS["mapped"], "plain", 1, timeout=300) == [1, 1]


@pytest.mark.interpreter
def test_a_failure_of_a_replay_is_told_to_who_asks(interpreted: Ranks) -> None:
    body = triton_bodies.replay_beside_a_silent_peer
    assert interpreted.run(2, body, PATHS["mapped"], timeout=300)[0] == ("PeerTimeout", 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["shm", "ipc"])
@pytest.mark.parametrize("form", FORMS)
def test_replays_of_every_form(interpreted: Ranks, form: str, path: str) -> None:
    assert interpreted.run(2, triton_bodies.replays, PATHS[path], form, 4, timeout=300) == [4, 4]


def test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on(interpreted: Ranks) -> None:
    texts = interpreted.run(2, triton_bodies.bad_ids, PATHS["mapped"], timeout=300)
    assert "an expert id outside -1 .. 7, at position 0 of topk_idx" in texts[0]
    assert texts[1] == ""


@pytest.mark.interpreter
def test_statistics(interpreted: Ranks) -> None:
    for rank, (total, added, waited) in enumerate(
        interpreted.run(2, triton_bodies.stats_of, PATHS["mapped"], timeout=300)
    ):
        assert total == added
        if rank == 0:
            assert waited[1] > 0.5e9


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
def test_more_formats(interpreted: Ranks, path: str) -> None:
    cases = WIRE_FORMATS + MORE
    assert interpreted.run(2, triton_bodies.against_the_oracle, PATHS[path], cases, timeout=580)


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["shm", "ipc"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(interpreted: Ranks, path: str, ranks: int) -> None:
    cases = of_ranks(WIRE_FORMATS, ranks)
    assert interpreted.run(ranks, triton_bodies.against_the_oracle, PATHS[path], cases, timeout=580)


@pytest.mark.interpreter
@pytest.mark.parametrize("ranks", [3, 4])
def test_one_wire_with_the_cpu_kernels_many_ranks(interpreted: Ranks, ranks: int) -> None:
    cases = of_ranks(WIRE_FORMATS, ranks)
    assert interpreted.run(ranks, triton_bodies.beside_the_cpu_kernels, PATHS["tcp"], cases, timeout=580)


@pytest.mark.interpreter
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_deepseek_sizes(interpreted: Ranks, fp8: bool) -> None:
    case = Case(tokens=128, counts=(128, 100), hidden=7168, experts=16, topk=8, fp8=fp8)
    assert interpreted.run(2, triton_bodies.against_the_oracle, PATHS["shm"], [case, case], timeout=580)
