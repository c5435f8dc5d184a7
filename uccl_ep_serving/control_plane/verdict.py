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

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .reports import Report

__all__ = ["Loss", "find_lost", "may_go_on"]

#: Ranks looked at in the search for the best connected ones, some 20 ms: the thread that searches has to answer others.
#: It is exact for any fault that is likely (parts of a network, one bad switch, a few cables); beyond that all ranks
#: stop at the same place.
_MOST_LOOKS = 10_000


class Loss(NamedTuple):
    """Why a rank is lost.

    Attributes:
        rule: "ended", "failed", "accused", "unreachable" or "silent".
        by: the rank that has seen it; an unreachable one itself where no other one has.
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
            if report.accused and rank not in lost:
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
        for peer in (report.down & members) - {rank}:
            if rank not in lost and peer not in lost:
                down.setdefault(rank, set()).add(peer)
                down.setdefault(peer, set()).add(rank)
    left = _most_connected(frozenset((rank, peer) for rank in down for peer in down[rank] if rank < peer))
    for rank in sorted(down.keys() - left):
        seen_by = [other for other in sorted(down[rank]) if other in heard and rank in heard[other].down]
        by = next((other for other in seen_by if other in left), seen_by[0] if seen_by else rank)
        lost[rank] = Loss("unreachable", by)


@functools.lru_cache(maxsize=8)
def _most_connected(pairs: frozenset[tuple[int, int]]) -> frozenset[int]:
    """The largest part of the ranks of ``pairs`` in which no connection is down; of equal ones that with the lowest
    ranks.

    Args:
        pairs: ranks between which the connection is down.
    """
    ranks = sorted({rank for pair in pairs for rank in pair})
    place = {rank: bit for bit, rank in enumerate(ranks)}
    #: Of each rank those to which its connection is down. Sets of ranks are bits of an integer here.
    down = [0] * len(ranks)
    for one, other in pairs:
        down[place[one]] |= 1 << place[other]
        down[place[other]] |= 1 << place[one]
    known: dict[int, int] = {}
    looks = 0

    def best(left: int) -> int:
        # connections that are down join it to parts, of which each is a question of its own
        kept = 0
        while left:
            part = _joined(down, left)
            left &= ~part
            kept |= best_of_part(part)
        return kept

    def best_of_part(part: int) -> int:
        nonlocal looks
        if part & (part - 1) == 0:
            return part
        if part in known:
            return known[part]
        if looks > _MOST_LOOKS:
            return _quickly(down, part)
        looks += part.bit_count()
        worst = _worst(down, part)
        found = best(part & ~(1 << worst))
        if looks <= _MOST_LOOKS:
            other = 1 << worst | best(part & ~(1 << worst | down[worst]))
            differ = found ^ other
            if (other.bit_count(), other & differ & -differ) > (found.bit_count(), found & differ & -differ):
                found = other
        known[part] = found
        return found

    kept = best((1 << len(ranks)) - 1)
    return frozenset(ranks[bit] for bit in _bits(kept))


def _bits(ranks: int) -> Iterator[int]:
    while ranks:
        lowest = ranks & -ranks
        yield lowest.bit_length() - 1
        ranks ^= lowest


def _joined(down: Sequence[int], left: int) -> int:
    """Those of ``left`` that connections which are down join to the lowest of them."""
    part, new = 0, left & -left
    while new:
        part |= new
        near = 0
        for bit in _bits(new):
            near |= down[bit]
        new = near & left & ~part
    return part


def _worst(down: Sequence[int], part: int) -> int:
    """The rank of ``part`` with the fewest connections in it, of equal ones the highest."""
    return max(_bits(part), key=lambda bit: ((down[bit] & part).bit_count(), bit))


def _quickly(down: Sequence[int], part: int) -> int:
    """A part of ``part`` in which no connection is down: without its worst connected ranks."""
    while any(down[bit] & part for bit in _bits(part)):
        part &= ~(1 << _worst(down, part))
    return part


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
