"""``efa``: one-sided writes over AWS EFA's scalable reliable datagram (SRD). Control path of the endpoint.

SRD is reliable, unordered and connectionless: each rail is one queue pair that reaches every peer, and a peer is an
address handle, a queue pair number and a QKEY. Both ends need the handle: a NIC refuses writes of an address that it
does not know. The pieces: :mod:`.efa_device` asks what the device can do, :mod:`.efa_qp` makes queue pairs,
:mod:`.efa_address` is what peers must know, :mod:`.efa_data` moves writes on the memory of :mod:`.efa_words`, and
:mod:`.striping` spreads streams over rails.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....config import Settings
from ....errors import BootstrapError, ConfigError, TransportError
from ....protocol.command import MAX_WRITE_BYTES, UNIT
from ..base import Capabilities, ConnectMonitor, DataPath
from ..verbs import codes
from ..verbs.device import CompletionQueue, Context, MemoryRegion, ProtectionDomain, open_device
from ..verbs.library import VerbsLibrary
from ..verbs.objects import AddressHandle, Path
from . import efa_words as words
from .efa_address import EfaAddress, RailAddress
from .efa_data import warm
from .efa_device import EfaLimits, explain_completion, load_libefa, query_limits
from .efa_qp import SrdQueuePair, address_number
from .efa_words import State
from .gid import Gid, choose_gid
from .window import DeviceOffer, DmaBuf, WindowRegion, register_window

__all__ = ["EfaEndpoint", "usable", "warm"]

_PORT = 1  # EFA devices have one
#: Most receives kept posted per rail where incoming writes need them.
_RECEIVES = 1024
#: Completions that may wait per peer and rail before they are polled: more than the kernels of a peer ever have under
#: way (see DESTINATION_QUOTA of the proxy).
_ARRIVALS_PER_PEER = 512


@dataclass(slots=True)
class _Rail:
    """One NIC of an endpoint, open."""

    context: Context
    limits: EfaLimits
    gid: Gid
    pd: ProtectionDomain
    cq: CompletionQueue
    qp: SrdQueuePair
    region: WindowRegion
    qkey: int


class EfaEndpoint:
    """Endpoint of one proxy thread over one or more EFA devices.

    Args:
        rank, ranks, proxy: who this is; peers' endpoints of the same ``proxy`` write to each other.
        window: address of this rank's window, the only memory that peers write.
        window_bytes: its length, equal on all ranks.
        devices: EFA devices, in rail order.
        settings: ``proxies`` is used.
        kind: kind of the window: "shared", "host" or "device".
        export: makes a dma-buf of a range of device memory, see :func:`.window.register_window`.
        library: libibverbs with libefa; for tests.
        watch: called a few times a second while rails are opened and peers connected; raises when one will never come.

    Raises:
        ConfigError: no device was named, or one that does not exist.
        TransportError: a device cannot be opened or lacks what is needed; says what and what to do. Nothing stays open.
        Whatever ``watch`` raises; nothing stays open.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        proxy: int,
        *,
        window: int,
        window_bytes: int,
        devices: Sequence[str],
        settings: Settings,
        kind: str = "shared",
        export: Callable[[int, int], DmaBuf] | None = None,
        library: VerbsLibrary | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if not devices:
            raise ConfigError(f"rank {rank}: no EFA device to use; uccl-ep doctor says why")
        self._rank, self._ranks, self._proxy = rank, ranks, proxy
        self._window, self._window_bytes = window, window_bytes
        self._monitor = ConnectMonitor(watch)
        self._how = ["not connected"] * ranks
        self._handles: dict[tuple[int, bytes], AddressHandle] = {}
        self._rails: list[_Rail] = []
        self._device_regions: list[WindowRegion] = []
        self._device_bytes = 0
        library = library or load_libefa()
        with contextlib.ExitStack() as opened:
            for device in devices:
                self._monitor.look()
                context = opened.enter_context(open_device(library, device))
                self._rails.append(_open_rail(context, ranks, window, window_bytes, kind, export))
            opened.pop_all()
        self._max_write = min([MAX_WRITE_BYTES, *(rail.limits.max_write for rail in self._rails)]) // UNIT * UNIT
        self._shift, self._chunks = self._rails[0].region.shift, len(self._rails[0].region.regions)
        self._state = State(
            rank=rank,
            ranks=ranks,
            proxies=settings.proxies,
            window=window,
            window_bytes=window_bytes,
            max_write=self._max_write,
            shift=self._shift,
            chunks=self._chunks,
            depths=[rail.limits.sends for rail in self._rails],
            receives=[_receives(rail.limits) for rail in self._rails],
        )
        try:
            for index, rail in enumerate(self._rails):
                self._fill_rail(index, rail)
        except BaseException:
            self.close()
            raise
        self._data_path = DataPath(self._state.address, *warm())

    def _fill_rail(self, index: int, rail: _Rail) -> None:
        """Tell the data path about a rail. Raises TransportError."""
        record, operations = self._state.rails[index], rail.qp.operations
        record[words.QP], record[words.QP_EX] = rail.qp.address, rail.qp.extended
        record[words.WR_START] = operations["wr_start"]
        record[words.WR_WRITE_IMM] = operations["wr_rdma_write_imm"]
        record[words.WR_SET_ADDRESS] = operations["wr_set_ud_addr"]
        record[words.WR_SET_SGE] = operations["wr_set_sge"]
        record[words.WR_COMPLETE] = operations["wr_complete"]
        record[words.CQ] = rail.cq.address
        record[words.POLL_CQ] = rail.context.operation("poll_cq")
        record[words.POST_RECV] = rail.context.operation("post_recv")
        self._state.local_keys[index] = [chunk.lkey for chunk in rail.region.regions]
        if record[words.RECEIVES]:
            landing = MemoryRegion(rail.pd, self._state.landing, words.LANDING_BYTES, codes.ACCESS_LOCAL_WRITE)
            self._state.let_land(index, landing.lkey)

    @property
    def capabilities(self) -> Capabilities:
        """No order at all; the sender's queue pair and address prove the source."""
        return Capabilities(
            name="efa",
            proves_source=True,
            max_write=self._max_write,
            notices_silent_death=False,
        )

    def address(self) -> bytes:
        """Where the window is, and GID, queue pair, QKEY and keys of each rail."""
        return self._own_address().encode()

    def _own_address(self) -> EfaAddress:
        return EfaAddress(
            self._rank,
            self._ranks,
            self._proxy,
            self._shift,
            self._window_bytes,
            self._window,
            tuple(
                RailAddress(rail.gid.raw, rail.qp.number, rail.qkey, rail.limits.unsolicited) for rail in self._rails
            ),
            tuple(tuple(chunk.rkey for chunk in rail.region.regions) for rail in self._rails),
        )

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Make an address handle for every peer and rail; never waits.

        Every rank must have returned from here before the first write: a NIC refuses addresses it has no handle for.

        Raises:
            BootstrapError: a peer's address is malformed, it sees another group, or the deadline (a
                ``time.monotonic()`` instant) is over. The endpoint is closed.
            TransportError: the NIC refused a handle. The endpoint is closed.
            Whatever ``watch`` raises; the endpoint is closed.
        """
        try:
            for peer, text in enumerate(addresses):
                if text is not None and peer != self._rank:
                    who = f"rank {self._rank} connects to rank {peer} over efa (proxy {self._proxy})"
                    self._monitor.before(deadline, who)
                    self._connect(who, peer, text)
        except BaseException:
            self.close()
            raise

    def _connect(self, who: str, peer: int, text: bytes) -> None:
        try:
            theirs = EfaAddress.decode(text)
        except ValueError as error:
            raise BootstrapError(f"{who}: {error}. The ranks run different versions") from None
        ours = self._own_address()
        if (theirs.rank, *theirs.group) != (peer, *ours.group):
            raise BootstrapError(
                f"{who}: rank {theirs.rank} answers with (ranks, proxy, window bytes, chunk shift, chunks) = "
                f"{theirs.group}, this rank has {ours.group}. Start all ranks with the same settings"
            )
        count = min(len(self._rails), len(theirs.rails))
        paths = []
        for index in range(count):
            rail, (gid, number, qkey, unsolicited) = self._rails[index], theirs.rails[index]
            if unsolicited != rail.limits.unsolicited:
                lacks = f"rank {self._rank}'s" if unsolicited else f"rank {peer}'s"
                raise BootstrapError(
                    f"{who}: {rail.context.device} and its peer do not agree on writes without receives: {lacks} EFA "
                    "driver or rdma-core does not know them. Install the same versions on all hosts"
                )
            # One handle per address, though several ranks of a host may share a NIC: completions name an address by
            # the number of its handle.
            handle = self._handles.get((index, gid))
            if handle is None:
                handle = AddressHandle(rail.pd, Path(port=_PORT, gid_index=rail.gid.index, gid=gid))
                self._handles[index, gid] = handle
            link = self._state.links[peer, index]
            link[words.AH], link[words.AH_NUMBER] = handle.address, address_number(handle)
            link[words.QPN], link[words.QKEY] = number, qkey
            self._state.remote_keys[peer, index] = theirs.keys[index]
            paths.append(f"{rail.context.device} -> {Gid(0, 0, gid).address} QP {number}")
        record = self._state.peers[peer]
        record[words.LINK_COUNT], record[words.REMOTE_WINDOW] = count, theirs.window
        record[words.STATE] = words.UP
        self._how[peer] = f"efa, {count} rail{'s' if count > 1 else ''}, {', '.join(paths)}"

    # --- windows in device memory -----------------------------------------------------------------------------------

    def offer_device(self, start: int, nbytes: int, export: Callable[[int, int], tuple[int, int]]) -> bytes:
        """See :class:`..base.DeviceReach`."""
        state, tables = self._state, []
        for index, rail in enumerate(self._rails):
            region = register_window(
                rail.pd, start, nbytes, "device", lambda *part: DmaBuf(*export(*part)), overlap=self._max_write
            )
            self._device_regions.append(region)
            tables.append(region.remote)
            record, own = state.rails[index], region.local
            record[words.DEVICE_SHIFT], record[words.DEVICE_KEYS] = own.shift, state.keep(own.keys)
        self._device_bytes = nbytes
        state.context[words.DEVICE_WINDOW] = start
        return DeviceOffer(start, nbytes, tuple(tables)).encode()

    def accept_device(self, offers: Sequence[bytes | None]) -> None:
        """See :class:`..base.DeviceReach`."""
        state = self._state
        for peer, text in enumerate(offers):
            if text is None or state.peers[peer, words.STATE] != words.UP:
                continue
            count = int(state.peers[peer, words.LINK_COUNT])
            try:
                offer = DeviceOffer.decode(text, self._device_bytes, count)
            except ValueError as error:
                who = f"rank {self._rank}: the device window of rank {peer} over efa (proxy {self._proxy})"
                raise BootstrapError(f"{who}: {error}. Start all ranks with the same settings") from None
            state.peers[peer, words.DEVICE_TARGET] = offer.start
            for index, keys in enumerate(offer.rails[:count]):
                link = state.links[peer, index]
                link[words.DEVICE_TARGET_SHIFT] = keys.shift
                link[words.DEVICE_REMOTE_KEYS] = state.keep(keys.keys)
        # The last word of all: with it the data path looks at the others.
        state.context[words.SPLIT] = self._device_bytes

    def release_device(self) -> None:
        """See :class:`..base.DeviceReach`."""
        self._state.context[words.SPLIT] = 0
        while self._device_regions:
            self._device_regions.pop().close()

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""
        return self._data_path

    def describe(self, peer: int) -> str:
        """How ``peer`` is reached, and what the NIC said when it was lost."""
        status, vendor = (int(self._state.peers[peer, word]) for word in (words.LOST_STATUS, words.LOST_VENDOR))
        if not status:
            return self._how[peer]
        reports = ", ".join(f"{rail.context.device}: {what}" for rail in self._rails for what in rail.context.reports())
        also = f"; the devices have reported: {reports}" if reports else ""
        return f"{self._how[peer]}: {explain_completion(status, vendor)}{also}"

    def diagnosis(self) -> str:
        """See :class:`..base.Diagnosed`."""
        broken, status, vendor = (
            int(self._state.context[word]) for word in (words.BROKEN_RAIL, words.BROKEN_STATUS, words.BROKEN_VENDOR)
        )
        if not broken:
            return ""
        context = self._rails[broken - 1].context
        what = f"its driver refused a call with {status}"
        if status > 0:
            what = f"a work request failed: {explain_completion(status, vendor)}"
        also = f"; the device has reported: {', '.join(reports)}" if (reports := context.reports()) else ""
        return f"{context.device}: {what}{also}"

    @property
    def strangers(self) -> int:
        """Immediates that were dropped because no peer's queue pair had sent them."""
        return int(self._state.context[words.STRANGERS])

    @property
    def writes(self) -> int:
        """Writes posted on all rails."""
        return int(self._state.rails[:, words.POSTED].sum())

    def close(self) -> None:
        """Close queue pairs, handles, registrations and devices, in that order. Never raises, may be called twice."""
        self._state.peers[:, words.STATE] = words.CLOSED
        self._state.rails[:, words.QP] = 0
        for rail in self._rails:
            rail.qp.close()
        for rail in self._rails:
            rail.context.close()  # and with it everything that was made from it
        self._rails, self._handles = [], {}


