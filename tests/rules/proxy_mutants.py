"""The proxy's compiled modules with rules that can be taken out, to show that a test would notice.

The production source is executed as a separate family of modules in which each rule of :data:`RULES` is guarded by a
switch in memory. Compiling takes seconds, so there is one family for all rules, and :meth:`Mutants.without` throws the
switch. Nothing of the family is cached or seen by anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from tests.rules.family import execute
from tests.rules.mutation import ALWAYS, BEFORE, INSTEAD, NEVER, SKIP, Rules, Way, find, mutated
from uccl_ep_serving.native.groups import Group

_PACKAGE = "uccl_ep_serving.proxy"
#: In the order in which they import each other.
_FAMILY = ("sequence", "queues", "faults", "flow", "arrivals", "ring", "loop")


RULES = Rules[Way](
    ("proxy",),
    {
        "only a prefix is published": BEFORE("store64(published, peek(window + MESSAGES) + last)"),
        "a repeat behind the prefix changes nothing": NEVER,
        "a repeat of a held write changes nothing": NEVER,
        "outstanding writes need credits": INSTEAD("peek(record + words.DONE + PREFIX)"),
        "outstanding writes need local completion": INSTEAD("peek(record + words.CREDITED)"),
        "one write to an idle peer is always admitted": NEVER,
        "bytes and writes in flight are capped": ALWAYS,
        "room under the caps goes to the write that waits for it": ALWAYS.of(1),
        "credits pass by the caps": INSTEAD("peek(state + words.QUEUED) != 0 or not credit_open(send)").of(1),
        "credits are returned": SKIP,
        "credits are bounded by what was sent": NEVER,
        "a blocked destination does not block its ring": ALWAYS,
        "commands do not overtake queued ones of their stream": ALWAYS.of(0),
        "only the last piece of a split command ends the message": INSTEAD("(high >> COMMAND_LAST_SHIFT) & 1"),
        "commands stay inside the window": NEVER.of(2),
        "a stream has one owner": NEVER,
        "the source must be proven": NEVER.of(2),
        "nothing is believed from a peer that was dropped": NEVER,
        "a completion of a peer that was dropped changes nothing": NEVER,
        "a completion counts once": NEVER,
        "a command is taken when both of its words are written": NEVER.of(1),
        "a wrong command of an operation ends the pair": ALWAYS,
        "a wrong command outside operations ends nothing": SKIP,
        "a number out of sequence is a fault where order is kept": NEVER,
        "what a NIC wrote is made visible before it counts": NEVER,
        "a lost peer sets the sticky error": NEVER,
        "a stream gets time slices": ALWAYS,
        "the proxy takes a bounded batch of commands": ALWAYS,
        "writes to a lost peer count as completed": SKIP,
        "bytes that a NIC may still read are not given back": ALWAYS,
        "a forgotten peer causes no error": INSTEAD("0"),
    },
)


class Mutants:
    """A compiled family whose rules can be switched off one at a time."""

    def __init__(self) -> None:
        self._switch = np.zeros(1, np.int64)
        sources = mutated(RULES, find(RULES), self._switch.ctypes.data)
        loop = execute([f"{_PACKAGE}.{short}" for short in _FAMILY], sources)[f"{_PACKAGE}.loop"]
        #: Takes the address of a proxy's state, as the production ``loop.step`` does.
        self.step: Callable[[int], int] = loop.step
        # a mutant must never be found by somebody else
        Group("mutants of the proxy", loop.step).compile(keep=False)

    @contextmanager
    def without(self, rule: str) -> Iterator[None]:
        """Switch ``rule`` off."""
        self._switch[0] = 1 + list(RULES).index(rule)
        try:
            yield
        finally:
            self._switch[0] = 0
