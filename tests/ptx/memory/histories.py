"""Every value that eight bytes have had: the coherence order of a cell, and who has read it last."""

from __future__ import annotations

from tests.ptx.memory.clocks import NOBODY, Agent, Lanes, Release
from tests.ptx.memory.operation import HOST_STORE, INITIAL, Operation, Scope
from tests.ptx.memory.regions import Region

ALL_BYTES = (1 << 64) - 1
#: messages that a cell keeps. Older ones can be read no more: that makes the model stronger, never wrong
LONGEST = 64


class Message:
    """One write of some bytes of a cell.

    Attributes:
        value, mask: the bytes written, in their place in the cell's 64 bits; other bits are zero.
        agent, time: its stamp.
        order: its place in the cell's coherence order.
        own: release patterns of this agent that end in this write; none end in a weak one.
        chain: release patterns that a read-modify-write carries on from the write that it read.
    """

    __slots__ = ("agent", "mask", "operation", "order", "step", "time", "value")

    own: tuple[Release, ...] = ()
    chain: tuple[Release, ...] = ()

    def __init__(
        self, value: int, mask: int, agent: Agent, time: int, operation: Operation, order: float, step: int
    ) -> None:
        self.value, self.mask = value, mask
        self.agent, self.time, self.operation = agent, time, operation
        self.order, self.step = order, step

    @property
    def touched(self) -> int:
        """The bytes that are certainly written: what accesses of others race with."""
        return self.mask


class StrongMessage(Message):
    """Of a strong operation: others may synchronise with it."""

    __slots__ = ("chain", "own")

    def __init__(
        self,
        value: int,
        mask: int,
        agent: Agent,
        operation: Operation,
        order: float,
        step: int,
        own: tuple[Release, ...],
        chain: tuple[Release, ...] = (),
    ) -> None:
        super().__init__(value, mask, agent, agent.timer.time, operation, order, step)
        self.own, self.chain = own, chain


class HostMessage(StrongMessage):
    """Of the host: bytes of a word of which some have changed."""

    __slots__ = ("changed",)

    def __init__(
        self, value: int, mask: int, changed: int, agent: Agent, order: float, step: int, release: Release
    ) -> None:
        super().__init__(value, mask, agent, HOST_STORE, order, step, (release,))
        self.changed = changed

    @property
    def touched(self) -> int:
        return self.changed


class Reading:
    """A load of some lanes: its stamp, and which bytes of their cells it read."""

    __slots__ = ("mask", "operation", "step", "time")

    def __init__(self, time: int, mask: int, operation: Operation, step: int) -> None:
        self.time, self.mask, self.operation, self.step = time, mask, operation, step


class Cell:
    """Eight aligned bytes.

    Attributes:
        history: writes in coherence order, the first of them what was there before.
        readers: reads since the last write, with what was read: of each agent, and of each warp at once, the last one
            of the same bytes in the same scope. Another one does not stand for it: a write may race with one alone.
        observed: masks of strong reads, which agents' ``seen`` has entries for.
        shown: the order of the last message that the host can see; later ones are on their way.
    """

    __slots__ = ("history", "index", "observed", "readers", "region", "shown")

    def __init__(self, within: Region, index: int) -> None:
        self.region, self.index = within, index
        initial = 0 if within.fresh else within.shadow[index]
        self.history = [Message(initial, 0 if within.fresh else ALL_BYTES, NOBODY, -1, INITIAL, 0.0, 0)]
        self.readers: dict[tuple[Lanes, int, Scope], tuple[Reading, int]] = {}
        self.observed: list[int] = []
        self.shown = 0.0

    def append(self, message: Message) -> None:
        history = self.history
        history.append(message)
        if len(history) > LONGEST:
            over = history[1].mask
            if self.region.private or history[1].order <= self.shown:
                # halves are written in turn; of those that the host has not seen the first is not shown without its own
                over |= history[2].mask
            if not history[0].mask & ~over:
                del history[0]

    def last_of(self, mask: int) -> Message:
        """The last write of some of these bytes."""
        last = self.history[-1]
        if last.mask & mask:
            return last
        return next((one for one in reversed(self.history) if one.mask & mask), last)

    def __str__(self) -> str:
        return self.region.name_of(self.region.address + 8 * self.index)
