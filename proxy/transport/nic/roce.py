"""``roce``: one-sided writes over reliable connections of any RDMA NIC that has them. Control path of the endpoint.

One or more NICs (*rails*), and on each, per peer, one queue pair (or UCCL_EP_NIC_QPS of them) for each proxy thread.
The pieces: :mod:`.roce_rail` is a NIC, on the C objects of :mod:`..verbs.objects`; :mod:`.gid`
chooses the address, :mod:`.families` has the defaults, :mod:`.striping` spreads streams over rails,
:mod:`.roce_data` moves the bytes on the memory of :mod:`.roce_words`. What a NIC is called plays no part: it needs
reliable connections and RDMA writes with immediates, as Broadcom, Mellanox, Pensando, Intel and soft-RoCE devices have.

A peer can write the window and one credit word per queue pair, nothing else; once it is lost or dropped, not even
those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ....config import Settings
from ....errors import BootstrapError, ConfigError
from ....protocol.command import MAX_WRITE_BYTES, UNIT
from ..base import Capabilities, ConnectMonitor, DataPath
from ..verbs import codes
from ..verbs.library import VerbsLibrary, load_libibverbs
from . import roce_words as words
from .roce_address import RoceAddress
from .roce_data import warm
from .roce_rail import NicPort, RoceRail
from .window import DeviceOffer, DmaBuf

__all__ = ["NicPort", "RoceEndpoint", "usable", "warm"]


class RoceEndpoint:
    """Endpoint of one proxy thread over ports of one or more RDMA devices.

    Args:
        rank, ranks, proxy: who this is; peers' endpoints of the same ``proxy`` connect to each other.
        window: address of this rank's window, the only memory of the user that peers write.
        window_bytes: its length, equal on all ranks.
        peers: ranks that will be connected; both ends must name each other.
        settings: the ``nic_*`` settings and ``proxies`` are used.
        nics: in rail order; rail i talks to rail i of the peer, and the rails that only one of them has are idle.
        kind: kind of the window: "shared", "host" or "device".
        export: makes a dma-buf of a range of device memory, see :func:`.window.register_window`.
        max_write: longest write, bytes, where it should be less than the NICs can do.
        library: where the C functions come from; default: libibverbs.
        watch: called a few times a second while queue pairs are made and connected; raises when a peer will never come.

    Raises:
        ConfigError: there is no such device, GID or port, or a setting contradicts it.
        TransportError: the library, a device or the kernel refused something; nothing is left open.
        Whatever ``watch`` raises; nothing is left open.
    """

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
        kind: str = "shared",
        export: Callable[[int, int], DmaBuf] | None = None,
        max_write: int = MAX_WRITE_BYTES,
        library: VerbsLibrary | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if rank in peers or any(not 0 <= peer < ranks for peer in peers):
            raise ConfigError(f"roce of rank {rank}: peers {sorted(peers)} of {ranks} ranks")
        if not nics:
            raise ConfigError(f"rank {rank}: no RDMA device to use; uccl-ep doctor says why")
        self._rank, self._ranks, self._proxy, self._qps = rank, ranks, proxy, settings.nic_qps
        self._window, self._window_bytes = window, window_bytes
        self._peers, self._monitor = sorted(peers), ConnectMonitor(watch)
        self._how = ["not connected"] * ranks
        self._rails: list[RoceRail] = []
        self._state: words.State | None = None
        self._device_bytes = 0
        library = library or load_libibverbs()
        try:
            for nic in nics:
                self._monitor.look()
                self._rails.append(RoceRail(library, nic, settings))
            self._open(library, settings, kind, export, max_write)
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        library: VerbsLibrary,
        settings: Settings,
        kind: str,
        export: Callable[[int, int], DmaBuf] | None,
        max_write: int,
    ) -> None:
        """Everything but the connections."""
        links = max(len(self._peers) * self._qps, 1)
        depths = [rail.depths(links) for rail in self._rails]
        sends, receives = (min(depth) for depth in zip(*depths, strict=True))
        for rail in self._rails:
            self._monitor.look()
            rail.furnish(
                links * (sends + receives),
                window=self._window,
                window_bytes=self._window_bytes,
                kind=kind,
                export=export,
            )
        self._state = state = words.State(
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
        state.context[words.MODIFY_QP] = library.address("ibv_modify_qp")
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
            name="roce",
            proves_source=True,
            max_write=min(most),
            bytes_in_flight=sum(rail.share for rail in self._rails),
            # A stream keeps to one rail, and with one queue pair there to that: RC loses, repeats and reorders nothing.
            in_sequence=self._qps == 1,
            # Its queue pairs at this end stop, so its next write, the idle one of every 200 ms at the latest, fails.
            tells_drop=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Streams are in sequence with one queue pair per peer and rail; the queue pair proves the source."""
        return self._capabilities

    @property
    def state(self) -> words.State:
        """Memory of the data path. Raises ConfigError when the endpoint was never opened."""
        if self._state is None:
            raise ConfigError(f"rank {self._rank}: this roce endpoint is closed")
        return self._state

    def address(self) -> bytes:
        """Where the window is, and GID, keys and queue pair numbers of each rail."""
        return RoceAddress(
            self._rank,
            self._ranks,
            self._proxy,
            self._qps,
            self._window,
            self._window_bytes,
            int(self.state.context[words.RECEIVE_SLOTS]),
            int(self.state.credits_in.ctypes.data),
            tuple(rail.address() for rail in self._rails),
        ).encode()

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Connect the queue pairs to every peer whose entry is not None; never waits for a peer.

        Nothing may be posted before all peers have returned from theirs: a queue pair that is not connected yet
        answers nothing. :meth:`established` says that this is so. ``deadline`` is looked at between two peers, each of
        which takes one or a few calls into the kernel.

        Raises:
            BootstrapError: a peer's address is malformed, it sees another group, or the time is over. Closed.
            TransportError: the NIC or the kernel refused the connection, for example without a route to the peer.
                The endpoint is closed.
            Whatever ``watch`` raises; the endpoint is closed.
        """
        try:
            for peer, address in enumerate(addresses):
                if address is not None and peer != self._rank:
                    who = f"rank {self._rank} connects to rank {peer} over roce (proxy {self._proxy})"
                    there = self._parse(who, peer, address)
                    self._monitor.before(deadline, who)
                    self._connect(peer, there)
        except BaseException:
            self.close()
            raise

    def _parse(self, who: str, peer: int, text: bytes) -> RoceAddress:
        if peer not in self._peers:
            raise BootstrapError(f"{who}: it was not among the peers for which queue pairs were made")
        try:
            there = RoceAddress.decode(text)
        except ValueError as error:
            raise BootstrapError(f"{who}: {error}. The ranks run different versions") from None
        ours = (peer, self._ranks, self._proxy, self._qps, self._window_bytes)
        if (there.rank, *there.group) != ours:
            raise BootstrapError(
                f"{who}: it has (rank, ranks, proxy, queue pairs, window bytes) = {(there.rank, *there.group)}, "
                f"{ours} were expected. Start all ranks with the same settings"
            )
        numbers = [len(rail.numbers.get(self._rank, ())) for rail in there.rails]
        if not numbers or set(numbers) != {self._qps} or not 0 < there.receives <= words.LINK_RECEIVES:
            raise BootstrapError(f"{who}: its {numbers} queue pairs by rail and {there.receives} receives cannot serve")
        return there

    def _connect(self, peer: int, there: RoceAddress) -> None:
        state, common = self.state, min(len(self._rails), len(there.rails))
        words_of = []
        for index, rail in enumerate(self._rails):
            if index >= common:
                rail.leave_out(peer)
                continue
            for place in range(self._qps):
                link = state.link_index(peer, index, place)
                state.links[link, words.ALLOWED] = state.credits_in[link] = there.receives
            mine = there.credits + 8 * (self._rank * len(there.rails) + index) * self._qps
            words_of.append(rail.connect(peer, self._rank, there.rails[index], mine, self._monitor.look))
        record = state.peers[peer]
        record[words.TARGET], record[words.COMMON_RAILS] = there.window, common
        record[words.STATE] = words.UP
        self._how[peer] = "roce, " + (f"{common} rails, " if common > 1 else "") + "; ".join(words_of)

    def established(self) -> None:
        """Every peer has returned from ``connect``: from now on a peer that does not answer is lost."""
        self.state.context[words.WATCHING] = 1

    # --- windows in device memory -----------------------------------------------------------------------------------

    def offer_device(self, start: int, nbytes: int, export: Callable[[int, int], tuple[int, int]]) -> bytes:
        """See :class:`..base.DeviceReach`."""
        regions = [rail.register_device(start, nbytes, export) for rail in self._rails]
        self._device_bytes = nbytes
        self.state.context[words.DEVICE_WINDOW] = start
        return DeviceOffer(start, nbytes, tuple(region.remote for region in regions)).encode()

    def accept_device(self, offers: Sequence[bytes | None]) -> None:
        """See :class:`..base.DeviceReach`."""
        state = self.state
        for peer, text in enumerate(offers):
            if text is None or state.peers[peer, words.STATE] != words.UP:
                continue
            common = int(state.peers[peer, words.COMMON_RAILS])
            try:
                offer = DeviceOffer.decode(text, self._device_bytes, common)
            except ValueError as error:
                who = f"rank {self._rank}: the device window of rank {peer} over roce (proxy {self._proxy})"
                raise BootstrapError(f"{who}: {error}. Start all ranks with the same settings") from None
            state.peers[peer, words.DEVICE_TARGET] = offer.start
            for rail, keys in zip(self._rails[:common], offer.rails[:common], strict=True):
                rail.use_device(peer, keys)
        # The last word of all: with it the data path looks at the others.
        state.context[words.SPLIT] = self._device_bytes

    def release_device(self) -> None:
        """See :class:`..base.DeviceReach`."""
        if self._state is not None:
            self._state.context[words.SPLIT] = 0
        for rail in self._rails:
            rail.release_device()

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""
        return self._data_path

    def describe(self, peer: int) -> str:
        """How ``peer`` is reached and, once it failed, what its NIC's completion said and usually means."""
        record = self.state.peers[peer]
        status, vendor = int(record[words.STATUS]), int(record[words.VENDOR])
        if status == 0:
            return self._how[peer]
        rail = int(record[words.FAILED_LINK]) // self._qps % len(self._rails)
        on = f"on {self._rails[rail].nic.device}: " if len(self._rails) > 1 else ""
        what = f"the NIC's driver refused a work request with errno {-status}"
        if status > 0:
            what = codes.completion_words(status, vendor)
        reports = ", ".join(self._rails[rail].context.reports())
        return f"{self._how[peer]}; {on}{what}" + (f"; the device has reported: {reports}" if reports else "")

    def diagnosis(self) -> str:
        """See :class:`..base.Diagnosed`."""
        broken = int(self.state.context[words.BROKEN_RAIL])
        if not broken:
            return ""
        rail, status = self._rails[broken - 1], int(self.state.context[words.BROKEN_STATUS])
        also = f"; the device has reported: {', '.join(reports)}" if (reports := rail.context.reports()) else ""
        return f"{rail.nic.device}: its completion queue could not be polled ({status}){also}"

    def close(self) -> None:
        """Destroy queue pairs, queues and regions, in this order, and close the devices."""
        if self._state is not None:
            self._state.detach()
        for rail in self._rails:
            rail.close()


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
