"""How many steps the host launches beyond what it works out."""

from __future__ import annotations

from uccl_ep_serving.gpu.spare_steps import SpareSteps


def test_none_while_nothing_was_missed() -> None:
    spare = SpareSteps()
    assert [spare.of(8, 0) for _ in range(200)] == [0] * 200


def test_as_many_more_as_were_missing() -> None:
    spare = SpareSteps()
    assert [spare.of(8, missed) for missed in (0, 3, 3, 4, 4)] == [0, 3, 3, 4, 4]


def test_at_most_as_many_again() -> None:
    """The host may be told of several operations at once, each of which missed the same steps."""
    spare = SpareSteps()
    assert spare.of(8, 100) == 8
    assert spare.of(2, 100) == 2
    assert spare.of(8, 101) == 3


def test_they_are_given_up_one_by_one() -> None:
    spare = SpareSteps()
    spare.of(8, 2)
    found = [spare.of(8, 2) for _ in range(200)]
    assert found == [2] * 63 + [1] * 64 + [0] * 73
