"""MACs of the frames of ``tcp`` (``UCCL_EP_TCP_AUTH``): AES-256-GMAC of OpenSSL's libcrypto, called from compiled code.

Each direction of a connection has a key of its own, which follows from the job's secret and the nonces of the handshake
(:func:`uccl_ep_serving.protocol.frame.keys_of`), and each MAC of it a nonce of its own: how many frames were sealed
before, and which part of the frame it is of (NIST SP 800-38D, section 8.2.1). So what was changed, repeated, left out,
put in or brought from another connection is not genuine. What is sent stays readable.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Iterator

import numpy as np

from ...errors import ConfigError
from ...native.atomics import peek, poke
from ...native.calls import call3_int, call4_int, call5_int
from ...native.jit import compiled
from ...protocol.frame import FRAME_BYTES, SEAL_BYTES, TAG_BYTES
from . import tcp_words as tcp

__all__ = ["MAX_SEALED_BYTES", "Key", "functions", "is_header_genuine", "is_payload_genuine", "seal", "set_key"]

#: Longest payload of a frame with a MAC: it is held back until it is whole, once for each connection.
MAX_SEALED_BYTES = 64 << 10

# --- what AUTH points at: addresses of libcrypto's functions, then room for one MAC -----------------------------------
_INIT, _UPDATE, _FINAL, _CTRL = 0, 1, 2, 3
_NONCE = 4  # 12 of 16 bytes: 8 of the frame's counter, 4 of the part
_LENGTH = 6  # an int that is written and not read
_NOTHING = 7  # 16 bytes: the text that a MAC without text has
_TAG = 9  # the MAC that was expected
_WORDS = 11

_PAYLOAD, _HEADER = 0, 1
_GET_TAG = 0x10  # EVP_CTRL_AEAD_GET_TAG


@functools.cache
def _library() -> ctypes.CDLL:
    """libcrypto: the one that Python's own hashlib uses, or the system's. Raises ConfigError where there is none."""
    for name in _names():
        try:
            library = ctypes.CDLL(name)
            library.EVP_aes_256_gcm.restype = ctypes.c_void_p
            library.EVP_CIPHER_CTX_new.restype = ctypes.c_void_p
        except (OSError, AttributeError):
            continue
        return library
    raise ConfigError(
        "UCCL_EP_TCP_AUTH=1 needs OpenSSL's libcrypto, and there is none. Next step: install it (libssl3), or unset "
        "UCCL_EP_TCP_AUTH where nobody else is on the network"
    )


def _names() -> Iterator[str]:
    try:
        import _hashlib

        yield _hashlib.__file__
    except (ImportError, AttributeError):
        pass  # a Python without OpenSSL, or with it built in
    found = ctypes.util.find_library("crypto")
    yield from [found] if found else []
    yield from ("libcrypto.so.3", "libcrypto.so.1.1")


def functions() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """What AUTH of a context points at. Raises ConfigError where there is no libcrypto."""
    library = _library()
    names = ("EVP_EncryptInit_ex", "EVP_EncryptUpdate", "EVP_EncryptFinal_ex", "EVP_CIPHER_CTX_ctrl")
    table = np.zeros(_WORDS, np.int64)
    table[: len(names)] = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    return table


class Key:
    """An ``EVP_CIPHER_CTX``, freed with the object.

    Attributes:
        address: what SEND_KEY and RECEIVE_KEY hold.
    """

    def __init__(self) -> None:
        self.address = 0
        self.address = int(_library().EVP_CIPHER_CTX_new() or 0)
        if not self.address:
            raise MemoryError("libcrypto has no room for a key")

    def __del__(self) -> None:
        if self.address:
            _library().EVP_CIPHER_CTX_free(ctypes.c_void_p(self.address))


def set_key(context: int, key: bytes) -> None:
    """Have the ``EVP_CIPHER_CTX`` at ``context`` make MACs with ``key``. Raises ConfigError when libcrypto refuses."""
    library = _library()
    cipher = ctypes.c_void_p(library.EVP_aes_256_gcm())
    if library.EVP_EncryptInit_ex(ctypes.c_void_p(context), cipher, None, key, None) != 1:
        raise ConfigError(
            "UCCL_EP_TCP_AUTH=1: libcrypto refuses AES-256-GCM. Likely cause: a policy of this system (FIPS). Next "
            "step: allow it, or unset UCCL_EP_TCP_AUTH where nobody else is on the network"
        )


@compiled
def _tag(auth: int, key: int, counter: int, part: int, start: int, nbytes: int, tag: int) -> bool:
    """Write the MAC of a part of frame ``counter`` to ``tag``; False when libcrypto fails."""
    poke(auth + 8 * _NONCE, counter)
    poke(auth + 8 * _NONCE + 8, part)
    length = auth + 8 * _LENGTH
    if call5_int(peek(auth + 8 * _INIT), key, 0, 0, 0, auth + 8 * _NONCE) != 1:
        return False
    if call5_int(peek(auth + 8 * _UPDATE), key, 0, length, start, nbytes) != 1:
        return False
    if call3_int(peek(auth + 8 * _FINAL), key, auth + 8 * _NOTHING, length) != 1:
        return False
    return call4_int(peek(auth + 8 * _CTRL), key, _GET_TAG, TAG_BYTES, tag) == 1


@compiled
def _fits(context: int, link: int, part: int, start: int, nbytes: int, tag: int) -> bool:
    """Whether ``tag`` is the MAC of a part of the frame that arrives at present."""
    auth = peek(context + 8 * tcp.AUTH)
    expected = auth + 8 * _TAG
    if not _tag(
        auth, peek(link + 8 * tcp.RECEIVE_KEY), peek(link + 8 * tcp.RECEIVE_COUNTER), part, start, nbytes, expected
    ):
        return False
    # both halves at once: how long it takes says nothing of where they differ
    return (peek(expected) ^ peek(tag)) | (peek(expected + 8) ^ peek(tag + 8)) == 0


@compiled
def seal(context: int, link: int, frame: int, payload: int, nbytes: int) -> None:
    """Put the MACs of a frame behind its header at address ``frame``.

    One that libcrypto could not make is wrong, and ends the connection at the peer.
    """
    auth, key = peek(context + 8 * tcp.AUTH), peek(link + 8 * tcp.SEND_KEY)
    counter, tag = peek(link + 8 * tcp.SEND_COUNTER), frame + FRAME_BYTES
    poke(link + 8 * tcp.SEND_COUNTER, counter + 1)
    for word in range(0, SEAL_BYTES, 8):
        poke(tag + word, 0)
    if nbytes > 0 and not _tag(auth, key, counter, _PAYLOAD, payload, nbytes, tag):
        return
    _tag(auth, key, counter, _HEADER, frame, FRAME_BYTES + TAG_BYTES, tag + TAG_BYTES)


@compiled
def is_header_genuine(context: int, link: int, header: int) -> bool:
    """Whether the second MAC behind ``header`` is that of the next frame of the peer."""
    return _fits(context, link, _HEADER, header, FRAME_BYTES + TAG_BYTES, header + FRAME_BYTES + TAG_BYTES)


@compiled
def is_payload_genuine(context: int, link: int, header: int, payload: int, nbytes: int) -> bool:
    """Whether the first MAC behind ``header`` is that of its payload; the next frame is another one."""
    fits = nbytes == 0 or _fits(context, link, _PAYLOAD, payload, nbytes, header + FRAME_BYTES)
    poke(link + 8 * tcp.RECEIVE_COUNTER, peek(link + 8 * tcp.RECEIVE_COUNTER) + 1)
    return fits
