"""Bulk copies, mbarriers and the fences of the async proxy: all of them are events.

PTX ISA: cp.async.bulk, mbarrier. What is not known here: multicast, cache hints, masks, reductions, tensors, shared
memory of other CTAs, generic addresses of mbarriers, and waiting by state instead of parity.
"""

from __future__ import annotations

from .code import Code, Modifiers
from .event import Operand as Slot
from .integers import operands
from .operands import Address, Operand, Register, Sink
from .program import Instruction

__all__ = ["ASYNCHRONOUS"]

_SHARED = ("shared", "shared::cta")
_CTA, _COPIED = "shared::cta", "mbarrier::complete_tx::bytes"


def _at(code: Code, where: Operand) -> Slot:
    """Where the machine finds an address, its offset added. Of shared memory the lower 32 bits count."""
    if not isinstance(where, Address):
        raise code.error(f"{where} where an address is known")
    base, offset = where.base, where.offset
    wide = not isinstance(base, Register) or code.width(base) == 64
    at = code.read(base, 64 if wide else 32)
    at = at if wide else code.value(f"zext i32 {at} to i64")
    return ("slot", code.keep(code.value(f"add i64 {at}, {offset}"), 64))


def _copy(code: Code, one: Instruction) -> None:
    """cp.async.bulk, and how its groups are made and waited for."""
    modifiers = Modifiers(one)
    modifiers.one_of("async")
    modifiers.one_of("bulk")
    first = modifiers.one_of("shared::cluster", _CTA, "global", "commit_group", "wait_group")
    if first == "commit_group":
        modifiers.end()
        operands(one, 0)
        code.event()
        return
    if first == "wait_group":
        modifiers.maybe("read")
        modifiers.end()
        (left,) = operands(one, 1)
        code.event((), [code.operand(left)])
        return
    to_shared = first != "global"
    modifiers.one_of("global" if to_shared else _CTA)
    modifiers.one_of(_COPIED if to_shared else "bulk_group")
    modifiers.end()
    target, source, size, *barrier = operands(one, 4 if to_shared else 3)
    code.event((), [_at(code, target), _at(code, source), code.operand(size), *(_at(code, at) for at in barrier)])


def _mbarrier(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    what = modifiers.one_of("init", "inval", "arrive", "test_wait", "try_wait")
    expects = bool(what == "arrive" and modifiers.maybe("expect_tx"))
    if what in ("test_wait", "try_wait"):
        modifiers.one_of("parity")
    if what in ("arrive", "test_wait", "try_wait"):
        order = modifiers.maybe("release" if what == "arrive" else "acquire", "relaxed")
        if order:
            modifiers.one_of("cta", "cluster")
    modifiers.one_of(*_SHARED)
    modifiers.one_of("b64")
    modifiers.end()
    if what in ("init", "inval"):
        where, *count = operands(one, 2 if what == "init" else 1)
        code.event((), [_at(code, where), *map(code.operand, count)])
    elif what == "arrive":
        state, where, *count = operands(one, *((3,) if expects else (2, 3)))
        if not isinstance(state, Sink):
            raise one.error("a state that somebody wants: phases are waited for by parity here")
        code.event((), [_at(code, where), *map(code.operand, count)])
    else:
        # how long try_wait may suspend the thread is a hint
        over, where, parity, *_ = operands(one, *((3, 4) if what == "try_wait" else (3,)))
        code.event([over], [_at(code, where), code.operand(parity)])


ASYNCHRONOUS = {"cp": _copy, "mbarrier": _mbarrier}
