"""Graphs of basic blocks: their loops, and what every way to the end passes.

A graph is the list of each block's successors; blocks are numbered from 0, where the function begins.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["loops", "postdominators", "reached", "reverse"]


def reverse(ahead: list[list[int]]) -> list[list[int]]:
    """Predecessors of each block."""
    back: list[list[int]] = [[] for _ in ahead]
    for place, following in enumerate(ahead):
        for one in following:
            back[one].append(place)
    return back


def reached(ahead: list[list[int]], starts: Iterable[int], stop: frozenset[int] = frozenset()) -> frozenset[int]:
    """Blocks that a walk from ``starts`` comes to without entering one of ``stop``, the starts included."""
    found: set[int] = set()
    todo = list(starts)
    while todo:
        place = todo.pop()
        if place not in found and place not in stop:
            found.add(place)
            todo += ahead[place]
    return frozenset(found)


def loops(ahead: list[list[int]]) -> list[tuple[int, frozenset[int]]]:
    """Natural loops: the head, and all blocks from which an edge goes back to it. A head with several such edges has
    a loop for each. What stands between a head and the branch back to it in the text need not belong to the loop."""
    back = reverse(ahead)
    return [(head, reached(back, [latch], frozenset({head})) | {head}) for latch, head in _returns(ahead)]


def postdominators(ahead: list[list[int]]) -> list[frozenset[int]]:
    """Blocks through which every way from each block to the end of the function goes, itself included.

    Of a block from which there is no way to the end, itself only.
    """
    everything = (1 << len(ahead)) - 1
    ending = reached(reverse(ahead), [place for place, following in enumerate(ahead) if not following])
    passed = [everything] * len(ahead)
    fixed = {place for place, following in enumerate(ahead) if not following or place not in ending}
    for place in fixed:
        passed[place] = 1 << place
    changed = True
    while changed:
        changed = False
        for place in reversed(range(len(ahead))):
            if place not in fixed:
                common = everything
                for one in ahead[place]:
                    common &= passed[one]
                common |= 1 << place
                changed |= common != passed[place]
                passed[place] = common
    return [frozenset(one for one in range(len(ahead)) if blocks >> one & 1) for blocks in passed]


def _returns(ahead: list[list[int]]) -> list[tuple[int, int]]:
    """Edges of a graph, walked from 0, that go back to where the walk has come from."""
    found = []
    on_the_way, seen = {0}, {0}
    walk = [(0, iter(ahead[0]))]
    while walk:
        place, following = walk[-1]
        one = next(following, None)
        if one is None:
            walk.pop()
            on_the_way.discard(place)
        elif one in on_the_way:
            found.append((place, one))
        elif one not in seen:
            seen.add(one)
            on_the_way.add(one)
            walk.append((one, iter(ahead[one])))
    return found
