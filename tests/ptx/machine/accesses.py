"""Memory events of a warp: operands from registers, through the memory model, to registers.

Where the memory does not model every access, the compiled code accesses shared memory itself, and what of it stops here
(atomics) goes to it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from tests.ptx.machine.report import BadMBarrier, MachineError, Misaligned, NotModelled, OutsideShared, Unmapped
from tests.ptx.memory.sequential import read, write

if TYPE_CHECKING:
    from tests.ptx.machine.block import Warp
    from tests.ptx.machine.decoded import Decoded
    from tests.ptx.memory.clocks import Agent

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def carry_out(warp: Warp, decoded: Decoded, lanes: list[int]) -> None:
    memory = warp.machine.memory
    whole = len(lanes) == warp.count
    agents = warp.agents if whole else [warp.agents[lane] for lane in lanes]
    assert decoded.operation is not None
    if decoded.kind == "fence":
        memory.fence(agents, decoded.operation)
        return
    where = _addresses(warp, decoded, lanes)
    try:
        _access(warp, decoded, lanes, agents, where)
    except Unmapped as error:
        wrong = next(lane for lane, at in zip(lanes, where, strict=True) if 0 <= error.address - at < decoded.nbytes)
        raise Unmapped(f"{warp.block.name_of(warp.first + wrong)}: {decoded.where}: {error}", error.address) from None


def _access(warp: Warp, decoded: Decoded, lanes: list[int], agents: Sequence[Agent], where: list[int]) -> None:
    memory = warp.machine.memory
    at_once = decoded.shared and not memory.every_access
    if decoded.kind == "load":
        if at_once:
            values = [read(at, decoded.nbytes) for at in where]
        else:
            values = memory.load(agents, where, decoded.operation)
        if len(decoded.dests) == 1:
            warp.put(lanes, decoded.dests[0][0], values)
            return
        bits = decoded.bits
        for place, (slot, _) in enumerate(decoded.dests):
            warp.put(lanes, slot, [value >> place * bits & (1 << bits) - 1 for value in values])
    elif decoded.kind == "store":
        if at_once:
            for at, value in zip(where, _values(warp, decoded, lanes), strict=True):
                write(at, decoded.nbytes, value)
        else:
            memory.store(agents, where, _values(warp, decoded, lanes), decoded.operation)
    else:
        changes = [_change(decoded, *operands) for operands in zip(*_operands(warp, decoded, lanes), strict=True)]
        if at_once:
            before = [_exchange(at, decoded.nbytes, change) for at, change in zip(where, changes, strict=True)]
        else:
            before = memory.atomic(agents, where, changes, decoded.operation)
        if decoded.dests:
            warp.put(lanes, decoded.dests[0][0], before)


def _exchange(at: int, nbytes: int, change: Callable[[int], int]) -> int:
    before = read(at, nbytes)
    write(at, nbytes, change(before))
    return before


def _addresses(warp: Warp, decoded: Decoded, lanes: list[int]) -> list[int]:
    (how, base), offset = decoded.address
    bases = warp.column(lanes, base) if how == "slot" else [base] * len(lanes)
    nbytes = decoded.nbytes
    if not decoded.shared:
        found = [one + offset & M64 for one in bases] if offset else bases
        if reduce(or_, found) % nbytes:
            raise _misplaced(warp, decoded, lanes, found)
        return found
    found = [(one & M32) + offset & M64 for one in bases]
    if reduce(or_, found) % nbytes or max(found) + nbytes > warp.block.launch.shared:
        raise _misplaced(warp, decoded, lanes, found)
    if warp.block.mbarriers.made:
        _keep_off_mbarriers(warp, decoded, lanes, found)
    first = warp.block.shared
    return [at + first for at in found]


def _keep_off_mbarriers(warp: Warp, decoded: Decoded, lanes: list[int], found: list[int]) -> None:
    for lane, at in zip(lanes, found, strict=True):
        try:
            warp.block.mbarriers.keep_off(at, decoded.nbytes)
        except BadMBarrier as error:
            raise BadMBarrier(f"{warp.block.name_of(warp.first + lane)}: {decoded.where}: {error}") from None


def _misplaced(warp: Warp, decoded: Decoded, lanes: list[int], found: list[int]) -> MachineError:
    """What is wrong with the first lane's address that is wrong."""
    nbytes = decoded.nbytes
    for lane, at in zip(lanes, found, strict=True):
        who = f"{warp.block.name_of(warp.first + lane)}: {decoded.where}"
        if at % nbytes:
            return Misaligned(f"{who}: address {at:#x} of {nbytes} bytes")
        if decoded.shared and at + nbytes > warp.block.launch.shared:
            return OutsideShared(f"{who}: offset {at:#x} of {nbytes} bytes")
    raise AssertionError("all addresses are right")


def _operands(warp: Warp, decoded: Decoded, lanes: list[int]) -> list[list[int]]:
    """By operand, of each lane, cut to an element's bits."""
    mask = (1 << decoded.bits) - 1
    columns = [warp.column(lanes, n) if how == "slot" else [n & mask] * len(lanes) for how, n in decoded.args]
    return columns if mask == M64 else [[one & mask for one in column] for column in columns]


def _values(warp: Warp, decoded: Decoded, lanes: list[int]) -> list[int]:
    """What each lane stores, all elements of a vector as one number."""
    columns = _operands(warp, decoded, lanes)
    values = columns[0]
    for place, column in enumerate(columns[1:], 1):
        shift = place * decoded.bits
        values = [value | more << shift for value, more in zip(values, column, strict=True)]
    return values


def _change(decoded: Decoded, value: int, swap: int = 0) -> Callable[[int], int]:
    """What an atomic operation makes of what was there."""
    bits = decoded.bits
    mask = (1 << bits) - 1
    how = decoded.parts[-2]
    signed = decoded.signed

    def number(one: int) -> int:
        return one - (one >> bits - 1 << bits) if signed else one

    changes: dict[str, Callable[[int], int]] = {
        "add": lambda old: old + value & mask,
        "exch": lambda old: value,
        "cas": lambda old: swap if old == value else old,
        "and": lambda old: old & value,
        "or": lambda old: old | value,
        "xor": lambda old: old ^ value,
        "min": lambda old: min(number(old), number(value)) & mask,
        "max": lambda old: max(number(old), number(value)) & mask,
        "inc": lambda old: 0 if old >= value else old + 1,
        "dec": lambda old: value if old == 0 or old > value else old - 1,
    }
    if how not in changes or decoded.parts[-1][0] not in "bus":
        raise NotModelled(decoded.where)
    return changes[how]
