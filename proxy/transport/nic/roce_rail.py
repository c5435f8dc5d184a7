"""One NIC of a ``roce`` endpoint: its share of the work, its credit words and the queue pairs on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from ....config import Settings
from ....errors import TransportError
from ....protocol.command import MAX_WRITE_BYTES
from ..verbs import codes
from ..verbs.library import VerbsLibrary
from ..verbs.objects import MemoryRegion, Path, QueuePair
from . import roce_words as rc
from . import words
from .defaults import Family, family_of
from .endpoint import NicAddress, Rail, RailAddress

_POST_RECV = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
#: An InfiniBand or Ethernet path MTU of 4096, as verbs counts them.
_LARGEST_MTU = 5
#: Work requests and receives of all queue pairs of an endpoint on a NIC: to stay within it, queues that are not short
#: already are shortened. Broadcom's NICs are reported to make no more queue pairs once their queues together pass a
#: limit that they do not tell.
_REQUESTS = 1 << 16
#: Least bytes in flight that sharing a NIC leaves to an endpoint.
_LEAST_SHARE = 64 << 10


class RoceRailAddress(RailAddress, frozen=True):
    """One NIC of an endpoint.

    Attributes:
        lid: of its port.
        mtu: of its path, the verbs number.
        credit_key: rkey of the credit words.
        numbers: by rank, the queue pairs that wait for it.
    """

    lid: int
    mtu: int
    credit_key: int
    numbers: dict[int, tuple[int, ...]]


class RoceAddress(NicAddress, frozen=True, tag="roce 2"):
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

    def enter(self, state: rc.RoceMemory, index: int, byte_limit: int) -> None:
        """Tell the data path about this NIC, rail ``index``, and register the credit words with it."""
        self._index, self._state = index, state
        access = codes.ACCESS_LOCAL_WRITE | codes.ACCESS_REMOTE_WRITE
        self._credits = MemoryRegion(self.pd, state.credits_in.ctypes.data, state.credit_bytes, access)
        state.fill(
            state.rails[index],
            {
                words.POLL_CQ: self.context.operation("poll_cq"),
                words.POST_RECV: self.context.operation("post_recv"),
                words.CQ: self.cq.address,
                rc.POST_SEND: self.context.operation("post_send"),
                rc.CREDIT_LKEY: self._credits.lkey,
                rc.BYTE_LIMIT: byte_limit,
            },
        )

    def add_link(self, peer: int, place: int, sends: int, receives: int) -> None:
        """Make queue pair ``place`` to ``peer``, in state INIT, with all its receives posted. Raises TransportError."""
        link = QueuePair(self.pd, self.cq, send_depth=sends, receive_depth=receives)
        link.initialise(self.port.number)
        self.links.setdefault(peer, []).append(link)
        state = self._state
        chain = state.add_link(peer, self._index, place, link.address)
        bad = int(state.context[rc.BAD])
        post_recv = _POST_RECV(int(state.rails[self._index, words.POST_RECV]))
        for _ in range(receives // rc.RECEIVE_BATCH):
            status = post_recv(link.address, chain, bad)
            if status:
                raise link.library.refused("post_recv", abs(status), self.device, "posting receives")
        record = state.links[state.link_index(peer, self._index, place)]
        record[rc.POSTED_RECEIVES] = record[rc.GRANTED] = receives

    def address(self) -> RoceRailAddress:
        """What peers need to connect to this NIC."""
        numbers = {peer: tuple(link.number for link in links) for peer, links in self.links.items()}
        return RoceRailAddress(
            self.gid.raw, self.region.remote, self.port.lid, self.port.mtu, self._credits.rkey, numbers
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
        numbers = there.numbers[rank]
        for place, link in enumerate(self.links[peer]):
            look()
            link.connect(path, numbers[place], f"connecting {self.gid} to rank {peer}")
            index = state.link_index(peer, self._index, place)
            record = state.links[index]
            state.credits_out[index] = record[rc.GRANTED]
            record[rc.CREDIT_TARGET], record[rc.CREDIT_RKEY] = credits + 8 * place, there.credit_key
        own = ",".join(str(link.number) for link in self.links[peer])
        return (
            f"{self.device} port {self.port.number}, {self.gid}, queue pair {own} to "
            f"{','.join(map(str, numbers))}, TC {path.traffic_class}, SL {path.service_level}"
        )

    def leave_out(self, peer: int) -> None:
        """The peer has no such rail: nothing will go this way."""
        for place, link in enumerate(self.links.pop(peer, ())):
            self._state.links[self._state.link_index(peer, self._index, place), rc.QP] = 0
            link.close()
