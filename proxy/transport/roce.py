"""``roce``: one-sided writes over reliable connections of any RDMA NIC that has them. Control path of the endpoint.

One device, one completion queue and, per peer, one queue pair (or UCCL_EP_NIC_QPS of them) for each proxy thread. The
pieces: :mod:`.verbs` and :mod:`.verbs_qp` are the C objects, :mod:`.verbs_gid` chooses the address,
:mod:`.verbs_families` has the defaults, :mod:`.roce_data` moves the bytes on the memory of :mod:`.roce_state`. What a
NIC is called plays no part: it needs reliable connections and RDMA writes with immediates, as Broadcom, Mellanox,
Pensando, Intel and soft-RoCE devices have.

A peer can write the window and one credit word per link, nothing else; once it is lost or dropped, not even those.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ...config import Settings
from ...errors import BootstrapError, ConfigError, TransportError
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.imm import IMM
from . import roce_state as words
from . import verbs_codes as codes
from .base import Capabilities, DataPath
from .roce_data import warm
from .verbs import CompletionQueue, Context, MemoryRegion, Port, ProtectionDomain, open_device
from .verbs_families import Family, family_of
from .verbs_gid import choose_gid
from .verbs_library import VerbsLibrary, load_libibverbs
from .verbs_memory import DmaBuf, register_window
from .verbs_qp import Path, QueuePair

__all__ = ["RoceEndpoint", "usable", "warm"]

_MAGIC = b"UER1"
#: magic, rank, ranks, proxy, links, chunk shift, chunks, MTU, LID, receives, window address, window bytes, address and
#: key of the credit words, GID; then the chunks' keys, then (rank, number) of every queue pair.
_ADDRESS = struct.Struct("<4sHHHHHHHHIQQQI16s")
_KEY = struct.Struct("<I")
_NUMBER = struct.Struct("<HI")
_POST_RECV = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
#: An InfiniBand or Ethernet path MTU of 4096, as verbs counts them.
_LARGEST_MTU = 5


@dataclass(frozen=True, slots=True)
class _PeerAddress:
    """What a peer's address says, checked."""

    shift: int
    keys: tuple[int, ...]
    mtu: int
    lid: int
    receives: int
    window: int
    credits: int
    credit_key: int
    gid: bytes
    numbers: tuple[int, ...]


