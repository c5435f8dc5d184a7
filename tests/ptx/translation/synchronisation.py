"""What threads do together, and what ends one."""

from __future__ import annotations

from .code import Code, Modifiers
from .event import TRAP
from .integers import operands
from .operands import Operand, Pair, Sink, Symbol
from .program import Instruction

__all__ = ["SYNCHRONISATION"]


def _branch(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    modifiers.maybe("uni")
    modifiers.end()
    (target,) = operands(one, 1)
    if not isinstance(target, Symbol) or target.name not in code.labels:
        raise one.error("no label of this kernel")
    code.branch(code.block_of(target.name), one.guard)


def _leave(code: Code, one: Instruction) -> None:
    """ret and exit."""
    modifiers = Modifiers(one)
    if one.opcode == "ret":
        modifiers.maybe("uni")
    modifiers.end()
    operands(one, 0)
    code.leave()


def _trap(code: Code, one: Instruction) -> None:
    Modifiers(one).end()
    operands(one, 0)
    code.fault("true", TRAP, "0")


def _barrier(code: Code, one: Instruction) -> None:
    """bar.sync, bar.arrive and barrier of a block, bar.warp.sync of a warp."""
    modifiers = Modifiers(one)
    if modifiers.maybe("warp"):
        modifiers.one_of("sync")
        modifiers.end()
        (mask,) = operands(one, 1)
        code.event((), [code.operand(mask)])
        return
    modifiers.maybe("cta")
    arrives = modifiers.one_of("sync", "arrive") == "arrive"
    if one.opcode == "barrier":
        modifiers.maybe("aligned")
    modifiers.end()
    code.event((), [code.operand(one) for one in operands(one, *((2,) if arrives else (1, 2)))])


def _fence(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    if one.opcode == "membar":
        modifiers.one_of("cta", "gl", "sys")
    elif modifiers.maybe("proxy"):
        modifiers.one_of("async")
        modifiers.maybe("global", "shared::cta", "shared::cluster")
    elif modifiers.maybe("mbarrier_init"):
        modifiers.one_of("release")
        modifiers.one_of("cluster")
    else:
        modifiers.maybe("sc", "acq_rel", "acquire", "release")
        modifiers.one_of("cta", "cluster", "gpu", "sys")
    modifiers.end()
    operands(one, 0)
    code.event()


def _both(code: Code, operand: Operand, *widths: int) -> list[Operand]:
    """The results ``d|p``, or ``d`` alone."""
    results = [operand.first, operand.second] if isinstance(operand, Pair) else [operand]
    for result, bits in zip(results, widths, strict=False):
        if code.width(result) != bits:
            raise code.error(f"a result of other than {bits} bits")
    return results


def _shuffle(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    modifiers.one_of("sync")
    modifiers.one_of("up", "down", "bfly", "idx")
    modifiers.one_of("b32")
    modifiers.end()
    d, *inputs = operands(one, 5)
    code.event(_both(code, d, 32, 8), [code.operand(operand) for operand in inputs])


def _vote(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    modifiers.one_of("sync")
    ballot = modifiers.one_of("all", "any", "uni", "ballot") == "ballot"
    modifiers.one_of("b32" if ballot else "pred")
    modifiers.end()
    d, predicate, mask = operands(one, 3)
    code.event(_both(code, d, 32 if ballot else 8), [code.operand(predicate, 1), code.operand(mask)])


def _match(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    everyone = modifiers.one_of("any", "all")
    modifiers.one_of("sync")
    bits = int(modifiers.one_of("b32", "b64")[1:])
    modifiers.end()
    d, value, mask = operands(one, 3)
    if isinstance(d, Pair) and everyone != "all":
        raise one.error("only .all tells whether all are equal")
    code.event(_both(code, d, 32, 8), [code.operand(value, bits), code.operand(mask)])


def _reduce(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    modifiers.one_of("sync")
    logic = modifiers.one_of("add", "min", "max", "and", "or", "xor") in ("and", "or", "xor")
    modifiers.one_of(*(("b32",) if logic else ("u32", "s32")))
    modifiers.end()
    d, value, mask = operands(one, 3)
    code.event(_both(code, d, 32), [code.operand(value), code.operand(mask)])


def _elect(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    modifiers.one_of("sync")
    modifiers.end()
    d, mask = operands(one, 2)
    if not isinstance(d, Pair):
        raise one.error("a lane and a predicate are its results")
    _both(code, d.second, 8)
    lane = [] if isinstance(d.first, Sink) else _both(code, d.first, 32)
    code.event([*(lane or [d.first]), d.second], [code.operand(mask)])


def _active(code: Code, one: Instruction) -> None:
    """activemask: which threads of a warp go together is for the machine to say."""
    modifiers = Modifiers(one)
    modifiers.one_of("b32")
    modifiers.end()
    (d,) = operands(one, 1)
    code.event(_both(code, d, 32))


def _sleep(code: Code, one: Instruction) -> None:
    modifiers = Modifiers(one)
    modifiers.one_of("u32")
    modifiers.end()
    (duration,) = operands(one, 1)
    code.event((), [code.operand(duration)])


SYNCHRONISATION = {
    "bra": _branch,
    "ret": _leave,
    "exit": _leave,
    "trap": _trap,
    "bar": _barrier,
    "barrier": _barrier,
    "membar": _fence,
    "fence": _fence,
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "redux": _reduce,
    "elect": _elect,
    "activemask": _active,
    "nanosleep": _sleep,
}