def _receives(limits: EfaLimits) -> int:
    """Receives kept posted: none where incoming writes need none, else whole batches that the queue holds."""
    if limits.unsolicited:
        return 0
    return min(_RECEIVES, limits.receives) // words.RECEIVE_BATCH * words.RECEIVE_BATCH


def _open_rail(
    context: Context,
    ranks: int,
    window: int,
    window_bytes: int,
    kind: str,
    export: Callable[[int, int], DmaBuf] | None,
) -> _Rail:
    """Make everything that a rail needs on an open device. Raises TransportError."""
    limits = query_limits(context)
    if missing := limits.missing(context.device):
        raise TransportError(missing, device=context.device)
    receives = _receives(limits)
    if not limits.unsolicited and receives == 0:
        raise TransportError(
            f"{context.device}: a receive queue of {limits.receives} is too short, {words.RECEIVE_BATCH} are needed",
            device=context.device,
        )
    port = context.port(_PORT)
    gid, _ = choose_gid(context.gids(_PORT), port.link_layer, device=context.device)
    pd = ProtectionDomain(context)
    # EFA does not tell when a completion queue overflows: it must hold whatever can be under way.
    wanted = limits.sends + max(receives, ranks * _ARRIVALS_PER_PEER)
    cq = CompletionQueue(context, min(wanted, context.limits.max_cqe))
    # 31 bits: the upper half of the space of QKEYs is reserved to the kernel.
    qkey = secrets.randbits(31)
    qp = SrdQueuePair(pd, cq, limits, sends=limits.sends, receives=receives or 1, qkey=qkey)
    # A write is never cut: the arrival of its second part would say nothing of the first.
    longest = min(MAX_WRITE_BYTES, limits.max_write)
    region = register_window(pd, window, window_bytes, kind, export, overlap=longest)
    return _Rail(context, limits, gid, pd, cq, qp, region, qkey)


def usable(device: str, library: VerbsLibrary | None = None) -> str:
    """Open ``device`` for a moment and say what it offers, in words.

    Raises:
        ConfigError: there is no such device.
        TransportError: it cannot be used; says why and what to do.
    """
    with open_device(library or load_libefa(), device) as context:
        limits = query_limits(context)
        if missing := limits.missing(device):
            raise TransportError(missing, device=device)
        return limits.words()
