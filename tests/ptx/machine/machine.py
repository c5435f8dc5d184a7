"""A model machine: it runs compiled kernels of several ranks thread by thread, in an order that one seed chooses.

How a harness runs ranks on it::

    machine = Machine(seed=7, memory=Weak(lag=0.01))
    kernel = Kernel(ptx, weak=machine.memory.every_access)         # once for all machines of that kind
    machine.memory.register("window of rank 0", address, nbytes)   # everything that kernels may touch
    machine.actor("proxy of rank 0", step)                         # True: it did something
    machine.host(0, body)                                          # body() runs as rank 0's host thread
    machine.run(limit_steps=1_000_000)

Inside ``body``, instead of what would block::

    machine.launch(0, kernel, grid=(4,), arguments=[address, 3], shared=1024)     # waits for the stream
    machine.launch_later(0, kernel, ...); machine.synchronise(0)                  # the asynchronous form
    machine.barrier("exchange", parties=2)
    machine.wait_until(lambda: flag[0] == 1, "the flag", timeout_s=1.0)
    machine.sleep(0.001); machine.monotonic()                                     # instead of those of ``time``

Only one host thread, proxy or warp runs at any time. Whoever runs, for how long, which lanes of a warp go together,
what a load reads, and when a store is seen: everything is drawn from the seed, so that a failing seed fails again, at
the same step (``digest()`` is of all steps). The clock goes on by ``tick_ns`` with each step. While nothing happens but
waiting it goes faster and faster, so that waits with a deadline come to it.

Of what the harness registers, ``watched=False`` is for tensors, which the host writes between launches only, and
``fresh=True`` for device memory that was just allocated. ``memory.regions.missing`` may register more when a kernel
comes there. ``Weak(races="keep")`` collects races in ``memory.races.found`` instead of raising the first.

An error says seed, step and who had the turn. Of a result that is wrong (``OtherBits``) it also says who accessed the
first element that differs (``memory.account(address)``).
"""

from __future__ import annotations

import gc
import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.ptx.machine.actors import HostThread, Proxy
from tests.ptx.machine.block import Block, Warp
from tests.ptx.machine.copies import Copy
from tests.ptx.machine.decoded import Decoded
from tests.ptx.machine.launched import Launched, Stream
from tests.ptx.machine.report import Deadlock, MachineError, NoEnd
from tests.support.bits import OtherBits

#: ns since boot at which every run begins
START_NS = 1_000_000_000
#: of an idle machine's clock at a time
LONGEST_TICK_NS = 1_000_000_000


