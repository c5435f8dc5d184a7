"""What endpoints over NICs share: rails, addresses, connecting, windows in device memory, failures in words, the end.

A transport adds (:mod:`.efa`, :mod:`.roce`) what its queue pairs are, how they reach a peer, and its data path.
"""

from __future__ import annotations

import ctypes
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from ....errors import BootstrapError, ConfigError, TransportError
from ..base import Capabilities, ConnectMonitor, DataPath
from ..verbs import codes
from ..verbs.device import Gid, Port, open_device
from ..verbs.library import VerbsLibrary
from ..verbs.objects import CompletionQueue, ProtectionDomain
from . import words
from .defaults import choose_gid
from .window import ACCESS, DeviceOffer, Export, KeyTable, WindowRegion, register_device, register_host

_POST_RECV = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_POLL_CQ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
#: In the place of the provider's function for a device that does nothing more.
_POLL_NOTHING = _POLL_CQ(lambda queue, room, entries: -errno.EIO)
_POLL_LOST = ctypes.cast(_POLL_NOTHING, ctypes.c_void_p).value or 0


class RailAddress(msgspec.Struct, frozen=True):
    """What peers must know of one NIC of an endpoint: the GID of its port, and its keys of the window."""

    gid: bytes
    keys: KeyTable


class NicAddress(msgspec.Struct, frozen=True):
    """What peers must know of an endpoint to reach it: the address that the bootstrap carries.

    Attributes:
        rank, ranks, proxy: whose it is.
        window, window_bytes: where its window lies in its process.
        rails: its NICs, in rail order.
    """

    rank: int
    ranks: int
    proxy: int
    window: int
    window_bytes: int
    rails: tuple[RailAddress, ...]

    @property
    def group(self) -> dict[str, int]:
        """What all ranks must have alike, by name."""
        return {"ranks": self.ranks, "proxy": self.proxy, "window bytes": self.window_bytes}

    def encode(self) -> bytes:
        """For the bootstrap."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, text: bytes, transport: str) -> Self:
        """Raises ValueError when ``text`` is no address of this transport."""
        try:
            found = msgspec.msgpack.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{text[:16]!r} is not the address of a {transport} endpoint ({error})") from None
        for rail in found.rails:
            if len(rail.gid) != 16 or not rail.keys.cover(found.window_bytes):
                raise ValueError(f"a GID of {len(rail.gid)} bytes, {len(rail.keys.keys)} keys of a window")
        return found


class Rail:
    """One NIC of an endpoint, open. :meth:`furnish` makes what the data path needs; :meth:`close` ends all of it.

    Args:
        library: where the C functions come from.
        device, port: which NIC.
        gid_index: of the GID to use, -1 = chosen by :func:`.defaults.choose_gid`.

    Attributes:
        context, port, gid: of the NIC; ``gid_reason`` says in words why it is that one.

    Raises:
        ConfigError: there is no such device, port or GID.
        TransportError: the device cannot be used; says why. Nothing is left open.
    """

    def __init__(self, library: VerbsLibrary, device: str, port: int = 1, gid_index: int = -1) -> None:
        self.device = device
        self._device_region: WindowRegion | None = None
        self.context = open_device(library, device)
        try:
            self.port: Port = self._usable_port(port)
            self.gid: Gid
            self.gid, self.gid_reason = choose_gid(
                self.context.gids(port), self.port.link_layer, index=gid_index, device=device
            )
        except BaseException:
            self.context.close()
            raise

    def _usable_port(self, number: int) -> Port:
        if not 1 <= number <= self.context.limits.ports:
            raise ConfigError(f"{self.device} has ports 1..{self.context.limits.ports}, not {number}")
        port = self.context.port(number)
        if port.state != codes.PORT_ACTIVE:
            raise TransportError(
                f"{self.device}: port {number} is not active (state {port.state}); check its cable, bring its "
                "interface up",
                device=self.device,
            )
        return port

    def furnish(self, entries: int, window: int, window_bytes: int) -> None:
        """Make a completion queue of ``entries`` entries and register the window. Raises TransportError."""
        self.pd = ProtectionDomain(self.context)
        self.cq = CompletionQueue(self.context, entries)
        self.region = register_host(self.pd, window, window_bytes)

    def post_receives(self, queue: int, chain: int, times: int) -> None:
        """Post the chain of receives at address ``chain`` on a queue pair, so often. Raises TransportError."""
        post_recv, bad = _POST_RECV(self.context.operation("post_recv")), ctypes.c_uint64(0)
        for _ in range(times):
            status = post_recv(queue, chain, ctypes.addressof(bad))
            if status:
                raise self.context.library.refused("post_recv", abs(status), self.device, "posting receives")

    def register_device(self, start: int, nbytes: int, export: Export, access: int) -> KeyTable:
        """Register device memory beside the window; the keys for peers. Raises TransportError, also when there is such
        memory already: its keys would be lost while peers use them."""
        if self._device_region is not None:
            raise TransportError(
                f"{self.device}: a window in device memory is registered already. Likely cause: the ranks have set "
                "theirs up twice in one epoch. Next step: close this Buffer on all ranks and build the group again",
                device=self.device,
            )
        self._device_region = register_device(self.pd, start, nbytes, export, access)
        return self._device_region.remote

    @property
    def device_way(self) -> str:
        """How the NIC reaches the device memory."""
        assert self._device_region is not None
        return self._device_region.way

    @property
    def device_keys(self) -> KeyTable:
        """Keys of the device memory for this rank's work requests."""
        assert self._device_region is not None
        return self._device_region.local

    def release_host(self) -> None:
        """Take the keys of the window in host memory back."""
        self.region.close()

    def release_device(self) -> None:
        """Take the keys of the device memory back."""
        if self._device_region is not None:
            self._device_region.close()
            self._device_region = None

    def close(self) -> None:
        """Close everything that was made, last first, and the device."""
        self.context.close()


