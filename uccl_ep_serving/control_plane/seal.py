"""MACs of control frames over TCP: they carry the addresses and keys of windows, and who they say is lost is left out.

Each direction of a connection has a key of its own, which follows from the job's secret and the nonces of the handshake
(:func:`~uccl_ep_serving.protocol.frame.keys_of`). A header has a MAC, and so has a payload: a length that was altered
must have nobody wait for the rest. Each is of the part and of how many parts there were before it. What was changed,
repeated, left out, put in, or brought from another connection is not genuine. What is sent stays readable.
"""

from __future__ import annotations

import hmac

__all__ = ["HEADER_BYTES", "MAC_BYTES", "Seal"]

#: Of a frame (frames.py).
HEADER_BYTES = 20
#: HMAC-SHA256, cut to 128 bits (RFC 2104, section 5).
MAC_BYTES = 16


class Seal:
    """Of one connection.

    Args:
        send_key, receive_key: of the handshake (:class:`~uccl_ep_serving.protocol.handshake.Proven`).

    Writers: of what is sent, who holds the lock of the :class:`.outbox.Outbox`; of what is received, the thread that
    reads.
    """

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = self._received = 0

    def seal(self, frame: bytes) -> bytes:
        """``frame``, the next one, with a MAC behind its header and, where it has a payload, one behind that."""
        sealed = b""
        for part in filter(None, (frame[:HEADER_BYTES], frame[HEADER_BYTES:])):
            sealed += part + _mac(self._send_key, self._sent, part)
            self._sent += 1
        return sealed

    def is_genuine(self, part: bytes, mac: bytes) -> bool:
        """Whether ``part`` is the next one of the peer: a header, or a payload. After one that is not, none is."""
        genuine = hmac.compare_digest(_mac(self._receive_key, self._received, part), mac)
        self._received += genuine
        return genuine


def _mac(key: bytes, number: int, part: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + part, "sha256")[:MAC_BYTES]
