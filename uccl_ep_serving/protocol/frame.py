"""What travels over a TCP connection: data frames, and the handshake before them. All little-endian, all fixed.

A connection carries the writes of some streams of one peer, in one direction each way. Every write is one frame: a
32-byte header and the payload. Each header also says how many frames of the other direction have arrived whole, and
where there is no write to say it with, a frame of its own does: a header without payload or number. With
``UCCL_EP_TCP_AUTH`` two MACs stand between the two: of the payload, then of the header and that one. The receiver takes
nothing on trust: it copies the header, checks every field, and only then lets the payload into its window.

The handshake runs before any frame, once per connection and again when one that broke is made anew. Each of its frames
starts with an 8-byte prefix that names the kind, so a reader always knows how many bytes follow; nothing in it has a
variable length.

    connector -> acceptor  HELLO      who I am, whom I want, what I believe the group looks like, nonce
    acceptor -> connector  CHALLENGE  nonce, proof
    connector -> acceptor  PROOF      how many frames I have taken of this connection so far, proof
    acceptor -> connector  WELCOME    how many I have taken, proof; frames may follow in both directions

Either side may send VERDICT, a refusal, instead of its next frame and close. A proof is HMAC-SHA256(secret, role label
+ HELLO + CHALLENGE nonce + count): it covers both nonces, both ranks, the count and everything else that HELLO claims,
and the role label keeps one frame's proof from being played back as another's. The keys of the MACs are made alike.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from .command import MAX_RANKS, MAX_WINDOW_BYTES, MAX_WRITE_BYTES

__all__ = [
    "ACK_MAGIC",
    "CHALLENGE_BYTES",
    "FRAME_BYTES",
    "FRAME_LENGTH",
    "FRAME_MAGIC",
    "FRAME_NUMBER",
    "FRAME_TARGET",
    "HANDSHAKE_VERSION",
    "HELLO_BYTES",
    "JOB_BYTES",
    "KEY_BYTES",
    "KIND_CHALLENGE",
    "KIND_HELLO",
    "KIND_PROOF",
    "KIND_VERDICT",
    "KIND_WELCOME",
    "MAX_CONNECTIONS",
    "MAX_PROXIES",
    "NONCE_BYTES",
    "PREFIX_BYTES",
    "PROOF_BYTES",
    "ROLE_ACCEPTOR",
    "ROLE_CONNECTOR",
    "ROLE_WELCOME",
    "SEAL_BYTES",
    "TAG_BYTES",
    "WELCOME_BYTES",
    "Frame",
    "Hello",
    "Verdict",
    "connection_of",
    "decode_address",
    "decode_challenge",
    "decode_counted",
    "decode_frame",
    "decode_hello",
    "decode_prefix",
    "encode_address",
    "encode_challenge",
    "encode_frame",
    "encode_hello",
    "encode_proof",
    "encode_verdict",
    "encode_welcome",
    "frame_fields",
    "handshake_fields",
    "job_digest",
    "keys_of",
    "proof_of",
]

# --- data frames ------------------------------------------------------------------------------------------------------

#: First four bytes of a frame: "UEP" and the version of the frame format; "UEA" when it only says what has arrived.
FRAME_MAGIC = int.from_bytes(b"UEP\x02", "little")
ACK_MAGIC = int.from_bytes(b"UEA\x02", "little")

_FRAME = struct.Struct("<IIQIIQ")
FRAME_BYTES = _FRAME.size
#: Byte offsets of 64-bit words: byte 0 holds the magic (low half) and the immediate (high half), FRAME_LENGTH the
#: length and how many frames have arrived (high half, modulo 2**32: far fewer are on their way).
FRAME_TARGET, FRAME_LENGTH, FRAME_NUMBER = 8, 16, 24
#: Of a MAC, AES-256-GMAC, and of the two that may follow a header: of the payload (0 where there is none), and of the
#: header and that one. A header that was altered is noticed at once, not when the payload that it promises is there.
TAG_BYTES = 16
SEAL_BYTES = 2 * TAG_BYTES
KEY_BYTES = 32

assert FRAME_BYTES == 32
assert MAX_WRITE_BYTES < 1 << 32


@dataclass(frozen=True, slots=True)
class Frame:
    """Header of one write.

    Attributes:
        imm: the 32-bit immediate.
        target: byte offset in the receiver's window.
        length: payload bytes that follow the header.
        number: frames sent before this one on the same connection, so that bytes lost or repeated are noticed.
        arrived: frames of the other direction that arrived whole, modulo 2**32.
        is_ack: it carries no write and does not count; the other fields but ``number`` are 0.
    """

    imm: int
    target: int
    length: int
    number: int
    arrived: int = 0
    is_ack: bool = False


def frame_fields() -> tuple[tuple[str, int, int, str], ...]:
    """(name, byte offset, bytes, meaning) of the frame header, for the tables in docs/architecture/formats.md."""
    return (
        (
            "magic",
            0,
            4,
            '"UEP" and the format version 2; "UEA" and the version: only `arrived` and `number` mean anything',
        ),
        ("imm", 4, 4, "the immediate; its source must be the rank that the connection proved"),
        ("target", FRAME_TARGET, 8, "byte offset in the receiver's window"),
        ("length", FRAME_LENGTH, 4, f"payload bytes that follow, at most {MAX_WRITE_BYTES}"),
        ("arrived", FRAME_LENGTH + 4, 4, "frames of the other direction that arrived whole, modulo 2**32"),
        ("number", FRAME_NUMBER, 8, "frames sent before on this connection"),
    )


def _check(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError(f"{name} = {value} is outside {low}..{high}")
    return value


def encode_frame(frame: Frame) -> bytes:
    """The 32 header bytes. Raises ValueError when a field is out of range."""
    _check("imm", frame.imm, 0, (1 << 32) - 1)
    _check("length", frame.length, 0, MAX_WRITE_BYTES)
    _check("target", frame.target, 0, MAX_WINDOW_BYTES - frame.length)
    _check("number", frame.number, 0, (1 << 63) - 1)
    _check("arrived", frame.arrived, 0, (1 << 32) - 1)
    magic = ACK_MAGIC if frame.is_ack else FRAME_MAGIC
    return _FRAME.pack(magic, frame.imm, frame.target, frame.length, frame.arrived, frame.number)


def decode_frame(header: bytes, *, window_bytes: int = MAX_WINDOW_BYTES) -> Frame:
    """The header in 32 bytes, checked against a window of ``window_bytes``. Raises ValueError naming the field."""
    if len(header) != FRAME_BYTES:
        raise ValueError(f"a frame header has {FRAME_BYTES} bytes, not {len(header)}")
    magic, imm, target, length, arrived, number = _FRAME.unpack(header)
    if magic not in (FRAME_MAGIC, ACK_MAGIC):
        raise ValueError(f"frame magic {magic:#010x} is not {FRAME_MAGIC:#010x}")
    if magic == ACK_MAGIC and imm | target | length:
        raise ValueError(f"a frame without a write has imm {imm}, target {target}, length {length}: none may be set")
    _check("length", length, 0, MAX_WRITE_BYTES)
    _check("target + length", target + length, 0, window_bytes)
    _check("number", number, 0, (1 << 63) - 1)
    return Frame(imm, target, length, number, arrived, magic == ACK_MAGIC)


def connection_of(stream: int, connections: int) -> int:
    """Index of the connection that carries ``stream``: fixed, so that a stream stays in order on its connection.

    Channels of a phase have consecutive ids, and the parities of one in low latency are 16 apart: adding the upper bits
    spreads both over the connections.
    """
    return (stream + (stream >> 4)) % connections


# --- address ----------------------------------------------------------------------------------------------------------

_ADDRESS = struct.Struct("<4sHH")
_ADDRESS_MAGIC = b"UEPA"
_MAX_HOST = 255


def encode_address(host: str, port: int) -> bytes:
    """What a peer needs to connect: magic, port, length of the host, host in ASCII. Raises ValueError on a misfit."""
    text = host.encode("ascii")
    _check("length of the host", len(text), 1, _MAX_HOST)
    return _ADDRESS.pack(_ADDRESS_MAGIC, _check("port", port, 1, 65535), len(text)) + text


def decode_address(address: bytes) -> tuple[str, int]:
    """(host, port). Raises ValueError when ``address`` was not made by :func:`encode_address`."""
    if len(address) < _ADDRESS.size:
        raise ValueError(f"a TCP address has at least {_ADDRESS.size} bytes, not {len(address)}")
    magic, port, length = _ADDRESS.unpack_from(address)
    if magic != _ADDRESS_MAGIC or len(address) != _ADDRESS.size + length or not port or not length:
        raise ValueError(f"{address[:16]!r} is not a TCP address")
    return address[_ADDRESS.size :].decode("ascii"), port


# --- handshake --------------------------------------------------------------------------------------------------------

HANDSHAKE_VERSION = 3
NONCE_BYTES = 32
JOB_BYTES = 16
_PROOF_SIZE = hashlib.sha256().digest_size

#: Capacities of the settings ``proxies`` and ``tcp_connections``.
MAX_PROXIES = 16
MAX_CONNECTIONS = 16

_HANDSHAKE_MAGIC = b"UEPH"
_PREFIX = struct.Struct("<4sBBH")
_HELLO = struct.Struct(f"<HHHHHHQ{JOB_BYTES}s{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<{NONCE_BYTES}s{_PROOF_SIZE}s")
_COUNT = struct.Struct(f"<Q{_PROOF_SIZE}s")

PREFIX_BYTES = _PREFIX.size
#: Bytes that follow the prefix, by kind.
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
PROOF_BYTES = WELCOME_BYTES = _COUNT.size

KIND_HELLO, KIND_CHALLENGE, KIND_PROOF, KIND_VERDICT, KIND_WELCOME = 1, 2, 3, 4, 5

ROLE_CONNECTOR = b"uccl-ep connector\0"
ROLE_ACCEPTOR = b"uccl-ep acceptor\0\0"
ROLE_WELCOME = b"uccl-ep welcome\0\0\0"
_KEYS_LABEL = b"uccl-ep keys\0"


class Verdict(IntEnum):
    """The 16-bit code of a VERDICT frame."""

    WRONG_SECRET = 1
    OTHER_JOB = 2
    OTHER_RANK = 3
    OTHER_SHAPE = 4
    OTHER_VERSION = 5
    LEFT = 6
    CROSSED = 7

    @property
    def words(self) -> str:
        """Why the handshake was refused."""
        return {
            Verdict.WRONG_SECRET: "the two sides do not have the same job secret",
            Verdict.OTHER_JOB: "the two sides belong to different jobs",
            Verdict.OTHER_RANK: "the connector asked for another rank than the one that answered",
            Verdict.OTHER_SHAPE: "the two sides disagree on ranks, proxies, TCP connections or window bytes",
            Verdict.OTHER_VERSION: "the two sides speak different versions of the handshake",
            Verdict.LEFT: "the other side has done with this rank",
            Verdict.CROSSED: "the other side, the higher rank, is connecting again itself",
        }[self]


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a connection.

    Attributes:
        source: rank of the connector.
        target: rank that it wants to reach.
        ranks: size of the group.
        proxy: index of the proxy thread at both ends.
        connections: connections per peer and proxy.
        connection: index of this one.
        window_bytes: length of every window of the group.
        job: :func:`job_digest`.
        nonce: 32 random bytes.
    """

    source: int
    target: int
    ranks: int
    proxy: int
    connections: int
    connection: int
    window_bytes: int
    job: bytes
    nonce: bytes


