"""From the same reports every rank finds the same ranks lost, and it is those where the failure began."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.control_plane.membership import ANSWER_SECONDS
from uccl_ep_serving.control_plane.reports import Report, Wait
from uccl_ep_serving.control_plane.verdict import find_lost, may_go_on


def _seen(**what: object) -> Report:
    return Report(1, **{name: frozenset(ranks) if isinstance(ranks, set) else ranks for name, ranks in what.items()})  # type: ignore[arg-type]


def _waits(peer: int, *, gave_up: bool = False, stood_still: bool = False) -> Report:
    return Report(1, waits=Wait(peer), gave_up=gave_up, stood_still=stood_still)


def _gave_up(peer: int) -> Report:
    return _waits(peer, gave_up=True)


_NOTHING = Report()


@pytest.mark.parametrize(
    ("reports", "lost"),
    [
        ({0: _NOTHING, 1: _NOTHING}, {}),
        ({0: _seen(dead={3})}, {3: "ended"}),
        ({0: _seen(gone={3}), 1: _seen(dead={3, 4})}, {3: "ended", 4: "ended"}),
        ({2: _seen(failed="a NIC")}, {2: "failed"}),
        # rule 2
        ({0: _seen(accused={3})}, {3: "accused"}),
        ({3: _seen(accused={0}), 1: _seen(accused={3})}, {3: "accused"}),
        ({0: _seen(accused={3}), 3: _seen(accused={0})}, {3: "accused"}),
        ({0: _seen(accused={3}), 3: _seen(accused={0}), 2: _seen(accused={0, 3}), 1: _seen(accused={0})},
         {0: "accused", 3: "accused"}),
        ({0: _seen(accused={3}), 3: _seen(accused={0}), 1: _seen(dead={0})}, {0: "ended"}),
        ({1: _seen(accused={0}), 0: _seen(failed="a NIC", accused={2})}, {0: "failed"}),
        # rule 3
        ({0: _seen(down={3})}, {3: "unreachable"}),
        ({3: _seen(down={0})}, {3: "unreachable"}),
        ({0: _seen(down={3}), 3: _seen(accused={0})}, {0: "accused"}),
        ({0: _seen(down={3, 4})}, {0: "unreachable"}),
        ({0: _seen(down={3}), 1: _seen(down={3})}, {3: "unreachable"}),
        ({0: _seen(down={1, 2}), 3: _seen(down={1, 2})}, {1: "unreachable", 2: "unreachable"}),
        ({0: _seen(down={2, 3, 4}), 1: _seen(down={2, 3, 4})}, {0: "unreachable", 1: "unreachable"}),
        ({0: _seen(down={1}), 1: _seen(down={2}), 2: _seen(down={3})}, {1: "unreachable", 3: "unreachable"}),
        # rule 4
        ({0: _gave_up(1), 1: _NOTHING}, {1: "silent"}),
        ({0: _gave_up(1)}, {}),  # it may say yet that it waits for another
        ({0: _gave_up(1), 1: _waits(2), 2: _waits(3), 3: _NOTHING}, {3: "silent"}),
        ({0: _gave_up(1), 1: _waits(2), 2: _seen(failed="a NIC")}, {2: "failed"}),
        ({0: _waits(1), 1: _waits(2)}, {}),  # no deadline has passed
        ({0: _gave_up(1), 1: _waits(2), 2: _waits(1)}, {1: "silent"}),
        ({0: _gave_up(1), 1: _waits(0)}, {1: "silent"}),
        ({0: _gave_up(1), 1: _waits(2), 2: _waits(1, stood_still=True)}, {2: "silent"}),
        ({0: _gave_up(1), 1: _NOTHING, 2: _gave_up(3), 3: _NOTHING}, {1: "silent", 3: "silent"}),
        ({0: _gave_up(1), 1: _gave_up(0), 2: _gave_up(0), 3: _waits(0)}, {0: "silent"}),
        # what concerns nobody here, or comes from nobody here
        ({0: _seen(dead={9}, down={8}, accused={7})}, {}),
        ({9: _seen(dead={1})}, {}),
    ],
)  # fmt: skip
def test_who_is_lost(reports: dict[int, Report], lost: dict[int, str]) -> None:
    assert {rank: loss.rule for rank, loss in find_lost(frozenset(range(5)), reports).items()} == lost


@pytest.mark.parametrize(
    ("reports", "by"),
    [
        ({0: _NOTHING, 2: _seen(dead={3}), 4: _seen(dead={3})}, 2),
        ({1: _seen(accused={3}), 3: _seen(accused={0}), 0: _seen(accused={3})}, 1),
        ({1: _seen(down={3}), 2: _seen(down={3})}, 1),
        ({0: _gave_up(1), 1: _waits(2), 2: _waits(3), 3: _NOTHING}, 2),
        ({0: _gave_up(1), 1: _waits(2), 2: _waits(3), 3: _waits(2), 4: _waits(3)}, 4),
    ],
)
def test_who_has_seen_it(reports: dict[int, Report], by: int) -> None:
    lost = find_lost(frozenset(range(5)), reports)
    assert lost[3].by == by if by != 4 else lost[3].by in (2, 4)


def _best_connected(pairs: set[tuple[int, int]], ranks: range) -> frozenset[int]:
    """Tried one by one, the largest first, of equal ones that with the lowest ranks."""
    return next(
        frozenset(some)
        for size in range(len(ranks), 0, -1)
        for some in itertools.combinations(ranks, size)
        if not any(one in some and other in some for one, other in pairs)
    )


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1])))
def test_the_best_connected_ranks_go_on(pairs: set[tuple[int, int]]) -> None:
    members = range(8)
    reports = {one: Report(1, down=frozenset(b for a, b in pairs if a == one)) for one in members}
    lost = find_lost(frozenset(members), reports)
    assert frozenset(members) - lost.keys() == _best_connected(pairs, members)


@pytest.mark.parametrize("ranks", [64, 256])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 1.0])
def test_many_connections_down_are_judged_before_others_take_this_rank_for_mute(ranks: int, share: float) -> None:
    """A bad switch takes connections by chance where traffic is spread over several."""
    dice, members = random.Random(ranks), range(ranks)
    pairs = {(a, b) for b in members for a in range(b) if dice.random() < share}
    reports = {one: Report(1, down=frozenset(b for a, b in pairs if a == one)) for one in members}
    begun = time.thread_time()
    left = frozenset(members) - find_lost(frozenset(members), reports).keys()
    assert time.thread_time() - begun < ANSWER_SECONDS
    assert left
    assert not any(one in left and other in left for one, other in pairs)


_RANKS = st.sets(st.integers(0, 5), max_size=3).map(frozenset)
_REPORTS = st.dictionaries(
    st.integers(0, 5),
    st.builds(
        Report,
        version=st.just(1),
        dead=_RANKS,
        down=_RANKS,
        accused=_RANKS,
        gave_up=st.booleans(),
        waits=st.none() | st.builds(Wait, st.integers(0, 5)),
    ),
)


@given(_REPORTS, st.integers(0, 1000))
def test_the_answer_does_not_depend_on_the_order(reports: dict[int, Report], seed: int) -> None:
    members = frozenset(range(6))
    shuffled = list(reports.items())
    random.Random(seed).shuffle(shuffled)
    lost = find_lost(members, reports)
    assert find_lost(members, dict(shuffled)) == lost
    left = members - lost.keys()
    for rank in left:
        report = reports.get(rank, Report())
        assert not (report.dead | report.down | report.accused) & left - {rank}, "what it has seen is settled"


@given(st.sets(st.integers(0, 5), min_size=1), _RANKS, _RANKS)
def test_two_parts_never_both_go_on(one: set[int], dead: frozenset[int], gone: frozenset[int]) -> None:
    """The rest of the group may live, as far as the two parts differ in what they know."""
    group = frozenset(range(6))
    other = group - one - dead - gone
    if other and may_go_on(group, frozenset(one) - dead, dead, frozenset()):
        assert not may_go_on(group, other, dead, frozenset())


@pytest.mark.parametrize(
    ("survivors", "dead", "gone", "may"),
    [
        ({0, 1, 2}, set(), set(), True),
        ({1, 2, 3}, set(), set(), True),
        ({0, 1}, set(), set(), False),
        ({3, 4}, {0, 1, 2}, set(), True),
        ({3, 4}, set(), {0, 1, 2}, True),
        ({3, 4}, {0}, set(), False),
        ({3, 4}, {0}, {1}, False),
        ({1, 4}, {0}, set(), True),
        ({1, 4}, {0}, {2}, True),
        ({3, 4}, set(), {0}, False),
        ({4}, {0, 1, 2, 3}, set(), True),
        (set(), {0, 1, 2, 3, 4}, set(), False),
    ],
)
def test_who_may_go_on(survivors: set[int], dead: set[int], gone: set[int], may: bool) -> None:
    group = frozenset(range(5))
    assert may_go_on(group, frozenset(survivors), frozenset(dead), frozenset(gone)) is may
