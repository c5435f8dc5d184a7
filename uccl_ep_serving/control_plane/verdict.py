"""Who is lost, decided from what ranks have seen: every rank that has the same reports comes to the same answer.

A failure shows in several places at once, and not where it began. The rules, in their order:

1. A process that has ended, a rank that says that something of its own failed: lost. Nobody can speak against that.
2. A rank that another one accuses (it broke the formats, or the user has masked it): lost, and what it says of others
   counts for nothing. Of ranks that accuse each other the most accused is lost.
3. Where connections are down between ranks that may live, the most ranks go on that are all connected: of one
   connection the end with fewer live ones is lost, at a tie the higher rank.
4. Of a rank that reached its deadline, the way from the one it waits for is followed to its end: to a rank that waits
   for nobody, or that has not run for a while. Of ranks that wait for each other the most awaited is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .reports import Report

__all__ = ["Loss", "find_lost", "may_go_on"]

#: Steps of the search for the best connected ranks. It is exact for any fault that is likely (parts of a network, one
#: bad switch, a few cables); beyond that all ranks stop at the same place.
_MOST_STEPS = 20_000


class Loss(NamedTuple):
    """Why a rank is lost.

    Attributes:
        rule: "ended", "failed", "accused", "unreachable" or "silent".
        by: the rank that has seen it.
    """

    rule: str
    by: int


def find_lost(members: frozenset[int], reports: Mapping[int, Report]) -> dict[int, Loss]:
    """The lost ranks of ``members``, and why; some more may follow once more reports are there.

    Args:
        members: the present group.
        reports: of some of its members.
    """
    heard = {rank: reports[rank] for rank in sorted(reports.keys() & members)}
    lost: dict[int, Loss] = {}
    for rank, report in heard.items():
        for peer in sorted((report.dead | report.gone) & members):
            lost.setdefault(peer, Loss("ended", rank))
    for rank, report in heard.items():
        if report.failed:
            lost.setdefault(rank, Loss("failed", rank))
    _add_accused(heard, members, lost)
    _add_unreachable(heard, members, lost)
    _add_silent(heard, members, lost)
    return lost


def _add_accused(heard: Mapping[int, Report], members: frozenset[int], lost: dict[int, Loss]) -> None:
    """Rule 2."""
    while True:
        accusers: dict[int, list[int]] = {}
        for rank, report in heard.items():
            if rank not in lost:
                for peer in report.accused & members - lost.keys() - {rank}:
                    accusers.setdefault(peer, []).append(rank)
        if not accusers:
            return
        # who is accused by nobody is believed first
        believed = {peer: [rank for rank in ranks if rank not in accusers] for peer, ranks in accusers.items()}
        found = {peer: ranks[0] for peer, ranks in believed.items() if ranks}
        if not found:
            worst = max(accusers, key=lambda peer: (len(accusers[peer]), peer))
            found = {worst: accusers[worst][0]}
        for peer, by in found.items():
            lost[peer] = Loss("accused", by)


def _add_unreachable(heard: Mapping[int, Report], members: frozenset[int], lost: dict[int, Loss]) -> None:
    """Rule 3."""
    down: dict[int, set[int]] = {}
    for rank, report in heard.items():
        for peer in report.down & members - {rank}:
            if rank not in lost and peer not in lost:
                down.setdefault(rank, set()).add(peer)
                down.setdefault(peer, set()).add(rank)
    left = _most_connected(down)
    for rank in sorted(down.keys() - left):
        others = sorted(down[rank])
        by = next((other for other in others if other in left and other in heard), others[0])
        lost[rank] = Loss("unreachable", by)


def _most_connected(down: Mapping[int, set[int]]) -> frozenset[int]:
    """The largest part of the ranks of ``down`` in which no connection is down; of equal ones that with the lowest
    ranks.

    Args:
        down: by rank, the ranks to which its connection is down; symmetric.
    """
    best: tuple[int, ...] = ()
    steps = 0

    def search(kept: tuple[int, ...], open_ranks: frozenset[int]) -> None:
        # keep the lowest rank with the most connections down, and so none of those, or leave it out
        nonlocal best, steps
        steps += 1
        if len(kept) + len(open_ranks) < len(best) or steps > _MOST_STEPS:
            return
        free = tuple(rank for rank in sorted(open_ranks) if not down[rank] & open_ranks)
        if len(free) == len(open_ranks):
            found = tuple(sorted(kept + free))
            if (len(found), best) > (len(best), found):
                best = found
            return
        rank = min(open_ranks, key=lambda rank: (-len(down[rank] & open_ranks), rank))
        search(kept, open_ranks - {rank})
        search((*kept, rank), open_ranks - {rank} - down[rank])

    search((), frozenset(down))
    return frozenset(best)


def _add_silent(heard: Mapping[int, Report], members: frozenset[int], lost: dict[int, Loss]) -> None:
    """Rule 4. The end of a way that has said nothing is not lost yet: it will, or is found unreachable."""
    waits = {
        rank: report.waits.peer
        for rank, report in heard.items()
        if report.waits is not None and report.waits.peer in members and (report.gave_up or not report.stood_still)
    }
    for rank in [rank for rank in waits if heard[rank].gave_up]:
        if rank in lost:
            continue
        way, peer = [rank], waits[rank]
        while peer not in lost and peer not in way and peer in waits:
            way.append(peer)
            peer = waits[peer]
        if peer in lost or peer not in heard:
            continue
        if peer in way:
            circle = way[way.index(peer) :]
            awaited = [waits[one] for one in waits if one not in lost]
            peer = max(circle, key=lambda one: (awaited.count(one), one))
        by = next(one for one in reversed(way) if waits[one] == peer)
        lost[peer] = Loss("silent", by)


def may_go_on(group: frozenset[int], survivors: frozenset[int], dead: frozenset[int], gone: frozenset[int]) -> bool:
    """Whether ``survivors`` may go on where members of ``group`` might: no other part of it can come to the same.

    More than half of the members that are not proven dead, or half of them with the lowest rank among them (dynamic
    linear voting: Jajodia and Mutchler, ACM TODS 15(2), 1990).

    Args:
        dead: ended, and whatever they had promised is known.
        gone: ended, and what they promised may be unknown: they matter only where somebody else is left outside.
    """
    inside = group & survivors
    if inside and group - survivors <= dead | gone:
        return True
    voters = group - dead
    votes = len(voters & survivors)
    return 2 * votes > len(voters) or (2 * votes == len(voters) > 0 and min(voters) in survivors)
