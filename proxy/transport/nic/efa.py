"""``efa``: one-sided writes over AWS EFA's scalable reliable datagram (SRD). Control path of the endpoint.

SRD is reliable, unordered and connectionless: each rail is one queue pair that reaches every peer, and a peer is an
address handle, a queue pair number and a QKEY. Both ends need the handle: a NIC refuses writes of an address that it
does not know. :mod:`.endpoint` is what all NICs share, :mod:`.efa_device` asks what the device can do and makes queue
pairs, :mod:`.efa_data` moves writes on the memory of :mod:`.efa_words`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....config import Settings
from ....errors import BootstrapError, ConfigError, TransportError
from ....protocol.command import MAX_WRITE_BYTES, UNIT
from ..base import Capabilities, DataPath
from ..verbs import codes
from ..verbs.bindings import control_path
from ..verbs.device import Gid, open_device
from ..verbs.library import VerbsLibrary
from ..verbs.objects import AddressHandle, MemoryRegion, Path
from . import efa_words as srd
from . import words
from .efa_data import FUNCTIONS
from .efa_device import (
    SERVICE_LEVEL_RELEASE,
    EfaLimits,
    SrdQueuePair,
    address_number,
    explain_completion,
    load_libefa,
    query_limits,
)
from .endpoint import NicAddress, NicEndpoint, Rail, RailAddress

_log = logging.getLogger("uccl_ep_serving")

#: Most receives kept posted per rail where incoming writes need them.
_RECEIVES = 1024
#: Writes of a peer that a completion queue holds, where the device makes it long enough: more than the kernels of a
#: peer ever have under way. A peer is told of every quarter of them, and at least one must go at a time.
_MOST_ROOM, _PARTS = 512, 4
#: Where peers would have less room than the former, the send queue gives way, down to the latter.
_LITTLE_ROOM, _SHORT_SENDS = 32, 256


@dataclass(frozen=True, slots=True)
class QueueDepths:
    """How long the queues of a rail are.

    Attributes:
        sends, receives: work requests of the queue pair; receives are 0 where incoming writes need none.
        completions: entries of the completion queue.
        room: of them for the writes of each peer; 0 where posted receives bound them.
        reason: in words.
    """

    sends: int
    receives: int
    completions: int
    room: int
    reason: str


def choose_depths(limits: EfaLimits, max_completions: int, peers: int, device: str) -> QueueDepths:
    """Depths with which the completion queue cannot overflow, of which EFA tells nobody.

    It holds this rank's own writes, and either the receives that are posted or, from each peer, ``room`` writes and
    what it has to tell of ours.

    Raises:
        TransportError: the device's queues are too short.
    """
    sends = limits.sends
    if not limits.unsolicited:
        receives = min(_RECEIVES, limits.receives, max_completions - sends)
        receives = receives // srd.RECEIVE_BATCH * srd.RECEIVE_BATCH
        if receives <= 0:
            raise TransportError(
                f"{device}: a receive queue of {limits.receives} and {max_completions} completions are too short: "
                f"{srd.RECEIVE_BATCH} receives are needed beside {sends} sends",
                device=device,
            )
        return QueueDepths(sends, receives, sends + receives, 0, f"{sends} sends, {receives} receives posted")
    peers = max(peers, 1)

    def room_beside(sends: int, most: int) -> int:
        return min((max_completions - sends) // peers - _PARTS, most) // _PARTS * _PARTS

    room = room_beside(sends, _MOST_ROOM)
    if room < _LITTLE_ROOM:
        room = room_beside(min(sends, _SHORT_SENDS), _LITTLE_ROOM)
    if room <= 0:
        raise TransportError(
            f"{device}: a completion queue has at most {max_completions} entries, too few for the writes of {peers} "
            f"peers beside {min(sends, _SHORT_SENDS)} sends. Next step: fewer ranks, or UCCL_EP_TRANSPORT=tcp",
            device=device,
        )
    sends = min(sends, max_completions - peers * (room + _PARTS))
    completions = sends + peers * (room + _PARTS)
    return QueueDepths(sends, 0, completions, room, f"{sends} sends, {room} writes of each peer")


class EfaRailAddress(RailAddress, frozen=True):
    """One NIC of an endpoint.

    Attributes:
        number, qkey: of its queue pair.
        unsolicited: that one takes writes without receives. Both ends must: a write is marked by its sender, and only
            a queue pair of the same kind takes it.
        room: writes of each peer that its completion queue holds, 0 = any number.
    """

    number: int
    qkey: int
    unsolicited: bool
    room: int


class EfaAddress(NicAddress, frozen=True, tag="efa 2"):
    """An endpoint of this transport."""

    rails: tuple[EfaRailAddress, ...]


class EfaRail(Rail):
    """One EFA device, open. Raises what :class:`.endpoint.Rail` does, and TransportError when it cannot write."""

    def __init__(self, library: VerbsLibrary, device: str) -> None:
        super().__init__(library, device)
        try:
            self.limits = _limits_of_writer(query_limits(self.context), device)
        except BaseException:
            self.close()
            raise

    def open_queue(self, ranks: int, window: int, window_bytes: int) -> None:
        """Register the window and make the queue pair. Raises TransportError."""
        limits = self.limits
        self.depths = choose_depths(limits, self.context.limits.max_cqe, ranks - 1, self.device)
        self.furnish(self.depths.completions, window, window_bytes)
        # 31 bits: the upper half of the space of QKEYs is reserved to the kernel.
        self.qkey = secrets.randbits(31)
        sends, receives = self.depths.sends, self.depths.receives
        self.qp = SrdQueuePair(self.pd, self.cq, limits, sends=sends, receives=receives, qkey=self.qkey)
        if self.qp.service_level == 0:
            _log.info(
                "%s: the service level for low latency was refused, 0 is used. rdma-core %d knows it%s",
                self.device,
                SERVICE_LEVEL_RELEASE,
                f", {limits.release} is installed" if limits.release else "",
            )
        if self.qp.sends < sends:
            _log.info("%s: a send queue of %d was refused, %d is used", self.device, sends, self.qp.sends)

    def enter(self, state: srd.EfaMemory, index: int) -> None:
        """Tell the data path about this NIC, rail ``index``. Raises TransportError."""
        operations = self.qp.operations
        state.fill(
            state.rails[index],
            {
                srd.QP: self.qp.address,
                srd.QP_EX: self.qp.extended,
                srd.WR_START: operations["wr_start"],
                srd.WR_WRITE_IMM: operations["wr_rdma_write_imm"],
                srd.WR_SET_ADDRESS: operations["wr_set_ud_addr"],
                srd.WR_SET_SGE: operations["wr_set_sge"],
                srd.WR_COMPLETE: operations["wr_complete"],
                words.CQ: self.cq.address,
                words.POLL_CQ: self.context.operation("poll_cq"),
                words.POST_RECV: self.context.operation("post_recv"),
            },
        )
        if self.depths.receives:
            landing = MemoryRegion(self.pd, state.landing, srd.LANDING_BYTES, codes.ACCESS_LOCAL_WRITE)
            chain = state.let_land(index, landing.lkey)
            # before any peer knows of this queue: not every device holds a write back that finds no receive
            self.post_receives(self.qp.address, chain, self.depths.receives // srd.RECEIVE_BATCH)

    def address(self) -> EfaRailAddress:
        """What peers need to write to this NIC."""
        keys = self.region.remote
        room = self.depths.room
        return EfaRailAddress(self.gid.raw, keys, self.qp.number, self.qkey, self.limits.unsolicited, room)


class EfaEndpoint(NicEndpoint[EfaRail, EfaAddress, srd.EfaMemory]):
    """Endpoint of one proxy thread over one or more EFA devices.

    Args:
        rank, ranks, proxy, window, window_bytes, watch: see :class:`.endpoint.NicEndpoint`.
        devices: EFA devices, in rail order.
        settings: ``proxies`` is used.
        library: libibverbs with libefa; for tests.

    Raises:
        ConfigError: no device was named, or one that does not exist.
        TransportError: a device cannot be opened or lacks what is needed; says what and what to do. Nothing stays open.
        Whatever ``watch`` raises; nothing stays open.
    """

    name = "efa"
    address_type = EfaAddress
    refused_call = "its driver refused a call with {status}"

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
        library: VerbsLibrary | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if not devices:
            raise ConfigError(f"rank {rank}: no EFA device to use; uccl-ep doctor says why")
        super().__init__(rank, ranks, proxy, window, window_bytes, watch, settings.nic_flush == "read")
        self._handles: dict[tuple[int, bytes], AddressHandle] = {}
        library = library or control_path(load_libefa(), settings.verbs)
        try:
            for device in devices:
                self._monitor.look()
                self._rails.append(EfaRail(library, device))
                self._rails[-1].open_queue(ranks, window, window_bytes)
            self._open(settings)
        except BaseException:
            self.close()
            raise

    def _open(self, settings: Settings) -> None:
        """Everything but the connections, on open rails."""
        longest = min([MAX_WRITE_BYTES, *(rail.limits.max_write for rail in self._rails)]) // UNIT * UNIT
        # No order at all; the sender's queue pair and address prove the source.
        self._capabilities = Capabilities(
            name=self.name,
            proves_source=True,
            max_write=longest,
            notices_silent_death=False,
            reads_after_drop=True,
        )
        self._state = state = srd.EfaMemory(
            rank=self._rank,
            ranks=self._ranks,
            proxies=settings.proxies,
            window=self._window,
            window_bytes=self._window_bytes,
            max_write=longest,
            depths=[rail.qp.sends for rail in self._rails],
            receives=[rail.depths.receives for rail in self._rails],
            steps=[rail.depths.room // _PARTS for rail in self._rails],
        )
        for index, rail in enumerate(self._rails):
            rail.enter(state, index)
        self._data_path = DataPath(state.address, *FUNCTIONS.addresses)

    def _own_address(self) -> EfaAddress:
        rails = tuple(rail.address() for rail in self._rails)
        return EfaAddress(self._rank, self._ranks, self._proxy, self._window, self._window_bytes, rails)

    def _check(self, who: str, peer: int, there: EfaAddress) -> None:
        if not there.rails:
            raise BootstrapError(f"{who}: it names no NIC")
        for rail, theirs in zip(self._rails, there.rails, strict=False):
            if theirs.room < 0:
                raise BootstrapError(f"{who}: its completion queue holds {theirs.room} writes of a peer")
            if theirs.unsolicited != rail.limits.unsolicited:
                lacks = f"rank {self._rank}'s" if theirs.unsolicited else f"rank {peer}'s"
                raise BootstrapError(
                    f"{who}: {rail.device} and its peer do not agree on writes without receives: {lacks} EFA "
                    "driver or rdma-core does not know them. Install the same versions on all hosts"
                )

    def _connect_rail(self, peer: int, index: int, there: EfaAddress) -> str:
        rail, theirs = self._rails[index], there.rails[index]
        # One handle per address, though several ranks of a host may share a NIC: completions name an address by the
        # number of its handle.
        handle = self._handles.get((index, theirs.gid))
        if handle is None:
            path = Path(port=rail.port.number, gid_index=rail.gid.index, gid=theirs.gid)
            handle = self._handles[index, theirs.gid] = AddressHandle(rail.pd, path)
        link = self.state.links[self.state.link_index(peer, index)]
        link[srd.AH], link[srd.AH_NUMBER] = handle.address, address_number(handle)
        link[srd.QPN], link[srd.QKEY], link[srd.ROOM] = theirs.number, theirs.qkey, theirs.room
        return f"{rail.device} -> {Gid(0, 0, theirs.gid).address} QP {theirs.number}, SL {rail.qp.service_level}"

    def _links(self, peer: int, index: int) -> Sequence[int]:
        return [self.state.link_index(peer, index)]

    def _explain(self, status: int, vendor: int) -> str:
        return explain_completion(status, vendor)

    def _reports(self, peer: int) -> str:
        reports = ", ".join(f"{rail.device}: {what}" for rail in self._rails for what in rail.context.reports())
        return f"; the devices have reported: {reports}" if reports else ""

    @property
    def strangers(self) -> int:
        """Immediates that were dropped because no peer's queue pair had sent them."""
        return int(self.state.context[srd.STRANGERS])

    @property
    def writes(self) -> int:
        """Writes posted on all rails."""
        return int(self.state.rails[:, srd.POSTED].sum())

    def _detach(self) -> None:
        self.state.peers[:, words.STATE] = srd.CLOSED
        self.state.rails[:, srd.QP] = 0


def _limits_of_writer(limits: EfaLimits, device: str) -> EfaLimits:
    """Raise TransportError unless the device can write."""
    if missing := limits.missing(device):
        raise TransportError(missing, device=device)
    return limits


def usable(device: str, library: VerbsLibrary | None = None) -> str:
    """Open ``device`` for a moment and say what it offers, in words.

    Raises:
        ConfigError: there is no such device.
        TransportError: it cannot be used; says why and what to do.
    """
    with open_device(library or load_libefa(), device) as context:
        return _limits_of_writer(query_limits(context), device).words()