def job_digest(job: bytes) -> bytes:
    """16 bytes that name the job on the wire; ``job`` itself is not sent."""
    return hashlib.sha256(b"uccl-ep job\0" + job).digest()[:JOB_BYTES]


def _prefix(kind: int, code: int = 0) -> bytes:
    return _PREFIX.pack(_HANDSHAKE_MAGIC, HANDSHAKE_VERSION, kind, code)


def decode_prefix(prefix: bytes) -> tuple[int, int, int]:
    """(version, kind, code) of a handshake frame. Raises ValueError when it is not one; any version is returned."""
    if len(prefix) != PREFIX_BYTES:
        raise ValueError(f"a handshake prefix has {PREFIX_BYTES} bytes, not {len(prefix)}")
    magic, version, kind, code = _PREFIX.unpack(prefix)
    # rule: handshake: a frame begins with its magic
    if magic != _HANDSHAKE_MAGIC:
        raise ValueError(f"handshake magic {magic!r} is not {_HANDSHAKE_MAGIC!r}")
    _check("handshake kind", kind, KIND_HELLO, KIND_WELCOME)
    # no proof covers it, and a frame of another version may use it
    # rule: handshake: only a refusal has a code
    if version == HANDSHAKE_VERSION and kind != KIND_VERDICT and code != 0:
        raise ValueError(f"handshake frame of kind {kind} with code {code}: only a refusal has one")
    return version, kind, code


