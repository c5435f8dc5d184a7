"""``roce``: one-sided writes over reliable connections of any RDMA NIC that has them. Control path of the endpoint.

One or more NICs, and on each, per peer, one queue pair (or UCCL_EP_NIC_QPS of them) for each proxy thread.
:mod:`.endpoint` is what all NICs share, :mod:`.roce_data` moves the bytes on the memory of :mod:`.roce_words`. What a
NIC is called plays no part: it needs reliable connections and RDMA writes with immediates, as Broadcom, Mellanox,
Pensando, Intel and soft-RoCE devices have.

A peer can write the window and one credit word per queue pair, nothing else; once it is lost or dropped, not even
those.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from ....config import Settings
from ....errors import BootstrapError, ConfigError, TransportError
from ....protocol.command import MAX_WRITE_BYTES, UNIT
from ..base import Capabilities, DataPath
from ..verbs import codes
from ..verbs.bindings import control_path
from ..verbs.library import VerbsLibrary, load_libibverbs
from ..verbs.objects import MemoryRegion, Path, QueuePair
from . import roce_words as rc
from . import words
from .defaults import Family, family_of, route
from .endpoint import NicAddress, NicEndpoint, Rail, RailAddress, one_device_reports
from .loopback import Loopback, fence_over
from .roce_data import FUNCTIONS
from .window import KeyTable

#: An InfiniBand or Ethernet path MTU of 4096, as verbs counts them.
_LARGEST_MTU = 5
#: Work requests and receives of all queue pairs of an endpoint on a NIC: to stay within it, queues that are not short
#: already are shortened. Broadcom's NICs are reported to make no more queue pairs once their queues together pass a
#: limit that they do not tell.
_REQUESTS = 1 << 16
#: Least bytes in flight that sharing a NIC leaves to an endpoint.
_LEAST_SHARE = 64 << 10
#: Of the number of a packet (InfiniBand Architecture Specification, base transport header).
_PSN_BITS = 24


class RoceRailAddress(RailAddress, frozen=True):
    """One NIC of an endpoint.

    Attributes:
        lid: of its port.
        mtu: of its path, the verbs number.
        credit_key: rkey of the credit words.
        psn: number of the first packet of each queue pair. Drawn for each epoch: what a rank that was given up still
            repeats may come to a queue pair that has the number of an earlier one, and must not count there.
        numbers: by rank, the queue pairs that wait for it.
    """

    lid: int
    mtu: int
    credit_key: int
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << _PSN_BITS)]
    numbers: dict[int, tuple[int, ...]]


class RoceAddress(NicAddress, frozen=True, tag="roce 3"):
    """An endpoint of this transport.

    Attributes:
        qps: queue pairs per peer and rail.
        receives: posted per queue pair.
        credits: address of its credit words, [rank][rail][queue pair].
    """

    rails: tuple[RoceRailAddress, ...]
    qps: int
    receives: int
    credits: int

    @property
    def group(self) -> dict[str, int]:
        """What all ranks must have alike, by name."""
        return {**super().group, "queue pairs": self.qps}


@dataclass(frozen=True, slots=True)
class NicPort:
    """A NIC as an endpoint uses it.

    Attributes:
        device, port: which.
        sharers: endpoints of this host that use the NIC, among which its bytes in flight are divided.
    """

    device: str
    port: int = 1
    sharers: int = 1


class RoceRail(Rail):
    """An open NIC with a queue pair, or several, to every peer.

    Args:
        library: where the C functions come from.
        nic: which NIC.
        settings: the ``nic_*`` settings are used.
    """

    def __init__(self, library: VerbsLibrary, nic: NicPort, settings: Settings) -> None:
        super().__init__(library, nic.device, nic.port, settings.nic_gid_index)
        self._sharers, self._settings = nic.sharers, settings
        self._psn = secrets.randbits(_PSN_BITS)
        self.links: dict[int, list[QueuePair]] = {}
        try:
            self.family: Family = family_of(self.context.limits.vendor)
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        """What the NIC is and which of its addresses is used, for reports."""
        limits = self.context.limits
        firmware = f", firmware {limits.firmware}" if limits.firmware else ""
        return f"{self.family.name} ({limits.vendor:#06x}:{limits.part}){firmware}, {self.gid_reason}"

    @property
    def share(self) -> int:
        """Bytes that the endpoint should have in flight on this NIC."""
        most = self._settings.nic_bytes_in_flight or self.family.bytes_in_flight
        return max(most // max(self._sharers, 1), _LEAST_SHARE)

    @property
    def max_message(self) -> int:
        """Longest write, bytes."""
        return min(self.port.max_message or MAX_WRITE_BYTES, MAX_WRITE_BYTES)

    def depths(self, links: int) -> tuple[int, int]:
        """Work requests and receives that each of ``links`` queue pairs can have. Raises TransportError."""
        limits = self.context.limits
        sends = min(rc.LINK_SENDS, limits.max_qp_wr)
        receives = min(rc.LINK_RECEIVES, limits.max_qp_wr)
        while links * (sends + receives) > limits.max_cqe or (
            links * (sends + receives) > _REQUESTS and receives > rc.SHORT_RECEIVES
        ):
            sends, receives = sends // 2, receives // 2
            if receives < 2 * rc.RECEIVE_BATCH:
                raise TransportError(
                    f"{self.device}: its completion queues have {limits.max_cqe} entries, too few for {links} "
                    "connections of one proxy. Lower UCCL_EP_NIC_QPS",
                    device=self.device,
                )
        # Receives are posted in whole batches.
        return sends, receives // rc.RECEIVE_BATCH * rc.RECEIVE_BATCH

    def enter(self, state: rc.RoceMemory, index: int) -> None:
        """Tell the data path about this NIC, rail ``index``, and register the credit words with it."""
        self._index, self._state = index, state
        taken, told = state.credits_in, state.credits_out
        access = codes.ACCESS_LOCAL_WRITE | codes.ACCESS_REMOTE_WRITE
        self._credits = MemoryRegion(self.pd, taken.ctypes.data, taken.nbytes, access)
        own = MemoryRegion(self.pd, told.ctypes.data, told.nbytes, codes.ACCESS_LOCAL_WRITE)
        state.fill(
            state.rails[index],
            {
                words.POLL_CQ: self.context.operation("poll_cq"),
                words.POST_RECV: self.context.operation("post_recv"),
                words.CQ: self.cq.address,
                rc.POST_SEND: self.context.operation("post_send"),
                rc.CREDIT_LKEY: own.lkey,
                rc.BYTE_LIMIT: self.share,
            },
        )

    def add_link(self, peer: int, place: int, sends: int, receives: int) -> None:
        """Make queue pair ``place`` to ``peer``, in state INIT, with all its receives posted. Raises TransportError."""
        link = QueuePair(self.pd, self.cq, send_depth=sends, receive_depth=receives)
        link.initialise(self.port.number, pkey_index=self._settings.nic_pkey_index)
        self.links.setdefault(peer, []).append(link)
        state = self._state
        chain = state.add_link(peer, self._index, place, link.address)
        self.post_receives(link.address, chain, receives // rc.RECEIVE_BATCH)
        record = state.links[state.link_index(peer, self._index, place)]
        record[rc.POSTED_RECEIVES] = record[rc.GRANTED] = receives

    def address(self) -> RoceRailAddress:
        """What peers need to connect to this NIC."""
        numbers = {peer: tuple(link.number for link in links) for peer, links in self.links.items()}
        return RoceRailAddress(
            self.gid.raw, self.region.remote, self.port.lid, self.port.mtu, self._credits.rkey, self._psn, numbers
        )

    def connect(self, peer: int, rank: int, there: RoceRailAddress, credits: int, look: Callable[[], None]) -> str:
        """Connect the queue pairs to ``peer`` to those of its NIC ``there``.

        Args:
            peer, rank: of the other end and of this one.
            credits: address of the credit words that the peer keeps for these queue pairs.
            look: called before each of them.

        Returns:
            The connection in words.
        """
        settings, state = self._settings, self._state
        traffic, level = settings.nic_traffic_class, settings.nic_service_level
        routed, lid = route(self.port, self.gid.raw, there.gid, there.lid)
        path = Path(
            port=self.port.number,
            gid_index=self.gid.index,
            gid=there.gid,
            lid=lid,
            mtu=min(there.mtu, self.port.mtu, _LARGEST_MTU),
            routed=routed,
            traffic_class=self.family.traffic_class if traffic < 0 else traffic,
            service_level=self.family.service_level if level < 0 else level,
            timeout=settings.nic_timeout,
            retries=self.family.retries if settings.nic_retries < 0 else settings.nic_retries,
        )
        numbers, doing = there.numbers[rank], f"connecting {self.gid} to rank {peer}"
        for place, link in enumerate(self.links[peer]):
            look()
            link.connect(path, numbers[place], doing, psn=self._psn, peer_psn=there.psn)
            index = state.link_index(peer, self._index, place)
            record = state.links[index]
            state.credits_out[index] = record[rc.GRANTED]
            record[rc.CREDIT_TARGET], record[rc.CREDIT_RKEY] = credits + 8 * place, there.credit_key
        own = ",".join(str(link.number) for link in self.links[peer])
        return (
            f"{self.device} port {self.port.number}, {self.gid}, queue pair {own} to "
            f"{','.join(map(str, numbers))}, TC {path.traffic_class}, SL {path.service_level}"
        )

    def loopback(self, start: int, key: int) -> Loopback:
        """A queue pair of the NIC to itself, over which it reads device memory. Raises TransportError."""
        return Loopback(self.pd, self.port, self.gid, start, key, self._settings.nic_pkey_index)

    def leave_out(self, peer: int) -> None:
        """The peer has no such rail: nothing will go this way."""
        for place, link in enumerate(self.links.pop(peer, ())):
            self._state.links[self._state.link_index(peer, self._index, place), rc.QP] = 0
            link.close()


class RoceEndpoint(NicEndpoint[RoceRail, RoceAddress, rc.RoceMemory]):
    """Endpoint of one proxy thread over ports of one or more RDMA devices.

    Eleven arguments: those of an endpoint over EFA, the peers, whose queue pairs are made before anybody is met, and
    ``max_write``, which tests lower.

    Args:
        rank, ranks, proxy, window, window_bytes, watch: see :class:`.endpoint.NicEndpoint`.
        peers: ranks that will be connected; both ends must name each other.
        settings: the ``nic_*`` settings and ``proxies`` are used.
        nics: in rail order; rail i talks to rail i of the peer, and the rails that only one of them has are idle.
        max_write: longest write, bytes, where it should be less than the NICs can do.
        library: where the C functions come from; default: libibverbs.

    Raises:
        ConfigError: there is no such device, GID or port, or a setting contradicts it.
        TransportError: the library, a device or the kernel refused something; nothing is left open.
        Whatever ``watch`` raises; nothing is left open.
    """

    name = "roce"
    address_type = RoceAddress
    refused_call = "its completion queue could not be polled ({status})"

    def __init__(
        self,
        rank: int,
        ranks: int,
        proxy: int,
        *,
        window: int,
        window_bytes: int,
        peers: Collection[int],
        settings: Settings,
        nics: Sequence[NicPort],
        max_write: int = MAX_WRITE_BYTES,
        library: VerbsLibrary | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if rank in peers or any(not 0 <= peer < ranks for peer in peers):
            raise ConfigError(f"roce of rank {rank}: peers {sorted(peers)} of {ranks} ranks")
        if not nics:
            raise ConfigError(f"rank {rank}: no RDMA device to use; uccl-ep doctor says why")
        super().__init__(rank, ranks, proxy, window, window_bytes, watch, settings.nic_flush == "read")
        self._qps, self._peers = settings.nic_qps, sorted(peers)
        self._loopbacks: list[Loopback] = []
        library = library or control_path(load_libibverbs(), settings.verbs)
        try:
            for nic in nics:
                self._monitor.look()
                self._rails.append(RoceRail(library, nic, settings))
            self._open(library, settings, max_write)
        except BaseException:
            self.close()
            raise

    def _open(self, library: VerbsLibrary, settings: Settings, max_write: int) -> None:
        """Everything but the connections, on open rails."""
        links = max(len(self._peers) * self._qps, 1)
        depths = [rail.depths(links) for rail in self._rails]
        sends, receives = (min(depth) for depth in zip(*depths, strict=True))
        most = [max_write, *(rail.max_message for rail in self._rails)]
        if len(self._rails) > 1:
            # The proxy cuts writes by what all NICs together may have in flight; a stream is on one of them.
            most += [rail.share // 4 // UNIT * UNIT for rail in self._rails]
        for rail in self._rails:
            self._monitor.look()
            rail.furnish(links * (sends + receives), self._window, self._window_bytes)
        self._state = state = rc.RoceMemory(
            rank=self._rank,
            ranks=self._ranks,
            proxies=settings.proxies,
            rails=len(self._rails),
            qps=self._qps,
            window=self._window,
            window_bytes=self._window_bytes,
            sends=sends,
            receives=receives,
        )
        state.context[rc.MODIFY_QP] = library.address("ibv_modify_qp")
        for index, rail in enumerate(self._rails):
            # Also of one NIC: the proxy's caps let one write go to each idle peer, whatever is in flight.
            rail.enter(state, index)
        self._data_path = DataPath(state.address, *FUNCTIONS.addresses)
        for peer in self._peers:
            for rail in self._rails:
                for place in range(self._qps):
                    self._monitor.look()
                    rail.add_link(peer, place, sends, receives)
        self._capabilities = Capabilities(
            name=self.name,
            # the queue pair proves the source
            proves_source=True,
            max_write=min(most),
            bytes_in_flight=sum(rail.share for rail in self._rails),
            # A stream keeps to one rail, and with one queue pair there to that: RC loses, repeats and reorders nothing.
            in_sequence=self._qps == 1,
            # Its queue pairs at this end stop, so its next write, the idle one of every 200 ms at the latest, fails.
            tells_drop=True,
        )

    def established(self) -> None:
        """Every peer has returned from ``connect``: from now on a peer that does not answer is lost."""
        self.state.context[rc.WATCHING] = 1

    def _own_address(self) -> RoceAddress:
        return RoceAddress(
            rank=self._rank,
            ranks=self._ranks,
            proxy=self._proxy,
            window=self._window,
            window_bytes=self._window_bytes,
            rails=tuple(rail.address() for rail in self._rails),
            qps=self._qps,
            receives=int(self.state.context[rc.RECEIVE_SLOTS]),
            credits=int(self.state.credits_in.ctypes.data),
        )

    def _check(self, who: str, peer: int, there: RoceAddress) -> None:
        if peer not in self._peers:
            raise BootstrapError(f"{who}: it was not among the peers for which queue pairs were made")
        numbers = [len(rail.numbers.get(self._rank, ())) for rail in there.rails]
        if not numbers or set(numbers) != {self._qps} or not 0 < there.receives <= rc.LINK_RECEIVES:
            raise BootstrapError(f"{who}: its {numbers} queue pairs by rail and {there.receives} receives cannot serve")

    def _before_connecting(self, peer: int, common: int) -> None:
        for rail in self._rails[common:]:
            rail.leave_out(peer)

    def _connect_rail(self, peer: int, index: int, there: RoceAddress) -> str:
        for link in self._links(peer, index):
            self.state.links[link, rc.ALLOWED] = self.state.credits_in[link] = there.receives
        mine = there.credits + 8 * (self._rank * len(there.rails) + index) * self._qps
        return self._rails[index].connect(peer, self._rank, there.rails[index], mine, self._monitor.look)

    def _links(self, peer: int, index: int) -> Sequence[int]:
        return [self.state.link_index(peer, index, place) for place in range(self._qps)]

    def _explain(self, status: int, vendor: int) -> str:
        if status < 0:
            return f"the NIC's driver refused a work request with errno {-status}"
        return codes.completion_words(status, vendor)

    def _failed_rail(self, peer: int) -> RoceRail:
        link = int(self.state.peers[peer, rc.FAILED_LINK])
        return self._rails[link // self._qps % len(self._rails)]

    def _where(self, peer: int) -> str:
        return f"on {self._failed_rail(peer).device}: " if len(self._rails) > 1 else ""

    def _reports(self, peer: int) -> str:
        return one_device_reports(self._failed_rail(peer))

    def _read_back(self, start: int, keys: Sequence[KeyTable]) -> None:
        self._loopbacks = []
        for rail, remote in zip(self._rails, keys, strict=True):
            self._loopbacks.append(rail.loopback(start, remote.keys[0]))
        self._fence = fence_over(self._loopbacks)

    def release_device(self) -> None:
        """See :class:`..base.DeviceReach`."""
        loopbacks, self._loopbacks, self._fence = self._loopbacks, [], None
        for loopback in loopbacks:
            loopback.close()
        super().release_device()

    def _detach(self) -> None:
        self.state.detach()


class PortFacts(NamedTuple):
    """A port of a NIC as ranks use it: path MTU in bytes, the address it is reached at and its index among the GIDs,
    and what it is, in words."""

    mtu: int
    address: str
    gid: int
    words: str


def examine(device: str, port: int, settings: Settings, library: VerbsLibrary | None = None) -> PortFacts:
    """Open ``port`` of ``device`` for a moment and say what it is and which address it would use.

    Raises:
        ConfigError: there is no such device, port or GID.
        TransportError: it cannot be used; says why.
    """
    library = library or control_path(load_libibverbs(), settings.verbs)
    rail = RoceRail(library, NicPort(device, port), settings)
    try:
        return PortFacts(128 << rail.port.mtu, str(rail.gid.address), rail.gid.index, rail.description)
    finally:
        rail.close()
