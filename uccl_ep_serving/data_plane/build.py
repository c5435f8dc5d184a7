"""How a data plane comes to be: allocate the window, share it, choose the way to each peer, connect, start.

Every step in which ranks depend on each other is a gather over the control connections, so a rank that is gone is
named at once, in each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..config import Settings
from ..control_plane.bootstrap import Introduction
from ..control_plane.frames import close_all
from ..control_plane.mesh import ControlMesh
from ..errors import BootstrapError, ConfigError, ProtocolError, TransportError
from ..native.groups import load
from ..protocol.layout import LowLatencyRoom, NormalPlan, WindowLayout
from ..protocol.mailbox import mailbox_bytes
from ..protocol.streams import CREDIT
from ..proxy.service import ProxyService, data_paths
from ..proxy.spin import Cores, bound_by_openmp, choose_spin, own_cores
from ..proxy.transport.base import Watchful
from ..proxy.transport.select import DIRECT, NIC_TRANSPORTS, Offer, Offers, choose
from ..proxy.transport.shm import ShmEndpoint
from ..proxy.transport.tcp import TcpEndpoint
from . import gpu_direct
from .compiling import compile_together
from .gpu_direct import Gpu, NicWrites, Paths
from .kernel_space import KernelSpace
from .nics import HostNics, gpu_address
from .nodes import equal_nodes, on_one_node
from .plane import DataPlane
from .rails import Channels, choose_channels
from .segments import Segment
from .watch import PlaneWatch

if TYPE_CHECKING:
    from ..proxy.transport.base import Endpoint

__all__ = ["PlaneBuilder"]

_log = logging.getLogger("uccl_ep_serving")

#: The end of a process is known on its control connection this soon after any other sign of it.
_NEWS_SECONDS = 0.5
_CONNECTING = "connecting"


class PlaneBuilder:
    """Builds the data planes of one Buffer, one epoch after the other.

    Args:
        mesh: connected control connections; its mask of ranks is shared with the kernels of every epoch.
        introduction: who the ranks are, and the job's secret.
        settings: this rank's settings.
        normal: sizes of normal mode, equal on all ranks.
        gpu: whose tensors this rank may serve; None = it serves CPU tensors only.
    """

    def __init__(
        self, mesh: ControlMesh, introduction: Introduction, settings: Settings, normal: NormalPlan, gpu: Gpu | None
    ) -> None:
        self._mesh = mesh
        self._gather = mesh.steps.gather
        self._cards = introduction.cards
        self._secret = introduction.secret
        self._settings = settings
        self._normal = normal
        self._liveness = mesh.liveness
        self._rank, self._ranks = mesh.rank, mesh.ranks
        #: What each rank offers over NICs; exchanged by the first build.
        self._offers: list[dict[str, Offer]] = []
        #: Agreed by the first build, and the same in every epoch: kernels are made for it.
        self.channels = Channels(0, "")
        self._gpu, self._writes = gpu, NicWrites()
        #: The last build has ended because an endpoint could not be connected, which may be the fault of either end.
        self.is_unconnected = False

    def build(self, room: LowLatencyRoom | None, epoch: int, watch: PlaneWatch) -> DataPlane:
        """A running data plane. Collective among the ranks that are not masked.

        Args:
            room: for low latency, None for none.
            epoch: number of the plane, equal on all ranks; connections of another one are refused.
            watch: what waits in the plane ask, and who names what ends them.

        Raises:
            ConfigError: the window would exceed what the formats hold.
            BootstrapError, TransportError, PeerError: a rank could not be reached; nothing is left open.
        """
        try:
            layout = WindowLayout(self._ranks, room, self._normal)
        except ValueError as error:
            raise ConfigError(f"{error}") from error
        plane = DataPlane(layout)
        self.is_unconnected = False
        try:
            self._exchange_offers()
            windows, mailboxes = self._share_windows(plane)
            self._choose_routes(plane, windows)
            self._agree_on_paths(plane)
            self._compile(plane)
            deadline = time.monotonic() + self._settings.connect_timeout
            self._offer_endpoints(plane, epoch, windows, mailboxes)
            self._connect_endpoints(plane, deadline)
            self._give_to_kernels(plane, windows, watch)
            self._start(plane)
        except BaseException:
            plane.close(time.monotonic() + 1.0)
            raise
        self._log_choices(plane)
        return plane

    def _share_windows(self, plane: DataPlane) -> tuple[list[int], list[int]]:
        """Allocate this rank's window and mailbox, and map those of the peers on this host: their addresses by rank."""
        rank, layout = self._rank, plane.layout
        # pinned as a whole anyway, by NICs or a GPU; other windows are committed as they are touched
        nics = [kind for kind, offer in self._offers[rank].items() if offer.nics]
        window = Segment.create(
            f"uccl_ep window {rank}", layout.nbytes, huge=bool(nics), node=self._nics.numa(nics) if nics else -1
        )
        plane.segments.append(window)
        mailbox = Segment.create(f"uccl_ep mailbox {rank}", mailbox_bytes(self._ranks, self._settings.proxies))
        plane.segments.append(mailbox)
        own_digest = layout.digest.to_bytes(8, "little")
        answers = self._gather("sharing windows", own_digest, descriptors=[window.fd, mailbox.fd])
        strange = [peer for peer, (digest, _) in enumerate(answers) if digest not in (b"", own_digest)]
        if strange:
            for _, taken in answers:
                close_all(taken)
            raise BootstrapError(
                f"rank {rank}: rank {strange[0]} lays its window out differently. Likely cause: the ranks run "
                "different builds of the same version"
            )
        local = self._mesh.local_peers & self._liveness.present
        addresses = plane.map_peers(rank, local, [taken for _, taken in answers])
        window.close_descriptor()
        mailbox.close_descriptor()
        return addresses

    def _choose_routes(self, plane: DataPlane, windows: list[int]) -> None:
        """The way to each peer."""
        settings, rank, cards = self._settings, self._rank, self._cards
        for peer in sorted(self._liveness.present):
            plane.choices[peer] = choose(
                settings,
                mapped=bool(windows[peer]),
                same_node=on_one_node(rank, peer, settings.node_ranks),
                same_host=cards[peer].host == cards[rank].host,
                mine=self._offers[rank],
                theirs=self._offers[peer],
            )
        if not self.channels.count:
            for warning in {choice.warning: None for choice in plane.choices.values() if choice.warning}:
                peers = [str(peer) for peer, choice in plane.choices.items() if choice.warning == warning]
                _log.warning("rank %d reaches ranks %s over tcp: %s", rank, ", ".join(peers), warning)

    def _log_choices(self, plane: DataPlane) -> None:
        """Once for each data plane: the first serves normal mode only, a later one more low-latency shapes."""
        room, masked = plane.layout.low_latency, sorted(self._liveness.masked)
        served = f"low latency {room.nbytes / 2**20:.1f} MiB" if room is not None else "no low latency yet"
        _log.info(
            "uccl_ep rank %d of %d: %s. %d proxies (spin %s), %d channels (%s), window %.1f MiB (heap %.1f MiB, %s)%s, "
            "timeout %g s%s",
            self._rank,
            self._ranks,
            plane.ways,
            self._settings.proxies,
            plane.spin.reason,
            self.channels.count,
            self.channels.reason,
            plane.layout.nbytes / 2**20,
            self._normal.heap / 2**20,
            served,
            f", {pages}" if (pages := plane.segments[0].pages) else "",
            self._settings.timeout,
            f", without ranks {', '.join(map(str, masked))}" if masked else "",
        )

    @functools.cached_property
    def _nics(self) -> HostNics:
        local = self._local_ranks()
        return HostNics(self._settings, place=local.index(self._rank), local_ranks=len(local), gpu=gpu_address())

    def _exchange_offers(self) -> None:
        """Tell the others what this rank offers over NICs, and learn the same of them. Later builds know it."""
        if self._offers:
            return
        if self._settings.transport not in ("auto", *NIC_TRANSPORTS):
            self._offers = [{} for _ in range(self._ranks)]
            return
        offers: Offers = self._nics.offers
        if self._settings.window != "host":
            offers, self._writes = gpu_direct.probe(self._nics, offers, self._gpu)
        answers = self._gather("exchanging NICs", msgspec.msgpack.encode(offers))
        self._offers = [
            msgspec.msgpack.decode(payload, type=dict[str, Offer]) if payload else {} for payload, _ in answers
        ]
        self._offers[self._rank] = dict(offers)

    def _agree_on_paths(self, plane: DataPlane) -> None:
        """Agree on the channels, in the first epoch; set ``plane.spin``, ``plane.gpu_reach`` and ``plane.node_ranks``,
        1 when a rank is masked, since rows of its peers on other nodes passed through it."""
        mine, offers, routes = self._offers[self._rank], self._offers, plane.routes
        shared = [
            min(len(mine[way].nics), len(offers[peer][way].nics))
            for peer, way in routes.items()
            if way in NIC_TRANSPORTS
        ]
        direct = [peer for peer, way in routes.items() if way == DIRECT]
        reach = gpu_direct.of_rank(self._settings, self._gpu, routes, mine, self._writes)
        cores = self._proxy_cores(plane.kinds)
        paths = Paths(direct, max(shared, default=0), reach, cores)
        answers = self._gather("agreeing on paths", msgspec.msgpack.encode(paths))
        told = {peer: gpu_direct.read(peer, payload) for peer, (payload, _) in enumerate(answers) if payload}
        if not self.channels.count:
            self.channels = choose_channels(self._settings, max(one.rails for one in told.values()))
            if self.channels.warning:
                _log.warning("rank %d: %s", self._rank, self.channels.warning)
        plane.spin = choose_spin(
            self._settings.proxy_spin,
            cores,
            [told[peer].cores for peer in self._local_ranks() if peer in told and peer != self._rank],
            proxies=self._settings.proxies,
            named_cores=len(set(self._settings.proxy_cpus)),
        )
        plane.gpu_reach = gpu_direct.settle({peer: one.reach for peer, one in told.items()})
        if not self._liveness.masked:
            plane.node_ranks = equal_nodes([one.direct for one in told.values()])

    def _compile(self, plane: DataPlane) -> None:
        """Compile, or load, the data paths of the transports that some peer needs."""
        if refusal := compile_together(self._mesh.steps, lambda: load(*data_paths(plane.kinds))):
            raise BootstrapError(refusal)

    def _offer_endpoints(self, plane: DataPlane, epoch: int, windows: list[int], mailboxes: list[int]) -> None:
        """One endpoint per proxy and kind of transport that some peer needs, listening but not connected."""
        rank, ranks, nbytes = self._rank, self._ranks, plane.layout.nbytes
        for proxy in range(self._settings.proxies):
            row: list[Endpoint] = []
            plane.endpoints.append(row)
            for kind in plane.kinds:
                if kind == "shm":
                    row.append(
                        ShmEndpoint(
                            rank,
                            ranks,
                            proxy,
                            mailbox=mailboxes[rank],
                            peer_mailboxes=mailboxes,
                            peer_windows=windows,
                            window_bytes=nbytes,
                        )
                    )
                elif kind in NIC_TRANSPORTS:
                    row.append(
                        self._nics.endpoint(
                            kind,
                            rank,
                            ranks,
                            proxy,
                            window=windows[rank],
                            window_bytes=nbytes,
                            peers=[peer for peer, way in plane.routes.items() if way == kind],
                            local_offers=[self._offers[local].get(kind, Offer()) for local in self._local_ranks()],
                            watch=lambda: self._liveness.check(_CONNECTING),
                        )
                    )
                else:
                    row.append(
                        TcpEndpoint(
                            rank,
                            ranks,
                            proxy,
                            window=windows[rank],
                            window_bytes=nbytes,
                            secret=self._secret,
                            settings=self._settings,
                            host=self._cards[rank].address,
                            job=epoch.to_bytes(8, "little"),
                            watch=lambda: self._liveness.check(_CONNECTING),
                        )
                    )

    def _connect_endpoints(self, plane: DataPlane, deadline: float) -> None:
        """Exchange the endpoints' addresses and connect each to its peers."""
        rank = self._rank
        offered = (plane.kinds, [[endpoint.address() for endpoint in row] for row in plane.endpoints])
        answers = self._gather("exchanging addresses", msgspec.msgpack.encode(offered))
        theirs: dict[int, dict[str, list[bytes]]] = {}
        for peer, (payload, _) in enumerate(answers):
            if payload and peer != rank:
                try:
                    names, rows = msgspec.msgpack.decode(payload, type=tuple[list[str], list[list[bytes]]])
                    theirs[peer] = {name: [row[k] for row in rows] for k, name in enumerate(names)}
                except (msgspec.DecodeError, IndexError) as error:
                    raise ProtocolError(f"rank {peer} sent something that is no table of addresses: {error}") from error
        for proxy, row in enumerate(plane.endpoints):
            for kind, endpoint in zip(plane.kinds, row, strict=True):
                peers = [peer for peer, way in plane.routes.items() if way == kind]
                if strange := [peer for peer in peers if kind not in theirs[peer]]:
                    raise BootstrapError(
                        f"rank {rank} reaches rank {strange[0]} over {kind}, but that rank offers "
                        f"{sorted(theirs[strange[0]]) or 'its memory'} only: they do not see each other's memory alike"
                    )
                addresses: list[bytes | None] = [
                    theirs[peer][kind][proxy] if peer in peers else None for peer in range(self._ranks)
                ]
                try:
                    endpoint.connect(addresses, deadline)
                except (BootstrapError, TransportError):
                    self.is_unconnected = True
                    # A transport may see the end of a process first, and it knows no reason.
                    self._liveness.wait_for_news(_NEWS_SECONDS)
                    self._liveness.check(_CONNECTING)
                    raise

    def _give_to_kernels(self, plane: DataPlane, windows: list[int], watch: PlaneWatch) -> None:
        """Make the kernel space and the proxies, which meet in its memory."""
        settings, rank, ranks, window = self._settings, self._rank, self._ranks, plane.segments[0]
        plane.space = space = KernelSpace(
            rank, ranks, self.channels.count, window, plane.layout, settings.timeout, mask=self._liveness.mask
        )
        kinds, routes = plane.kinds, plane.routes
        plane.service = service = ProxyService(
            rank=rank,
            ranks=ranks,
            window=window.address,
            window_bytes=plane.layout.nbytes,
            settings=dataclasses.replace(settings, proxy_cpus=self._own_cpus()),
            error=space.error,
            endpoints=plane.endpoints,
            route=[kinds.index(routes[peer]) if routes.get(peer) in kinds else -1 for peer in range(ranks)],
            near_cpus=[self._nics.near_cpus(kinds, proxy) for proxy in range(settings.proxies)]
            if set(kinds) & set(NIC_TRANSPORTS)
            else (),
            spin=plane.spin.nanoseconds,
        )
        for stream in range(CREDIT):
            space.set_ring(stream, service.ring(stream))
        for peer, kind in routes.items():
            if kind == DIRECT:
                space.connect_direct(peer, windows[peer])
            else:
                space.connect_proxied(peer, service.arrived, service.completed)
        space.watch, space.raise_named = watch.look, watch.raise_named

    def _start(self, plane: DataPlane) -> None:
        """Start the proxies, and return when those of all ranks run."""
        assert plane.service is not None
        plane.service.start()
        self._gather("starting")
        for endpoint in (one for row in plane.endpoints for one in row):
            if isinstance(endpoint, Watchful):
                endpoint.established()

    def _local_ranks(self) -> list[int]:
        """Ranks on this host."""
        return [rank for rank, card in enumerate(self._cards) if card.host == self._cards[self._rank].host]

    def _proxy_cores(self, kinds: Sequence[str]) -> Cores:
        """What this rank's proxies may use. Those with cores of their own by name leave the rest to the ranks."""
        cores = own_cores()
        if not self._settings.proxy_cpus and kinds and (bound := bound_by_openmp(cores, os.environ)):
            _log.warning("rank %d: its proxies may use %s", self._rank, bound)
        if self._settings.proxy_cpus or not set(kinds) & set(NIC_TRANSPORTS):
            return cores
        return Cores(self._nics.proxy_cpus(kinds), cores.quotas)

    def _own_cpus(self) -> tuple[int, ...]:
        """This rank's share of ``UCCL_EP_PROXY_CPUS``: ranks of a host get the same list from the launcher."""
        cpus, proxies = self._settings.proxy_cpus, self._settings.proxies
        before = sum(card.host == self._cards[self._rank].host for card in self._cards[: self._rank])
        if not cpus:
            return ()
        return tuple(cpus[(before * proxies + proxy) % len(cpus)] for proxy in range(proxies))