def _check_hello(hello: Hello) -> Hello:
    _check("ranks", hello.ranks, 1, MAX_RANKS)
    _check("source", hello.source, 0, hello.ranks - 1)
    _check("target", hello.target, 0, hello.ranks - 1)
    _check("proxy", hello.proxy, 0, MAX_PROXIES - 1)
    _check("connections", hello.connections, 1, MAX_CONNECTIONS)
    _check("connection", hello.connection, 0, hello.connections - 1)
    _check("window_bytes", hello.window_bytes, 1, MAX_WINDOW_BYTES)
    _check("bytes of job", len(hello.job), JOB_BYTES, JOB_BYTES)
    _check("bytes of nonce", len(hello.nonce), NONCE_BYTES, NONCE_BYTES)
    return hello


def encode_hello(hello: Hello) -> bytes:
    """Prefix and body. Raises ValueError when a field is out of range."""
    _check_hello(hello)
    return _prefix(KIND_HELLO) + _HELLO.pack(
        hello.source,
        hello.target,
        hello.ranks,
        hello.proxy,
        hello.connections,
        hello.connection,
        hello.window_bytes,
        hello.job,
        hello.nonce,
    )


def decode_hello(body: bytes) -> Hello:
    """The body of a HELLO (without its prefix). Raises ValueError when it is malformed."""
    if len(body) != HELLO_BYTES:
        raise ValueError(f"a hello has {HELLO_BYTES} bytes, not {len(body)}")
    # rule: handshake: what a hello claims is in range
    return _check_hello(Hello(*_HELLO.unpack(body)))


