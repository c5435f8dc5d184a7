"""Functions that a kernel calls, put where it calls them: what the threads of a program do is followed through them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from tests.kernels.llvm_ir import NAME, Function, Instruction, arguments

__all__ = ["inlined"]


def inlined(function: Function, others: Mapping[str, Function], calling: tuple[str, ...] = ()) -> Function:
    """``function`` without calls of ``others``.

    A block that calls is cut in two, between which the blocks of the called function stand. Its values have the number
    of the call before their names; what it returns is taken out of there field by field.

    Raises:
        ValueError: a function calls itself.
    """
    if function.name in calling:
        raise ValueError(f"{function.name} calls itself, which tests/kernels/llvm_calls.py does not know")
    calling = (*calling, function.name)
    blocks: list[list[Instruction]] = []
    ahead: list[list[int]] = []
    labels: dict[str, int] = {}
    #: by number of a block here: where it begins, and where it ends
    first, last = [], []
    for index, block in enumerate(function.blocks):
        first.append(len(blocks))
        blocks.append([])
        for one in block:
            if one.callee not in others:
                blocks[-1].append(replace(one, block=len(blocks) - 1))
                continue
            inner = _renamed(inlined(others[one.callee], others, calling), one)
            start, behind = len(blocks), len(blocks) + len(inner.blocks)
            labels |= {name: start + place for name, place in inner.labels.items()}
            blocks[-1].append(_branch(one, start - 1))
            ahead.append([start])
            result: list[Instruction] = []
            for place, part in enumerate(inner.blocks):
                end = part[-1]
                moved = [replace(each, block=start + place) for each in part[:-1]]
                if end.opcode == "ret":
                    result += [_result(one, end, behind)] if one.name else []
                    moved.append(_branch(end, start + place))
                    ahead.append([behind])
                else:
                    moved.append(replace(end, block=start + place))
                    ahead.append([start + each for each in inner.ahead[place]])
                blocks.append(moved)
            if len(result) > 1:
                raise ValueError(
                    f"{one.callee} returns at several places, which tests/kernels/llvm_calls.py does not know"
                )
            blocks.append(result)
        last.append(len(blocks) - 1)
        # of this block's end: filled in below, when all places are known
        ahead.append([-1 - each for each in function.ahead[index]])
    return replace(
        function,
        blocks=_fields(blocks),
        ahead=[[first[-1 - each] if each < 0 else each for each in following] for following in ahead],
        # a value that comes from a block comes from its end
        labels=labels | {name: last[place] for name, place in function.labels.items()},
    )


def _branch(one: Instruction, block: int) -> Instruction:
    """What leads to a called function, and back."""
    return Instruction(one.line, block, "", "br", "", "", "", False, (), "br", one.place)


def _result(call: Instruction, end: Instruction, block: int) -> Instruction:
    """What the call gives, of what the function returns."""
    text = f"{call.name} = freeze {end.text.removeprefix('ret ')}"
    return replace(end, block=block, name=call.name, opcode="freeze", text=text)


def _renamed(function: Function, call: Instruction) -> Function:
    """With other names of values and labels than the caller has, and what is passed for the parameters."""
    known = dict(zip(function.parameters, arguments(call), strict=True))

    def new(name: str) -> str:
        return known.get(name, f"%{call.line}.{name[1:]}")

    def changed(one: Instruction) -> Instruction:
        return replace(
            one,
            name=one.name and new(one.name),
            operands=tuple(name for name in map(new, one.operands) if name.startswith("%")),
            text=re.sub(NAME, lambda found: new(found.group()), one.text),
        )

    return replace(
        function,
        blocks=[list(map(changed, block)) for block in function.blocks],
        labels={new(f"%{name}")[1:]: place for name, place in function.labels.items()},
    )


def _fields(blocks: list[list[Instruction]]) -> list[list[Instruction]]:
    """Each field that is taken out of a result as the value that was put there: one may differ from thread to thread
    where others do not."""
    defined = {one.name: one for block in blocks for one in block if one.name}

    def field(name: str, wanted: str) -> str:
        """Type and value of it, or "" where that is not known."""
        one = defined.get(name)
        found = re.search(r"(\S+), ([^,]+), (\d+)$", one.text) if one and one.opcode == "insertvalue" else None
        if found:
            return found.group(2) if found.group(3) == wanted else field(found.group(1), wanted)
        return field(one.operands[0], wanted) if one and one.opcode == "freeze" and one.operands else ""

    def taken(one: Instruction) -> Instruction:
        wanted = re.search(r", (\d+)$", one.text) if one.opcode == "extractvalue" else None
        value = field(one.operands[0], wanted.group(1)) if wanted and one.operands else ""
        if not value:
            return one
        names = tuple(re.findall(NAME, value))
        return replace(one, opcode="freeze", operands=names, text=f"{one.name} = freeze {value}")

    return [list(map(taken, block)) for block in blocks]
