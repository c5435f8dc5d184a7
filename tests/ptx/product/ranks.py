"""The product's own ranks on the model machine: hosts and proxies are actors, kernels are what Triton compiled.

Everything above a launch is production code: Buffers' sessions, windows, rings, proxies on the fake transport. What is
replaced stands here: a launch goes to the machine, a rank is a host thread of it, a proxy is stepped by it, ranks meet
at its barriers, and memory is told to it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.ptx.machine.machine import Machine
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.device import Allocations, ModelMemory
from tests.support.direct_ranks import DirectRuntime
from tests.support.fake_ranks import FakeGroup
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.gpu_direct import GpuReach
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.gpu.context import GpuContext
from uccl_ep_serving.gpu.streams import HostOrder, StreamOrder
from uccl_ep_serving.handles import EventOverlap
from uccl_ep_serving.kernels import select
from uccl_ep_serving.kernels.cuda import normal as copies
from uccl_ep_serving.kernels.triton import launch, low_latency, normal
from uccl_ep_serving.kernels.triton.target import Target
from uccl_ep_serving.modes.low_latency_gpu import LowLatencyGpu
from uccl_ep_serving.modes.normal_gpu import NormalGpu
from uccl_ep_serving.protocol.context import FAILURE_PROXY_DIED
from uccl_ep_serving.protocol.layout import LowLatencyRoom, NormalPlan, WindowLayout
from uccl_ep_serving.proxy.loop import DIED
from uccl_ep_serving.proxy.transport.fake import Adversary

#: Seconds of the machine's clock that a kernel waits for a peer.
TIMEOUT = 20.0
#: Tokens whose ids a program counts: groups have few, and several programs.
MARKED = 4
#: Normal mode has a place in every window; small, because the machine keeps a shadow of all memory.
_OF_WINDOWS = ("window of", "host memory of")
_SMALL = {"heap": 1 << 16, "rounds": 1 << 16, "chunk": 4096}


class ModelRuntime(DirectRuntime):
    """Beside what it has for CPU kernels, what :class:`GpuContext` wants of a Runtime."""

    gpu_reach = GpuReach()
    nic_peers: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[Callable[[Callable[[], object]], None]]:
        """Every rank makes its own; none can fail."""
        yield lambda make: (make(), None)[1]

    def before_draining(self, finish: Callable[[float], bool]) -> None:
        """Nothing is left in flight when a test ends."""

    def before_unmapping(self, release: Callable[[], object]) -> None:
        """Windows stay until the group goes."""


class _Barrier:
    """Where ranks meet, in place of threading.Barrier."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        self._machine, self._ranks = machine, ranks
        self._come = itertools.count()

    def wait(self, timeout: float = 0.0) -> int:
        """The number of ranks that were here before."""
        place = next(self._come) % self._ranks
        self._machine.barrier("ranks", self._ranks)
        return place


class _Order(HostOrder):
    """Kernels of an operation are launched one behind the other; the host waits for the last of them."""

    def __init__(self, synchronise: Callable[[], None]) -> None:
        self._synchronise = synchronise

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        event = super().run(launch, tensors, own_stream=own_stream, finish=finish)
        self._synchronise()
        return event


