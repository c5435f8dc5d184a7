"""Each rule of the agreement, and the proof that its test notices when the rule is taken out of the source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.control_plane.membership_model import Crash, Stall, World
from uccl_ep_serving.control_plane import membership
from uccl_ep_serving.control_plane.frames import MOST_PAYLOAD
from uccl_ep_serving.control_plane.membership import Membership
from uccl_ep_serving.control_plane.reports import Note, Promise, Report, Wait
from uccl_ep_serving.control_plane.verdict import find_lost

_SOURCE = Path(membership.__file__).parent
#: The module of the source, or a mutant of it, and the other one.
_Modules = dict[str, Any]


def _told(machine: Membership, clock: float) -> set[frozenset[int]]:
    """The groups that ``machine`` says it has promised by ``clock``."""
    return {
        promise.group for _, note in machine.advance(clock) for promise in note.promises if machine._rank in promise.by
    }


def _says(machine: Membership, by: int, proposal: set[int], promised: bool = False, **report: object) -> None:
    """Rank ``by`` reports, proposes and maybe promises."""
    group = frozenset(proposal)
    seen = Report(1, **{name: frozenset(ranks) for name, ranks in report.items()})  # type: ignore[call-overload]
    promises = (Promise(1, group, frozenset({by})),) if promised else ()
    machine.hear(by, Note(machine.number, machine.members, {by: seen}, {}, group, promises))


def _promised_to_one(modules: _Modules) -> Membership:
    """Rank 0 of 3 has promised rank 1 to go on with it, and does not hear its promise."""
    machine: Membership = modules["membership"].Membership(0, 3)
    _says(machine, 1, {0, 1}, accused={2})
    assert _told(machine, 1.0) == {frozenset({0, 1})}
    return machine


def _a_promise_binds(modules: _Modules) -> None:
    """Rank 1 may act on that group, whatever rank 0 sees after."""
    machine = _promised_to_one(modules)
    machine.observe(lambda report: report.grown(accused={1}))
    _says(machine, 2, {0, 2})
    assert _told(machine, 1.1) == {frozenset({0, 1})}


def _a_part_of_it_may_go_on(modules: _Modules) -> None:
    machine = _promised_to_one(modules)
    machine.observe(lambda report: report.grown(dead={1, 2}))
    machine.advance(1.1)
    assert (machine.number, machine.members) == (2, {0}), "above the number of the group that was promised"


def _all_promise(modules: _Modules) -> None:
    machine: Membership = modules["membership"].Membership(0, 5)
    machine.observe(lambda report: report.grown(dead={3, 4}))
    _says(machine, 1, {0, 1, 2}, promised=True)
    _says(machine, 2, {0, 1, 2})
    machine.advance(1.0)
    assert machine.number == 0
    _says(machine, 2, {0, 1, 2}, promised=True)
    machine.advance(1.1)
    assert machine.members == {0, 1, 2}


def _all_propose(modules: _Modules) -> None:
    """Who proposes another group has seen something else."""
    machine: Membership = modules["membership"].Membership(0, 3)
    machine.observe(lambda report: report.grown(dead={2}))
    _says(machine, 1, {0, 1, 2})
    assert _told(machine, 1.0) == set()
    _says(machine, 1, {0, 1})
    assert _told(machine, 1.1) == {frozenset({0, 1})}


def _left_out_first(modules: _Modules) -> None:
    machine: Membership = modules["membership"].Membership(1, 4)
    machine.observe(lambda report: report.grown(accused={2, 3}))
    _says(machine, 0, {0, 1})
    assert [peer for peer, _ in machine.advance(1.0)] == [2, 3, 0]
    _says(machine, 0, {0, 1}, promised=True)
    assert [peer for peer, _ in machine.advance(1.1)] == [2, 3, 0]
    assert machine.members == {0, 1}


def _minority_stops(modules: _Modules) -> None:
    machine: Membership = modules["membership"].Membership(1, 2)
    machine.observe(lambda report: report.grown(accused={0}))
    for step in range(40):
        machine.advance(step * 0.05)
    assert "more than half of those that may be alive" in machine.stopped
    assert machine.number == 0


def _may_go_on(*cases: tuple[set[int], set[int], set[int], bool]) -> Callable[[_Modules], None]:
    def check(modules: _Modules) -> None:
        for survivors, dead, gone, may in cases:
            sets = [frozenset(ranks) for ranks in (range(5), survivors, dead, gone)]
            assert modules["verdict"].may_go_on(*sets) is may

    return check


def _stalls_are_not_others(modules: _Modules) -> None:
    """Rank 0 stands still while the others answer: it does not take them for silent."""
    machine: Membership = modules["membership"].Membership(0, 3)
    machine.advance(0.0)
    machine.observe(lambda report: report.grown(accused={2}))
    machine.advance(10.0)
    _says(machine, 1, {0, 1})
    assert _told(machine, 10.01) == {frozenset({0, 1})}


def _losing_a_connection(modules: _Modules, words: str, promises: bool = False) -> Any:
    """Rank 0 has promised a group without rank 1, which then closes its Buffer, and may have promised another one; why
    that one is lost."""
    machine: Membership = modules["membership"].Membership(0, 3)
    for step in range(10):
        machine.advance(step * 0.05)
    machine.observe(lambda report: report.grown(down={1}, causes={1: words}))
    for step in range(10, 20):
        _says(machine, 2, {0, 2})
        machine.advance(step * 0.05)
    machine.observe(lambda report: report.grown(dead={1}))
    if promises:
        _says(machine, 1, {0, 1}, promised=True)
        assert _told(machine, 1.0) == {frozenset({0, 2})}
    _says(machine, 2, {0, 2}, promised=True)
    machine.advance(1.1)
    assert machine.members == {0, 2}
    return machine.lost[1]


def _what_a_promise_was_given_for(modules: _Modules) -> None:
    lost = _losing_a_connection(modules, "status 12")
    assert (lost.loss.rule, lost.cause(1)) == ("unreachable", "status 12")


def _what_it_was_first_given_for(modules: _Modules) -> None:
    assert _losing_a_connection(modules, "status 12", promises=True).loss.rule == "unreachable"


def _what_a_connection_was_down_for(modules: _Modules) -> None:
    assert _losing_a_connection(modules, "").loss.rule == "ended"


def _passes_reports_on(modules: _Modules) -> None:
    """That of a rank that is dead, and that of one whose connection to the peer is down."""
    for says in ({"accused": {2}}, {"down": {2}}):
        machine: Membership = modules["membership"].Membership(0, 4)
        machine.observe(lambda report: report.grown(accused={3}))
        _says(machine, 1, {0, 1}, **says)
        if "accused" in says:
            machine.observe(lambda report: report.grown(dead={1}))
        assert [note.reports.keys() for peer, note in machine.advance(0.01) if peer == 2] == [{0}]
        assert [note.reports.keys() for peer, note in machine.advance(0.05) if peer == 2] == [{0, 1}]


def _passes_all_on_in_the_end(modules: _Modules) -> None:
    machine: Membership = modules["membership"].Membership(0, 4)
    machine.observe(lambda report: report.grown(accused={3}))
    _says(machine, 1, {0, 1, 2}, accused={3})
    told = [note.reports.keys() for step in range(10) for peer, note in machine.advance(0.04 * step) if peer == 2]
    assert told[0] == {0}
    assert told[-1] == {0, 1}


def _in_a_world(*faults: Any, left: set[int]) -> Callable[[_Modules], None]:
    def check(modules: _Modules) -> None:
        for seed in range(5):
            world = World(4, faults, seed, machine=modules["membership"].Membership)
            world.run(2.5)
            assert world.check_one_group() == left == set(world.going_on)

    return check


class _Rule(NamedTuple):
    module: str
    text: str
    instead: str
    check: Callable[[_Modules], None]


_RULES = {
    "a promise binds": _Rule(
        "membership", "        if group & proposal - given:\n", "        if True:\n", _a_promise_binds
    ),
    "what follows a promised group is a part of it": _Rule(
        "membership", "(proposal <= group and may_go_on", "(may_go_on", _a_promise_binds
    ),
    "a part of a promised group may go on": _Rule(
        "membership", "or (proposal <= group and may_go_on", "or (False and may_go_on", _a_part_of_it_may_go_on
    ),
    "one number is one group": _Rule(
        "membership", "max(others + 1, same)", "max(self.number + 1, same)", _a_part_of_it_may_go_on
    ),
    "all of a group promise it": _Rule(
        "membership", "if group <= given and", "if 2 * len(group & given) > len(group) and", _all_promise
    ),
    "all of a group propose it": _Rule(
        "membership", "self._notes[peer].proposal != proposal for", "False for", _all_propose
    ),
    "a promise goes first to whom it leaves out": _Rule(
        "membership", "key=lambda peer: (peer in (proposal or self.members), peer)", "", _left_out_first
    ),
    "only the larger part goes on": _Rule(
        "membership", "if not may_go_on(self.members, proposal, *self._ended()):", "if False:", _minority_stops
    ),
    "a rank that nobody answers stops": _Rule("membership", "> LIMIT_SECONDS:", "> 1e9:", _minority_stops),
    "time in which a rank stood still does not count": _Rule(
        "membership", ", _MOST_STEP_SECONDS)", ", 1e9)", _stalls_are_not_others
    ),
    "who answers nothing is not waited for": _Rule(
        "membership",
        "        if mute:\n",
        "        if False:\n",
        _in_a_world(Stall(3, 0, 3.0), Crash(2, 0.1), left={0, 1}),
    ),
    "a report reaches who is cut off from its rank": _Rule(
        "membership", "cut_off = self._cut_off(ended) if relay else {}", "cut_off = {}", _passes_reports_on
    ),
    "a report that a peer lacks reaches it in the end": _Rule(
        "membership", "everybody = self._reports.keys() if", "everybody = cut_off.keys() if", _passes_all_on_in_the_end
    ),
    "a rank that leaves since it is left out was not lost for that": _Rule(
        "membership",
        "self._reasons.get(group, {}).get(peer)",
        "self._reasons.get(frozenset(), {}).get(peer)",
        _what_a_promise_was_given_for,
    ),
    "a promise that is given again is given for the same": _Rule(
        "membership", "self._reasons.setdefault(", "self._reasons.__setitem__(", _what_it_was_first_given_for
    ),
    "the end of a process explains a connection that is down": _Rule(
        "membership",
        '(known.loss != Loss("unreachable", known.by) or known.cause(peer))',
        "True",
        _what_a_connection_was_down_for,
    ),
    "half of the ranks are not enough": _Rule(
        "verdict", "2 * votes > len(voters)", "3 * votes > len(voters)", _may_go_on(({3, 4}, set(), set(), False))
    ),
    "at an even split the lowest rank decides": _Rule(
        "verdict",
        " and min(voters) in survivors",
        "",
        _may_go_on(({3, 4}, {0}, set(), False), ({1, 4}, {0}, set(), True)),
    ),
    "the dead do not count": _Rule(
        "verdict", "voters = group - dead", "voters = group", _may_go_on(({1, 2}, {3, 4}, set(), True))
    ),
    "who has ended unheard counts": _Rule(
        "verdict", "voters = group - dead", "voters = group - dead - gone", _may_go_on(({3, 4}, set(), {0, 1}, False))
    ),
    "where all others have ended the rest goes on": _Rule(
        "verdict",
        "    if inside and group - survivors <= dead | gone:\n",
        "    if False:\n",
        _may_go_on(({4}, {0, 1}, {2, 3}, True)),
    ),
    "somebody must be left": _Rule(
        "verdict", "if inside and group", "if group", _may_go_on((set(), {0, 1, 2}, {3, 4}, False))
    ),
}


def _without(rule: _Rule | None) -> _Modules:
    modules: _Modules = {}
    try:
        for name in ("verdict", "membership"):
            source = (_SOURCE / f"{name}.py").read_text()
            if rule is not None and rule.module == name:
                assert source.count(rule.text) == 1, f"{rule.text!r} in {name}.py"
                source = source.replace(rule.text, rule.instead)
            source = source.replace("from .reports", "from uccl_ep_serving.control_plane.reports")
            source = source.replace("from .verdict", f"from {__name__}_verdict")
            module = modules[name] = ModuleType(f"{__name__}_{name}")
            sys.modules[module.__name__] = module
            exec(compile(source, f"{name}.py without a rule", "exec"), module.__dict__)
    finally:
        for module in modules.values():
            del sys.modules[module.__name__]
    return modules


@pytest.mark.parametrize("name", _RULES)
def test_rule(name: str) -> None:
    rule = _RULES[name]
    rule.check(_without(None))
    with pytest.raises(AssertionError):
        rule.check(_without(rule))


def test_who_waited_is_said_once() -> None:
    """What a rank waits for when it hears of a failure: its operation is void then, a later wait explains nothing."""
    waits = [Wait(1), Wait(2)]
    machine = Membership(0, 4, lambda: Report(waits=waits.pop(0)))
    machine.observe(lambda report: report.grown(down={3}))
    machine.observe(lambda report: report.grown(down={2}))
    reports = [note.reports[0] for _, note in machine.advance(0.01)]
    assert {report.waits for report in reports} == {Wait(1)}


def test_who_stops_says_who_answers_nothing() -> None:
    """Of two hosts the first has lost its power: ranks of the second cannot go on, and must not name those as left."""
    machine = Membership(2, 4)
    machine.observe(lambda report: report.grown(down={0, 1}))
    _says(machine, 3, {2, 3}, down={0, 1})
    for step in range(40):
        machine.advance(step * 0.05)
    assert "of ranks [0, 1, 2, 3], [0, 1] answer nothing. Ranks go on only where" in machine.stopped


def test_who_speaks_of_an_older_group_is_told_of_this_one() -> None:
    """Also by a rank for which all has long been settled."""
    machine = Membership(0, 3)
    machine.observe(lambda report: report.grown(dead={2}))
    _says(machine, 1, {0, 1}, promised=True)
    machine.advance(1.0)
    assert (machine.deciding, machine.owes, machine.number) == (False, False, 1)
    machine.hear(1, Note(0, frozenset(range(3)), {1: Report(2, dead=frozenset({2}))}))
    assert machine.owes
    assert [(peer, note.number) for peer, note in machine.advance(1.1)] == [(1, 1)]
    assert not machine.owes


@pytest.mark.parametrize(("ranks", "ended", "words"), [(64, 8, 4096), (320, 160, 60), (320, 16, 4096)])
def test_what_many_ranks_have_seen_fits_a_frame(ranks: int, ended: int, words: int) -> None:
    """Who sends a longer one breaks the formats, and is accused. Who is lost stands in it whole."""
    lost, left = frozenset(range(ended)), frozenset(range(ended, ranks))
    seen = Report().grown(dead=lost, failed="\u20ac" * words, causes=dict.fromkeys(lost, "\u20ac" * words))
    note = Note(0, lost | left, dict.fromkeys(left, seen), dict.fromkeys(left, 1), left, (Promise(1, left, left),))
    payload = note.encode()
    assert len(payload) <= MOST_PAYLOAD
    again = Note.decode(ended, payload, ranks)
    assert find_lost(lost | left, again.reports) == find_lost(lost | left, note.reports)
    assert (again.promises, again.proposal) == (note.promises, note.proposal)
    assert all(again.reports[ended].causes.values())
