"""``tcp``: one-sided writes as frames over several TCP connections per peer. Control path of the endpoint.

The pieces: :mod:`.tcp_connect` finds the peers and :mod:`.tcp_mend` finds them again when a connection breaks, both by
:mod:`.tcp_talks`; :mod:`uccl_ep_serving.protocol.handshake` proves who they are; :mod:`.tcp_data` moves frames,
:mod:`.tcp_link` on each connection, in the memory of :mod:`.tcp_words`; :mod:`.tcp_auth` makes their MACs, and
:mod:`uccl_ep_serving.protocol.frame` says what is on the wire. The job's secret authenticates connections. What travels
over them is not encrypted, and only with ``UCCL_EP_TCP_AUTH`` is it authenticated: without, the network between the
hosts of a job must be trusted not to alter traffic, as RDMA networks are.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...config import Settings
from ...errors import BootstrapError, ConfigError, TransportError
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.frame import FRAME_BYTES, SEAL_BYTES, decode_address, encode_address
from ...protocol.handshake import Identity, Proven
from ...protocol.listener import PortsTaken, listen, ports_needed
from ...protocol.talks import Key
from . import tcp_auth
from . import tcp_words as tcp
from .base import Capabilities, DataPath, refused
from .tcp_connect import Met, meet
from .tcp_data import FUNCTIONS
from .tcp_link import take_over
from .tcp_mend import Mender

#: HMAC-SHA256 keys shorter than this could be guessed from one recorded handshake.
MIN_SECRET_BYTES = 16


class _State:
    """Allocates and holds all of it for one endpoint; freed with the object.

    Raises ConfigError where frames shall carry MACs and there is no libcrypto.
    """

    def __init__(self, *, ranks: int, connections: int, window: int, window_bytes: int, auth: bool) -> None:
        links = ranks * connections
        self.context = np.zeros(tcp.CONTEXT_WORDS, np.int64)
        self.links = np.zeros((links, tcp.LINK_WORDS), np.int64)
        self.peers = np.zeros((ranks, tcp.PEER_WORDS), np.int64)
        self._auth = tcp_auth.functions() if auth else None
        #: By link: its queue; where frames carry MACs the payload that is held back, and the two keys.
        self._queues: dict[int, npt.NDArray[np.int64]] = {}
        self._held: dict[int, npt.NDArray[np.int64]] = {}
        self._keys: dict[int, tuple[tcp_auth.Key, tcp_auth.Key]] = {}
        self._events = np.zeros(tcp.EVENT_SLOTS * 4, np.int64)
        self._ready = np.zeros(max(links, 1), np.int64)
        self._staging = np.zeros(tcp.STAGING_BYTES // 8, np.int64)
        self._vectors = np.zeros((2 * tcp.GATHER_FRAMES + 1) * tcp.IOVEC_WORDS, np.int64)
        self._message = np.zeros(tcp.MSGHDR_WORDS, np.int64)
        self._waiting = np.zeros(tcp.WAITING_SLOTS * 2, np.int64)
        self._message[2] = self._vectors.ctypes.data
        self.links[:, tcp.FD] = -1
        self.links[:, tcp.PEER] = np.repeat(np.arange(ranks), connections)
        for word, value in {
            tcp.WINDOW: window,
            tcp.WINDOW_BYTES: window_bytes,
            tcp.RANKS: ranks,
            tcp.CONNECTIONS: connections,
            tcp.LINKS: self.links.ctypes.data,
            tcp.PEERS: self.peers.ctypes.data,
            tcp.EPOLL: -1,
            tcp.EVENTS: self._events.ctypes.data,
            tcp.READY: self._ready.ctypes.data,
            tcp.STAGING: self._staging.ctypes.data,
            tcp.VECTORS: self._vectors.ctypes.data,
            tcp.MESSAGE: self._message.ctypes.data,
            tcp.WAITING: self._waiting.ctypes.data,
            tcp.BELL: -1,
            tcp.HEADER_BYTES: FRAME_BYTES + (SEAL_BYTES if auth else 0),
            tcp.AUTH: 0 if self._auth is None else self._auth.ctypes.data,
        }.items():
            self.context[word] = value

    @property
    def address(self) -> int:
        """Address of the context."""
        return int(self.context.ctypes.data)

    def attach(self, link: int, fd: int, proven: Proven) -> None:
        """Give connection ``link`` its non-blocking socket; its peer is up from now on. Raises OSError."""
        queue = np.zeros((tcp.QUEUE_SLOTS + 1) * tcp.FRAME_SLOT_BYTES // 8, np.int64)
        self._queues[link] = queue
        record = self.links[link]
        record[tcp.QUEUE] = queue.ctypes.data
        if self._auth is not None:
            self._held[link] = np.zeros(tcp_auth.MAX_SEALED_BYTES // 8, np.int64)
            self._keys[link] = tcp_auth.Key(), tcp_auth.Key()
            record[tcp.HELD] = self._held[link].ctypes.data
            record[tcp.SEND_KEY], record[tcp.RECEIVE_KEY] = (key.address for key in self._keys[link])
        self.set_keys(link, proven)
        status = take_over(self.address, link, fd, 0)
        if status < 0:
            raise OSError(-status, os.strerror(-status))
        self.peers[int(record[tcp.PEER]), tcp.STANDING] = tcp.PRESENT

    def set_keys(self, link: int, proven: Proven) -> None:
        """Have MACs of connection ``link`` be made with the keys of a handshake; nothing where there are none."""
        if self._auth is not None:
            for key, value in zip(self._keys[link], (proven.send_key, proven.receive_key), strict=True):
                tcp_auth.set_key(key.address, value)

    def detach(self) -> None:
        """Forget all sockets: posts are refused and polls find nothing from here on."""
        self.links[:, tcp.FD] = -1
        self.links[:, tcp.STATE] = tcp.OVER
        self.peers[:, tcp.STANDING] = tcp.DROPPED
        self.context[tcp.EPOLL] = -1
        self.context[tcp.READY_HEAD] = self.context[tcp.READY_TAIL] = 0


class TcpEndpoint:
    """Endpoint of one proxy thread over TCP.

    Args:
        rank, ranks, proxy: who this is; peers' endpoints of the same ``proxy`` connect to each other.
        window: address of this rank's window, the only memory that peers write.
        window_bytes: its length, equal on all ranks.
        secret: the job's secret, at least :data:`MIN_SECRET_BYTES` bytes, equal on all ranks.
        settings: ``tcp_connections``, ``tcp_auth``, ``port_range`` and ``proxies`` are used.
        host: numeric IPv4 or IPv6 address of an interface that peers can reach.
        job: name of the job; a connection of another job is dropped.
        watch: called a few times a second while connecting; raises when a peer will never come.

    Raises:
        ConfigError: the secret is too short, ``host`` is not an address that peers could connect to, or frames shall
            carry MACs and there is no libcrypto.
        TransportError: the operating system refused to listen on ``host``, or no port of the range is free.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        proxy: int,
        *,
        window: int,
        window_bytes: int,
        secret: bytes,
        settings: Settings,
        host: str,
        job: bytes,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"rank {rank}: the job secret has {len(secret)} bytes, {MIN_SECRET_BYTES} are needed")
        self._identity = Identity(rank, ranks, proxy, settings.tcp_connections, window_bytes, job, secret)
        self._state = _State(
            ranks=ranks,
            connections=settings.tcp_connections,
            window=window,
            window_bytes=window_bytes,
            auth=settings.tcp_auth,
        )
        self._max_write = tcp_auth.MAX_SEALED_BYTES if settings.tcp_auth else MAX_WRITE_BYTES
        self._watch = watch
        self._how = ["not connected"] * ranks
        self._descriptors: dict[Key, int] = {}
        self._mender: Mender | None = None
        self._connected = False
        self._epoll: select.epoll | None = None
        self._data_path = DataPath(self._state.address, *FUNCTIONS.addresses)
        self._listener: socket.socket | None = _listen(rank, ranks, host, settings)
        self._address = encode_address(*self._listener.getsockname()[:2])

    @property
    def capabilities(self) -> Capabilities:
        """In order per stream, not between streams on different connections; the connection proves the source."""
        return Capabilities(
            name="tcp",
            proves_source=True,
            max_write=self._max_write,
            in_sequence=True,
            tells_drop=True,
        )

    def address(self) -> bytes:
        """Host and port on which this endpoint listens."""
        return self._address

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Connect to every peer whose entry is not None; both sides prove the job's secret.

        Every endpoint of the group must be in its ``connect`` before the deadline (a ``time.monotonic()`` instant).

        Raises:
            BootstrapError: a peer did not come in time, was refused or refused; it is named. The endpoint is closed.
            TransportError: the operating system refused a socket. The endpoint is closed.
            Whatever ``watch`` raises; the endpoint is closed.
        """
        try:
            self._connect(addresses, deadline)
        except BaseException:
            self.close()
            raise

    def _connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        me = self._identity
        if self._listener is None or self._connected:
            raise BootstrapError(f"rank {me.rank}: this tcp endpoint has been connected or closed already")
        where, sources = {}, set()
        for peer, address in enumerate(addresses):
            if address is None or peer == me.rank:
                continue
            try:
                host_port = decode_address(address)
            except ValueError as error:
                raise BootstrapError(f"rank {me.rank}: address of rank {peer} for tcp: {error}") from None
            where[peer] = host_port
            if peer > me.rank:
                sources.add(peer)
        targets = {peer: place for peer, place in where.items() if peer not in sources}
        links = meet(me, self._listener, targets, frozenset(sources), deadline, self._watch)
        self._connected = True
        _open.add(self)
        try:
            for peer in where:
                self._how[peer] = self._words(peer, [links[peer, number][0] for number in range(me.connections)])
            self._take_over(links)
        except OSError as error:
            raise refused(f"rank {me.rank}: cannot watch its tcp connections", error, "tcp") from None
        finally:
            for connection, _ in links.values():
                connection.close()
        if where:
            self._mender = Mender(
                me,
                self._listener,
                where=where,
                context=self._state.context,
                links=self._state.links,
                descriptors=self._descriptors,
                set_keys=self._state.set_keys,
            )

    def _words(self, peer: int, connections: Sequence[socket.socket]) -> str:
        """``tcp, 2 connections, [10.0.0.1]:40000,40001 - [10.0.0.2]:50000,50000``."""
        try:
            sides = [[one.getsockname() for one in connections], [one.getpeername() for one in connections]]
        except OSError as error:
            # getpeername fails when the peer is gone by now
            raise BootstrapError(
                f"rank {self._identity.rank}: a tcp connection to rank {peer}, proven already, failed: "
                f"{error.strerror}. Likely cause: that rank has ended. Next step: read its log"
            ) from None
        ends = [f"[{names[0][0]}]:{','.join(str(name[1]) for name in names)}" for names in sides]
        return f"tcp, {len(connections)} connections, {' - '.join(ends)}"

    def _take_over(self, links: Met) -> None:
        """Have the data path own ``links``. Raises OSError; what is left the caller closes."""
        self._epoll = select.epoll()
        self._state.context[tcp.EPOLL] = self._epoll.fileno()
        for (peer, number), (connection, proven) in links.items():
            fd = self._descriptors[peer, number] = connection.detach()
            self._state.attach(peer * self._identity.connections + number, fd, proven)

    def established(self) -> None:
        """Every peer's proxies run."""
        if self._mender is not None:
            self._mender.established()

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""
        return self._data_path

    @property
    def reconnections(self) -> int:
        """Connections that broke and were made again."""
        mender = self._mender
        return 0 if mender is None else mender.reconnections

    def describe(self, peer: int) -> str:
        """How ``peer`` is reached."""
        return self._how[peer]

    def close(self) -> None:
        """Close all sockets; what the kernel has taken is still sent. Never raises, may be called twice."""
        if self._mender is not None:
            self._mender.close()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and nothing else: what a forked child must do."""
        if self._mender is not None:
            self._mender.abandon()
            self._mender = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for fd in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._descriptors.clear()
        self._state.detach()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None


#: Endpoints that hold connections, to be let go in a forked child.
_open: weakref.WeakSet[TcpEndpoint] = weakref.WeakSet()


def _close_in_child() -> None:
    """A child that kept the descriptors would keep a killed rank's connections open: its peers would see no DOWN."""
    for endpoint in list(_open):
        endpoint.abandon()


os.register_at_fork(after_in_child=_close_in_child)


def _listen(rank: int, ranks: int, host: str, settings: Settings) -> socket.socket:
    """A socket listening on ``host``, on a port of ``UCCL_EP_PORT_RANGE`` or of the kernel's choice."""
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"rank {rank}: {host!r} is not a numeric IPv4 or IPv6 address") from None
    if parsed.is_unspecified or (parsed.version == 6 and parsed.is_link_local):
        raise ConfigError(
            f"rank {rank}: peers cannot connect to {host}; choose an interface with UCCL_EP_SOCKET_IFNAME"
        )
    try:
        return listen(host, settings.port_range)
    except PortsTaken as error:
        what = f"rank {rank}: cannot listen on {host}: {error}. {ports_needed(ranks, settings.proxies)}"
        raise TransportError(what, device=host, errno=error.errno or 0) from None
    except OSError as error:
        raise refused(f"rank {rank}: cannot listen on {host}", error, host) from None
