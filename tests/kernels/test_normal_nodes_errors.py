"""Normal mode between nodes, when a rank falls silent, dies or breaks the format: who and what is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.combinations import diagonal, first_of
from tests.support.fake_ranks import nodes
from tests.support.normal_cases import Case, dispatch, round_trip
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import PeerLost, PeerTimeout, ProtocolError
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol import relay
from uccl_ep_serving.proxy.transport.fake import Adversary


@pytest.mark.parametrize(("silent", "operation"), diagonal([1, 2, 3], ["dispatch", "combine"]))
def test_who_falls_silent_is_named(operation: str, silent: int) -> None:
    """Rank 0 hears of it from its node or over its rail; each rank's error names a rank and the operation."""
    inputs = Case((30, 30, 30, 30), experts=4, lost=0.0).inputs()

    def body(runtime: Any) -> PeerTimeout | None:
        normal, rank = Normal(runtime), runtime.rank
        received, *_, handle, _ = dispatch(normal, inputs, rank)
        if rank == silent:

            def stop(form: Any) -> None:
                raise KeyboardInterrupt

            normal._exchange.run = stop  # type: ignore[method-assign]
        attempts: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: dispatch(normal, inputs, rank),
            "combine": lambda: normal.combine(received, handle),
        }
        with pytest.raises((PeerTimeout, KeyboardInterrupt)) as caught:
            attempts[operation]()
        return caught.value if isinstance(caught.value, PeerTimeout) else None

    with nodes(4, 2, settings=Settings(timeout=0.5)) as group:
        errors = group.run(body)
    assert errors[silent] is None
    named = {error.peer for error in errors if error is not None}
    assert silent in named
    assert all(error.phase == f"normal {operation}" for error in errors if error is not None)
    # whatever is counted, less has come than is waited for
    assert all(error.arrived < error.expected for error in errors if error is not None)


def test_a_killed_peer_is_named() -> None:
    """By those who talk to it over the wire; in production its control connection tells the rest."""
    inputs = Case((60, 50, 40, 30), experts=8).inputs()
    with nodes(4, 2, adversary=Adversary(kill=2, kill_after=40), settings=Settings(timeout=2.0)) as group:

        def body(runtime: Any) -> Any:
            normal = Normal(runtime)

            def many() -> None:
                for _ in range(100):
                    round_trip(normal, inputs, runtime.rank)

            with pytest.raises((PeerLost, PeerTimeout)) as caught:
                many()
            return caught.value

        errors = group.run(body)
    assert any(isinstance(error, PeerLost) and error.peer == 2 for error in errors)


def forged_board(word: int, value: int) -> ProtocolError:
    """What rank 1 says of a board of rank 0, its forwarder for rank 2, of which one word is wrong."""
    inputs = Case((30, 30, 30, 30), experts=4, lost=0.0).inputs()

    def body(runtime: Any) -> ProtocolError | None:
        normal, rank = Normal(runtime), runtime.rank
        if rank == 0:
            real = normal._exchange.run

            def run_late(form: Any) -> None:
                time.sleep(0.3)
                real(form)

            normal._exchange.run = run_late  # type: ignore[method-assign]
        elif rank == 1:
            real_place = normal._exchange.place

            def place(form: Any, capacity: int) -> Any:
                # rank 0 sleeps: its board is written here
                window = group.spaces[0].window_bytes
                at = group.spaces[0].layout.relay_boards + relay.BOARD_BYTES
                words = window[at : at + relay.BOARD_BYTES].view(np.int64)
                landing = group.spaces[0].layout.normal_rounds
                words[:6] = (0, 30, landing, landing + 8192, 4, 16384)
                words[relay.ARRIVED] = 1 << relay.STAMP_SHIFT | 1
                words[word] = value
                return real_place(form, capacity)

            normal._exchange.place = place  # type: ignore[method-assign]
        with pytest.raises((ProtocolError, PeerTimeout)) as caught:
            dispatch(normal, inputs, rank)
        return caught.value if isinstance(caught.value, ProtocolError) else None

    with nodes(4, 2, settings=Settings(timeout=0.6)) as group:
        error = group.run(body)[1]
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (relay.ROWS, -1),
        (relay.META_OFFSET, -64),
        # two slots hold four each
        (relay.ARRIVED, 1 << relay.STAMP_SHIFT | 9),
        *first_of(
            (relay.SLOT_STRIDE, 1 << 40),
            (relay.SLOT_ROWS, 0),
            (relay.SLOT_ROWS, 1 << 40),
            (relay.ROW_OFFSET, 4096),
            (relay.ROW_OFFSET, 1 << 40),
            (relay.ARRIVED, 1 << relay.STAMP_SHIFT | 31),
        ),
    ],
)
def test_a_board_that_breaks_the_format_is_refused(word: int, value: int) -> None:
    assert forged_board(word, value).peer == 0


def lied_to(topk: int, lie: Callable[[torch.Tensor], None], seed: int = 0) -> list[BaseException | None]:
    """What each rank raises when rank 2 marks other rows than it told of, in a dispatch or in its combine."""
    inputs = Case((30, 30, 30, 30), experts=4, topk=topk, lost=0.0, seed=seed).inputs()
    kept: list[torch.Tensor] = []

    def body(runtime: Any) -> BaseException | None:
        normal, rank = Normal(runtime), runtime.rank
        if rank == 2:
            real = normal._exchange.relay.prepare

            def prepare(context: int, operation: Any, peers: int, route: Any, in_rank: torch.Tensor) -> None:
                kept.append(in_rank.clone())
                lie(kept[-1])
                real(context, operation, peers, route, kept[-1])

            normal._exchange.relay.prepare = prepare  # type: ignore[method-assign]
        try:
            round_trip(normal, inputs, rank)
        except (ProtocolError, PeerTimeout) as error:
            return error
        return None

    with nodes(4, 2, settings=Settings(timeout=0.6)) as group:
        return group.run(body)


def test_a_source_that_marks_fewer_rows_than_it_tells_of_is_named() -> None:
    """Rank 1 has looked at all rows of rank 2 and misses some."""

    def lie(in_rank: torch.Tensor) -> None:
        in_rank[:, 1] = False

    error = lied_to(4, lie)[1]
    assert isinstance(error, ProtocolError)
    assert error.peer == 2


def test_a_source_that_marks_more_rows_than_it_tells_of_is_named() -> None:
    """Rank 0 would sum rows that it never got, from beyond its caller's tensor."""

    def lie(in_rank: torch.Tensor) -> None:
        in_rank[:, 0] |= in_rank[:, 1]

    error = lied_to(1, lie)[0]
    assert isinstance(error, ProtocolError)
    assert error.peer == 2
    assert error.args[0].startswith("normal combine")


def test_rows_that_a_source_marks_for_another_rank_and_never_told_of_are_waited_for_no_longer_than_allowed() -> None:
    """Rank 0 would sum rows that rank 1 has not, and cannot know that it has none."""

    def lie(in_rank: torch.Tensor) -> None:
        in_rank[:, 1] |= in_rank[:, 0]

    error = lied_to(1, lie)[0]
    assert isinstance(error, PeerTimeout)
    assert error.peer == 1
    assert error.phase == "normal combine"