class Machine:
    """See the module.

    Args:
        memory: :class:`tests.ptx.memory.weak.Weak` or :class:`tests.ptx.memory.sequential.Sequential`.
        resident: CTAs of a kernel that run at the same time. They start in increasing order, or in any if ``shuffled``.
        burst: chance that a warp's turn ends after an event.
        parting: chance that an event is carried out for some only of the lanes that stand at it.
        host_share: chance that a turn is a host thread's or a proxy's.
        copy_share: chance that a turn is a bulk copy's, where one is on its way.
        patience: steps without anything but waiting after which the clock goes faster.
        host_limit_s: of real time, for a turn of a host thread.
    """

    def __init__(
        self,
        seed: int,
        memory: Any,
        *,
        resident: int = 8,
        shuffled: bool = False,
        burst: float = 0.3,
        parting: float = 0.05,
        host_share: float = 0.1,
        copy_share: float = 0.1,
        tick_ns: int = 50,
        patience: int = 2000,
        host_limit_s: float = 60.0,
    ) -> None:
        self.seed, self.memory = seed, memory
        self.random = random.Random(seed)
        memory.seed(random.Random(f"memory {seed}"))
        self.resident, self.shuffled = resident, shuffled
        self.burst, self.parting, self.host_share, self.copy_share = burst, parting, host_share, copy_share
        self.tick_ns, self.patience, self.host_limit_s = tick_ns, patience, host_limit_s
        self.now_ns = START_NS
        self.steps = 0
        self._limit = 0
        self._hosts: list[HostThread] = []
        self._proxies: list[Proxy] = []
        self._streams: dict[int, Stream] = {}
        self._settling: list[Launched] = []
        #: bulk copies on their way
        self.copies: list[Copy] = []
        self._ready: list[Warp] = []
        self._decoded: dict[Any, dict[int, Decoded]] = {}
        self._here = threading.local()
        self._turn: object = "nobody"
        self._barriers: dict[tuple[str, int], int] = {}
        self._idle_since = 0
        self._trace = hashlib.blake2b(digest_size=16)

    # -- set up

    def host(self, rank: int, body: Callable[[], object]) -> HostThread:
        """``body`` runs as a host thread of ``rank``; its result is in ``result`` of what is returned."""

        def here() -> object:
            self._here.thread = thread
            return body()

        thread = HostThread(rank, here)
        self._hosts.append(thread)
        return thread

    def actor(self, name: str, step: Callable[[], bool]) -> None:
        """A proxy: ``step`` is called now and then, and returns whether it did anything."""
        self._proxies.append(Proxy(name, step))

    # -- for host threads

    def launch_later(
        self, rank: int, kernel: Any, grid: Sequence[int], arguments: Sequence[int], shared: int = 0
    ) -> Launched:
        """Puts a kernel on ``rank``'s stream. Arguments are integers: pointers, numbers, or the bits of a float."""
        launch = Launched(self, rank, kernel, grid, arguments, shared)
        self.memory.launched(launch)
        stream = self._streams.setdefault(rank, Stream(rank))
        stream.launches += 1
        launch.sequence = stream.launches
        stream.queue.append(launch)
        if len(stream.queue) == 1:
            self._begin(stream)
        return launch

    def launch(self, rank: int, kernel: Any, grid: Sequence[int], arguments: Sequence[int], shared: int = 0) -> None:
        """As :meth:`launch_later`, and waits until all of the stream has ended."""
        self.launch_later(rank, kernel, grid, arguments, shared)
        self.synchronise(rank)

    def synchronise(self, rank: int) -> None:
        """Waits until everything on ``rank``'s stream has ended."""
        stream = self._streams.setdefault(rank, Stream(rank))
        self._wait(lambda: stream.idle, f"the stream of rank {rank}")
        self.memory.host_waited(rank)

    def is_idle(self, rank: int) -> bool:
        """Whether nothing is left on ``rank``'s stream."""
        return rank not in self._streams or self._streams[rank].idle

    def barrier(self, name: str, parties: int) -> None:
        """Waits until ``parties`` host threads have come to ``name``."""
        count = self._barriers[name, 0] = self._barriers.get((name, 0), 0) + 1
        goal = -(-count // parties) * parties
        self._wait(lambda: self._barriers[name, 0] >= goal, f"{parties} host threads at {name}")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float | None = None) -> bool:
        """Waits for ``condition``, of which others see to; False where ``timeout_s`` of the machine went by first."""
        until = None if timeout_s is None else self.now_ns + timeout_s * 1e9
        self._wait(condition, what, until)
        return condition()

    def sleep(self, seconds: float) -> None:
        """``time.sleep`` on the machine's clock."""
        self._wait(lambda: False, f"{seconds} s to go by", self.now_ns + seconds * 1e9)

    def monotonic(self) -> float:
        """``time.monotonic`` on the machine's clock. Who asks again and again lets others go on."""
        if hasattr(self._here, "thread"):
            self._wait(lambda: True, "its turn")
        return self.now_ns / 1e9

    def _wait(self, condition: Callable[[], bool], what: str, until_ns: float | None = None) -> None:
        thread = getattr(self._here, "thread", None)
        if thread is None:
            raise MachineError(f"only a host thread of the machine can wait for {what}: give its body to Machine.host")
        thread.wait(condition, what, until_ns)

    # -- for warps and blocks

    def ready(self, warp: Warp) -> None:
        """It can move."""
        if warp.place < 0:
            warp.place = len(self._ready)
            self._ready.append(warp)

    def not_ready(self, warp: Warp) -> None:
        """All its lanes wait, or have exited."""
        if warp.place >= 0:
            last = self._ready.pop()
            if last is not warp:
                self._ready[warp.place] = last
                last.place = warp.place
            warp.place = -1

    def warp_exited(self, warp: Warp) -> None:
        self.not_ready(warp)
        block = warp.block
        if not block.alive:
            self._block_exited(block)

    def progress(self) -> None:
        """Something happened but waiting."""
        self._idle_since = self.steps

    @property
    def waited(self) -> int:
        """Steps since anything happened but waiting."""
        return self.steps - self._idle_since

    def record(self, warp: Warp, number: int, lanes: Sequence[int]) -> None:
        """A step for the digest: which lanes carry which event out."""
        block = warp.block
        mask = (1 << warp.count) - 1 if len(lanes) == warp.count else sum([1 << lane for lane in lanes])
        self._trace.update(b"%d %d %d %d %d %d;" % (block.launch.rank, *block.place, warp.number, number, mask))

    def order(self, programs: int) -> list[int]:
        """In which CTAs start."""
        return self.random.sample(range(programs), programs) if self.shuffled else list(range(programs))

    def elected(self, lanes: Sequence[int]) -> int:
        """One of ``lanes``, the same each time."""
        return random.Random(f"elect {self.seed} {lanes}").choice(lanes)

    def decoded(self, kernel: Any) -> dict[int, Decoded]:
        if kernel not in self._decoded:
            self._decoded[kernel] = {number: Decoded(event) for number, event in kernel.events.items()}
        return self._decoded[kernel]

    def reached(self) -> frozenset[tuple[str, int]]:
        """Names of kernels, and lines of their PTX, at which some thread has stopped so far."""
        return frozenset(
            (kernel.program.name, one.event.line)
            for kernel, events in self._decoded.items()
            for one in events.values()
            if one.reached
        )

    def digest(self) -> str:
        """Of all steps so far: the same for the same seed, on any machine and in any process."""
        return self._trace.hexdigest()

    # -- streams

    def _begin(self, stream: Stream) -> None:
        launch = stream.queue[0]
        self.memory.begin(launch)
        launch.fill()
        self.progress()

    def _block_exited(self, block: Block) -> None:
        launch = block.launch
        launch.resident.remove(block)
        block.close()
        launch.fill()
        if not launch.resident:
            self._settling.append(launch)

    def _settle(self, launch: Launched) -> None:
        """Its copies end and its stores reach the host; then it has ended, and the next of its stream starts."""
        if any(copy.block.launch is launch for copy in self.copies):
            return
        if self.memory.settle(launch):
            self.memory.end(launch, launch.agents)
            self._settling.remove(launch)
            stream = self._streams[launch.rank]
            stream.queue.popleft()
            if stream.queue:
                self._begin(stream)
            self.progress()

    # -- turns

    def run(self, limit_steps: int = 10_000_000) -> None:
        """Runs until all host threads have ended and all streams are empty.

        Raises:
            NoEnd: not within ``limit_steps``. Deadlock: nobody can go on. What a body, proxy or kernel raised.
        """
        self._limit = self.steps + limit_steps
        # next to nothing of a run is garbage before its end, and looking for it takes an eighth of the time
        collecting = gc.isenabled()
        gc.disable()
        try:
            for thread in self._hosts:
                if thread.thread.ident is None:
                    thread.start()
            while self._ready or self._settling or not all(thread.done for thread in self._hosts):
                self._one_turn()
                if self.steps > self._limit:
                    raise NoEnd(f"no end after {limit_steps} steps:\n{self.where()}")
        except MachineError as error:
            error.args = (f"seed {self.seed}, step {self.steps}, {self._turn}: {error}", *error.args[1:])
            raise
        except Exception as error:
            error.add_note(f"on the model machine: seed {self.seed}, step {self.steps}, {self._turn}")
            if isinstance(error, OtherBits):
                error.add_note(self.memory.account(error.address))
            raise
        finally:
            for thread in self._hosts:
                thread.stop()
            if collecting:
                gc.enable()

    def _one_turn(self) -> None:
        draw = self.random.random
        outside = self._hosts or self._proxies or self._settling
        if self.copies and draw() < self.copy_share:
            self._copy_turn()
        elif not self._ready or (outside and draw() < self.host_share):
            if not self._outside_turn() and not self._ready:
                self._nobody()
        elif self._ready:
            self._warp_turn(self._ready[int(draw() * len(self._ready))])
        self._pass_time()

    def _warp_turn(self, warp: Warp) -> None:
        draw = self.random.random
        self._turn = warp.block
        while True:
            self.steps += 1
            self.now_ns += self.tick_ns
            if not warp.advance() or warp.place < 0 or draw() < self.burst or self.steps > self._limit:
                return

    def _copy_turn(self) -> None:
        """Of one bulk copy."""
        self.steps += 1
        self.now_ns += self.tick_ns
        chosen = int(self.random.random() * len(self.copies))
        self._trace.update(b"copy %d;" % chosen)
        copy = self.copies[chosen]
        self._turn = copy.name
        self.memory.step = self.steps
        copy.step()
        if copy.is_done:
            del self.copies[chosen]
            self.progress()

    def _outside_turn(self) -> bool:
        """Of a host thread, a proxy or a kernel that settles. False where there is none that could."""
        hosts = [thread for thread in self._hosts if thread.can_go_on(self.now_ns)]
        count = len(hosts) + len(self._proxies) + len(self._settling)
        if not count:
            return False
        self.steps += 1
        self.now_ns += self.tick_ns
        chosen = int(self.random.random() * count)
        self._trace.update(b"outside %d;" % chosen)
        if chosen < len(hosts):
            self._host_turn(hosts[chosen])
        elif chosen < len(hosts) + len(self._proxies):
            proxy = self._proxies[chosen - len(hosts)]
            self._turn = proxy.name
            if proxy.step():
                self.progress()
            self.memory.host_stepped()
        else:
            launch = self._settling[chosen - len(hosts) - len(self._proxies)]
            self._turn = f"the end of {launch}"
            self._settle(launch)
        return True

    def _host_turn(self, thread: HostThread) -> None:
        self._turn = thread.name
        thread.turn(self.host_limit_s)
        if thread.error is not None:
            raise thread.error
        if thread.done or not (thread.until is not None or (thread.waits is not None and thread.waits())):
            self.progress()
        self.memory.host_stepped()

    def _pass_time(self) -> None:
        """A machine on which all wait doubles its ticks every ``patience`` steps, or goes to where a sleeper wakes.

        Not while a store is on its way: nobody's deadline comes before what he waits for, only because that is late.
        """
        if self.waited < self.patience or self.memory.catch_up():
            return
        faster = self.tick_ns << min(self.waited // self.patience, 40)
        self.now_ns += min(faster, LONGEST_TICK_NS)

    def _nobody(self) -> None:
        """No warp, proxy or host thread can go on: time passes for those who sleep."""
        wakes = [thread.until for thread in self._hosts if not thread.done and thread.until is not None]
        if not wakes:
            raise Deadlock(f"nobody can go on:\n{self.where()}")
        self.steps += 1
        self.now_ns = max(self.now_ns, int(min(wakes)) + 1)

    def where(self) -> str:
        """Where everybody is."""
        hosts = [
            f"  {thread.name}: "
            + ("has ended" if thread.done else f"waits for {thread.what}" if thread.waits else "runs")
            for thread in self._hosts
        ]
        streams = [stream.where() for stream in self._streams.values()]
        return "\n".join(hosts + streams + [f"  {copy}" for copy in self.copies])
