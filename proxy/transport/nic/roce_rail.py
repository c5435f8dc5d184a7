"""One NIC of a ``roce`` endpoint: its port and address, its queues and regions, and the queue pairs on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from ....config import Settings
from ....errors import ConfigError, TransportError
from ....protocol.command import MAX_WRITE_BYTES
from ..verbs import codes
from ..verbs.device import CompletionQueue, Context, MemoryRegion, Port, ProtectionDomain, open_device
from ..verbs.library import VerbsLibrary
from ..verbs.objects import Path, QueuePair
from . import roce_words as words
from .families import Family, family_of
from .gid import Gid, choose_gid
from .roce_address import RailAddress
from .window import DmaBuf, KeyTable, WindowRegion, register_window

__all__ = ["NicPort", "RoceRail"]

_POST_RECV = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
#: An InfiniBand or Ethernet path MTU of 4096, as verbs counts them.
_LARGEST_MTU = 5
#: Work requests and receives of all queue pairs of an endpoint on a NIC: to stay within it, queues that are not short
#: already are shortened. Broadcom's NICs are reported to make no more queue pairs once their queues together pass a
#: limit that they do not tell.
_REQUESTS = 1 << 16
#: Least bytes in flight that sharing a NIC leaves to an endpoint.
_LEAST_SHARE = 64 << 10


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


class RoceRail:
    """An open NIC. :meth:`furnish` makes what the data path needs; :meth:`close` ends all of it.

    Args:
        library: where the C functions come from.
        nic: which NIC.
        settings: the ``nic_*`` settings are used.

    Attributes:
        context, port, family, gid: of the NIC; ``gid_reason`` says in words why it is that one.

    Raises:
        ConfigError: there is no such device, port or GID.
        TransportError: the device cannot be used; says why. Nothing is left open.
    """

    def __init__(self, library: VerbsLibrary, nic: NicPort, settings: Settings) -> None:
        self.nic = nic
        self._settings = settings
        self.links: dict[int, list[QueuePair]] = {}
        self.device_window: WindowRegion | None = None
        self.context: Context = open_device(library, nic.device)
        try:
            self.port: Port = self._usable_port()
            self.family: Family = family_of(self.context.limits.vendor)
            gids = self.context.gids(nic.port)
            self.gid: Gid
            self.gid, self.gid_reason = choose_gid(
                gids, self.port.link_layer, index=settings.nic_gid_index, device=nic.device
            )
        except BaseException:
            self.context.close()
            raise

    def _usable_port(self) -> Port:
        device, number = self.nic.device, self.nic.port
        if not 1 <= number <= self.context.limits.ports:
            raise ConfigError(f"{device} has ports 1..{self.context.limits.ports}, not {number}")
        port = self.context.port(number)
        if port.state != codes.PORT_ACTIVE:
            raise TransportError(
                f"{device}: port {number} is not active (state {port.state}); check its cable, bring its interface up",
                device=device,
            )
        return port

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
        return max(most // max(self.nic.sharers, 1), _LEAST_SHARE)

    @property
    def max_message(self) -> int:
        """Longest write, bytes."""
        return min(self.port.max_message or MAX_WRITE_BYTES, MAX_WRITE_BYTES)

    def depths(self, links: int) -> tuple[int, int]:
        """Work requests and receives that each of ``links`` queue pairs can have. Raises TransportError."""
        limits = self.context.limits
        sends = min(words.LINK_SENDS, limits.max_qp_wr)
        receives = min(words.LINK_RECEIVES, limits.max_qp_wr)
        while links * (sends + receives) > limits.max_cqe or (
            links * (sends + receives) > _REQUESTS and receives > words.SHORT_RECEIVES
        ):
            sends, receives = sends // 2, receives // 2
            if receives < 2 * words.RECEIVE_BATCH:
                raise TransportError(
                    f"{self.nic.device}: its completion queues have {limits.max_cqe} entries, too few for {links} "
                    "connections of one proxy. Lower UCCL_EP_NIC_QPS",
                    device=self.nic.device,
                )
        # Receives are posted in whole batches.
        return sends, receives // words.RECEIVE_BATCH * words.RECEIVE_BATCH

    def furnish(
        self,
        entries: int,
        *,
        window: int,
        window_bytes: int,
        kind: str,
        export: Callable[[int, int], DmaBuf] | None,
    ) -> None:
        """Make a completion queue of ``entries`` entries and register the window. Raises TransportError."""
        self._pd = ProtectionDomain(self.context)
        self._cq = CompletionQueue(self.context, entries)
        self.region = register_window(self._pd, window, window_bytes, kind, export, overlap=MAX_WRITE_BYTES)

    def enter(self, state: words.State, index: int, byte_limit: int) -> None:
        """Tell the data path about this NIC, rail ``index``, and register the credit words with it."""
        self._index, self._state = index, state
        access = codes.ACCESS_LOCAL_WRITE | codes.ACCESS_REMOTE_WRITE
        self._credits = MemoryRegion(self._pd, state.credits_in.ctypes.data, state.credit_bytes, access)
        self._local_keys = state.keep(self.region.local.words)
        for word, value in {
            words.POLL_CQ: self.context.operation("poll_cq"),
            words.POST_SEND: self.context.operation("post_send"),
            words.POST_RECV: self.context.operation("post_recv"),
            words.CREDIT_LKEY: self._credits.lkey,
            words.BYTE_LIMIT: byte_limit,
            words.CQ: self._cq.address,
        }.items():
            state.rails[index, word] = value

    def add_link(self, peer: int, place: int, sends: int, receives: int) -> None:
        """Make queue pair ``place`` to ``peer``, in state INIT, with all its receives posted. Raises TransportError."""
        link = QueuePair(self._pd, self._cq, send_depth=sends, receive_depth=receives)
        link.initialise(self.port.number)
        self.links.setdefault(peer, []).append(link)
        state = self._state
        chain = state.add_link(peer, self._index, place, link.address)
        bad = int(state.context[words.BAD])
        post_recv = _POST_RECV(int(state.rails[self._index, words.POST_RECV]))
        for _ in range(receives // words.RECEIVE_BATCH):
            status = post_recv(link.address, chain, bad)
            if status:
                raise link.library.refused("post_recv", abs(status), self.nic.device, "posting receives")
        record = state.links[state.link_index(peer, self._index, place)]
        record[words.POSTED_RECEIVES] = record[words.GRANTED] = receives

    def address(self) -> RailAddress:
        """What peers need to connect to this NIC."""
        numbers = {peer: tuple(link.number for link in links) for peer, links in self.links.items()}
        return RailAddress(self.gid.raw, self.port.lid, self.port.mtu, self.region.remote, self._credits.rkey, numbers)

    def connect(self, peer: int, rank: int, there: RailAddress, credits: int, look: Callable[[], None]) -> str:
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
        path = Path(
            port=self.port.number,
            gid_index=self.gid.index,
            gid=there.gid,
            lid=there.lid,
            mtu=min(there.mtu, self.port.mtu, _LARGEST_MTU),
            # On Ethernet always; on InfiniBand only the routed header carries the GID, and one subnet needs none.
            routed=self.port.link_layer == codes.LINK_ETHERNET,
            traffic_class=self.family.traffic_class if traffic < 0 else traffic,
            service_level=self.family.service_level if level < 0 else level,
            timeout=settings.nic_timeout,
            retries=self.family.retries,
        )
        numbers, remote_keys = there.numbers[rank], state.keep(there.keys.words)
        for place, link in enumerate(self.links[peer]):
            look()
            link.connect(path, numbers[place], f"connecting {self.gid} to rank {peer}")
            index = state.link_index(peer, self._index, place)
            record = state.links[index]
            state.credits_out[index] = record[words.GRANTED]
            record[words.CREDIT_TARGET] = credits + 8 * place
            record[words.CREDIT_RKEY] = there.credit_key
            record[words.SHIFT], record[words.LKEYS] = self.region.shift, self._local_keys
            record[words.TARGET_SHIFT], record[words.RKEYS] = there.keys.shift, remote_keys
        own = ",".join(str(link.number) for link in self.links[peer])
        return (
            f"{self.nic.device} port {self.port.number}, {self.gid}, queue pair {own} to "
            f"{','.join(map(str, numbers))}, TC {path.traffic_class}, SL {path.service_level}"
        )

    def leave_out(self, peer: int) -> None:
        """The peer has no such rail: nothing will go this way."""
        for place, link in enumerate(self.links.pop(peer, ())):
            self._state.links[self._state.link_index(peer, self._index, place), words.QP] = 0
            link.close()

    def register_device(self, start: int, nbytes: int, export: Callable[[int, int], tuple[int, int]]) -> WindowRegion:
        """Register device memory beside the window. Raises TransportError."""
        self.device_window = register_window(
            self._pd, start, nbytes, "device", lambda *part: DmaBuf(*export(*part)), overlap=MAX_WRITE_BYTES
        )
        return self.device_window

    def use_device(self, peer: int, there: KeyTable) -> None:
        """Tell the links to ``peer`` the keys of the device memory at both ends."""
        assert self.device_window is not None
        state, own = self._state, self.device_window.local
        local, remote = state.keep(own.words), state.keep(there.words)
        for place in range(len(self.links[peer])):
            record = state.links[state.link_index(peer, self._index, place)]
            record[words.DEVICE_SHIFT], record[words.DEVICE_LKEYS] = own.shift, local
            record[words.DEVICE_TARGET_SHIFT], record[words.DEVICE_RKEYS] = there.shift, remote

    def release_device(self) -> None:
        """Take the keys of the device memory back."""
        if self.device_window is not None:
            self.device_window.close()
            self.device_window = None

    def close(self) -> None:
        """Destroy queue pairs, queues and regions, in this order, and close the device."""
        self.context.close()
