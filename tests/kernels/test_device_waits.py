"""How kernels on a device wait: until the time is over or the sticky error is set, which they read now and then."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.support.interpreter_process import interpreted

if TYPE_CHECKING:
    from tests.kernels.wait_kernels import Ended

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

TOO_LATE, RELEASED = 1, 2
NEVER = 1 << 60
#: ``wait.CHECK_NS``, the promise of docs/architecture/gpu.md.
LOOK = 20_000
#: (limit, length of a spin, when the sticky error is set) in nanoseconds of a clock that moves by spins only.
SILENCE = (600_000, 1_000, NEVER)
SHORT_SPINS = (1_000_000, 1_000, 333_000)
LONG_SPINS = (1_000_000, 50_000, 333_000)
JUST_BEFORE_THE_END = (300_000, 1_000, 300_500)
WAITS = (SILENCE, SHORT_SPINS, LONG_SPINS, JUST_BEFORE_THE_END)


def _run_all() -> list[Ended]:
    from tests.kernels import wait_kernels

    return [wait_kernels.run(*one) for one in WAITS]


@pytest.fixture(scope="module")
def ended() -> dict[tuple[int, int, int], Ended]:
    """How each of :data:`WAITS` ended."""
    return dict(zip(WAITS, interpreted(_run_all), strict=True))


def test_memory_of_the_host_is_read_now_and_then(ended: dict[tuple[int, int, int], Ended]) -> None:
    silence = ended[SILENCE]
    assert (silence.ending, silence.spins, silence.nanoseconds) == (TOO_LATE, 601, 601_000)
    # one read for each CHECK_NS and a spin, and one at the end
    assert silence.reads == 600_000 // (LOOK + 1_000) + 1


@pytest.mark.parametrize("wait", [SHORT_SPINS, LONG_SPINS], ids=["short spins", "long spins"])
def test_the_sticky_error_ends_a_wait_soon(
    ended: dict[tuple[int, int, int], Ended], wait: tuple[int, int, int]
) -> None:
    """At most CHECK_NS and a spin later, however long spins are."""
    _, step, fails_at = wait
    assert ended[wait].ending == RELEASED
    assert fails_at <= ended[wait].nanoseconds + step
    assert ended[wait].nanoseconds <= fails_at + LOOK + step


def test_what_the_host_knows_counts_when_the_time_is_over(ended: dict[tuple[int, int, int], Ended]) -> None:
    """A failure set just before the deadline names whom the kernel would only guess."""
    last = ended[JUST_BEFORE_THE_END]
    assert (last.ending, last.nanoseconds) == (RELEASED, 301_000)
