"""The data plane of a rank: window, endpoints, proxies and kernel space of one epoch, and how they end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..control_plane.failures import Liveness
from ..errors import ProtocolError, ProxyDied, TransportError, in_words
from ..protocol.layout import WindowLayout
from ..proxy.fence import DriverFlush, fence_block
from ..proxy.service import ProxyService
from ..proxy.spin import Spin
from ..proxy.transport.base import DeviceReach, Diagnosed
from ..proxy.transport.select import DIRECT, NIC_TRANSPORTS, Choice
from .gpu_direct import GpuReach
from .kernel_space import KernelSpace
from .segments import Segment

if TYPE_CHECKING:
    from ..proxy.transport.base import Endpoint

__all__ = ["DataPlane"]

_log = logging.getLogger("uccl_ep_serving")

#: Seconds that a proxy thread has to stop, however little is left of the time for closing.
_STOP_SECONDS = 2.0
#: Seconds that a device has to finish what it was given, however little is left: an engine's longest kernels, and more.
_DEVICE_SECONDS = 10.0
#: And at the very least: a thread that waits for it has to start.
_LEAST_SECONDS = 0.5
_LENDING = "registering device windows with the NICs"
#: While writes drain, lost peers are looked for this often.
_WATCH_SECONDS = 0.05

#: Planes in which a thread still runs, or a device. Their memory must stay mapped: it would fault without it.
_abandoned: list[DataPlane] = []


@dataclass(eq=False)
class DataPlane:
    """What a change of layout rebuilds. Closed in the reverse order of construction.

    Attributes:
        layout: of the window.
        segments: this rank's window and mailbox, then what was mapped of peers.
        endpoints: by proxy, one of each kind of transport in use.
        choices: the way to each peer.
        finishes: wait, until an instant, for the devices whose kernels may still publish, or look at this memory;
            False where one has not finished by then. The sticky error ends the kernels.
        node_ranks: ranks of a node when all nodes are equal groups of consecutive ranks, else 1.
        gpu_reach: what stands in the way of windows in GPU memory.
        spin: how long its idle proxies keep their cores.
        releases: called before the memory goes, by who has mapped it into a device.
        fence: words of the driver's flush that arrivals wait for.
        device_window: NICs use device memory for the windows.
        drains_since: since when a drain has waited for devices, in vain where it has ended; infinity else.
    """

    layout: WindowLayout
    segments: list[Segment] = field(default_factory=list)
    endpoints: list[list[Endpoint]] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    node_ranks: int = 1
    gpu_reach: GpuReach = GpuReach()  # noqa: RUF009
    spin: Spin = field(default_factory=lambda: Spin(0, "no proxy runs"))
    space: KernelSpace | None = None
    service: ProxyService | None = None
    finishes: list[Callable[[float], bool]] = field(default_factory=list)
    releases: list[Callable[[], object]] = field(default_factory=list)
    fence: npt.NDArray[np.int64] | None = None
    device_window: bool = False
    drains_since: float = math.inf

    @property
    def routes(self) -> dict[int, str]:
        """Name of the way to each peer."""
        return {peer: choice.transport for peer, choice in self.choices.items()}

    @property
    def nic_peers(self) -> frozenset[int]:
        """Peers that are reached over NICs."""
        return frozenset(peer for peer, kind in self.routes.items() if kind in NIC_TRANSPORTS)

    @property
    def kinds(self) -> list[str]:
        """Transports in use beside direct access, in the order of every row of ``endpoints``."""
        return sorted(set(self.routes.values()) - {DIRECT})

    @property
    def ways(self) -> str:
        """The way to each peer and why, for the log."""
        by_reason: dict[str, list[str]] = {}
        for peer, choice in sorted(self.choices.items()):
            by_reason.setdefault(choice.reason, []).append(str(peer))
        return "; ".join(f"{reason}: ranks {', '.join(peers)}" for reason, peers in by_reason.items()) or "alone"

    def totals(self) -> dict[str, int]:
        """What all its proxies have counted."""
        return self.service.totals() if self.service is not None else {}

    def stats(self) -> dict[str, Any]:
        """Plain counters, and how each peer is reached."""
        routes = self.routes
        counters: dict[str, Any] = self.service.counters() if self.service is not None else {}
        return {
            "transport_by_peer": {str(peer): kind for peer, kind in routes.items()},
            "direct_peers": sorted(peer for peer, kind in routes.items() if kind == DIRECT),
            "proxy_spin_us": self.spin.nanoseconds // 1000,
            **counters.get("total", {}),
            "by_proxy": counters.get("proxies", []),
            "streams": counters.get("streams", []),
            "latency": {str(stream): buckets for stream, buckets in counters.get("latency", {}).items()},
        }

    def map_peers(
        self, rank: int, local: Iterable[int], descriptors: Sequence[list[int]]
    ) -> tuple[list[int], list[int]]:
        """Map the windows and mailboxes of the peers on this host.

        Args:
            rank: of this process.
            local: peers on this host; each must have handed over both of its segments.
            descriptors: by rank, what was handed over. All are taken over, whatever happens.

        Returns:
            Addresses of the windows and of the mailboxes by rank, 0 where there is none; this rank's own included.

        Raises:
            TransportError: a segment is missing or cannot be mapped. ConfigError: one is too short.
        """
        window, mailbox = self.segments[:2]
        windows, mailboxes = [0] * len(descriptors), [0] * len(descriptors)
        windows[rank], mailboxes[rank] = window.address, mailbox.address
        try:
            for peer in sorted(local):
                taken = descriptors[peer]
                if len(taken) != 2:
                    # It may well have mapped ours: going on would have the two of them choose different ways.
                    raise TransportError(
                        f"rank {peer} on this host handed {len(taken)} segments over to rank {rank}, 2 expected. "
                        "Likely cause: the limit on open files (ulimit -n)",
                        device="memfd",
                    )
                for addresses, own in ((windows, window), (mailboxes, mailbox)):
                    segment = Segment.attach(taken.pop(0), own.nbytes)
                    segment.close_descriptor()
                    self.segments.append(segment)
                    addresses[peer] = segment.address
        finally:
            for descriptor in (descriptor for taken in descriptors for descriptor in taken):
                os.close(descriptor)
        return windows, mailboxes

    def register_device_window(
        self,
        start: int,
        nbytes: int,
        export: Callable[[int, int], tuple[int, int]],
        flush: Callable[[], DriverFlush | None],
        exchange: Callable[[str, bytes], list[bytes]],
    ) -> str:
        """Have NICs use device memory for the windows; see ``Runtime.register_device_window``.

        Args:
            exchange: all-gather of bytes among the ranks, told the step's name.
        """
        assert self.service is not None
        # what its releases undo belongs to the plane, and a second window would overwrite it
        assert not self.device_window, "a device window is registered already"
        reached = [
            (proxy, index, kind, endpoint)
            for proxy, row in enumerate(self.endpoints)
            for index, (kind, endpoint) in enumerate(zip(self.kinds, row, strict=True))
            if isinstance(endpoint, DeviceReach)
        ]
        with contextlib.ExitStack() as undo:
            offers: dict[str, bytes] = {}
            objection, common = "", 0
            try:
                if driver := flush():
                    self.fence = fence_block(driver)
                    common = int(self.fence.ctypes.data)
                for proxy, index, kind, endpoint in reached:
                    undo.callback(endpoint.release_device)
                    offers[f"{kind} {proxy}"] = endpoint.offer_device(start, nbytes, export)
                    # before any peer learns where it may write
                    if fence := endpoint.fence or common:
                        undo.callback(self.service.use_fence, proxy, index, 0)
                        self.service.use_fence(proxy, index, fence)
            # of whatever kind: the others wait
            except Exception as error:
                objection = in_words(error)
            theirs = _agree(exchange, objection, offers)
            try:
                for proxy, _, kind, endpoint in reached:
                    name = f"{kind} {proxy}"
                    endpoint.accept_device([offer.get(name) if offer is not None else None for offer in theirs])
            except Exception as error:
                objection = in_words(error)
            _agree(exchange, objection, {})
            self.releases.append(undo.pop_all().close)
        self.device_window = True
        for *_, endpoint in reached:
            endpoint.release_host()
        # registering it has committed every page
        self.segments[0].forget()
        return " and ".join(dict.fromkeys(endpoint.device_way() for *_, endpoint in reached))

    def forget(self, peer: int) -> None:
        """Send nothing more to ``peer``, where proxies do."""
        if self.service is not None and self.routes.get(peer) not in (None, DIRECT):
            self.service.forget(peer)

    def look_at_devices(self) -> None:
        """Have proxies fail whose NIC has reported that it does nothing more, instead of waiting for it."""
        for endpoint in itertools.chain.from_iterable(self.endpoints):
            if isinstance(endpoint, Diagnosed):
                endpoint.look()

    def drain(self, deadline: float, liveness: Liveness) -> bool:
        """Wait until what this rank has sent is out; writes to ranks that are lost never will be.

        Returns:
            False when something is still under way at ``deadline``, a ``time.monotonic()`` instant.

        Raises:
            ProxyDied: nothing will move any more. TransportError: a device has failed.
        """
        self.drains_since = time.monotonic()
        if not all(finish(deadline + _STOP_SECONDS) for finish in self.finishes):
            return False
        self.drains_since = math.inf
        while self.service is not None and not self.service.drain(min(time.monotonic() + _WATCH_SECONDS, deadline)):
            for peer in liveness.lost_unmasked:
                self.forget(peer)
            if time.monotonic() >= deadline:
                return False
        return True

    def close(self, deadline: float) -> None:
        """Release waiting kernels, stop the proxies, close the endpoints, let go of the memory.

        Threads that do not stop, kernels of other threads that do not return, and devices that do not finish are
        logged, and keep all they use until the process ends.
        """
        if self.space is not None and not self.space.leave(max(deadline, time.monotonic() + _STOP_SECONDS)):
            _abandoned.append(self)
            _log.error("a kernel of another thread did not return in time. Its memory stays until this process ends")
        if self.service is not None:
            try:
                self.service.stop(max(deadline, time.monotonic() + _STOP_SECONDS))
            except BaseException as error:
                _abandoned.append(self)
                if not isinstance(error, ProxyDied):
                    raise
                _log.error("%s. They stay until this process ends", error)
                return
        # a drain may have waited for them, in vain
        now = time.monotonic()
        enough = min(self.drains_since, now) + _DEVICE_SECONDS
        if self in _abandoned or not self._devices_finish(max(deadline, enough, now + _LEAST_SECONDS)):
            return
        with contextlib.ExitStack() as steps:  # runs from the last to the first, each whatever becomes of the others
            for segment in self.segments:
                steps.callback(segment.close)
            for endpoint in (one for row in self.endpoints for one in row):
                steps.callback(endpoint.close)
            for release in self.releases:
                steps.callback(release)
            self.segments, self.endpoints, self.releases = [], [], []

    def _devices_finish(self, deadline: float) -> bool:
        """Wait for them; False, which is logged, where one is busy at ``deadline`` with whatever it was given. Kernels
        behind that would fault without this memory, and unmapping it waits for the device as well."""
        for finish in self.finishes:
            try:
                if not finish(deadline):
                    _abandoned.append(self)
                    _log.error(
                        "the GPU has not finished what it was given. Windows stay until this process ends. Likely "
                        "cause: a kernel of something else that hangs. Next step: end the process"
                    )
                    return False
            except TransportError as error:
                # nothing runs there any more
                _log.error("%s", error)
            except BaseException:
                # interrupted: nobody knows whether it has
                _abandoned.append(self)
                raise
        return True


def _agree(
    exchange: Callable[[str, bytes], list[bytes]], objection: str, offers: dict[str, bytes]
) -> list[dict[str, bytes] | None]:
    """What every rank offers by transport and proxy, None for masked ones. Raises TransportError on every rank when one
    objects."""
    answers = exchange(_LENDING, msgspec.msgpack.encode((objection, offers)))
    given: list[dict[str, bytes] | None] = []
    for peer, text in enumerate(answers):
        try:
            refusal, theirs = msgspec.msgpack.decode(text, type=tuple[str, dict[str, bytes]]) if text else ("", None)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"{_LENDING}: rank {peer} sent something that is no table of offers: {error}"
            ) from error
        if refusal:
            raise TransportError(f"{_LENDING}: rank {peer}: {refusal}")
        given.append(theirs)
    return given