class ModelGroup(FakeGroup):
    """Ranks whose kernels run on ``machine``.

    Args:
        machine: that runs them. Its memory learns of windows, of what the host maps, and of each rank's tensors.
        compiled: where its kernels come from.
        mapped: which peers map each other's window; the others are reached through proxies, over the fake transport.
        sizes: of what normal mode has of the windows.
        node_ranks: more than 1: those that do are the groups of so many ranks.
    """

    def __init__(
        self,
        machine: Machine,
        compiled: Compiled,
        ranks: int,
        *,
        seed: int = 0,
        adversary: Adversary | None = None,
        settings: Settings | None = None,
        mapped: Callable[[int, int], bool] = lambda rank, peer: False,
        sizes: Mapping[str, int] = _SMALL,
        node_ranks: int = 1,
    ) -> None:
        self.machine, self.compiled = machine, compiled
        self._here = threading.local()
        self._kept: list[object] = []
        #: What ranks have mapped stays mapped until the last of them has ended.
        self.contexts: list[GpuContext] = []
        #: The step in which each write that is under way has begun.
        self._begun: dict[tuple[int, int, int], int] = {}
        #: Called after each turn of a proxy.
        self.stepped: Callable[[], object] = lambda: None
        settings = settings or Settings(timeout=TIMEOUT, window="host")
        plan = NormalPlan(ranks, 16, **sizes)
        super().__init__(
            ranks,
            adversary=adversary,
            seed=seed,
            normal=plan,
            settings=settings,
            mapped=mapped,
            node_ranks=node_ranks,
        )
        self.barrier = _Barrier(machine, ranks)  # type: ignore[assignment]
        for rank, proxy in itertools.product(range(ranks), range(self.settings.proxies)):
            machine.actor(f"proxy {proxy} of rank {rank}", lambda rank=rank, proxy=proxy: self.step(rank, proxy))

    def start(self) -> None:
        """The machine steps the proxies."""

    def step(self, rank: int, proxy: int) -> bool:
        """A turn of a proxy. Whether it did anything."""
        if not self.services:
            return False
        before = self.fabric.sources()
        done = self.services[rank].step(proxy)
        self.stepped()
        # of a write that has begun, or is over now: in between it may be read at any time
        after, read = self.fabric.sources(), self.machine.memory.host_read
        for one in after - before:
            self._begun[one] = read(*one[1:])
        for one in before - after:
            read(*one[1:], since=self._begun.pop(one))
        # what the thread of a proxy does that ends by itself
        return self.spaces[rank].fail(FAILURE_PROXY_DIED, arrived=proxy) if done == DIED else done > 0

    def join(self, rank: int, segments: list[Segment], layout: WindowLayout, endpoints: Any) -> Any:
        if rank == 0:
            for owner, segment in enumerate(segments):
                self.machine.memory.register(f"window of rank {owner}", segment.address, layout.nbytes)
        return super().join(rank, segments, layout, endpoints)

    def build(self, room: LowLatencyRoom | None) -> None:
        # what belonged to the windows before goes with them
        for region in [one for one in self.machine.memory.regions if one.name.startswith(_OF_WINDOWS)]:
            self.machine.memory.unregister(region.start)
        super().build(room)

    def gpu(self, runtime: DirectRuntime, order: StreamOrder | None = None) -> GpuContext:
        """What the modes of a rank share on its device."""
        order = order or _Order(self.synchronise)
        found = GpuContext(runtime, torch.device("cpu"), order)  # type: ignore[arg-type]
        found.memory = ModelMemory(self.machine.memory, runtime.rank)
        self.contexts.append(found)
        return found

    def low_latency(self, runtime: DirectRuntime, order: StreamOrder | None = None) -> LowLatencyGpu:
        """Low-latency mode of a rank; ``order``: of its kernels, where it is another one."""
        return LowLatencyGpu(runtime, self.gpu(runtime, order))  # type: ignore[arg-type]

    def normal_mode(self, runtime: DirectRuntime) -> NormalGpu:
        """Normal mode of a rank."""
        found = NormalGpu(runtime, self.gpu(runtime))  # type: ignore[arg-type]
        # what it tells the host with is mapped memory
        self._kept.append(found)
        return found

    @property
    def calling(self) -> int:
        """The rank whose host thread asks."""
        rank: int = self._here.rank
        return rank

    def launch(self, one: launch.Launch | copies.CopyLaunch) -> None:
        """In place of ``Launch.run``: what Triton's launcher would hand to the driver runs on the machine."""
        ready = self.compiled.ready(one)
        self.machine.launch_later(self._here.rank, ready.kernel, one.grid, ready.arguments, ready.shared)

    def synchronise(self) -> None:
        """Waits until all that the calling rank has launched is over."""
        self.machine.synchronise(self._here.rank)

    def run(self, body: Callable[[Any], Any], seconds: float = 100.0, limit_steps: int = 5_000_000) -> list[Any]:
        """Run ``body`` as one host thread per rank; returns results by rank, raises the first failure.

        Args:
            limit_steps: of the machine.
        """

        def of(rank: int) -> Callable[[], Any]:
            def here() -> Any:
                self._here.rank = rank
                # the machine looks at what a rank that has ended has left, as long as others launch
                self._kept.append(allocations := Allocations(self.machine.memory, f"rank {rank}"))
                with allocations:
                    return body(ModelRuntime(self, rank, self.settings))

            return here

        threads = [self.machine.host(rank, of(rank)) for rank in range(self.ranks)]
        with _launching(self):
            self.machine.run(limit_steps)
        return [thread.result for thread in threads]


@contextlib.contextmanager
def _launching(group: ModelGroup) -> Iterator[None]:
    """Inside, launches of CPU tensors go to the machine of ``group``, compiled for CUDA."""
    # programs that start in any order take their numbers as they start
    target = Target(1, 32, in_order=not group.machine.shuffled)
    with pytest.MonkeyPatch.context() as patch:
        for module in (low_latency, normal):
            patch.setattr(module, "present_target", lambda: target)
        patch.setattr(normal, "_MARKED", MARKED)
        patch.setattr(launch.Launch, "run", lambda self: group.launch(self))
        patch.setattr(launch.Launch, "compile", lambda self: group.compiled.ready(self))
        for method, instead in (("run", group.launch), ("compile", group.compiled.ready)):
            patch.setattr(copies.CopyLaunch, method, lambda self, instead=instead: instead(self))
        patch.setattr(copies, "check_copies", lambda ranks: None)
        patch.setattr(select, "_check_interpreter", lambda present, wanted: None)
        yield