def encode_challenge(nonce: bytes, proof: bytes) -> bytes:
    """Prefix and body. Raises ValueError when a part has the wrong length."""
    _check("bytes of nonce", len(nonce), NONCE_BYTES, NONCE_BYTES)
    _check("bytes of proof", len(proof), _PROOF_SIZE, _PROOF_SIZE)
    return _prefix(KIND_CHALLENGE) + _CHALLENGE.pack(nonce, proof)


def decode_challenge(body: bytes) -> tuple[bytes, bytes]:
    """(nonce, proof). Raises ValueError when ``body`` has the wrong length."""
    if len(body) != CHALLENGE_BYTES:
        raise ValueError(f"a challenge has {CHALLENGE_BYTES} bytes, not {len(body)}")
    nonce, proof = _CHALLENGE.unpack(body)
    return nonce, proof


def encode_proof(count: int, proof: bytes) -> bytes:
    """PROOF, prefix and body. Raises ValueError when a part does not fit."""
    return _prefix(KIND_PROOF) + _counted(count, proof)


def encode_welcome(count: int, proof: bytes) -> bytes:
    """WELCOME, prefix and body. Raises ValueError when a part does not fit."""
    return _prefix(KIND_WELCOME) + _counted(count, proof)


def _counted(count: int, proof: bytes) -> bytes:
    _check("count", count, 0, (1 << 63) - 1)
    _check("bytes of proof", len(proof), _PROOF_SIZE, _PROOF_SIZE)
    return _COUNT.pack(count, proof)


def decode_counted(body: bytes) -> tuple[int, bytes]:
    """(count, proof) in the body of a PROOF or WELCOME. Raises ValueError when it is malformed."""
    if len(body) != _COUNT.size:
        raise ValueError(f"a count and its proof have {_COUNT.size} bytes, not {len(body)}")
    count, proof = _COUNT.unpack(body)
    # rule: handshake: a count is in range
    _check("count", count, 0, (1 << 63) - 1)
    return count, proof


def encode_verdict(verdict: Verdict) -> bytes:
    """The whole frame: a prefix whose code is the verdict, never 0."""
    return _prefix(KIND_VERDICT, int(verdict))


def proof_of(secret: bytes, role: bytes, hello: Hello, nonce: bytes, count: int = 0) -> bytes:
    """What a side that knows ``secret`` says in ``role`` to this HELLO, the acceptor's ``nonce`` and with ``count``."""
    return hmac.new(secret, role + encode_hello(hello) + nonce + count.to_bytes(8, "little"), hashlib.sha256).digest()


def keys_of(secret: bytes, hello: Hello, nonce: bytes) -> tuple[bytes, bytes]:
    """Keys of the MACs of this connection, KEY_BYTES each: from the connector, and from the acceptor."""
    both = hmac.new(secret, _KEYS_LABEL + encode_hello(hello) + nonce, hashlib.sha512).digest()
    return both[:KEY_BYTES], both[KEY_BYTES:]


def handshake_fields() -> tuple[tuple[str, int, str], ...]:
    """(kind, bytes with the prefix, contents) of the handshake frames, for docs/architecture/formats.md."""
    return (
        (
            "HELLO",
            PREFIX_BYTES + HELLO_BYTES,
            "source, target, ranks, proxy, connections, connection, window bytes, job digest, nonce",
        ),
        ("CHALLENGE", PREFIX_BYTES + CHALLENGE_BYTES, "nonce, proof"),
        ("PROOF", PREFIX_BYTES + PROOF_BYTES, "frames taken so far, proof"),
        ("VERDICT", PREFIX_BYTES, "nothing: the prefix holds its code, why the other side is refused"),
        ("WELCOME", PREFIX_BYTES + WELCOME_BYTES, "frames taken so far, proof"),
    )
