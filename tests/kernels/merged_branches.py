"""Takes branches apart that LLVM has made one of, so that threads part only where the source has them part.

Of ``if over: if first thread: tell; if not over: go on`` the optimizer makes one branch on ``over and first thread``,
and on its other way a second one on ``over``: all threads pass the second alike, but by the graph they have parted at
the first, which differs between threads. The same two conditions asked in the other order mean the same::

    p: br (a and b), t, s        p: br b, s, y
    s: br b, x, y                s: br a, t, x

    p: br (a or b), s, f         p: br b, x, s
    s: br b, x, y                s: br a, y, f
"""

from __future__ import annotations

import re
from dataclasses import replace

from tests.kernels.flow_graph import reverse
from tests.kernels.llvm_ir import NAME, Function, Instruction

__all__ = ["apart"]

_BRANCH = re.compile(rf"br i1 ({NAME}), label ({NAME}), label ({NAME})$")
_BOTH = re.compile(rf"and i1 ({NAME}), ({NAME})$|select i1 ({NAME}), i1 ({NAME}), i1 false$")
_EITHER = re.compile(rf"or i1 ({NAME}), ({NAME})$|select i1 ({NAME}), i1 true, i1 ({NAME})$")


def apart(function: Function) -> Function:
    """``function`` with every such pair of branches asked in the other order."""
    blocks = [list(block) for block in function.blocks]
    ahead = [list(following) for following in function.ahead]
    names = {number: f"%{name}" for name, number in function.labels.items()}
    defined = {one.name: one for block in blocks for one in block if one.name}

    def number(label: str) -> int:
        return function.labels[label[1:]]

    def come(place: int, before: int, now: int) -> None:
        """What comes to ``place`` from one block comes from another one."""
        blocks[place] = [
            replace(one, text=re.sub(rf", {re.escape(names[before])} \]", f", {names[now]} ]", one.text))
            if one.opcode == "phi"
            else one
            for one in blocks[place]
        ]

    def end(place: int, condition: str, yes: int, no: int, like: Instruction) -> None:
        text = f"br i1 {condition}, label {names[yes]}, label {names[no]}"
        blocks[place][-1] = replace(like, block=place, operands=(condition,), text=text)
        ahead[place] = [yes, no]

    for place in range(len(blocks)):
        outer = blocks[place][-1]
        if not (first := _BRANCH.match(outer.text)) or first[1] not in defined:
            continue
        form = defined[first[1]].text.partition(" = ")[2]
        both, either = _BOTH.match(form), _EITHER.match(form)
        if not (both or either):
            continue
        second, other = (number(first[3]), number(first[2])) if both else (number(first[2]), number(first[3]))
        inner = blocks[second][-1]
        if len(blocks[second]) > 1 or reverse(ahead)[second] != [place] or not (asked := _BRANCH.match(inner.text)):
            continue
        conditions = [one for one in (both or either).groups() if one]  # type: ignore[union-attr]
        if asked[1] not in conditions:
            continue
        (left,) = [one for one in conditions if one != asked[1]] or [asked[1]]
        yes, no = number(asked[2]), number(asked[3])
        moved = no if both else yes
        if moved in (other, second) or yes == no:
            continue
        come(moved, second, place)
        come(other, place, second)
        if both:
            end(place, asked[1], second, no, inner)
            end(second, left, other, yes, outer)
        else:
            end(place, asked[1], yes, second, inner)
            end(second, left, no, other, outer)
    return replace(function, blocks=blocks, ahead=ahead)
