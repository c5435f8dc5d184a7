"""``roce``: one-sided writes over reliable connections of any RDMA NIC that has them. Control path of the endpoint.

One or more NICs, and on each, per peer, one queue pair (or UCCL_EP_NIC_QPS of them) for each proxy thread.
:mod:`.endpoint` is what all NICs share, :mod:`.roce_rail` is a NIC with its queue pairs, :mod:`.roce_data` moves the
bytes on the memory of :mod:`.roce_words`. What a NIC is called plays no part: it needs reliable connections and RDMA
writes with immediates, as Broadcom, Mellanox, Pensando, Intel and soft-RoCE devices have.

A peer can write the window and one credit word per queue pair, nothing else; once it is lost or dropped, not even
those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ....config import Settings
from ....errors import BootstrapError, ConfigError
from ....protocol.command import MAX_WRITE_BYTES, UNIT
from ..base import Capabilities, DataPath
from ..verbs import codes
from ..verbs.library import VerbsLibrary, load_libibverbs
from . import roce_words as rc
from .endpoint import NicEndpoint, one_device_reports
from .roce_data import warm
from .roce_rail import NicPort, RoceAddress, RoceRail


class RoceEndpoint(NicEndpoint[RoceRail, RoceAddress, rc.RoceMemory]):
    """Endpoint of one proxy thread over ports of one or more RDMA devices.

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
        super().__init__(rank, ranks, proxy, window, window_bytes, watch)
        self._qps, self._peers = settings.nic_qps, sorted(peers)
        library = library or load_libibverbs()
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
            # With one NIC the caps of the proxy are its caps.
            rail.enter(state, index, rail.share if len(self._rails) > 1 else 0)
        self._data_path = DataPath(state.address, *warm())
        for peer in self._peers:
            for rail in self._rails:
                for place in range(self._qps):
                    self._monitor.look()
                    rail.add_link(peer, place, sends, receives)
        most = [max_write, *(rail.max_message for rail in self._rails)]
        if len(self._rails) > 1:
            # The proxy cuts writes by what all NICs together may have in flight; a stream is on one of them.
            most += [rail.share // 4 // UNIT * UNIT for rail in self._rails]
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

    def _detach(self) -> None:
        self.state.detach()


def usable(device: str, port: int, settings: Settings, library: VerbsLibrary | None = None) -> str:
    """Open ``port`` of ``device`` for a moment and say what it is and which address it would use, in words.

    Raises:
        ConfigError: there is no such device, port or GID.
        TransportError: it cannot be used; says why.
    """
    rail = RoceRail(library or load_libibverbs(), NicPort(device, port), settings)
    try:
        return rail.description
    finally:
        rail.close()
