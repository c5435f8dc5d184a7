"""The proxy's compiled modules with rules that can be taken out, to show that a test would notice.

The production source is executed as a separate family of modules in which each rule of :data:`RULES` is guarded by a
switch in memory. Compiling takes seconds, so there is one family for all rules, and :meth:`Mutants.without` throws the
switch. Nothing of the family is cached or seen by anybody else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numba
import numpy as np

from uccl_ep_serving.native import jit
from uccl_ep_serving.proxy.state import QUEUED

_PACKAGE = "uccl_ep_serving.proxy"
#: In the order in which they import each other.
_FAMILY = ("sequence", "queues", "faults", "flow", "arrivals", "ring", "loop")


class Rule(NamedTuple):
    """How to take a rule out: ``old`` becomes ``new``, where REMOVED stands for "the switch is thrown"."""

    module: str
    old: str
    new: str


RULES = {
    "only a prefix is published": Rule(
        "sequence",
        "    return HELD_BACK\n",
        "    if REMOVED:\n        store64(published, peek(window + MESSAGES) + last)\n    return HELD_BACK\n",
    ),
    "a repeat behind the prefix changes nothing": Rule(
        "sequence", "    if ahead > _WINDOW_MASK:\n", "    if ahead > _WINDOW_MASK and not REMOVED:\n"
    ),
    "a repeat of a held write changes nothing": Rule(
        "sequence", "    if (word >> shift) & 1:\n", "    if (word >> shift) & 1 and not REMOVED:\n"
    ),
    "outstanding writes need credits": Rule(
        "flow",
        "    covered = min(peek(record + CREDITED), peek(record + DONE + PREFIX))\n",
        "    covered = peek(record + DONE + PREFIX)\n"
        "    if not REMOVED:\n        covered = min(covered, peek(record + CREDITED))\n",
    ),
    "outstanding writes need local completion": Rule(
        "flow",
        "    return peek(record + NEXT) - covered < SEQUENCE_WINDOW\n",
        "    if REMOVED:\n        covered = peek(record + CREDITED)\n"
        "    return peek(record + NEXT) - covered < SEQUENCE_WINDOW\n",
    ),
    "one write to an idle peer is always admitted": Rule(
        "flow", "    if peer_load == 0:\n", "    if peer_load == 0 and not REMOVED:\n"
    ),
    "bytes and writes in flight are capped": Rule(
        "flow",
        "    load = peek(state + LOAD)\n    return (\n",
        "    load = peek(state + LOAD)\n    if REMOVED:\n        return True\n    return (\n",
    ),
    "room under the caps goes to the write that waits for it": Rule(
        "flow",
        "        and peek(entry + PEER_WAITER) == 0\n",
        "        and (peek(entry + PEER_WAITER) == 0 or REMOVED)\n",
    ),
    "credits pass by the caps": Rule(
        "arrivals",
        "or not credit_open(send):\n",
        f"or not credit_open(send) or (REMOVED and peek(state + {QUEUED})):\n",
    ),
    "credits are returned": Rule(
        "loop", "    work += grant_credits(state)\n", "    if not REMOVED:\n        work += grant_credits(state)\n"
    ),
    "credits are bounded by what was sent": Rule(
        "arrivals",
        "        if covered > peek(send + NEXT):\n",
        "        if covered > peek(send + NEXT) and not REMOVED:\n",
    ),
    "a blocked destination does not block its ring": Rule(
        "ring",
        "        if not enqueue(state, entry, record, index, low, high):\n",
        "        if REMOVED or not enqueue(state, entry, record, index, low, high):\n",
    ),
    "commands do not overtake queued ones of their stream": Rule(
        "ring",
        "        peek(record + QUEUE_HEAD) == 0\n",
        "        (peek(record + QUEUE_HEAD) == 0 or REMOVED)\n",
    ),
    "only the last piece of a split command ends the message": Rule(
        "ring",
        "        last = (high >> COMMAND_LAST_SHIFT) & 1 if final else 0\n",
        "        last = (high >> COMMAND_LAST_SHIFT) & 1 if final or REMOVED else 0\n",
    ),
    "commands stay inside the window": Rule(
        "ring", "or _offset(high) > limit", "or (_offset(high) > limit and not REMOVED)"
    ),
    "a stream has one owner": Rule(
        "arrivals",
        "    elif peek(peek(state + OWNED) + stream * 8) == 0:\n",
        "    elif peek(peek(state + OWNED) + stream * 8) == 0 and not REMOVED:\n",
    ),
    "the source must be proven": Rule(
        "arrivals", "(proven >= 0 and proven != source)", "(proven >= 0 and proven != source and not REMOVED)"
    ),
    "nothing is believed from a peer that was parted from": Rule(
        "arrivals", " + PEER_STATE) != UP:\n        # Lost", " + PEER_STATE) != UP and not REMOVED:\n        # Lost"
    ),
    "a completion of a peer that was parted from changes nothing": Rule(
        "flow",
        "        if peek(entry + PEER_STATE) != UP:\n            return\n        done",
        "        if peek(entry + PEER_STATE) != UP and not REMOVED:\n            return\n        done",
    ),
    "a completion counts once": Rule(
        "flow",
        "    if note(record + DONE, peek(state + COMPLETED) + index * 8, word, ticket_last(word)) == REPEATED:\n",
        "    outcome = note(record + DONE, peek(state + COMPLETED) + index * 8, word, ticket_last(word))\n"
        "    if outcome == REPEATED and not REMOVED:\n",
    ),
    "a command is taken when both of its words are written": Rule(
        "ring",
        "        if low & 1 != lap or high & 1 != lap:\n",
        "        if low & 1 != lap or (high & 1 != lap and not REMOVED):\n",
    ),
    "a wrong command of an operation parts the pair": Rule(
        "faults",
        "    if HOST <= stream < HOST + MAX_CHANNELS:\n",
        "    if HOST <= stream < HOST + MAX_CHANNELS or REMOVED:\n",
    ),
    "a wrong command outside operations ends nothing": Rule(
        "faults",
        "        store64(state + REFUSED, peek(state + REFUSED) + 1)\n        return\n",
        "        store64(state + REFUSED, peek(state + REFUSED) + 1)\n        if not REMOVED:\n            return\n",
    ),
    "a number out of sequence is a fault where order is kept": Rule(
        "arrivals",
        "        if peek(peek(state + PEERS) + source * PEER_ENTRY + PEER_EXACT):\n",
        "        if peek(peek(state + PEERS) + source * PEER_ENTRY + PEER_EXACT) and not REMOVED:\n",
    ),
    "a lost peer sets the sticky error": Rule(
        "faults",
        "    if request == 0:\n        set_failure(",
        "    if request == 0 and not REMOVED:\n        set_failure(",
    ),
    "streams take turns": Rule(
        "ring",
        "    while posted < WRITES_PER_TURN and moved < quantum:\n",
        "    while (posted < WRITES_PER_TURN and moved < quantum) or REMOVED:\n",
    ),
    "the proxy takes a bounded batch of commands": Rule(
        "ring", "    while tail - first < limit:\n", "    while tail - first < limit or REMOVED:\n"
    ),
    "writes to a lost peer count as completed": Rule(
        "faults",
        "        store64(peek(state + COMPLETED) + index * 8, peek(record + ENQUEUED))\n",
        "        if not REMOVED:\n            store64(peek(state + COMPLETED) + index * 8, peek(record + ENQUEUED))\n",
    ),
    "a forgotten peer causes no error": Rule(
        "faults",
        "    request = load64(entry + PEER_REQUEST)\n    if request == 0:\n",
        "    request = 0 if REMOVED else load64(entry + PEER_REQUEST)\n    if request == 0:\n",
    ),
}


def _quick(function: Any) -> Any:
    """Compiled without cache: a mutant must never be found by somebody else."""
    return numba.njit(nogil=True, error_model="numpy")(function)


@contextmanager
def _without_cache() -> Iterator[None]:
    kept = jit.compiled, jit.inlined
    jit.compiled = jit.inlined = _quick
    try:
        yield
    finally:
        jit.compiled, jit.inlined = kept


class Mutants:
    """A compiled family whose rules can be switched off one at a time."""

    def __init__(self) -> None:
        self._switch = np.zeros(1, np.int64)
        loop = self._execute()["loop"]
        #: Takes the address of a proxy's state, as the production ``loop.step`` does.
        self.step: Callable[[int], int] = loop.step
        loop.step.compile("int64(int64)")

    @contextmanager
    def without(self, rule: str) -> Iterator[None]:
        """Switch ``rule`` off."""
        self._switch[0] = 1 + list(RULES).index(rule)
        try:
            yield
        finally:
            self._switch[0] = 0

    def _mutate(self, module: str, source: str) -> str:
        """Guard every rule of ``module``. Raises AssertionError when a rule's text is not found exactly once."""
        for number, rule in enumerate(RULES.values(), start=1):
            if rule.module == module:
                assert source.count(rule.old) == 1, f"{module}: {rule.old!r} occurs {source.count(rule.old)} times"
                switch = f"(peek({self._switch.ctypes.data}) == {number})"
                source = source.replace(rule.old, rule.new.replace("REMOVED", switch))
        return source

    def _execute(self) -> dict[str, ModuleType]:
        names = [f"{_PACKAGE}.{short}" for short in _FAMILY]
        kept = {name: importlib.import_module(name) for name in names}
        package = sys.modules[_PACKAGE]
        family: dict[str, ModuleType] = {}
        try:
            with _without_cache():
                for short, name in zip(_FAMILY, names, strict=True):
                    path = Path(str(kept[name].__file__))
                    family[short] = fresh = ModuleType(name)
                    fresh.__package__ = _PACKAGE
                    sys.modules[name] = fresh
                    setattr(package, short, fresh)
                    source = self._mutate(short, path.read_text())
                    exec(compile(source, f"<mutant of {path.name}>", "exec"), fresh.__dict__)
        finally:
            for short, name in zip(_FAMILY, names, strict=True):
                sys.modules[name] = kept[name]
                setattr(package, short, kept[name])
        return family
