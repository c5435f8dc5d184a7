"""Operations of lanes of a warp together: shfl, redux, vote, match, elect, ldmatrix, stmatrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from operator import and_, or_, xor
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.machine.decoded import WHOLE_WARP
from tests.ptx.machine.report import BadParticipation, Misaligned, NotModelled, OutsideShared
from tests.ptx.memory.sequential import read, write

if TYPE_CHECKING:
    from tests.ptx.machine.block import Warp
    from tests.ptx.machine.decoded import Decoded

M32 = 0xFFFFFFFF


def mask_of(warp: Warp, lane: int, decoded: Decoded) -> int:
    """The lanes that ``lane`` wants to meet."""
    if decoded.parts[0] in WHOLE_WARP:
        return M32
    return _operand(warp, lane, decoded.args[-1]) & M32


def masks_of(warp: Warp, decoded: Decoded, lanes: list[int]) -> list[int]:
    """:func:`mask_of` of each."""
    if decoded.parts[0] in WHOLE_WARP:
        return [M32] * len(lanes)
    return _column(warp, decoded, lanes, -1, M32)


def _operand(warp: Warp, lane: int, operand: tuple[str, int]) -> int:
    how, n = operand
    return int(warp.state[lane, n]) if how == "slot" else n


def _operands(warp: Warp, lanes: dict[int, Decoded], place: int, bits: int = 32) -> list[int]:
    """That at ``place`` of each lane."""
    mask = (1 << bits) - 1
    if len(set(lanes.values())) > 1:
        return [_operand(warp, lane, decoded.args[place]) & mask for lane, decoded in lanes.items()]
    return _column(warp, next(iter(lanes.values())), list(lanes), place, mask)


def _column(warp: Warp, decoded: Decoded, lanes: list[int], place: int, mask: int) -> list[int]:
    """The same where all have one instruction."""
    how, n = decoded.args[place]
    if how != "slot":
        return [n & mask] * len(lanes)
    return [one & mask for one in warp.column(lanes, n)]


def _set(warp: Warp, lane: int, dest: tuple[int, int], value: int) -> None:
    if dest[0] >= 0:
        warp.state[lane, dest[0]] = np.uint64(value & (1 << 64) - 1)


def _set_each(warp: Warp, lanes: dict[int, Decoded], place: int, values: list[int]) -> None:
    """The result at ``place`` of each lane."""
    if len(set(lanes.values())) > 1:
        for (lane, decoded), value in zip(lanes.items(), values, strict=True):
            _set(warp, lane, decoded.dests[place], value)
    else:
        warp.put(list(lanes), next(iter(lanes.values())).dests[place][0], values)


def carry_out(warp: Warp, lanes: dict[int, Decoded]) -> None:
    """All ``lanes`` have come, each with its own instruction of the same operation."""
    name = next(iter(lanes.values())).parts[0]
    if name not in ("bar", "barrier"):
        how: dict[str, Callable[[Warp, dict[int, Decoded]], None]] = {
            "shfl": _shfl,
            "redux": _redux,
            "vote": _vote,
            "match": _match,
            "elect": _elect,
            "ldmatrix": _ldmatrix,
            "stmatrix": _stmatrix,
        }
        how[name](warp, lanes)


def _source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane that is read and whether it is in range (PTX ISA, shfl.sync)."""
    clamp, segment = c & 31, c >> 8 & 31
    most = lane & segment | clamp & ~segment
    b &= 31
    if mode == "up":
        return lane - b, lane - b >= most
    if mode == "down":
        return lane + b, lane + b <= most
    if mode == "bfly":
        return lane ^ b, lane ^ b <= most
    least = lane & segment
    return least | b & ~segment, (least | b & ~segment) <= most


@lru_cache
def _sources(mode: str, b: int, c: int) -> list[tuple[int, bool]]:
    """:func:`_source` of all lanes."""
    return [_source(mode, lane, b, c) for lane in range(32)]


def _shfl(warp: Warp, lanes: dict[int, Decoded]) -> None:
    decoded = next(iter(lanes.values()))
    mode = next(one for one in decoded.parts[1:] if one in ("up", "down", "bfly", "idx"))
    given = dict(zip(lanes, _operands(warp, lanes, 0), strict=True))
    moves = list(zip(_operands(warp, lanes, 1), _operands(warp, lanes, 2), strict=True))
    of_all = {move: _sources(mode, *move) for move in set(moves)}
    found = [of_all[move][lane] for lane, move in zip(lanes, moves, strict=True)]
    sources = [source if inside else lane for lane, (source, inside) in zip(lanes, found, strict=True)]
    if not given.keys() >= set(sources):
        lane, source = next(one for one in zip(lanes, sources, strict=True) if one[1] not in given)
        who = f"{warp.block.name_of(warp.first + lane)}: {lanes[lane].where}"
        raise BadParticipation(f"{who}: reads lane {source}, which does not take part")
    _set_each(warp, lanes, 0, [given[source] for source in sources])
    if len(decoded.dests) > 1:
        _set_each(warp, lanes, 1, [int(inside) for _, inside in found])


