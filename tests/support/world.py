"""A small world for the proxies: ranks in one process on a fake fabric, and kernels that check every byte.

:class:`World` stands up the production ProxyService for every rank and steps them in one thread, so a seed fixes the
run. :class:`Sender` and :class:`Receiver` do what kernels do, by the rules of the stream: a send slot is used again
only when its message has completed locally and the receiver has consumed it; a receiver looks at a message only when
``arrived`` covers it, and then at every byte.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from uccl_ep_serving.config import Settings
from uccl_ep_serving.protocol.command import COMMAND_BYTES, Command, encode
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.protocol.ring import CAPACITY, HEAD, SLOTS, TAIL, lap_of
from uccl_ep_serving.protocol.streams import proxy_of
from uccl_ep_serving.proxy import loop
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.fake import Adversary, FakeFabric

#: Bytes of every message slot.
SLOT = 256


class RingProducer:
    """Puts commands into a ring as a single kernel would (independent of the kernels' own code)."""

    def __init__(self, service: ProxyService, stream: int) -> None:
        for state in service.states:
            if state.ring == service.ring(stream):
                self._bytes = state._ring
        self._words = self._bytes.view(np.int64)
        self.capacity = int(self._words[CAPACITY // 8])

    @property
    def room(self) -> int:
        """Free slots."""
        return self.capacity - int(self._words[HEAD // 8] - self._words[TAIL // 8])

    def put(self, command: Command) -> None:
        """Append a command; the caller has looked at ``room``."""
        assert self.room > 0
        index = int(self._words[HEAD // 8])
        self.put_words(*encode(command, lap_of(index, self.capacity)))

    def put_words(self, low: int, high: int) -> None:
        """Append two words as they are."""
        index = int(self._words[HEAD // 8])
        self.put_half(index, 1, high)
        self.put_half(index, 0, low)

    def put_half(self, index: int, half: int, word: int) -> None:
        """Reserve index ``index`` and store one of its two words."""
        self._words[HEAD // 8] = index + 1
        self._words[(SLOTS + index % self.capacity * COMMAND_BYTES) // 8 + half] = word


class World:
    """``ranks`` ranks with a window, a sticky error and a ProxyService each, all on one fabric."""

    def __init__(
        self,
        ranks: int,
        window_bytes: int,
        seed: int = 0,
        adversary: Adversary | None = None,
        *,
        proxies: int = 1,
        step: Callable[[int], int] | None = None,
        fabric_options: dict[str, Any] | None = None,
        near_cpus: Sequence[frozenset[int]] = (),
        **settings: Any,
    ) -> None:
        #: The compiled step: the production one, or that of a mutant.
        self._step = step or loop.step
        #: Ranks that are not stepped for now.
        self.asleep: set[int] = set()
        self.ranks = ranks
        self._near_cpus = near_cpus
        self.settings = Settings(proxies=proxies, channels=max(proxies, settings.pop("channels", 1)), **settings)
        self.fabric = FakeFabric(ranks, window_bytes, seed, adversary, proxies=proxies, **(fabric_options or {}))
        self.windows = [np.zeros(window_bytes, np.uint8) for _ in range(ranks)]
        self.errors = [np.zeros(ERROR_WORDS, np.int64) for _ in range(ranks)]
        for rank in range(ranks):
            self.fabric.register_window(rank, self.windows[rank].ctypes.data)
        self.services = [self._service(rank) for rank in range(ranks)]
        self._producers: dict[tuple[int, int], RingProducer] = {}
        #: Called with a rank after each of its steps that did something.
        self.watchers: list[Callable[[int], None]] = []

    def _service(self, rank: int) -> ProxyService:
        proxies = self.settings.proxies
        endpoints = [self.fabric.endpoint(rank, proxy) for proxy in range(proxies)]
        for proxy, endpoint in enumerate(endpoints):
            addresses = [None if r == rank else f"fake:{r}.{proxy}".encode() for r in range(self.ranks)]
            endpoint.connect(addresses, time.monotonic() + 1)
        return ProxyService(
            rank=rank,
            ranks=self.ranks,
            window=self.windows[rank].ctypes.data,
            window_bytes=self.windows[rank].nbytes,
            settings=self.settings,
            error=self.errors[rank].ctypes.data,
            endpoints=[[endpoint] for endpoint in endpoints],
            route=[-1 if r == rank else 0 for r in range(self.ranks)],
            near_cpus=self._near_cpus,
        )

    def producer(self, rank: int, stream: int) -> RingProducer:
        """The producer of the ring of ``rank`` that carries ``stream``."""
        ring = self.services[rank].ring(stream)
        if (rank, ring) not in self._producers:
            self._producers[rank, ring] = RingProducer(self.services[rank], stream)
        return self._producers[rank, ring]

    def arrived(self, rank: int, peer: int, stream: int) -> int:
        """Messages from ``peer`` that ``rank`` may look at."""
        proxy = proxy_of(stream, self.settings.proxies)
        return int(self.services[rank].states[proxy].arrived[peer, stream])

    def completed(self, rank: int, peer: int, stream: int) -> int:
        """Own messages to ``peer`` whose source bytes ``rank`` may overwrite."""
        proxy = proxy_of(stream, self.settings.proxies)
        return int(self.services[rank].states[proxy].completed[peer, stream])

    def step(self) -> int:
        """One iteration of every living proxy, watchers in between; returns the work done."""
        work = 0
        for rank, service in enumerate(self.services):
            if rank in self.asleep or not self.fabric.alive(rank):
                continue
            for state in service.states:
                did = max(0, self._step(state.address))
                work += did
                for watch in self.watchers if did else ():
                    watch(rank)
        return work

    def run(self, done: Callable[[], bool], steps: int = 20_000) -> bool:
        """Step until ``done``; False when it has not happened after ``steps``."""
        for _ in range(steps):
            if done():
                return True
            self.step()
        return done()


def pattern(*key: int) -> bytes:
    """SLOT bytes that depend on the stream and the message number."""
    return hashlib.shake_128(repr(key).encode()).digest(SLOT)


@dataclass
class Link:
    """A stream of messages from ``sender`` to ``receiver``, checked byte by byte.

    Message n has ``sizes[n]`` bytes, cut into ``parts`` commands. ``slots`` slots are reused in turn on each side, one
    more on the sending side, so that a payload repeated too late meets a slot that holds another message by then.
    """

    world: World
    sender: int
    receiver: int
    stream: int
    send_base: int
    receive_base: int
    sizes: Sequence[int]
    parts: int = 1
    slots: int = 2
    #: Rule under test in some tests: wait for local completion before a send slot is used again.
    wait_completed: bool = True
    sent: int = 0
    consumed: int = 0
    _pending: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._producer = self.world.producer(self.sender, self.stream)

    def produce(self) -> None:
        """Put as much into the ring as rules and room allow."""
        if not self._pending and (self.sent == len(self.sizes) or self.consumed <= self.sent - self.slots):
            return
        producer = self._producer
        while True:
            while self._pending and producer.room:
                producer.put(self._pending.pop(0))
            if self._pending or self.sent == len(self.sizes):
                return
            if self.consumed <= self.sent - self.slots:
                return
            completed = self.world.completed(self.sender, self.receiver, self.stream)
            # Covers the send slot and the receive slot: neither may be touched by a late repeat.
            if self.wait_completed and completed <= self.sent - self.slots:
                return
            self._begin()

    def _begin(self) -> None:
        nbytes = self.sizes[self.sent]
        source = self.send_base + self.sent % (self.slots + 1) * SLOT
        target = self.receive_base + self.sent % self.slots * SLOT
        data = pattern(self.sender, self.receiver, self.stream, self.sent)[:nbytes]
        self.world.windows[self.sender][source : source + nbytes] = np.frombuffer(data, np.uint8)
        units = nbytes // 16
        cuts = [units * i // self.parts * 16 for i in range(self.parts + 1)]
        for i in range(self.parts):
            self._pending.append(
                Command(
                    rank=self.receiver,
                    stream=self.stream,
                    source=source + cuts[i],
                    target=target + cuts[i],
                    length=cuts[i + 1] - cuts[i],
                    last=i == self.parts - 1,
                )
            )
        self.sent += 1

    def consume(self) -> bool:
        """Check every message that ``arrived`` covers, then free its slot. False when there was none."""
        before, arrived = self.consumed, self.world.arrived(self.receiver, self.sender, self.stream)
        assert arrived <= self.sent, f"{self}: arrived {arrived} of {self.sent} sent"
        while self.consumed < arrived:
            self.verify(self.consumed)
            self.consumed += 1
        return self.consumed != before

    def verify(self, number: int) -> None:
        """Every byte of message ``number`` is in its receive slot."""
        nbytes = self.sizes[number]
        start = self.receive_base + number % self.slots * SLOT
        here = self.world.windows[self.receiver][start : start + nbytes].tobytes()
        assert here == pattern(self.sender, self.receiver, self.stream, number)[:nbytes], (
            f"message {number} of {self.sender}->{self.receiver} stream {self.stream} was published early, "
            "lost or overwritten"
        )

    @property
    def done(self) -> bool:
        """Everything was sent and consumed."""
        return self.consumed == len(self.sizes)

    @property
    def finished(self) -> bool:
        """Everything was consumed and has completed locally."""
        return self.done and self.world.completed(self.sender, self.receiver, self.stream) == len(self.sizes)


def attach(world: World, links: Sequence[Link]) -> Callable[[int], None]:
    """Let the kernels of both ends of ``links`` run whenever their rank's proxy did something."""
    by_receiver: dict[int, list[Link]] = {}
    by_sender: dict[int, list[Link]] = {}
    for link in links:
        by_receiver.setdefault(link.receiver, []).append(link)
        by_sender.setdefault(link.sender, []).append(link)
        link.produce()

    def watch(rank: int) -> None:
        for link in by_receiver.get(rank, ()):
            if link.consume() and world.fabric.alive(link.sender):
                link.produce()
        if world.fabric.alive(rank):
            for link in by_sender.get(rank, ()):
                link.produce()

    world.watchers.append(watch)
    return watch


def drive(world: World, links: Sequence[Link], steps: int = 20_000) -> bool:
    """Run all links to their end; True when all messages arrived and everything completed locally."""

    watch = attach(world, links)

    def done() -> bool:
        open_links[:] = [link for link in open_links if not link.finished]
        return not open_links

    open_links = list(links)
    finished = world.run(done, steps)
    world.watchers.remove(watch)
    return finished


def all_to_all(
    world: World,
    streams: Sequence[int],
    span: int,
    window: int,
    sizes: Sequence[int],
    *,
    parts: int,
    slots: int,
) -> list[Link]:
    """A link on each of ``streams`` between any two ranks, each with ``span`` bytes of either half of the window."""
    return [
        Link(
            world,
            a,
            b,
            stream,
            send_base=(b * len(streams) + i) * span,
            receive_base=window // 2 + (a * len(streams) + i) * span,
            sizes=[sizes[(n + a + b) % len(sizes)] for n in range(len(sizes) + 2)],
            parts=parts,
            slots=slots,
        )
        for a in range(world.ranks)
        for b in range(world.ranks)
        if a != b
        for i, stream in enumerate(streams)
    ]
