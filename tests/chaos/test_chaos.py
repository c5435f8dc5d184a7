"""Some faults of each kind, quickly; and that the judge refuses every record that is not as it must be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import chaos
from tests.chaos import command
from tests.chaos.judge import allowed, seconds_to, verdict
from tests.chaos.processes import Prepared, TrialHung
from tests.chaos.records import Loss, Outcome, Record
from tests.chaos.supervisor import SECONDS
from tests.chaos.trials import KINDS, PATHS, Trial, draw


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    with Prepared() as one:
        yield one


def first(kind: str, **wanted: Any) -> Trial:
    """The first trial of a kind that has these attributes."""
    trials = map(draw, range(10_000))
    return next(one for one in trials if one.kind == kind and all(getattr(one, k) == v for k, v in wanted.items()))


#: One of each kind that takes less than its deadline.
QUICK = [
    first("kill", path="tcp", mode="both"),
    first("kill two", path="direct"),
    first("kill in rebuild", path="shm", ranks=4),
    first("kill in constructor", path="tcp"),
    first("pause", path="shm", ranks=3),
    first("flood", path="tcp", ranks=3),
    first("cache", form="shared", ranks=3),
]


@pytest.mark.parametrize("trial", QUICK, ids=lambda trial: f"{trial.kind}, {trial.path}")
def test_survivors_go_on_together(prepared: Prepared, trial: Trial) -> None:
    outcome = prepared.run(trial, SECONDS)
    assert verdict(trial, outcome) == [], outcome.log
    # that it was there at all
    assert trial.kind != "cache" or "others can write it" in outcome.log


def test_a_trial_that_hangs_is_ended_with_its_processes(prepared: Prepared) -> None:
    with pytest.raises(TrialHung, match=r"not over after 0 s"):
        prepared.run(first("stop"), 0.1)
    # and the next one finds nothing in its way
    trial = first("kill", ranks=3)
    assert verdict(trial, prepared.run(trial, SECONDS)) == []


def lost(peer: int, *others: int, at: float = 10.02) -> Loss:
    return Loss("PeerLost", peer, (peer, *others), f"rank {peer} is gone", at)


def good_kill() -> tuple[Trial, Outcome]:
    """Rank 1 of 4 is killed, and the others go on."""
    trial = replace(first("kill"), ranks=4, victims=(1,))
    records = [Record(rank, "finished", [lost(1)], frozenset([1]), 10.07, 5) for rank in range(4)]
    records[1] = Record(1, "killed")
    return trial, Outcome(records, 10.0, 10.0)


def test_a_good_record_is_accepted_and_timed() -> None:
    trial, outcome = good_kill()
    assert verdict(trial, outcome) == []
    raised, good = seconds_to(outcome)
    assert raised == pytest.approx([0.02] * 3)
    assert good == pytest.approx([0.07] * 3)


def change(rank: int, **fields: Any) -> Callable[[Outcome], None]:
    def falsify(outcome: Outcome) -> None:
        outcome.records[rank] = replace(outcome.records[rank], **fields)

    return falsify


FALSIFIED = {
    "one survivor left out another rank": (change(0, masked=frozenset([2])), "the survivors disagree"),
    "one left out one more": (change(3, masked=frozenset([0, 1])), "rank 3 left out [0, 1]"),
    "a healthy rank stopped": (change(2, end="left out"), "rank 2 left out, not finished"),
    "a healthy rank failed": (change(2, end="failed", losses=[lost(3)]), "rank 2 failed, not finished: PeerLost"),
    "wrong data": (change(0, end="wrong", words="the combined rows differ"), "the combined rows differ"),
    "a raw error": (change(0, end="raised", words="AttributeError"), "rank 0 raised: AttributeError"),
    "no good operation": (change(0, good=0), "no operation after the loss"),
    "a rank that hangs": (change(3, end="working", words="operation 7"), "rank 3 did not end: operation 7"),
    "a crash": (change(3, end="died", words="exit status -11"), "rank 3 died: exit status -11"),
    "memory that is left": (change(0, left="memory: 5 maps"), "rank 0 still holds memory"),
    "a process that is left": (lambda outcome: setattr(outcome, "left", "processes: 7"), "left behind: processes: 7"),
    "no fault": (lambda outcome: setattr(outcome, "fault_at", 0.0), "the fault never came"),
}


@pytest.mark.parametrize("name", FALSIFIED)
def test_a_falsified_record_is_refused(name: str) -> None:
    trial, outcome = good_kill()
    falsify, words = FALSIFIED[name]
    falsify(outcome)
    assert words in "\n".join(verdict(trial, outcome))


def test_all_survivors_may_be_wrong_together() -> None:
    trial, outcome = good_kill()
    for one in outcome.records:
        one.masked = frozenset([1, 2])
    outcome.records[2].end = "left out"
    assert verdict(trial, outcome) == ["lost [1, 2], not [1]"]


def test_of_a_cut_link_the_higher_end_may_be_lost_and_nobody_else() -> None:
    trial = replace(first("cut control"), ranks=4, victims=(1,), peer=2)
    assert allowed(trial) == [frozenset(), frozenset([2])]
    records = [Record(rank, "finished", [lost(2)], frozenset([2]), 10.1, 4) for rank in range(4)]
    records[2] = Record(2, "left out", [lost(1)])
    assert verdict(trial, Outcome(records, 10.0, 10.0)) == []
    # it stops: two sides would serve
    records[2] = Record(2, "finished", [lost(1)], frozenset([0, 1, 3]), 10.1, 4)
    assert "the survivors disagree" in verdict(trial, Outcome(records, 10.0, 10.0))[0]
    healthy = [Record(rank, "finished", good=9) for rank in range(4)]
    assert verdict(trial, Outcome(healthy, 10.0, 10.0)) == []


def test_a_short_stop_harms_nobody() -> None:
    trial = replace(first("pause"), ranks=3, victims=(1,))
    records = [Record(rank, "finished", [lost(1)], frozenset([1]), 10.1, 4) for rank in range(3)]
    records[1] = Record(1, "left out", [lost(0)])
    assert verdict(trial, Outcome(records, 10.0, 10.0))[0] == "lost [1], not []"


def test_whoever_opens_no_buffer_names_one_that_is_gone() -> None:
    trial = replace(first("kill in constructor"), ranks=3, victims=(2,))
    named = Loss("BootstrapError", -1, (), "ranks [2] have not connected", 10.1)
    records = [Record(0, "refused", [named]), Record(1, "refused", [named]), Record(2, "killed")]
    assert verdict(trial, Outcome(records, 10.0, 10.0)) == []
    records[1] = Record(1, "refused", [replace(named, message="something went wrong")])
    assert "rank 1 names nobody who is gone" in verdict(trial, Outcome(records, 10.0, 10.0))[0]
    other = replace(first("pause"), ranks=3)
    assert "no Buffer was built" in verdict(other, Outcome(records, 10.0, 10.0))[0]


def test_a_seed_gives_one_trial_and_seeds_give_all() -> None:
    trials = [draw(seed) for seed in range(1000)]
    assert trials == [draw(seed) for seed in range(1000)]
    assert {trial.kind for trial in trials if trial.node_ranks} == set(KINDS) - {"cache"}
    assert {one.kind for one in trials} == set(KINDS)
    assert {one.path for one in trials} == set(PATHS)
    assert {one.ranks for one in trials} == {3, 4, 5, 6}
    for one in trials:
        assert len({*one.victims, one.peer} - {-1}) == len(one.victims) + (one.peer >= 0)
        assert max(*one.victims, one.peer) < one.ranks


class Played:
    """Runs no trial: of each it returns that of :func:`good_kill`, or says that it hung."""

    ran: list[int]

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, trial: Trial, seconds: float) -> Outcome:
        Played.ran.append(trial.seed)
        if trial.kind == "stop":
            raise TrialHung("not over")
        return good_kill()[1]


def test_a_run_goes_on_where_one_of_the_same_commit_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "chaos.json"
    monkeypatch.setattr(command, "Prepared", Played)

    def run(*arguments: str, commit: str = "abc") -> tuple[int, list[int], str]:
        Played.ran = []
        monkeypatch.setattr(command, "describe", lambda: {"commit": commit, "load": [0.0]})
        done = CliRunner().invoke(command.app, ["--output", str(output), *arguments])
        return done.exit_code, Played.ran, done.output

    hanging = next(seed for seed in range(100) if draw(seed).kind == "stop")
    status, ran, words = run("--seed", str(hanging), "--trials", "3")
    assert (status, ran) == (1, [hanging, hanging + 1, hanging + 2])
    assert f'again: make chaos ARGS="--dry --trials 1 --seed {hanging}"' in words
    assert run("--seed", str(hanging), "--trials", "5")[1] == [hanging + 3, hanging + 4]
    kept = output.read_text()
    assert run("--seed", str(hanging), "--trials", "2", "--dry")[1] == [hanging, hanging + 1]
    assert output.read_text() == kept
    found = json.loads(kept)
    assert [one["seed"] for one in found["trials"]] == [hanging + step for step in range(5)]
    shown = chaos.markdown(found)
    assert f"* seed {hanging}, stop, {draw(hanging).path}: not over" in shown
    assert "5 seeded faults" in shown
    # another commit begins anew, and so do sources that have none
    assert [run("--trials", "1", commit=commit)[1] for commit in ("def", "def", "def+", "def+")] == [[0], [], [0], [0]]
    assert run("--kind", "explosion")[0] == 2
    assert {draw(seed).kind for seed in run("--kind", "stop", "--kind", "wake", "--trials", "4")[1]} <= {"stop", "wake"}
