"""``uccl-ep check --gpu``: the calls of the driver one by one, then a small operation of each mode, path by path.

Two ranks, each a process, on two GPUs of one kind that reach each other, else both on one. Each part has a limit, and
all together have one; a part that hangs is ended with its processes and named.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from triton.backends.compiler import GPUTarget

from ..control_plane.bootstrap import StoreExchange
from ..kernels.triton.ahead import compiling_for, keep, present_gpu
from ..kernels.triton.launch import Launch
from ..modes.ahead import launches, low_latency_launches
from ..native.background import start_thread
from ..native.failure import STICKY_ERROR
from ..native.groups import Group, load
from ..proxy.service import proxy_groups
from . import driver, operations
from .faults import Fault, Wrong, slow
from .paths import PATHS
from .place import Place, interpreting, present_place
from .workers import Answer, Worker, answers, each, note

__all__ = ["GROUPS", "PARTS", "SECONDS", "Part", "Report", "Result", "run"]

#: All parts together take no longer.
SECONDS = 120.0
#: What a part belongs to: calls of the driver, or first operations.
GROUPS = ("probe", "first")
#: Kept for the operations when code is compiled, and the longest that a rank's process may take to begin.
_RESERVED_SECONDS, _BEGIN_SECONDS = 35.0, 60.0
_INTERPRETER_FACTOR = 4.0
#: Processes that compile: each holds some hundred megabytes.
_MOST_COMPILERS = 16

Setup = Callable[[int], Place]


class Part(NamedTuple):
    """One thing that is checked.

    Attributes:
        group: of :data:`GROUPS`.
        seconds: that it may take.
        ranks: that it needs.
        body: called on each rank with its place, an exchange of the ranks, and ``arguments``.
    """

    name: str
    group: str
    seconds: float
    ranks: int
    body: Callable[..., str]
    arguments: tuple[str, ...] = ()


def _parts() -> Iterator[Part]:
    for body in (driver.clock, driver.host_memory, driver.segments, driver.device_memory, driver.peers):
        yield Part(body.__name__.replace("_", " "), "probe", 20.0, 1 + (body in (driver.segments, driver.peers)), body)
    yield Part("waiting", "probe", 20.0, 2, driver.waiting)
    yield Part("captures", "probe", 20.0, 1, driver.captures)
    yield Part("dma-buf", "probe", 20.0, 1, driver.dma_buf)
    for path in PATHS:
        yield Part(f"alone over {path}", "first", 30.0, 1, operations.low_latency, (path,))
        yield Part(f"low latency over {path}", "first", 30.0, 2, operations.low_latency, (path,))
        yield Part(f"normal over {path}", "first", 30.0, 2, operations.normal, (path,))


PARTS = tuple(_parts())


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        said: by it, when it has passed.
        fault: why it has not.
    """

    name: str
    passed: bool
    seconds: float
    said: str = ""
    fault: Fault | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON has it: ``fault`` in words, and its trace."""
        fault = None if self.fault is None else str(self.fault)
        trace = "" if self.fault is None else self.fault.trace
        return {**asdict(self), "seconds": round(self.seconds, 1), "fault": fault, "trace": trace}


@dataclass(frozen=True)
class Report:
    """What a check has found.

    Attributes:
        device: that it was run on, in words.
        complete: every part of every kind of GPU was to be run, on a device: a record may be kept.
    """

    device: str
    results: tuple[Result, ...]
    seconds: float
    complete: bool

    @property
    def passed(self) -> bool:
        """Whether everything that ran has passed, and something ran."""
        return bool(self.results) and all(one.passed for one in self.results)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "device": self.device,
            "torch": torch.__version__,
            "seconds": round(self.seconds, 1),
            "parts": [one.plain() for one in self.results],
        }


# -- on the ranks ---------------------------------------------------------------------------------------------------

_place: tuple[int, Place] | None = None


def _at(setup: Setup, index: int) -> Place:
    """What ``setup`` makes of GPU ``index``, once as long as no other is asked for."""
    global _place
    if _place is None or _place[0] != index:
        _place = index, setup(index)
    return _place[1]


def _on_rank(setup: Setup, index: int, port: int, meeting: tuple[str, int, int], part: Part) -> str:
    name, rank, size = meeting
    place = _at(setup, index)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))  # type: ignore[attr-defined]
    note(part.name)
    return part.body(place, StoreExchange(store, rank, size, name), *part.arguments)


class _Kind(NamedTuple):
    """A kind of GPU: its name, and those of the two ranks."""

    name: str
    devices: tuple[int, int]

    @property
    def places(self) -> str:
        """Of the ranks, in words."""
        found = sorted(set(self.devices))
        return "both ranks share it" if len(found) == 1 else " and ".join(f"cuda:{index}" for index in found)


def _ready() -> None:
    """What a rank needs is imported before it is given a part."""


def _kinds(setup: Setup) -> list[_Kind]:
    """Every kind of GPU here. The first call of the driver is made here."""
    if interpreting():
        return [_Kind("Triton's interpreter", (0, 0))]
    note("torch.cuda.is_available")
    if not torch.cuda.is_available():
        built = torch.version.hip or torch.version.cuda or "CPU"
        cause, step = "a build of torch for another driver, or none for GPUs", "uccl-ep doctor"
        raise Wrong("torch.cuda.is_available", "a GPU", f"none (torch {torch.__version__}, {built})", cause, step)
    _at(setup, 0)
    note("torch.cuda.get_device_properties")
    by_name: dict[str, list[int]] = {}
    for index in range(torch.cuda.device_count()):
        by_name.setdefault(torch.cuda.get_device_name(index), []).append(index)
    found = []
    for name, indices in by_name.items():
        first = indices[0]
        reached = (other for other in indices[1:] if torch.cuda.can_device_access_peer(first, other))
        found.append(_Kind(name, (first, next(reached, first))))
    return found


def _kernels() -> tuple[GPUTarget, list[str]]:
    """What the operations launch, to compile."""
    note("triton.runtime.driver")
    return present_gpu()[1], [launch.kernel.__name__ for launch in _launches()]


def _launches() -> list[Launch]:
    return [*launches(operations.PLAN, ("bf16",), 0), *low_latency_launches(operations.ALONE, ("bf16",))]


def _compile_kernel(gpu: GPUTarget, place: int, name: str) -> None:
    note(f"kernel {name}, compiled for {gpu.backend} {gpu.arch}")
    with compiling_for(gpu):
        keep(_launches()[place])


def _groups() -> list[Group]:
    """What the proxies of the operations run."""
    return [*proxy_groups("auto"), STICKY_ERROR]


def _compile_group(name: str) -> None:
    note(f"proxies: {name}")
    load(next(one for one in _groups() if one.name == name))


# -- the check ------------------------------------------------------------------------------------------------------


class _Check:
    """Ranks as processes, new ones after a failure: a fault of a kernel is the end of the process's context.

    Args:
        deadline: of everything (``time.monotonic()``).
        setup: makes the place of a rank.
        say: is told what begins.
    """

    def __init__(self, deadline: float, setup: Setup, say: Callable[[str], None]) -> None:
        self._deadline, self._setup, self._say = deadline, setup, say
        self._ranks: list[Worker] = []
        self._names = itertools.count()
        self._store: Any = None
        self.results: list[Result] = []

    @property
    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _workers(self, count: int) -> list[Worker]:
        self._ranks = [worker for worker in self._ranks if worker.process.is_alive()]
        while len(self._ranks) < count:
            self._ranks.append(Worker())
        return self._ranks[:count]

    def _note(self, name: str, started: float, found: Sequence[Answer], said: str = "") -> bool:
        """Keep the result of a part; of several faults the first that blames nobody else."""
        faults = sorted((one.fault for one in found if one.fault is not None), key=lambda fault: fault.blames)
        seconds = time.monotonic() - started
        said = said or (str(found[0].value) if found else "")
        self.results.append(Result(name, not faults, seconds, "" if faults else said, faults[0] if faults else None))
        return not faults

    def _asked(self, name: str, *tasks: tuple[Any, ...]) -> Any:
        """What rank 0 answers to the first of ``tasks``, rank 1 doing the second; None where one fails, which is then
        the result ``name``."""
        self._say(name)
        started = time.monotonic()
        workers = self._workers(len(tasks))
        for worker, task in zip(workers, tasks, strict=True):
            worker.give(*task)
        found = answers(workers, min(_BEGIN_SECONDS, self._left))
        if any(answer.fault for answer in found):
            self._note(name, started, found)
            return None
        return found[0].value

    def kinds(self) -> list[_Kind]:
        """Of GPUs here; none where that has failed."""
        return list(self._asked("device", (_kinds, self._setup), (_ready,)) or ())

    def compiling(self) -> Callable[[], bool]:
        """Begin to compile what the operations launch, in parallel and into the caches of the engines; what is returned
        waits for the end of that and says whether all of it has compiled."""
        known = self._asked("what there is to compile", (_kernels,))
        if known is None:
            return lambda: False
        gpu, names = known
        started = time.monotonic()
        groups = [group.name for group in _groups() if not group.cached]
        tasks: list[tuple[Any, ...]] = [(_compile_group, name) for name in groups]
        tasks += [(_compile_kernel, gpu, place, name) for place, name in enumerate(names)]
        # what the probe runs on meanwhile needs cores as well
        jobs = min(max(len(os.sched_getaffinity(0)) - 2, 1), _MOST_COMPILERS, len(tasks))
        found: list[Answer] = []
        seconds = max(self._left - _RESERVED_SECONDS, 5.0)
        thread = start_thread("uccl_ep compile", lambda: found.extend(each(tasks, jobs, seconds)))

        def all_compiled() -> bool:
            self._say("compile")
            thread.join(max(self._left, 1.0))
            said = f"{len(names)} kernels for {gpu.backend} {gpu.arch}, {len(groups)} groups of the proxies"
            return self._note("compile", started, found or [Answer(fault=slow("compile"))], said)

        return all_compiled

    def part(self, part: Part, kind: _Kind, label: str) -> bool:
        """Run one part on GPUs of one kind."""
        name = f"{part.name}{label}"
        self._say(name)
        started, seconds = time.monotonic(), part.seconds * (_INTERPRETER_FACTOR if interpreting() else 1.0)
        if self._left < 1.0:
            return self._note(name, started, [Answer(fault=slow(name))])
        if self._store is None:
            self._store = _private_store()
        ranks, meeting = self._workers(part.ranks), str(next(self._names))
        for rank, worker in enumerate(ranks):
            place = (meeting, rank, part.ranks)
            worker.give(_on_rank, self._setup, kind.devices[rank], self._store.port, place, part)
        return self._note(name, started, answers(ranks, min(seconds, self._left)))

    def close(self) -> None:
        """End every process."""
        for worker in self._ranks:
            worker.kill()


def _private_store() -> dist.TCPStore:  # type: ignore[name-defined]
    """A store on this host's loopback alone: torch opens one to all networks, whatever address it is given, and asks
    nobody who he is."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        host, port = listener.getsockname()
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


def run(
    groups: Sequence[str] = GROUPS,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda _: None,
    setup: Setup = present_place,
    parts: Sequence[Part] = PARTS,
) -> Report:
    """Check the GPUs that this process sees, without a call of the driver in it.

    Args:
        groups: of :data:`GROUPS`, to be run.
        seconds: that all parts may take together.
        say: is told what begins.
        setup: makes the place of a rank; an importable function.
    """
    started = time.monotonic()
    check = _Check(started + seconds, setup, say)
    with contextlib.closing(check):
        kinds = check.kinds()
        compiles = bool(kinds) and "first" in groups and not interpreting()
        all_compiled = check.compiling() if compiles else lambda: True
        for group in filter(groups.__contains__, GROUPS):
            if group == "probe" or all_compiled():
                for kind, part in itertools.product(kinds, parts):
                    if part.group == group:
                        check.part(part, kind, f" ({kind.name})" if len(kinds) > 1 else "")
        device = "; ".join(f"{kind.name} ({kind.places})" for kind in kinds)
    complete = set(groups) == set(GROUPS) and not interpreting()
    return Report(device, tuple(check.results), time.monotonic() - started, complete)
