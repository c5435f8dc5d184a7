"""A kernel on a rank's stream: its parameters, and its CTAs, of which some are resident at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.machine.block import Block
from tests.ptx.machine.decoded import Decoded
from tests.ptx.memory.clocks import Agent, Clock, Seen, View
from tests.ptx.translation.event import COUNT, CTAZ, LANE, NCTAX, NCTAY, NCTAZ, PARAMS, PC, SHARED_BYTES, TID, WARP

if TYPE_CHECKING:
    from tests.ptx.machine.machine import Machine


class Launched:
    """One launch.

    Attributes:
        clock, seen, fenced: what its threads know of when they start; memory sets them.
        host: what the host knew when it launched.
        sequence: its number among the launches of its rank, from 1.
    """

    def __init__(
        self, machine: Machine, rank: int, kernel: Any, grid: Sequence[int], arguments: Sequence[int], shared: int
    ) -> None:
        self.machine, self.rank, self.kernel = machine, rank, kernel
        width, height = (*grid, 1)[:2]
        self.grid = (width, height)
        self.params = _parameters(kernel.program, arguments)
        program = kernel.program
        # what is dynamic comes last, where its alignment lets it
        self.shared = shared + max(program.static_shared, *program.shared.values(), 0)
        self.sequence = 0
        source = np.random.Generator(np.random.SFC64(machine.random.getrandbits(63)))
        #: of every block: registers and shared memory that nobody has written hold anything
        self.shared_at_first = source.integers(0, 1 << 63, self.shared // 8 + 4, dtype=np.uint64)
        self.state_at_first = self._state(source)
        self.decoded: dict[int, Decoded] = machine.decoded(kernel)
        self.left = deque(machine.order(width * height))
        self.resident: list[Block] = []
        self.agents: list[Agent] = []
        self.clock: Clock = {}
        self.seen: Seen = {}
        self.fenced: tuple[View, View] | None = None
        self.host: View | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kernel.program.name}"

    def _state(self, source: np.random.Generator) -> np.ndarray[Any, Any]:
        """Of the threads of any block, but for where that is."""
        threads = self.kernel.program.threads
        state = source.integers(0, 1 << 63, (threads, self.kernel.nslots), dtype=np.uint64)
        state[:, PC] = state[:, COUNT] = state[:, CTAZ] = 0
        state[:, TID] = np.arange(threads)
        state[:, LANE], state[:, WARP] = state[:, TID] % 32, state[:, TID] // 32
        state[:, NCTAX], state[:, NCTAY], state[:, NCTAZ] = *self.grid, 1
        state[:, SHARED_BYTES], state[:, PARAMS] = self.shared, self.params.ctypes.data
        return state

    def fill(self) -> None:
        """As many CTAs as may be resident start."""
        while self.left and len(self.resident) < self.machine.resident:
            number = self.left.popleft()
            block = Block(self.machine, self, (number % self.grid[0], number // self.grid[0]))
            self.resident.append(block)
            self.agents += block.agents
            for warp in block.warps:
                self.machine.ready(warp)


class Stream:
    """The launches of a rank, one after another."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.queue: deque[Launched] = deque()
        self.launches = 0

    @property
    def idle(self) -> bool:
        return not self.queue

    def where(self) -> str:
        """What runs, and where its threads are."""
        if self.idle:
            return f"  rank {self.rank}: its stream is empty"
        launch = self.queue[0]
        lines = [f"  {launch}: {len(launch.left)} CTAs have not started, {len(self.queue) - 1} kernels wait behind it"]
        return "\n".join(lines + [block.where() for block in launch.resident])


def _parameters(program: Any, arguments: Sequence[int]) -> np.ndarray[Any, Any]:
    """The block of parameters. Those that Triton appends for itself are zero."""
    block = bytearray(program.parameter_bytes + 8)
    if len(arguments) > len(program.parameters):
        raise TypeError(f"{program.name} takes {len(program.parameters)} parameters, not {len(arguments)}")
    for parameter, value in zip(program.parameters, arguments, strict=False):
        mask = (1 << 8 * parameter.nbytes) - 1
        block[parameter.offset : parameter.offset + parameter.nbytes] = (value & mask).to_bytes(
            parameter.nbytes, "little"
        )
    return np.frombuffer(bytes(block) + bytes(-len(block) % 8), np.uint64).copy()
