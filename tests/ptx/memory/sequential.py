"""Sequentially consistent memory: every access is of real memory, at once. Kernels run at their full speed on it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.ptx.memory.clocks import Agent, Clock, Timer, View
from tests.ptx.memory.operation import Operation
from tests.ptx.memory.regions import Region, Regions


def read(at: int, nbytes: int) -> int:
    """Of real memory."""
    return int.from_bytes(ctypes.string_at(at, nbytes), "little")


def write(at: int, nbytes: int, value: int) -> None:
    ctypes.memmove(at, value.to_bytes(nbytes, "little"), nbytes)


class Sequential:
    """The interface of :class:`tests.ptx.memory.weak.Weak`, without its model: it only knows the registered regions.

    Kernels that were translated to stop only at ordered accesses carry plain ones out themselves, unseen.
    """

    every_access = behind = False

    def __init__(self) -> None:
        self.regions = Regions()
        self.step = self.accesses = 0

    def seed(self, source: random.Random) -> None: ...

    def register(self, name: str, address: int, nbytes: int, watched: bool = True, fresh: bool = False) -> None:
        """See :meth:`Weak.register`; nothing is watched here."""
        self.regions.add(Region(name, address, nbytes, watched, fresh, shadowed=False))

    def is_registered(self, address: int, nbytes: int) -> bool:
        return any(one.start == address and one.end == address + nbytes for one in self.regions)

    def unregister(self, address: int) -> None:
        (old,) = [one for one in self.regions if one.start == address]
        self.regions.remove(old)

    def table(self) -> int:
        """Of the regions, for what the compiled code accesses by itself."""
        return self.regions.table()

    def account(self, address: int) -> str:
        return "sequential memory keeps no account of accesses: play the seed on weak memory"

    def open_shared(self, block: str, address: int, nbytes: int) -> None: ...

    def close_shared(self, address: int) -> None: ...

    def launched(self, launch: Any) -> None: ...

    def begin(self, launch: Any) -> None: ...

    def settle(self, launch: Any) -> bool:
        return True

    def end(self, launch: Any, agents: Sequence[Agent]) -> None:
        """By these an agent refers to itself, and nobody looks for garbage while the machine runs."""
        for agent in agents:
            del agent.warp, agent.alone, agent.joint

    def host_waited(self, rank: int) -> None: ...

    def catch_up(self) -> bool:
        return False

    def host_stepped(self) -> None: ...

    def host_read(self, address: int, nbytes: int, since: int | None = None) -> int:
        return 0

    def new_block(self, launch: Any, block: str, count: int) -> list[Agent]:
        timer = Timer()
        return [Agent((block, number), launch.rank, launch.sequence, timer, (0, 0, 0, 0)) for number in range(count)]

    def load(self, agents: Sequence[Agent], addresses: Sequence[int], operation: Operation) -> list[int]:
        self.accesses += len(addresses)
        return [self._read(at, operation.nbytes) for at in addresses]

    def store(
        self, agents: Sequence[Agent], addresses: Sequence[int], values: Sequence[int], operation: Operation
    ) -> None:
        self.accesses += len(addresses)
        for at, value in zip(addresses, values, strict=True):
            self._write(at, operation.nbytes, value)

    def atomic(
        self,
        agents: Sequence[Agent],
        addresses: Sequence[int],
        changes: Sequence[Callable[[int], int]],
        operation: Operation,
    ) -> list[int]:
        self.accesses += len(addresses)
        found = []
        for at, change in zip(addresses, changes, strict=True):
            found.append(self._read(at, operation.nbytes))
            self._write(at, operation.nbytes, change(found[-1]))
        return found

    def _read(self, at: int, nbytes: int) -> int:
        self.regions.at(at, nbytes)
        return read(at, nbytes)

    def _write(self, at: int, nbytes: int, value: int) -> None:
        self.regions.at(at, nbytes)
        write(at, nbytes, value)

    def fence(self, agents: Sequence[Agent], operation: Operation) -> None: ...

    def arrive(self, agent: Agent) -> View:
        return View({}, {})

    def new_entity(self, rank: int) -> int:
        return 0

    def fence_proxy(self, agents: Sequence[Agent], shared: bool, everywhere: bool) -> None: ...

    def copier(
        self, issuer: Agent, name: str, keys: tuple[int, int], time: int, to_shared: bool, launch: Any
    ) -> tuple[Agent, Agent]:
        return issuer, issuer

    def stamp(self, agent: Agent) -> tuple[Agent, int]:
        return agent, 0

    def knows(self, agent: Agent, stamp: tuple[Agent, int]) -> bool:
        return True

    def proxy_knows(self, agent: Agent, stamp: tuple[Agent, int]) -> bool:
        return True

    def told_by_copies(self, times: Clock) -> View:
        return View({}, {})

    def hear(self, agent: Agent, views: Sequence[View]) -> None: ...

    def united(self, views: Sequence[View]) -> View:
        return View({}, {})

    def barrier(self, agents: Sequence[Agent], entity: int | None, arrived: Sequence[View] = ()) -> None: ...
