"""The TCP frame formats and the shm mailbox: every field's range, and what a reader must refuse."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.protocol import frame, mailbox
from uccl_ep_serving.protocol.command import MAX_RANKS, MAX_WINDOW_BYTES, MAX_WRITE_BYTES
from uccl_ep_serving.protocol.streams import LL_COMBINE, LL_DISPATCH, NORMAL_COMBINE, NORMAL_DISPATCH, ll_stream

frames = st.builds(
    lambda imm, length, target, number, arrived: frame.Frame(
        imm, min(target, MAX_WINDOW_BYTES - length), length, number, arrived
    ),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, MAX_WRITE_BYTES),
    st.integers(0, MAX_WINDOW_BYTES),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 32) - 1),
)
HELLO = frame.Hello(
    source=5,
    target=2,
    ranks=8,
    proxy=1,
    connections=4,
    connection=3,
    window_bytes=1 << 30,
    job=frame.job_digest(b"job"),
    nonce=bytes(range(32)),
)


class TestDataFrame:
    @given(frames)
    def test_round_trip(self, header: frame.Frame) -> None:
        wire = frame.encode_frame(header)
        assert len(wire) == frame.FRAME_BYTES
        assert frame.decode_frame(wire) == header

    def test_bytes_are_little_endian_at_the_published_offsets(self) -> None:
        values = {"imm": 0x01020304, "target": 0x10, "length": 0x20, "number": 0x30, "arrived": 0x40}
        wire = frame.encode_frame(frame.Frame(**values))
        assert wire[:8] == b"UEP\x02\x04\x03\x02\x01"
        for name, offset, size, _ in frame.frame_fields():
            if name in values:
                assert int.from_bytes(wire[offset : offset + size], "little") == values[name]
        covered = sorted((offset, offset + size) for _, offset, size, _ in frame.frame_fields())
        assert covered[0][0] == 0
        assert covered[-1][1] == frame.FRAME_BYTES
        assert all(left[1] == right[0] for left, right in pairwise(covered))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("imm", -1),
            ("imm", 1 << 32),
            ("length", -1),
            ("length", MAX_WRITE_BYTES + 1),
            ("target", -1),
            ("target", MAX_WINDOW_BYTES + 1),
            ("number", -1),
            ("number", 1 << 63),
            ("arrived", 1 << 32),
        ],
    )
    def test_the_encoder_refuses_what_does_not_fit(self, field: str, value: int) -> None:
        with pytest.raises(ValueError, match=field):
            frame.encode_frame(replace(frame.Frame(0, 0, 0, 0), **{field: value}))

    @pytest.mark.parametrize(
        ("wire", "words"),
        [
            (b"GET / HTTP/1.1\r\nHost: somewhere\r\n"[:32], "magic"),
            (b"", "32 bytes"),
            (struct.pack("<IIQQQ", frame.FRAME_MAGIC, 0, 0, MAX_WRITE_BYTES + 1, 0), "length"),
            (struct.pack("<IIQQQ", frame.FRAME_MAGIC, 0, 4096 - 15, 16, 0), "target"),
            (struct.pack("<IIQQQ", frame.FRAME_MAGIC, 0, (1 << 64) - 16, 16, 0), "target"),
            (struct.pack("<IIQQQ", frame.ACK_MAGIC, 1, 0, 0, 0), "imm 1"),
            (struct.pack("<IIQQQ", frame.ACK_MAGIC, 0, 16, 0, 0), "target 16"),
            (struct.pack("<IIQQQ", frame.ACK_MAGIC, 0, 0, 2, 0), "length 2"),
        ],
    )
    def test_the_decoder_refuses(self, wire: bytes, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            frame.decode_frame(wire, window_bytes=4096)

    def test_a_frame_that_only_says_what_has_arrived(self) -> None:
        said = frame.Frame(0, 0, 0, number=7, arrived=9, is_ack=True)
        assert frame.decode_frame(frame.encode_frame(said)) == said
        assert frame.encode_frame(said)[:4] == b"UEA\x02"

    def test_a_write_up_to_the_end_of_the_window_is_right(self) -> None:
        wire = frame.encode_frame(frame.Frame(0, 4096 - 16, 16, 0))
        assert frame.decode_frame(wire, window_bytes=4096).target == 4080


class TestStreamsToConnections:
    @given(st.integers(0, 255), st.integers(1, frame.MAX_CONNECTIONS))
    def test_always_one_of_the_connections(self, stream: int, connections: int) -> None:
        assert 0 <= frame.connection_of(stream, connections) < connections

    @pytest.mark.parametrize("phase", [LL_DISPATCH, LL_COMBINE])
    def test_the_two_parities_of_a_channel_take_different_connections(self, phase: int) -> None:
        taken = {frame.connection_of(ll_stream(phase, number, 0), 2) for number in range(2)}
        assert taken == {0, 1}

    @pytest.mark.parametrize("phase", [LL_DISPATCH, LL_COMBINE, NORMAL_DISPATCH, NORMAL_COMBINE])
    def test_channels_use_all_connections(self, phase: int) -> None:
        for connections in (2, 3, 4, 8):
            taken = {frame.connection_of(phase + channel, connections) for channel in range(connections)}
            assert taken == set(range(connections))


@pytest.mark.parametrize(
    ("name", "most"),
    [("UCCL_EP_TCP_CONNECTIONS", frame.MAX_CONNECTIONS), ("UCCL_EP_PROXIES", frame.MAX_PROXIES)],
)
def test_the_settings_allow_what_the_handshake_holds(name: str, most: int) -> None:
    Settings.from_environment({name: str(most)})
    with pytest.raises(ConfigError, match=name):
        Settings.from_environment({name: str(most + 1)})


class TestAddress:
    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fd00::1234:5678", "255.255.255.255"])
    def test_round_trip(self, host: str) -> None:
        assert frame.decode_address(frame.encode_address(host, 65535)) == (host, 65535)

    @pytest.mark.parametrize("bad", [b"", b"UEPA", b"x" * 20, frame.encode_address("::1", 1)[:-1]])
    def test_refuses(self, bad: bytes) -> None:
        with pytest.raises(ValueError, match="address"):
            frame.decode_address(bad)

    @pytest.mark.parametrize(("host", "port"), [("::1", 0), ("::1", 65536), ("", 1), ("x" * 256, 1)])
    def test_the_encoder_refuses(self, host: str, port: int) -> None:
        with pytest.raises(ValueError, match="outside"):
            frame.encode_address(host, port)


#: Of every handshake frame.
_PREFIX = b"UEPH" + bytes([frame.HANDSHAKE_VERSION])


class TestHandshake:
    def test_hello_round_trip(self) -> None:
        wire = frame.encode_hello(HELLO)
        version, kind, code = frame.decode_prefix(wire[: frame.PREFIX_BYTES])
        assert (version, kind, code) == (frame.HANDSHAKE_VERSION, frame.KIND_HELLO, 0)
        assert frame.decode_hello(wire[frame.PREFIX_BYTES :]) == HELLO

    @pytest.mark.parametrize(
        "change",
        [
            {"ranks": 0},
            {"ranks": MAX_RANKS + 1},
            {"source": 8},
            {"target": 8},
            {"proxy": frame.MAX_PROXIES},
            {"connection": 4},
            {"connections": 17},
            {"window_bytes": 0},
            {"window_bytes": MAX_WINDOW_BYTES + 1},
            {"nonce": b"short"},
            {"job": b"short"},
        ],
    )
    def test_hello_out_of_range(self, change: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=next(iter(change))):
            frame.encode_hello(replace(HELLO, **change))

    def test_a_hello_with_some_bytes_changed_is_refused_or_in_range(self) -> None:
        """A right one is changed, so that some are accepted: of random bytes none would be."""
        outcomes = dict.fromkeys(("accepted", "refused"), 0)
        right = frame.encode_hello(HELLO)[frame.PREFIX_BYTES :]

        @given(st.dictionaries(st.integers(0, frame.HELLO_BYTES - 1), st.integers(0, 255), min_size=1, max_size=3))
        def mutate(changes: dict[int, int]) -> None:
            wire = bytearray(right)
            for place, value in changes.items():
                wire[place] = value
            try:
                hello = frame.decode_hello(bytes(wire))
            except ValueError:
                outcomes["refused"] += 1
                return
            outcomes["accepted"] += 1
            assert 0 <= hello.source < hello.ranks <= MAX_RANKS
            assert 0 <= hello.target < hello.ranks
            assert 0 <= hello.proxy < frame.MAX_PROXIES
            assert 0 <= hello.connection < hello.connections <= frame.MAX_CONNECTIONS
            assert 0 < hello.window_bytes <= MAX_WINDOW_BYTES
            assert frame.encode_hello(hello)[frame.PREFIX_BYTES :] == wire

        mutate()
        assert min(outcomes.values()) > 10, outcomes

    def test_a_challenge_carries_its_parts(self) -> None:
        nonce, proof = bytes(32), bytes(range(32))
        wire = frame.encode_challenge(nonce, proof)
        assert frame.decode_prefix(wire[:8])[1] == frame.KIND_CHALLENGE
        assert frame.decode_challenge(wire[8:]) == (nonce, proof)

    def test_a_proof_and_a_welcome_carry_a_count(self) -> None:
        for encode, kind in ((frame.encode_proof, frame.KIND_PROOF), (frame.encode_welcome, frame.KIND_WELCOME)):
            wire = encode(7, bytes(range(32)))
            assert frame.decode_prefix(wire[:8])[1] == kind
            assert frame.decode_counted(wire[8:]) == (7, bytes(range(32)))
            with pytest.raises(ValueError, match="bytes"):
                frame.decode_counted(wire[8:-1])
            for count in (-1, 1 << 63):
                with pytest.raises(ValueError, match="count"):
                    encode(count, bytes(32))
        with pytest.raises(ValueError, match="count"):
            frame.decode_counted(b"\xff" * frame.PROOF_BYTES)

    def test_a_verdict_is_its_prefix(self) -> None:
        for verdict in frame.Verdict:
            assert frame.decode_prefix(frame.encode_verdict(verdict))[1:] == (frame.KIND_VERDICT, verdict)
            assert verdict.words

    @pytest.mark.parametrize(
        "prefix",
        [b"", b"UEPH\x01", b"SSH-2.0-", *(_PREFIX + rest for rest in (b"\x06\x00\x00", bytes(3), b"\x01\x00\x01"))],
    )
    def test_a_strange_prefix(self, prefix: bytes) -> None:
        with pytest.raises(ValueError, match="handshake"):
            frame.decode_prefix(prefix)

    def test_a_proof_depends_on_everything(self) -> None:
        """Secret, role, both nonces, both ranks, the count: a change of any makes another proof."""
        nonce = bytes(32)
        proofs = [
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, HELLO, nonce),
            frame.proof_of(b"t" * 16, frame.ROLE_CONNECTOR, HELLO, nonce),
            frame.proof_of(b"s" * 16, frame.ROLE_ACCEPTOR, HELLO, nonce),
            frame.proof_of(b"s" * 16, frame.ROLE_WELCOME, HELLO, nonce),
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, HELLO, nonce, 1),
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, HELLO, bytes([1]) + bytes(31)),
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, replace(HELLO, nonce=bytes(32)), nonce),
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, replace(HELLO, source=6), nonce),
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, replace(HELLO, target=1), nonce),
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, replace(HELLO, connection=0), nonce),
            frame.proof_of(b"s" * 16, frame.ROLE_CONNECTOR, replace(HELLO, job=frame.job_digest(b"other")), nonce),
        ]
        assert len(set(proofs)) == len(proofs)

    def test_keys_depend_on_everything_and_on_the_direction(self) -> None:
        keys = [
            *frame.keys_of(b"s" * 16, HELLO, bytes(32)),
            *frame.keys_of(b"t" * 16, HELLO, bytes(32)),
            *frame.keys_of(b"s" * 16, replace(HELLO, nonce=bytes(32)), bytes(32)),
            *frame.keys_of(b"s" * 16, HELLO, bytes([1]) + bytes(31)),
        ]
        assert len(set(keys)) == 8
        assert {len(key) for key in keys} == {frame.KEY_BYTES}

    def test_the_table_says_the_real_sizes(self) -> None:
        sizes = {kind: size for kind, size, _ in frame.handshake_fields()}
        assert sizes["HELLO"] == len(frame.encode_hello(HELLO))
        assert sizes["CHALLENGE"] == len(frame.encode_challenge(bytes(32), bytes(32)))
        assert sizes["PROOF"] == len(frame.encode_proof(0, bytes(32)))
        assert sizes["WELCOME"] == len(frame.encode_welcome(0, bytes(32)))
        assert sizes["VERDICT"] == len(frame.encode_verdict(frame.Verdict.LEFT))


class TestMailbox:
    def test_rings_do_not_overlap_and_fill_the_segment(self) -> None:
        ranks, proxies = 5, 3
        offsets = [mailbox.ring_offset(ranks, proxy, source) for proxy in range(proxies) for source in range(ranks)]
        assert offsets == [i * mailbox.RING_BYTES for i in range(ranks * proxies)]
        assert mailbox.mailbox_bytes(ranks, proxies) == offsets[-1] + mailbox.RING_BYTES

    def test_lap_bits_alternate_and_start_with_one(self) -> None:
        laps = [mailbox.lap_of(n) for n in (0, mailbox.SLOTS - 1, mailbox.SLOTS, 2 * mailbox.SLOTS)]
        assert laps == [1, 1, 0, 1]

    @pytest.mark.parametrize(
        ("ranks", "proxy", "source"), [(2, 0, 2), (2, 0, -1), (2, 16, 0), (2, -1, 0), (MAX_RANKS + 1, 0, 0)]
    )
    def test_out_of_range(self, ranks: int, proxy: int, source: int) -> None:
        with pytest.raises(ValueError, match=r"outside|not one of"):
            mailbox.ring_offset(ranks, proxy, source)
