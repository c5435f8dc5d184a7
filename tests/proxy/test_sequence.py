"""The sequence window against a model in plain Python, and the codecs against the protocol's own encoders."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.protocol import imm
from uccl_ep_serving.protocol.imm import SEQUENCE_SPACE, SEQUENCE_WINDOW, Immediate
from uccl_ep_serving.proxy import sequence as codec
from uccl_ep_serving.proxy.sequence import (
    HELD,
    HELD_BACK,
    IN_ORDER,
    MESSAGES,
    PREFIX,
    REPEATED,
    WINDOW_STATE_BYTES,
    note,
)


class Model:
    """What a window must say, the obvious way: the set of all numbers that have happened."""

    def __init__(self) -> None:
        self.happened: set[int] = set()
        self.ends: set[int] = set()
        self.prefix = 0
        self.messages = 0

    def note(self, number: int, last: bool) -> int:
        """One more number."""
        if number in self.happened:
            return REPEATED
        self.happened.add(number)
        if last:
            self.ends.add(number)
        outcome = IN_ORDER if number == self.prefix else HELD_BACK
        while self.prefix in self.happened:
            self.messages += self.prefix in self.ends
            self.prefix += 1
        return outcome


@given(
    start=st.sampled_from([0, 5, 1000, 2040, 4090]),
    steps=st.lists(
        st.tuples(st.one_of(st.integers(0, 40), st.integers(0, SEQUENCE_WINDOW - 1)), st.booleans()), max_size=150
    ),
)
def test_window_equals_the_model(start: int, steps: list[tuple[int, bool]]) -> None:
    """Any order within the window, with repeats of anything outstanding or just behind."""
    memory = np.zeros(WINDOW_STATE_BYTES // 8 + 1, np.int64)
    window, published = memory.ctypes.data, memory.ctypes.data + WINDOW_STATE_BYTES
    model = Model()
    for number in range(start):
        assert note(window, published, number % SEQUENCE_SPACE, 1) == model.note(number, True) == IN_ORDER
    fixed_ends: dict[int, bool] = {}
    for ahead, last in steps:
        # A repeat may come for anything at most a window behind; a new number lies less than a window ahead.
        number = max(0, model.prefix + ahead - 8)
        number = min(number, model.prefix + SEQUENCE_WINDOW - 1)
        last = fixed_ends.setdefault(number, last if number >= start else True)
        assert note(window, published, number % SEQUENCE_SPACE, int(last)) == model.note(number, last)
        assert memory[PREFIX // 8] == model.prefix
        assert memory[MESSAGES // 8] == memory[-1] == model.messages, "published is not the gap-free prefix"
        assert memory[HELD // 8] == len(model.happened) - model.prefix


def test_a_full_window_in_reverse() -> None:
    memory = np.zeros(WINDOW_STATE_BYTES // 8 + 1, np.int64)
    window, published = memory.ctypes.data, memory.ctypes.data + WINDOW_STATE_BYTES
    for lap in range(5):
        base = lap * SEQUENCE_WINDOW
        for number in reversed(range(base + 1, base + SEQUENCE_WINDOW)):
            assert note(window, published, number % SEQUENCE_SPACE, 1) == HELD_BACK
            assert memory[-1] == base
        assert note(window, published, base % SEQUENCE_SPACE, 1) == IN_ORDER
        assert memory[-1] == base + SEQUENCE_WINDOW
    assert not memory[HELD // 8 : -1].any(), "nothing is left behind"


@given(
    st.integers(0, 4095), st.integers(0, 255), st.integers(0, 1 << 40), st.booleans(), st.integers(0, (256 << 20) // 16)
)
def test_codecs_agree_with_the_protocol(rank: int, stream: int, count: int, last: bool, units: int) -> None:
    word = codec.immediate(rank, stream, count, int(last))
    assert word == imm.encode(Immediate(rank, stream, count % SEQUENCE_SPACE, last))
    assert (codec.imm_source(word), codec.imm_stream(word), codec.imm_last(word)) == (rank, stream, last)
    ticket = codec.ticket(rank, stream, count, int(last), units * 16)
    assert ticket == codec.TICKET.pack(
        peer=rank, stream=stream, sequence=count % SEQUENCE_SPACE, last=int(last), length=units
    )
    assert 0 <= ticket < 1 << 63
    assert codec.ticket_peer(ticket) == rank
    assert codec.ticket_stream(ticket) == stream
    assert codec.ticket_last(ticket) == last
    assert codec.ticket_bytes(ticket) == units * 16
