"""TCP between the nodes on the addresses and ports of a job: control connections of a Buffer, and ``tcp`` itself."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator

from ..check.faults import Fault
from ..config import Settings
from ..protocol.listener import listen
from .job import Finding
from .wire import rounds

__all__ = ["Listener", "try_peers"]

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 5.0
_TOKEN_BYTES, _TURNS = 16, 50
#: Sent to a peer and acknowledged, to see what the network carries over one connection.
_BULK_BYTES, _PIECE_BYTES = 32 << 20, 1 << 20
#: What accept() may raise of a listener that goes on, and the time until the next try.
_PASSING, _PAUSE_SECONDS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED), 0.1
_PART = "TCP"


class Listener(contextlib.AbstractContextManager["Listener"]):
    """Answers peers: says back what it is sent, and acknowledges each block.

    Raises OSError where the address or all ports of the range are taken.
    """

    def __init__(self, address: str, settings: Settings) -> None:
        self._socket = listen(address, settings.port_range)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="uccl-ep check", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        # wakes accept, which closing alone does not
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_ANSWER_SECONDS)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in _PASSING:
                    return
                time.sleep(_PAUSE_SECONDS)
                continue
            # one that stands still holds up nobody else
            threading.Thread(target=_answer, args=(connection,), name="uccl-ep check", daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TURNS):
            connection.sendall(_read(connection, _TOKEN_BYTES))
        buffer, left = bytearray(_PIECE_BYTES), _BULK_BYTES
        while left and (taken := connection.recv_into(buffer)):
            left -= taken
        connection.sendall(b"\0")


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (piece := connection.recv(count - len(found))):
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        found += piece
    return found


def try_peers(me: int, addresses: dict[int, tuple[str, int]], words: dict[int, str]) -> Iterator[Finding]:
    """Connect to every other one, in turns in which nobody has two peers; each direction is tried by who connects.

    Args:
        me: this one of those that take part.
        addresses: of their listeners.
        words: for each of them, whoever it is.
    """
    order = sorted(addresses)
    for pairs in rounds(len(order)):
        for pair in pairs:
            one, other = (order[place] for place in pair)
            if me in (one, other):
                peer = other if me == one else one
                yield _try(words[me], words[peer], *addresses[peer])


def _try(here: str, there: str, address: str, port: int) -> Finding:
    where = f"{here} -> {there}"
    stage = "a connection"
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stage, token = "the same bytes back", secrets.token_bytes(_TOKEN_BYTES)
            turns = []
            for _ in range(_TURNS):
                begun = time.perf_counter()
                connection.sendall(token)
                if _read(connection, _TOKEN_BYTES) != token:
                    raise ConnectionResetError(errno.ECONNRESET, "another program answered")
                turns.append(time.perf_counter() - begun)
            stage, block = "32 MiB taken", bytes(_PIECE_BYTES)
            begun = time.perf_counter()
            for _ in range(_BULK_BYTES // _PIECE_BYTES):
                connection.sendall(block)
            _read(connection, 1)
            rate = _BULK_BYTES / (time.perf_counter() - begun) / 1e9
    except OSError as error:
        found = "nothing within 5 s" if isinstance(error, TimeoutError) else str(error.strerror or error)
        return Finding(
            _PART, where, fault=Fault(where, f"{stage} at {address} port {port}", found, *_why(error, stage))
        )
    return Finding(
        _PART, where, f"{statistics.median(turns) / 2 * 1e6:.0f} us one way, {rate:.2f} GB/s over one connection"
    )


def _why(error: OSError, stage: str) -> tuple[str, str]:
    """The likely cause, and the next step."""
    ports = (
        "open TCP between the nodes for the ports of UCCL_EP_PORT_RANGE=20000-20100 (else any), or name the interface "
        "between them in UCCL_EP_SOCKET_IFNAME"
    )
    if stage != "a connection":
        if isinstance(error, TimeoutError) and stage.startswith("32"):
            cause = "large packets are dropped: an MTU mismatch on the way, with ICMP filtered"
            return cause, "ping -M do -s 8972 between the nodes; set the smallest MTU of the way on both interfaces"
        return "something between the nodes interferes", ports
    if error.errno == errno.ECONNREFUSED:
        return "a firewall rejects the port, or the address leads to another host", ports
    if isinstance(error, TimeoutError):
        return "a firewall drops the packets: the port is closed", ports
    return "no route: the address is of an interface that does not lead to the other nodes", ports
