"""Each order, scope and barrier of low latency's PTX taken away in turn, as ``make kernel-faults`` judges all of them:
noticed, or a sentence says why not."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
judge = pytest.importorskip("tests.ptx.faults.judge", reason="needs Triton")

from tests.ptx.faults.edits import Fault, faults_of, is_doubled  # noqa: E402
from tests.ptx.faults.equivalent import EQUIVALENT  # noqa: E402
from tests.ptx.faults.scenes import FULL_OF_NOTICES, FULL_RING, SCENES, WITHIN, Scene  # noqa: E402
from tests.ptx.machine.report import DataRace  # noqa: E402
from tests.ptx.product.test_low_latency import compiled  # noqa: E402
from tests.ptx.texts import text  # noqa: E402
from tests.ptx.translation.program import parse  # noqa: E402

_BARRIERS = ("barrier",)
_ATOMICS = ("both of an atomic", "release of an atomic", "acquire of an atomic", "scope of an atomic")
_RELEASES = ("release", "scope of a release")
_ACQUIRES = ("acquire", "scope of an acquire")
#: READY: of a program that serves a peer, and of those that wait for it.
_READY = ("release that an atomic is", "scope of an acquire on the device")
_ALL = (*_BARRIERS, *_ATOMICS, *_RELEASES, *_ACQUIRES, *_READY)
#: By kernel, the kinds of what it holds.
HELD: dict[str, tuple[str, ...]] = {
    "dispatch_send": _ALL,
    "dispatch_recv": _ALL,
    "combine_send": _ALL,
    "combine_recv": _ALL,
}


@pytest.mark.parametrize(
    ("body", "doubled"),
    [
        ("bar.sync 0;\nadd.s64 %rd3, %rd1, %rd2;\nbar.sync 0;", True),
        ("bar.sync 0;\nld.global.b64 %rd3, [%rd1];\nbar.sync 0;", False),
        ("setp.eq.s32 %p1, %r1, 0;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\nbar.sync 0;", False),
        ("setp.eq.s32 %p1, %r1, 0;\nbar.sync 0;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:", False),
        ("bar.sync 0;", False),
    ],
)
def test_a_barrier_beside_another(body: str, doubled: bool) -> None:
    """Taken away with all that came of its line, it has none beside it."""
    first = text(body).split("\n").index("bar.sync 0;") + 1
    (fault,) = faults_of(text(body))
    assert first in fault.lines
    assert not fault.doubled
    assert is_doubled(parse(text(body)).code, first, [first]) == doubled


def test_a_fault_of_a_kernel_is_noticed() -> None:
    (fault,) = judge.faults("combine_send", "release that an atomic is")
    with pytest.raises(DataRace, match="combine_send"):
        SCENES[0].play(compiled("weak").edited(fault.edit), "weak", 0)


@pytest.mark.model
def test_all_that_kernels_hold_is_tried() -> None:
    held: dict[str, set[str]] = {}
    for one in judge.faults():
        held.setdefault(one.short, set()).add(one.kind)
    assert held == {kernel: set(kinds) for kernel, kinds in HELD.items()}


@pytest.mark.model
def test_every_reason_is_of_some_fault() -> None:
    faults: list[Fault] = list(judge.faults())
    assert [one for one in EQUIVALENT if not any(one.holds(fault) for fault in faults)] == []


@pytest.mark.model
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_kernels_as_they_are_pass_ten_times_as_many_seeds(scene: Scene) -> None:
    for seed in range(10 * WITHIN):
        scene.play(compiled("weak"), "weak", seed)


@pytest.mark.parametrize("scene", [FULL_RING, FULL_OF_NOTICES], ids=str)
def test_kernels_wait_for_room(scene: Scene) -> None:
    """No lane reads where a ring ends while another one stores it, and a notice needs no more than its own slot."""
    scene.play(compiled("sequential"), "sequential", 0)
