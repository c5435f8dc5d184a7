"""What ranks tell each other has been read, by kernels on a device in Triton's interpreter: one rank, step by step."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.interpreter_process import interpreted

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def _run_all() -> tuple[list[list[int]], list[list[list[int]]]]:
    from tests.kernels import count_kernels

    orders, acked = ([0, 1, 2], [1, 0, 2], [0, 2, 1]), ([2, 2], [1, 2], [2, 0], [1, 1])
    return [count_kernels.read_after(order) for order in orders], [count_kernels.told(one) for one in acked]


@pytest.fixture(scope="module")
def found() -> tuple[list[list[int]], list[list[list[int]]]]:
    return interpreted(_run_all)  # type: ignore[no-any-return]


def test_hooks_of_two_dispatches_may_come_swapped(found: tuple[list[list[int]], list[list[list[int]]]]) -> None:
    """What is read counts from the oldest on."""
    assert found[0] == [[1, 2, 3], [0, 2, 3], [1, 1, 3]]


def test_peers_hear_that_their_dispatch_before_last_is_read_where_no_message_has_said_so(
    found: tuple[list[list[int]], list[list[list[int]]]],
) -> None:
    """Dispatches that nobody combines carry no word of it."""
    assert found[1] == [[[], []], [[0, 3], []], [[], [0, 3]], [[0, 3], [0, 3]]]