def _redux(warp: Warp, lanes: dict[int, Decoded]) -> None:
    parts = next(iter(lanes.values())).parts
    how, signed = next(one for one in parts[1:] if one != "sync"), parts[-1][0] == "s"
    values = _operands(warp, lanes, 0)
    if parts[-1] == "f32":
        raise NotModelled(next(iter(lanes.values())).where)
    if signed:
        values = [value - (value >> 31 << 32) for value in values]
    folds: dict[str, Callable[[list[int]], int]] = {
        "add": sum,
        "min": min,
        "max": max,
        "and": lambda all_: reduce(and_, all_),
        "or": lambda all_: reduce(or_, all_),
        "xor": lambda all_: reduce(xor, all_),
    }
    _set_each(warp, lanes, 0, [folds[how](values) & M32] * len(lanes))


def _vote(warp: Warp, lanes: dict[int, Decoded]) -> None:
    how = next(one for one in next(iter(lanes.values())).parts[1:] if one != "sync")
    ballot = sum(1 << lane for lane, value in zip(lanes, _operands(warp, lanes, 0, 1), strict=True) if value)
    everybody = sum(1 << lane for lane in lanes)
    found = {"ballot": ballot, "all": ballot == everybody, "any": ballot != 0, "uni": ballot in (0, everybody)}[how]
    _set_each(warp, lanes, 0, [int(found)] * len(lanes))


def _match(warp: Warp, lanes: dict[int, Decoded]) -> None:
    parts = next(iter(lanes.values())).parts
    bits = (1 << int(parts[-1][1:])) - 1
    values = {lane: _operand(warp, lane, decoded.args[0]) & bits for lane, decoded in lanes.items()}
    for lane, decoded in lanes.items():
        same = sum(1 << other for other, value in values.items() if value == values[lane])
        if "all" in parts:
            agreed = same == sum(1 << other for other in lanes)
            _set(warp, lane, decoded.dests[0], same if agreed else 0)
            if len(decoded.dests) > 1:
                _set(warp, lane, decoded.dests[1], int(agreed))
        else:
            _set(warp, lane, decoded.dests[0], same)


def _elect(warp: Warp, lanes: dict[int, Decoded]) -> None:
    """One of them, the same of the same lanes each time."""
    chosen = warp.machine.elected(sorted(lanes))
    for lane, decoded in lanes.items():
        _set(warp, lane, decoded.dests[0], chosen)
        _set(warp, lane, decoded.dests[1], int(lane == chosen))


def _place(warp: Warp, lanes: dict[int, Decoded], lane: int, n: int) -> int:
    """The address of what ``lane`` has of matrix ``n``: two elements of a row that another lane points to."""
    giver = 8 * n + lane // 4
    operand, offset = lanes[giver].address
    at = _operand(warp, giver, operand) + offset & M32
    if at % 16 or at + 16 > warp.block.launch.shared:
        kind = Misaligned if at % 16 else OutsideShared
        raise kind(f"{warp.block.name_of(warp.first + giver)}: {lanes[giver].where}: a row at offset {at:#x}")
    return warp.block.shared + at + 4 * (lane % 4)


def _ldmatrix(warp: Warp, lanes: dict[int, Decoded]) -> None:
    memory = warp.machine.memory
    for lane, decoded in lanes.items():
        _plain_matrix(decoded)
        for n, dest in enumerate(decoded.dests):
            at = _place(warp, lanes, lane, n)
            (value,) = (
                memory.load([warp.agents[lane]], [at], decoded.operation) if memory.every_access else [read(at, 4)]
            )
            _set(warp, lane, dest, value)


def _stmatrix(warp: Warp, lanes: dict[int, Decoded]) -> None:
    memory = warp.machine.memory
    for lane, decoded in lanes.items():
        _plain_matrix(decoded)
        for n, operand in enumerate(decoded.args):
            at, value = _place(warp, lanes, lane, n), _operand(warp, lane, operand) & M32
            if memory.every_access:
                memory.store([warp.agents[lane]], [at], [value], decoded.operation)
            else:
                write(at, 4, value)


def _plain_matrix(decoded: Decoded) -> None:
    if "trans" in decoded.parts or "m8n8" not in decoded.parts or decoded.parts[-1] != "b16":
        raise NotModelled(decoded.where)