RailT = TypeVar("RailT", bound=Rail)
AddressT = TypeVar("AddressT", bound=NicAddress)
MemoryT = TypeVar("MemoryT", bound=words.Memory)


class NicEndpoint(ABC, Generic[RailT, AddressT, MemoryT]):
    """An :class:`..base.Endpoint` of one proxy thread over one or more NICs, for windows in host and device memory.

    A subclass opens its rails and its memory when it is made, and closes the endpoint when that fails.

    Args:
        rank, ranks, proxy: who this is; peers' endpoints of the same ``proxy`` connect to each other.
        window: address of this rank's window, the only memory of the user that peers write.
        window_bytes: its length, equal on all ranks.
        watch: called a few times a second while rails are opened and peers connected; raises when one will never come.
        reads: NICs read device memory back before what they wrote there counts (UCCL_EP_NIC_FLUSH=read).
    """

    #: Name of the transport, and its type of address.
    name: ClassVar[str]
    address_type: ClassVar[type[Any]]
    #: What a call of the driver that failed stopped, in words; ``{status}`` is what it returned.
    refused_call: ClassVar[str]

    def __init__(
        self,
        rank: int,
        ranks: int,
        proxy: int,
        window: int,
        window_bytes: int,
        watch: Callable[[], None],
        reads: bool,
    ) -> None:
        self._rank, self._ranks, self._proxy = rank, ranks, proxy
        self._window, self._window_bytes = window, window_bytes
        self._monitor = ConnectMonitor(watch)
        self._how = ["not connected"] * ranks
        self._rails: list[RailT] = []
        self._state: MemoryT | None = None
        self._device_bytes = 0
        #: UCCL_EP_NIC_FLUSH: arrivals in device memory wait for a read by the NIC.
        self._reads = reads
        self._fence: words.Words | None = None
        self._capabilities: Capabilities
        self._data_path: DataPath

    @property
    def capabilities(self) -> Capabilities:
        """What the transport offers over these NICs."""
        return self._capabilities

    @property
    def state(self) -> MemoryT:
        """Memory of the data path. Raises ConfigError when the endpoint was never opened."""
        if self._state is None:
            raise ConfigError(f"rank {self._rank}: this {self.name} endpoint is closed")
        return self._state

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""
        return self._data_path

    # --- what a transport adds --------------------------------------------------------------------------------------

    @abstractmethod
    def _own_address(self) -> AddressT:
        """What peers must know of this endpoint."""

    @abstractmethod
    def _check(self, who: str, peer: int, there: AddressT) -> None:
        """Raise BootstrapError, which begins with ``who``, when ``peer`` cannot be reached with this address."""

    @abstractmethod
    def _connect_rail(self, peer: int, index: int, there: AddressT) -> str:
        """Connect to ``peer`` over rail ``index``, which both ends have; the connection in words."""

    @abstractmethod
    def _links(self, peer: int, index: int) -> Sequence[int]:
        """The link records of ``peer`` on rail ``index``."""

    @abstractmethod
    def _explain(self, status: int, vendor: int) -> str:
        """A failed completion, or -errno of a call that failed, in words."""

    @abstractmethod
    def _reports(self, peer: int) -> str:
        """What the NICs that lead to ``peer``, which is lost, have reported of themselves; "" when nothing."""

    def _where(self, peer: int) -> str:
        """The NIC over which ``peer`` was lost, to be put before what it said; "" where that is not known."""
        return ""

    def _before_connecting(self, peer: int, common: int) -> None:
        """Called before rail 0; ``common`` rails are those that both ends have."""

    @abstractmethod
    def _detach(self) -> None:
        """Let the data path refuse posts and find nothing from here on."""

    # --- connecting -------------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        """Where the window is, and what leads to each rail."""
        return self._own_address().encode()

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Connect to every peer whose entry is not None; never waits for a peer.

        Nothing may be posted before all peers have returned from theirs: a NIC that does not know this rank yet refuses
        its writes, or does not answer. ``deadline``, a ``time.monotonic()`` instant, is looked at between two peers,
        each of which takes one or a few calls into the kernel.

        Raises:
            BootstrapError: a peer's address is malformed, it sees another group, or the time is over. Closed.
            TransportError: the NIC or the kernel refused the connection, for example without a route to the peer.
                The endpoint is closed.
            Whatever ``watch`` raises; the endpoint is closed.
        """
        try:
            ours = self._own_address().group
            for peer, text in enumerate(addresses):
                if text is not None and peer != self._rank:
                    who = f"rank {self._rank} connects to rank {peer} over {self.name} (proxy {self._proxy})"
                    there = self._parse(who, peer, text, ours)
                    self._monitor.before(deadline, who)
                    self._connect(peer, there)
        except BaseException:
            self.close()
            raise

    def _parse(self, who: str, peer: int, text: bytes, ours: dict[str, int]) -> AddressT:
        try:
            there: AddressT = self.address_type.decode(text, self.name)
        except ValueError as error:
            raise BootstrapError(f"{who}: {error}. The ranks run different versions") from None
        if (there.rank, there.group) != (peer, ours):
            raise BootstrapError(
                f"{who}: it has (rank, {', '.join(ours)}) = {(there.rank, *there.group.values())}, "
                f"{(peer, *ours.values())} were expected. Start all ranks with the same settings"
            )
        self._check(who, peer, there)
        return there

    def _connect(self, peer: int, there: AddressT) -> None:
        common = min(len(self._rails), len(there.rails))
        self._before_connecting(peer, common)
        said = []
        for index in range(common):
            self.state.use_keys(
                self._links(peer, index), words.HOST_KEYS, self._rails[index].region.local, there.rails[index].keys
            )
            said.append(self._connect_rail(peer, index, there))
        record = self.state.peers[peer]
        record[words.TARGET], record[words.COMMON_RAILS] = there.window, common
        record[words.STATE] = words.UP
        count = f"{common} rails, " if common > 1 else ""
        self._how[peer] = f"{self.name}, {count}{'; '.join(said)}"

    # --- windows in device memory -----------------------------------------------------------------------------------

    def offer_device(self, start: int, nbytes: int, export: Export) -> bytes:
        """See :class:`..base.DeviceReach`."""
        # what a NIC reads of its own peers do not: their queue pairs have no right to read
        access = ACCESS | (codes.ACCESS_REMOTE_READ if self._reads else 0)
        keys = tuple(rail.register_device(start, nbytes, export, access) for rail in self._rails)
        self._device_bytes = nbytes
        if self._reads:
            self._read_back(start, keys)
        self.state.context[words.DEVICE_WINDOW] = start
        return DeviceOffer(start, nbytes, keys).encode()

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
                who = f"rank {self._rank}: the device window of rank {peer} over {self.name} (proxy {self._proxy})"
                raise BootstrapError(f"{who}: {error}. Start all ranks with the same settings") from None
            state.peers[peer, words.DEVICE_TARGET] = offer.start
            for index in range(common):
                own, there = self._rails[index].device_keys, offer.rails[index]
                state.use_keys(self._links(peer, index), words.DEVICE_KEYS, own, there)
        # The last word of all: with it the data path looks at the others.
        state.context[words.SPLIT] = self._device_bytes

    def device_way(self) -> str:
        """See :class:`..base.DeviceReach`."""
        return " and ".join(dict.fromkeys(rail.device_way for rail in self._rails))

    @property
    def fence(self) -> int:
        """See :class:`..base.DeviceReach`."""
        return 0 if self._fence is None else int(self._fence.ctypes.data)

    def _read_back(self, start: int, keys: Sequence[KeyTable]) -> None:
        """Make :attr:`fence` a read of the device memory at ``start`` by each NIC, with its key for peers in ``keys``.
        Raises TransportError."""
        raise TransportError(f"UCCL_EP_NIC_FLUSH=read: {self.name} has no such flush. Next step: unset it")

    def release_host(self) -> None:
        """See :class:`..base.DeviceReach`."""
        for rail in self._rails:
            rail.release_host()

    def release_device(self) -> None:
        """See :class:`..base.DeviceReach`."""
        if self._state is not None:
            self._state.context[words.SPLIT] = 0
        for rail in self._rails:
            rail.release_device()

    # --- failures, and the end --------------------------------------------------------------------------------------

    def describe(self, peer: int) -> str:
        """How ``peer`` is reached and, once it is lost, what its NIC said and what that usually means."""
        record = self.state.peers[peer]
        status, vendor = int(record[words.LOST_STATUS]), int(record[words.LOST_VENDOR])
        if not status:
            return self._how[peer]
        return f"{self._how[peer]}; {self._where(peer)}{self._explain(status, vendor)}{self._reports(peer)}"

    def look(self) -> None:
        """See :class:`..base.Diagnosed`."""
        for index, rail in enumerate(self._rails):
            if self._state is not None and rail.context.is_lost():
                self._state.rails[index, words.POLL_CQ] = _POLL_LOST

    def diagnosis(self) -> str:
        """See :class:`..base.Diagnosed`."""
        broken, status, vendor = (
            int(self.state.context[word]) for word in (words.BROKEN_RAIL, words.BROKEN_STATUS, words.BROKEN_VENDOR)
        )
        if not broken:
            return ""
        rail = self._rails[broken - 1]
        what = self.refused_call.format(status=status)
        if status > 0:
            what = f"a work request failed: {self._explain(status, vendor)}"
        return f"{rail.device}: {what}{one_device_reports(rail)}"

    def close(self) -> None:
        """Close queue pairs, registrations and devices, in that order. Never raises, may be called twice."""
        if self._state is not None:
            self._detach()
        for rail in self._rails:
            rail.close()


def one_device_reports(rail: Rail) -> str:
    """What a NIC has reported of itself, to be put behind a message."""
    reports = ", ".join(rail.context.reports())
    return f"; the device has reported: {reports}" if reports else ""
