"""The formats: what fits is encoded and read back, what does not is refused, and the capacities are as promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from uccl_ep_serving.protocol import command, imm, ring, streams
from uccl_ep_serving.protocol.bitfield import Word
from uccl_ep_serving.protocol.command import MAX_RANKS, MAX_WINDOW_BYTES, MAX_WRITE_BYTES, UNIT, Command
from uccl_ep_serving.protocol.imm import SEQUENCE_SPACE, SEQUENCE_WINDOW, Immediate

_OFFSETS = st.integers(0, MAX_WINDOW_BYTES // UNIT - 1).map(lambda units: units * UNIT)
_COMMANDS = st.builds(
    Command,
    rank=st.integers(0, MAX_RANKS - 1),
    stream=st.integers(0, streams.STREAMS - 1),
    source=_OFFSETS,
    target=_OFFSETS,
    length=st.integers(0, MAX_WRITE_BYTES // UNIT).map(lambda units: units * UNIT),
    last=st.booleans(),
)
_IMMEDIATES = st.builds(
    Immediate,
    source=st.integers(0, MAX_RANKS - 1),
    stream=st.integers(0, streams.STREAMS - 1),
    sequence=st.integers(0, SEQUENCE_SPACE - 1),
    last=st.booleans(),
)


@given(_COMMANDS, st.integers(0, 1))
def test_command_round_trip(value: Command, lap: int) -> None:
    assume(max(value.source, value.target) + value.length <= MAX_WINDOW_BYTES)
    low, high = command.encode(value, lap)
    assert command.decode(low, high) == value
    # Non-negative as int64, in Numba and in Triton; never all zero, so a zeroed slot is no command.
    assert 0 <= low < 1 << 63
    assert 0 < high < 1 << 63
    assert low & 1 == high & 1 == lap


def test_commands_outside_a_window_are_refused() -> None:
    value = Command(rank=1, stream=8, source=0, target=4096 - 16, length=16, last=True)
    command.encode(value, 0, window_bytes=4096)
    for wrong in (replace(value, length=32), replace(value, target=0, source=4096)):
        with pytest.raises(ValueError, match="outside a window of 4096 bytes"):
            command.encode(wrong, 0, window_bytes=4096)


@given(_IMMEDIATES)
def test_immediate_round_trip(value: Immediate) -> None:
    word = imm.encode(value)
    assert 0 <= word < 1 << 32
    assert imm.decode(word) == value


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": MAX_RANKS},
        {"rank": -1},
        {"stream": 256},
        {"source": 8},
        {"source": MAX_WINDOW_BYTES},
        {"target": -16},
        {"length": MAX_WRITE_BYTES + 16},
        {"length": 24},
        {"kind": 0},
        {"kind": 2},
    ],
)
def test_commands_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    fields = {"rank": 1, "stream": 8, "source": 0, "target": 0, "length": 16, "last": True}
    with pytest.raises(ValueError, match=r"must be a multiple|does not fit|unknown command kind"):
        command.encode(Command(**{**fields, **wrong}), 0)


def test_torn_and_foreign_commands_are_refused() -> None:
    low, high = command.encode(Command(1, 8, 0, 0, 16, True), 1)
    with pytest.raises(ValueError, match="lap bits differ"):
        command.decode(low ^ 1, high)
    with pytest.raises(ValueError, match="unknown command kind 0"):
        command.decode(0, 0)
    with pytest.raises(ValueError, match="exceeds"):
        command.decode(low | command.LOW["length"].put(command.LOW["length"].limit), high)


@pytest.mark.parametrize("word", [-1, 1 << 32])
def test_an_immediate_has_32_bits(word: int) -> None:
    with pytest.raises(ValueError, match="not a 32-bit word"):
        imm.decode(word)


def test_capacities() -> None:
    """The design's table: what the formats must hold at least."""
    assert MAX_RANKS >= 4096
    assert streams.MAX_CHANNELS >= 16
    assert streams.NORMAL_CHANNELS >= streams.MAX_CHANNELS
    assert MAX_WINDOW_BYTES >= 1 << 40
    assert MAX_WRITE_BYTES >= 256 << 20
    assert SEQUENCE_WINDOW >= 1024
    # A number is in the window ahead or behind, never both.
    assert SEQUENCE_WINDOW * 2 <= SEQUENCE_SPACE
    assert command.COMMAND_BYTES == 16


def test_words_refuse_bad_definitions() -> None:
    with pytest.raises(ValueError, match="fields need 9 bits"):
        Word("too wide", 8, ("a", 5, ""), ("b", 4, ""))
    with pytest.raises(ValueError, match="bad field"):
        Word("twice", 8, ("a", 1, ""), ("a", 1, ""))
    with pytest.raises(ValueError, match="has no field"):
        Word("unknown", 8, ("a", 1, "")).pack(b=1)


@given(st.integers(1, 10), st.integers(0, 1 << 40))
def test_laps_alternate_and_start_with_one(bits: int, index: int) -> None:
    capacity = 1 << bits
    assert ring.lap_of(index % capacity, capacity) == 1
    assert ring.lap_of(index + capacity, capacity) == 1 - ring.lap_of(index, capacity)


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_ring_capacity_is_a_power_of_two(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        ring.ring_bytes(capacity)


def test_every_phase_parity_and_channel_has_a_stream_of_its_own() -> None:
    ids = [streams.NOTICE, streams.NORMAL_NOTIFY, streams.NORMAL_GRANT]
    for channel in range(streams.MAX_CHANNELS):
        for phase in (streams.LL_DISPATCH, streams.LL_COMBINE):
            ids += [streams.ll_stream(phase, parity, channel) for parity in (0, 1)]
    for channel in range(streams.NORMAL_CHANNELS):
        both = [streams.NORMAL_DISPATCH + channel, streams.NORMAL_COMBINE + channel]
        assert [streams.channel_of(stream) for stream in both] == [channel, channel]
        ids += both
    assert len(set(ids)) == len(ids)
    assert max(ids) < streams.CREDIT


@given(st.integers(0, streams.CREDIT - 1), st.integers(1, 16))
def test_credits_belong_to_the_proxy_of_their_stream(stream: int, proxies: int) -> None:
    owner = streams.proxy_of(stream, proxies)
    assert 0 <= owner < proxies
    assert streams.proxy_of(stream | streams.CREDIT, proxies) == owner


@given(st.sampled_from([streams.LL_DISPATCH, streams.LL_COMBINE]), st.integers(0, 1000), st.integers(0, 15))
def test_low_latency_messages_alternate_between_two_streams(phase: int, number: int, channel: int) -> None:
    assert streams.ll_stream(phase, number, channel) == streams.ll_stream(phase, number + 2, channel)
    assert streams.ll_stream(phase, number, channel) != streams.ll_stream(phase, number + 1, channel)
    assert streams.channel_of(streams.ll_stream(phase, number, channel)) == channel


def test_stream_names_are_distinct() -> None:
    used = range(streams.HOST + 1)
    names = {streams.name_of(stream) for stream in used}
    assert len(names) == len(used)
    assert streams.name_of(streams.CREDIT | streams.LL_DISPATCH).startswith("credit of low-latency dispatch")
