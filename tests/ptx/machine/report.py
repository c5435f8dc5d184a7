"""What can go wrong on the machine, and how it is told."""

from __future__ import annotations


class MachineError(Exception):
    """A run that failed. The machine adds the seed, the step and who had the turn."""


class Unmapped(MachineError):
    """An access outside every registered region."""

    def __init__(self, message: str, address: int = 0) -> None:
        super().__init__(message)
        self.address = address


class Misaligned(MachineError):
    """An address that is no multiple of the access's bytes."""


class OutsideShared(MachineError):
    """An offset outside of the CTA's shared memory."""


class Trapped(MachineError):
    """A thread came to ``trap``."""


def fault(cause: str) -> type[MachineError]:
    """What a fault of the compiled code is."""
    kinds = {"misaligned": Misaligned, "not mapped": Unmapped, "shared": OutsideShared, "trap": Trapped}
    return next(kind for word, kind in kinds.items() if word in cause)


class Uninitialised(MachineError):
    """A read of bytes that nobody has written."""


class DataRace(MachineError):
    """Two conflicting accesses that are not both strong, and that nothing orders."""


class BadParticipation(MachineError):
    """Threads of a warp that do not meet at a ``.sync`` operation as its mask says."""


class BadBarrier(MachineError):
    """A barrier that threads of the CTA can never complete."""


class BadMBarrier(MachineError):
    """An mbarrier of which nobody may know yet, that counts more than it can, or whose bytes somebody accesses."""


class Unfinished(MachineError):
    """A CTA ends while bulk copies may still access its shared memory."""


class NoEnd(MachineError):
    """More steps than were allowed."""


class Deadlock(MachineError):
    """Nobody can go on."""


class HostStuck(MachineError):
    """A host thread that kept its turn: it waits for something that the machine does not know of."""


class NotModelled(MachineError):
    """An instruction that the machine does not know."""
