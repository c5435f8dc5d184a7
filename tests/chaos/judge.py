"""Whether a trial ended as it must: all who go on left out the same ranks, none of them healthy, with right data.

What may be lost is the fault's alone. A rank that is lost, and lives, is told so by name and stops.
"""

from __future__ import annotations

import re

from tests.chaos.records import Outcome, Record
from tests.chaos.trials import Trial

__all__ = ["allowed", "seconds_to", "verdict"]

#: How a rank may end that the fault hit itself, by kind; "finished" where it may also be no loss.
_FATES = {
    "kill": {"killed"},
    "kill two": {"killed"},
    "kill in rebuild": {"killed"},
    "kill in constructor": {"killed"},
    "stop": {"killed"},
    "flood": {"killed"},
    "leave": {"left"},
    "limit": {"refused", "failed", "finished"},
}
#: Who is named in a message: "rank 3", "ranks [1, 3]".
_RANKS = re.compile(r"rank \d+|ranks \[[\d, ]+\]")


def allowed(trial: Trial) -> list[frozenset[int]]:
    """The sets of lost ranks that all survivors may agree on."""
    none, hit = frozenset[int](), frozenset(trial.victims)
    if trial.kind in ("cut control", "cut data twice"):
        # one end of a link of which both are healthy: they have as many live links, so it is the higher rank
        return [none, frozenset([max(trial.victims[0], trial.peer)])]
    if trial.kind in ("wake", "garble control", "garble data", "kill in constructor", "limit"):
        return [none, hit]
    return [none] if trial.kind in ("pause", "cache", "cut wire", "cut data", "garble sealed") else [hit]


def verdict(trial: Trial, outcome: Outcome) -> list[str]:
    """What is wrong, in words; empty when nothing is."""
    records = outcome.records
    complaints = [f"left behind: {outcome.left}"] if outcome.left else []
    complaints += [f"rank {one.rank} still holds {one.left}" for one in records if one.left]
    complaints += [f"rank {one.rank} {one.end}: {one.words}" for one in records if one.end in ("wrong", "raised")]
    complaints += [f"rank {one.rank} did not end: {one.words}" for one in records if one.end == "working"]
    complaints += [f"rank {one.rank} died: {one.words}" for one in records if one.end == "died"]
    if not outcome.fault_at:
        return [*complaints, "the fault never came"]
    if trial.kind == "flood" and not outcome.strangers:
        complaints.append("no stranger found a listener")
    if any(one.end == "refused" for one in records):
        return complaints + _refused(trial, records)
    return complaints + _lost(trial, records)


def _lost(trial: Trial, records: list[Record]) -> list[str]:
    survivors = [one for one in records if one.end in ("finished", "working")]
    sets = {one.masked for one in survivors}
    who = "; ".join(f"rank {one.rank} left out {sorted(one.masked)}" for one in survivors)
    complaints = []
    if not survivors:
        complaints.append("nobody went on")
    elif len(sets) > 1:
        complaints.append(f"the survivors disagree: {who}")
    elif not sets & set(allowed(trial)):
        may = " or ".join(str(sorted(one)) for one in allowed(trial))
        complaints.append(f"lost {sorted(*sets)}, not {may}")
    if any(one.end == "finished" and not one.good for one in survivors):
        complaints.append("no operation after the loss")
    lost = frozenset().union(*sets)
    for one in records:
        fates = _FATES.get(trial.kind, {"left out", "finished"}) if one.rank in trial.victims else {"finished"}
        if one.rank in lost and one.rank not in trial.victims:
            fates = {"left out"}
        elif one.rank in lost:
            fates = fates - {"finished"}
        elif one.rank in trial.victims:
            fates = fates - {"left out"}
        if one.end not in {*fates, "working", "died", "wrong", "raised"}:
            last = f": {one.losses[-1].kind}: {one.losses[-1].message}" if one.losses else ""
            complaints.append(f"rank {one.rank} {one.end}, not {' or '.join(sorted(fates))}{last}")
    return complaints


def _refused(trial: Trial, records: list[Record]) -> list[str]:
    """Of ranks that never had a Buffer: each names one that is gone, and who was built already leaves out nobody who
    could go on."""
    if trial.kind not in ("kill in constructor", "limit"):
        last = next(one.losses[-1] for one in records if one.end == "refused")
        return [f"no Buffer was built: {last.kind}: {last.message}"]
    (victim,) = trial.victims
    gone = {one.rank for one in records if one.end in ("refused", "killed")}
    complaints = []
    for one in records:
        if one.rank == victim or one.end == "killed":
            continue
        for loss in one.losses:
            named = {int(number) for words in _RANKS.findall(loss.message) for number in re.findall(r"\d+", words)}
            if one.end == "refused" and not (named | {loss.peer}) & (gone - {one.rank}):
                complaints.append(f"rank {one.rank} names nobody who is gone: {loss.kind}: {loss.message}")
        if one.end != "refused" and not one.masked <= gone:
            complaints.append(f"rank {one.rank} left out {sorted(one.masked)}")
    return complaints


def seconds_to(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Of all that went on after a loss: seconds from the fault to their first error, and from its last part to their
    first right operation without the lost ranks."""
    survivors = [one for one in outcome.records if one.end == "finished" and one.masked and one.losses]
    raised = [one.losses[0].at - outcome.fault_at for one in survivors]
    good = [one.good_at - outcome.last_at for one in survivors if one.good_at]
    return raised, good
