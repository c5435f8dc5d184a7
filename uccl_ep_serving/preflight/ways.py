"""Every way that rows can take between the ranks, opened as a job opens it and written over: each NIC by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..check import faults
from ..config import Settings
from ..data_plane.gpu_direct import Gpu
from ..data_plane.runtime import Runtime
from ..errors import PeerError, UcclEpError
from ..gpu.context import GpuContext
from ..gpu.memory import memory_of
from ..native.groups import load
from ..proxy.transport.select import SHM, TCP
from .causes import explained
from .facts import Facts, swapped_rails
from .job import Finding
from .meeting import Meeting
from .turns import WIRE
from .wire import LARGE, LONGEST, WINDOW_BYTES, Measured, Wire, device_bytes, rounds, size_words

__all__ = ["DEVICE", "JOB", "Way", "try_way", "ways_of"]

#: As the settings in force have it.
JOB = "as a job"
DEVICE = "GPU memory"
#: Less than this part of a NIC's rate, or of a plain copy's, is worth a note.
_SLOW = 0.5
#: Short waits, since everything is there already or is not; and small windows.
SETTINGS: dict[str, Any] = {
    "timeout": 10.0,
    "connect_timeout": 20.0,
    "heap_bytes": 2 * WINDOW_BYTES,
    "round_bytes": LONGEST,
    "chunk_bytes": LONGEST // 4,
}


class Way(NamedTuple):
    """How rows get from rank to rank.

    Attributes:
        name: of it.
        settings: on top of those in force.
        rail: which NIC of each rank, -1 without one.
        on_device: windows lie in GPU memory.
    """

    name: str
    settings: dict[str, Any]
    rail: int = -1
    on_device: bool = False


def ways_of(known: Sequence[Facts], settings: Settings) -> list[Way]:
    """What there is to try; the same on all ranks."""
    found = [Way(JOB, {})]
    one_node = len({facts.node for facts in known}) == 1
    if settings.transport == "auto" and one_node:
        found += [Way(name, {"transport": name, "direct": False}) for name in (SHM, TCP)]
    transports = {rail.transport for facts in known for rail in facts.rails}
    gpus = all(facts.gpu for facts in known)
    for transport in sorted(transports):
        for rail in range(min(sum(one.transport == transport for one in facts.rails) for facts in known)):
            own = {"transport": transport, "direct": False}
            found.append(Way(f"{transport} rail {rail}", own, rail))
            if gpus and settings.window != "host":
                found.append(Way(f"{transport} rail {rail}, {DEVICE}", {**own, "window": "device"}, rail, True))
    return found


def try_way(
    way: Way,
    meeting: Meeting,
    known: Sequence[Facts],
    settings: Settings,
    device: torch.device | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> tuple[list[Finding], dict[int, str]]:
    """Open the way and write over it to every other rank, in turns in which nobody has two peers. Collective.

    Returns:
        What this rank has found, and how each peer is reached.
    """
    me, rank = known[meeting.place.rank], meeting.place.rank
    own = {**way.settings, **SETTINGS}
    if way.rail >= 0:
        rails = [rail for rail in me.rails if rail.transport == way.settings["transport"]]
        own["nics"] = rails[way.rail].alone
    found: list[Finding] = []
    routes: dict[int, str] = {}
    # whoever fails says what it was doing
    doing = ["opening"]
    try:
        load(WIRE)
        say(f"{way.name}: opens")
        with _opened(meeting, way, replace(settings, **own), device) as (runtime, wire):
            routes = {int(peer): kind for peer, kind in runtime.stats()["transport_by_peer"].items()}
            for pairs in rounds(meeting.place.ranks):
                runtime.exchange("check", b"")
                for pair in pairs:
                    if rank in pair:
                        peer = sum(pair) - rank
                        say(f"{way.name}: rank {rank} with rank {peer}")
                        measured = wire.measure(peer, lambda words: doing.__setitem__(0, words))
                        found.append(_told(way, rank, peer, measured, routes[peer], known))
    except (UcclEpError, OSError, RuntimeError) as error:
        found.append(_failure(way, rank, error, doing[0], known))
    return found, routes


@contextlib.contextmanager
def _opened(
    meeting: Meeting, way: Way, settings: Settings, device: torch.device | None
) -> Iterator[tuple[Runtime, Wire]]:
    """A Runtime and this rank's end of its wire."""
    gpu = None if device is None else Gpu(lambda: memory_of(device, device.type == "cpu"))
    runtime = Runtime(meeting.exchange(way.name), settings, gpu=gpu)
    try:
        if way.on_device:
            assert device is not None
            window = device_bytes(GpuContext(runtime, device).space().own_window, runtime.layout.nbytes, device)
        else:
            window = torch.from_numpy(runtime.window_bytes)
        yield runtime, Wire(runtime.space, window)
    except BaseException:
        runtime.close(0.0)
        raise
    runtime.close()


def _told(way: Way, rank: int, peer: int, measured: Measured, kind: str, known: Sequence[Facts]) -> Finding:
    """What was measured between two ranks, beside what it could be."""
    where = f"rank {rank} -> rank {peer}"
    rate_words = f"{size_words(LONGEST)} {measured.gbytes:.2f} GB/s"
    said = f"{kind}: {measured.empty_us:.1f} us, 16 B {measured.little_us:.1f} us, {rate_words}"
    note = ""
    if way.rail >= 0:
        ends = [_rail(way, facts) for facts in (known[rank], known[peer])]
        said = f"{ends[0].name} -> {ends[1].name}, {said}"
        if rate := min(end.gbps for end in ends) / 8:
            said += f", {measured.gbytes / rate:.0%} of the NIC's {rate:g}"
            if measured.gbytes < _SLOW * rate:
                note = (
                    "less than half of the NIC's rate. Next step: uccl-ep doctor (PCIe link, relaxed ordering, the "
                    "NUMA node of the proxies), and the switch's counters"
                )
    elif known[rank].node == known[peer].node and known[rank].copies:
        said += f", {measured.gbytes / known[rank].copies:.0%} of a plain copy"
    return Finding(way.name, where, said, note)


def _rail(way: Way, facts: Facts) -> Any:
    return [rail for rail in facts.rails if rail.transport == way.settings["transport"]][way.rail]


def _failure(way: Way, rank: int, error: Exception, doing: str, known: Sequence[Facts]) -> Finding:
    """Who and what is to blame: the error's own words, and what the facts add to them."""
    fault = explained(faults.of(error, f"rank {rank}, {doing}"))
    peer = error.peer if isinstance(error, PeerError) else -1
    where = f"rank {rank} -> rank {peer}" if 0 <= peer < len(known) else f"rank {rank}"
    cause, step = fault.cause, fault.step
    if way.rail >= 0:
        ends = [_rail(way, known[end]).name for end in (rank, peer) if 0 <= end < len(known)]
        fault = replace(fault, where=f"rail {way.rail} ({' -> '.join(ends)}), {doing}")
        if swapped := swapped_rails(known):
            cause, step = swapped.split(". Next step: ")
        elif doing == LARGE:
            cause = "small messages pass and large ones do not: the MTU of the switch is smaller than the ports'"
            step = "set the MTU of the switch ports to that of the NICs, or the NICs' to the switch's"
        else:
            step = f"{step}; without this rail: UCCL_EP_NICS=^{ends[0]}"
    elif doing == LARGE and way.name != JOB:
        cause, step = (
            "large packets are dropped: an MTU mismatch on the way",
            "the same MTU on all interfaces of the way",
        )
    return Finding(way.name, where, fault=replace(fault, cause=cause, step=step))