class RoceEndpoint:
    """Endpoint of one proxy thread over one port of an RDMA device.

    Args:
        rank, ranks, proxy: who this is; peers' endpoints of the same ``proxy`` connect to each other.
        window: address of this rank's window, the only memory of the user that peers write.
        window_bytes: its length, equal on all ranks.
        peers: ranks that will be connected; both ends must name each other.
        settings: the ``nic_*`` settings are used.
        device, port: the NIC.
        kind: kind of the window: "shared", "host" or "device".
        sharers: endpoints of this host that use the NIC, among which its bytes in flight are divided.
        export: makes a dma-buf of a range of device memory, see :func:`.verbs_memory.register_window`.
        max_write: longest write, bytes, where it should be less than the NIC can do.
        library: where the C functions come from; default: libibverbs.

    Raises:
        ConfigError: there is no such device, GID or port, or a setting contradicts it.
        TransportError: the library, the device or the kernel refused something; nothing is left open.
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
        device: str,
        port: int = 1,
        kind: str = "shared",
        sharers: int = 1,
        export: Callable[[int, int], DmaBuf] | None = None,
        max_write: int = MAX_WRITE_BYTES,
        library: VerbsLibrary | None = None,
    ) -> None:
        if rank in peers or any(not 0 <= peer < ranks for peer in peers):
            raise ConfigError(f"roce of rank {rank}: peers {sorted(peers)} of {ranks} ranks")
        self._rank, self._ranks, self._proxy, self._qps = rank, ranks, proxy, settings.nic_qps
        self._window_bytes, self._settings, self._library = window_bytes, settings, library or load_libibverbs()
        self._peers = sorted(peers)
        self._how = ["not connected"] * ranks
        self._context: Context = open_device(self._library, device)
        try:
            self._open(window, port, kind, sharers, export, max_write)
        except BaseException:
            self._context.close()
            raise

    def _open(
        self,
        window: int,
        port_number: int,
        kind: str,
        sharers: int,
        export: Callable[[int, int], DmaBuf] | None,
        max_write: int,
    ) -> None:
        """Everything but the connections."""
        context, settings = self._context, self._settings
        self._port = self._usable_port(port_number)
        self._family: Family = family_of(context.limits.vendor)
        self._gid, self._gid_reason = choose_gid(
            context.gids(port_number), self._port.link_layer, index=settings.nic_gid_index, device=context.device
        )
        sends, receives, entries = self._depths()
        self._pd = ProtectionDomain(context)
        self._cq = CompletionQueue(context, entries)
        region = register_window(self._pd, window, self._window_bytes, kind, export, overlap=MAX_WRITE_BYTES)
        self._shift, self._keys = region.shift, [chunk.rkey for chunk in region.regions]
        self._state = state = words.State(
            ranks=self._ranks,
            qps=self._qps,
            window=window,
            window_bytes=self._window_bytes,
            sends=sends,
            receives=receives,
        )
        access = codes.ACCESS_LOCAL_WRITE | codes.ACCESS_REMOTE_WRITE
        self._credits = MemoryRegion(self._pd, state.credits_in.ctypes.data, state.credit_bytes, access)
        for word, value in {
            words.SHIFT: self._shift,
            words.LKEYS: state.keep([chunk.lkey for chunk in [*region.regions, region.regions[-1]]]),
            words.CREDIT_LKEY: self._credits.lkey,
            words.POLL_CQ: context.operation("poll_cq"),
            words.POST_SEND: context.operation("post_send"),
            words.POST_RECV: context.operation("post_recv"),
            words.MODIFY_QP: self._library.address("ibv_modify_qp"),
        }.items():
            state.context[word] = value
        post, flush, poll, drop = warm()
        self._data_path = DataPath(state.address, post=post, flush=flush, poll=poll, drop=drop)
        self._links: dict[int, list[QueuePair]] = {}
        inline = codes.SEND_INLINE
        for peer in self._peers:
            self._links[peer] = [self._add_link(peer, place, sends, receives) for place in range(self._qps)]
            if any(link.inline < 8 for link in self._links[peer]):
                inline = 0
        state.context[words.INLINE] = inline
        state.context[words.CQ] = self._cq.address
        share = (settings.nic_bytes_in_flight or self._family.bytes_in_flight) // max(sharers, 1)
        self._capabilities = Capabilities(
            name="roce",
            ordered=self._qps == 1,
            proves_source=True,
            memory_kinds=("shared", "host", "device"),
            immediate_bits=IMM.bits,
            max_write=min(max_write, self._port.max_message or MAX_WRITE_BYTES, MAX_WRITE_BYTES),
            bytes_in_flight=max(share, 1 << 16),
        )

    def _usable_port(self, number: int) -> Port:
        device = self._context.device
        if not 1 <= number <= self._context.limits.ports:
            raise ConfigError(f"{device} has ports 1..{self._context.limits.ports}, not {number}")
        port = self._context.port(number)
        if port.state != codes.PORT_ACTIVE:
            raise TransportError(
                f"{device}: port {number} is not active (state {port.state}); check its cable, bring its interface up",
                device=device,
            )
        return port

    def _depths(self) -> tuple[int, int, int]:
        """Work requests and receives per link, and entries of the CQ that hold all of them at once."""
        limits, links = self._context.limits, max(len(self._peers) * self._qps, 1)
        sends = min(words.LINK_SENDS, limits.max_qp_wr)
        receives = min(words.LINK_RECEIVES, limits.max_qp_wr)
        while links * (sends + receives) > limits.max_cqe:
            sends, receives = sends // 2, receives // 2
            if receives < 2 * words.RECEIVE_BATCH:
                raise TransportError(
                    f"{self._context.device}: its completion queues have {limits.max_cqe} entries, too few for {links} "
                    "connections of one proxy. Lower UCCL_EP_NIC_QPS",
                    device=self._context.device,
                )
        # Receives are posted in whole batches.
        receives = receives // words.RECEIVE_BATCH * words.RECEIVE_BATCH
        return sends, receives, links * (sends + receives)

    def _add_link(self, peer: int, place: int, sends: int, receives: int) -> QueuePair:
        """A queue pair in state INIT with all its receives posted."""
        link = QueuePair(self._pd, self._cq, send_depth=sends, receive_depth=receives, inline=8)
        link.initialise(self._port.number)
        index = peer * self._qps + place
        chain = self._state.add_link(index, peer, link.address)
        bad = int(self._state.context[words.BAD])
        post_recv = _POST_RECV(int(self._state.context[words.POST_RECV]))
        for _ in range(receives // words.RECEIVE_BATCH):
            status = post_recv(link.address, chain, bad)
            if status:
                raise self._library.refused("post_recv", abs(status), self._context.device, "posting receives")
        self._state.links[index, words.POSTED_RECEIVES] = self._state.links[index, words.GRANTED] = receives
        return link

    @property
    def capabilities(self) -> Capabilities:
        """In order with one queue pair per peer; the queue pair proves the source."""
        return self._capabilities

    def address(self) -> bytes:
        """GID, keys and queue pair numbers of this endpoint."""
        head = _ADDRESS.pack(
            _MAGIC,
            self._rank,
            self._ranks,
            self._proxy,
            self._qps,
            self._shift,
            len(self._keys),
            self._port.mtu,
            self._port.lid,
            int(self._state.context[words.RECEIVE_SLOTS]),
            int(self._state.context[words.WINDOW]),
            self._window_bytes,
            int(self._state.credits_in.ctypes.data),
            self._credits.rkey,
            self._gid.raw,
        )
        keys = b"".join(_KEY.pack(key) for key in self._keys)
        return (
            head
            + keys
            + b"".join(_NUMBER.pack(peer, link.number) for peer, links in self._links.items() for link in links)
        )

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Connect the queue pairs to every peer whose entry is not None; never waits for a peer.

        Nothing may be posted before all peers have returned from theirs: a queue pair that is not connected yet
        answers nothing. :meth:`established` says that this is so.

        Raises:
            BootstrapError: a peer's address is malformed, or it sees another group.
            TransportError: the NIC or the kernel refused the connection, for example without a route to the peer.
        """
        for peer, address in enumerate(addresses):
            if address is not None and peer != self._rank:
                self._connect(peer, self._parse(peer, address))

    def _parse(self, peer: int, address: bytes) -> _PeerAddress:
        who = f"rank {self._rank} connects to rank {peer} over roce (proxy {self._proxy})"
        if peer not in self._links:
            raise BootstrapError(f"{who}: it was not among the peers for which queue pairs were made")
        try:
            magic, *theirs, shift, chunks, mtu, lid, receives, window, nbytes, credits, key, gid = _ADDRESS.unpack_from(
                address
            )
            if magic != _MAGIC:
                raise struct.error("another kind of address")
            keys = tuple(_KEY.unpack_from(address, _ADDRESS.size + i * _KEY.size)[0] for i in range(chunks))
            rest = address[_ADDRESS.size + chunks * _KEY.size :]
            numbers = tuple(number for rank, number in _NUMBER.iter_unpack(rest) if rank == self._rank)
        except struct.error as error:
            raise BootstrapError(f"{who}: {address[:16]!r} is not the address of a roce endpoint ({error})") from None
        ours = [peer, self._ranks, self._proxy, self._qps, self._window_bytes]
        if [*theirs, nbytes] != ours:
            raise BootstrapError(
                f"{who}: it has [rank, ranks, proxy, queue pairs, window bytes] = {[*theirs, nbytes]}, {ours} were "
                "expected. Start all ranks with the same settings"
            )
        if len(numbers) != self._qps or chunks << min(shift, 40) < nbytes or not 0 < receives <= words.LINK_RECEIVES:
            raise BootstrapError(
                f"{who}: its {len(numbers)} queue pairs, {chunks} keys and {receives} receives cannot serve"
            )
        return _PeerAddress(
            shift, keys, min(mtu, self._port.mtu, _LARGEST_MTU), lid, receives, window, credits, key, gid, numbers
        )

    def _connect(self, peer: int, there: _PeerAddress) -> None:
        settings, state = self._settings, self._state
        traffic, level = settings.nic_traffic_class, settings.nic_service_level
        path = Path(
            port=self._port.number,
            gid_index=self._gid.index,
            gid=there.gid,
            lid=there.lid,
            mtu=there.mtu,
            # On Ethernet always; on InfiniBand only the routed header carries the GID, and one subnet needs none.
            routed=self._port.link_layer == codes.LINK_ETHERNET,
            traffic_class=self._family.traffic_class if traffic < 0 else traffic,
            service_level=self._family.service_level if level < 0 else level,
            timeout=settings.nic_timeout,
            retries=self._family.retries,
        )
        for place, link in enumerate(self._links[peer]):
            link.connect(path, there.numbers[place], f"connecting {self._gid} to rank {peer}")
            index = peer * self._qps + place
            record = state.links[index]
            record[words.ALLOWED] = there.receives
            state.credits_in[index] = there.receives
            state.credits_out[index] = record[words.GRANTED]
            record[words.CREDIT_TARGET] = there.credits + 8 * (self._rank * self._qps + place)
            record[words.CREDIT_RKEY] = there.credit_key
        record = state.peers[peer]
        record[words.TARGET] = there.window
        # Once more the last key: an empty write may stand at the very end of the window.
        record[words.RKEYS] = state.keep([*there.keys, there.keys[-1]])
        record[words.TARGET_SHIFT] = there.shift
        record[words.STATE] = words.UP
        numbers = ",".join(str(link.number) for link in self._links[peer])
        self._how[peer] = (
            f"roce, {self._context.device} port {self._port.number}, {self._gid}, queue pair {numbers} to "
            f"{','.join(map(str, there.numbers))}, TC {path.traffic_class}, SL {path.service_level}"
        )

    def established(self) -> None:
        """Every peer has returned from ``connect``: from now on a peer that does not answer is lost."""
        self._state.context[words.WATCHING] = 1

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""
        return self._data_path

    def describe(self, peer: int) -> str:
        """How ``peer`` is reached and, once it failed, what its NIC's completion said and usually means."""
        status, vendor = (int(self._state.peers[peer, word]) for word in (words.STATUS, words.VENDOR))
        if status > 0:
            return f"{self._how[peer]}; {codes.completion_words(status, vendor)}"
        if status < 0:
            return f"{self._how[peer]}; the NIC's driver refused a work request with errno {-status}"
        return self._how[peer]

    def close(self) -> None:
        """Destroy queue pairs, queues and regions, in this order, and close the device."""
        self._state.detach()
        with contextlib.suppress(AttributeError):
            self._context.close()


def usable(device: str, library: VerbsLibrary | None = None) -> str:
    """Open ``device`` for a moment and say what it is, in words.

    Raises:
        ConfigError: there is no such device.
        TransportError: it cannot be used; says why.
    """
    with open_device(library or load_libibverbs(), device) as context:
        limits = context.limits
        firmware = f", firmware {limits.firmware}" if limits.firmware else ""
        return f"{family_of(limits.vendor).name} ({limits.vendor:#06x}:{limits.part}){firmware}"
