"""Every claim that low latency's kernels check, made false: refused, and whose it was is told. One that changes is the
same to all threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.ptx.faults.alone import before_launch, meeting, peek, poke, run
from tests.ptx.faults.scenes import CASE, EXPANDED, Play
from tests.ptx.machine.machine import Machine
from tests.ptx.product import trials
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import ModelGroup, ModelRuntime
from tests.support import ll_cases
from tests.support.ll_cases import Case
from tests.support.ll_player import Player
from uccl_ep_serving.errors import ProtocolError, UcclEpError
from uccl_ep_serving.kernels.blocks import low_latency as block
from uccl_ep_serving.kernels.blocks.low_latency_device import state_word
from uccl_ep_serving.kernels.triton.ll_dispatch_recv import dispatch_recv
from uccl_ep_serving.protocol.message import (
    DTYPE_BF16,
    HEADER_BYTES,
    NOTICE_SLOTS,
    PAIRS_SHIFT,
    PLACE_SHIFT,
    LowLatencyHeader,
    Notice,
    counts_bytes,
    meta_bytes,
    row_bytes,
)
from uccl_ep_serving.protocol.streams import LL_COMBINE, LL_DISPATCH, NOTICE, ll_stream

__all__ = ["LIES"]

_RANKS = 2


class Seen(NamedTuple):
    """What the host finds in rank 0's memory of what rank 1 has sent."""

    group: ModelGroup
    state: int

    def _word(self, word: int) -> int:
        return peek(self.state + 8 * word)

    @property
    def _window(self) -> int:
        return int(self.group.spaces[0].window)

    def arrived(self, stream: int) -> int:
        """Address of the count."""
        return int(self.group.spaces[0]._arrived[1, stream])

    def dispatch(self, number: int) -> int:
        """Where dispatch message ``number`` lies, once it is there."""
        self._wait(ll_stream(LL_DISPATCH, number, 0), number)
        slot = (number & 1) * _RANKS + 1
        return self._window + self._word(block.DISPATCH_RECV) + slot * self._word(block.DISPATCH_SLOT)

    def combine(self, number: int) -> int:
        """Where combine message ``number`` lies, once it is there."""
        self._wait(ll_stream(LL_COMBINE, number, 0), number)
        region = self._word(block.COMBINE_RECV) + (number & 1) * self._word(block.COMBINE_RECV_STEP)
        base = state_word("COMBINE_BASE_ODD" if number & 1 else "COMBINE_BASE", 1)
        return self._window + region + self._word(base)

    def notice(self) -> int:
        """Where the first notice goes."""
        return self._window + self._word(block.NOTICE_RECV) + NOTICE_SLOTS * HEADER_BYTES

    def _wait(self, stream: int, number: int) -> None:
        address, machine = self.arrived(stream), self.group.machine
        assert machine.wait_until(lambda: peek(address) > number // 2, f"message {number}", timeout_s=1.0)

    @property
    def room(self) -> int:
        """Bytes of a parity of what returns."""
        return self._word(block.COMBINE_RECV_STEP)


#: Told what the host finds, it writes what is false.
Tell = Callable[[Seen], None]


def _of_dispatch(number: int, word: int, value: int) -> Tell:
    return lambda seen: poke(seen.dispatch(number) + 8 * word, value)


def _of_combine(number: int, word: int, value: int) -> Tell:
    return lambda seen: poke(seen.combine(number) + 8 * word, value)


def _of_notice(tag: int, claim: int) -> Tell:
    def tell(seen: Seen) -> None:
        notice = seen.notice()
        for word, value in {Notice.TAG: tag, Notice.NUMBER: 0, Notice.CONSUMED_DISPATCH: claim}.items():
            poke(notice + 8 * word, value)
        poke(notice + 8 * Notice.CONSUMED_COMBINE, 0)
        poke(seen.arrived(NOTICE), 1)

    return tell


def _too_far(seen: Seen) -> None:
    poke(seen.dispatch(0) + 8 * LowLatencyHeader.RETURN_OFFSET, seen.room - HEADER_BYTES)


def _rows(seen: Seen) -> int:
    return peek(seen.dispatch(0) + 8 * LowLatencyHeader.ROWS) & ((1 << PAIRS_SHIFT) - 1)


def _of_pairs(pairs: int) -> Tell:
    """The first dispatch has so many (token, slot) pairs."""

    def tell(seen: Seen) -> None:
        poke(seen.dispatch(0) + 8 * LowLatencyHeader.ROWS, pairs << PAIRS_SHIFT | _rows(seen))

    return tell


def _of_count(value: int) -> Tell:
    """The first dispatch has so many rows for the second expert."""
    return lambda seen: poke(seen.dispatch(0) + HEADER_BYTES + 4, value, nbytes=4)


def _of_meta(word: int, value: int) -> Tell:
    """Of the second row of the first dispatch: its token's index, its pairs before, or a place. Who refuses it names
    the row, and the first is nothing; programs that copy later rows end after it."""

    def tell(seen: Seen) -> None:
        assert _rows(seen) > 2
        first, row = HEADER_BYTES + counts_bytes(CASE.experts // _RANKS), meta_bytes(CASE.topk)
        at = first + row + row_bytes(CASE.hidden, DTYPE_BF16)
        poke(seen.dispatch(0) + at + 4 * word, value, nbytes=4)

    return tell


@dataclass(frozen=True)
class Lie:
    """What rank 1 claims, as far as rank 0 sees.

    Attributes:
        programs: of both ranks (:class:`tests.support.ll_player.Player`).
        kernel, number: the launch of rank 0 before which it is told.
        case: what they exchange.
    """

    programs: tuple[str, str]
    kernel: str
    number: int
    tell: Tell
    case: Case = CASE

    def play(self, compiled: Compiled, memory: str, seed: int) -> Machine:
        """The machine on which it was refused."""
        counts: list[int] = []
        with meeting(compiled, memory, seed) as (machine, group):

            def before(given: Sequence[int]) -> None:
                self.tell(Seen(group, given[1]))
                if self.kernel == "dispatch_recv":
                    counts.append(given[dispatch_recv.arg_names.index("recv_count")])

            def first() -> None:
                before_launch(group, self.kernel, self.number, before)

            def ended(error: UcclEpError) -> None:
                assert isinstance(error, ProtocolError), error
                assert error.peer == 1, error
                # all words of it, and not some
                assert "got 0x0" not in str(error), error
                # of both experts
                assert all(peek(address) == 0 for address in counts)

            run(group, self.programs, first, ended, self.case)
        return machine


def _rows_or_refusal(player: Player, words: str) -> None:
    """A refused message leaves no rows, and says so or has the next call say so."""
    try:
        try:
            player.play(words)
        except AssertionError as wrong:
            player.dispatch()
            raise wrong from None
    except ProtocolError as error:
        if error.peer != 1:
            raise


@dataclass(frozen=True)
class Fickle:
    """A word of a message that rank 1 changes before every read of it, true and false in turn: what comes of it are the
    rows, or a refusal.

    Attributes:
        programs, kernel: as of :class:`Lie`.
        place: where the word is.
        false: what it must not be.
    """

    programs: tuple[str, str]
    kernel: str
    place: Callable[[Seen], int]
    false: int

    def play(self, compiled: Compiled, memory: str, seed: int) -> Machine:
        """The machine on which nothing else came of it."""
        with meeting(compiled, memory, seed) as (machine, group):

            def begin(given: Sequence[int]) -> None:
                address, load = self.place(Seen(group, given[1])), machine.memory.load
                words = itertools.cycle((peek(address), self.false)[:: 1 if seed % 2 else -1])

                def changing(agents: Sequence[Any], addresses: Sequence[int], operation: Any) -> list[int]:
                    read: list[int] = []
                    # no two threads read at the same time
                    for agent, at in zip(agents, addresses, strict=True):
                        if at <= address < at + operation.nbytes:
                            poke(address, next(words))
                        read += load([agent], [at], operation)
                    return read

                machine.memory.load = changing

            def body(runtime: ModelRuntime) -> None:
                low_latency = group.low_latency(runtime)
                ll_cases.reserve(low_latency, CASE)
                player = Player(low_latency, runtime.rank, CASE)
                if runtime.rank == 0:
                    before_launch(group, self.kernel, 0, begin)
                    _rows_or_refusal(player, self.programs[0])
                else:
                    player.play(self.programs[1])

            group.run(body, limit_steps=trials.LIMIT_STEPS)
        return machine


#: Words of a meta.
_TOKEN, _PAIRS, _PLACE = 0, 1, 2
_HEADER = {
    "tag": (LowLatencyHeader.TAG, 1),
    "plan": (LowLatencyHeader.PLAN, 1),
    "number": (LowLatencyHeader.NUMBER, 4),
    "coding": (LowLatencyHeader.CODING, 7),
    "rows": (LowLatencyHeader.ROWS, CASE.tokens + 1),
    "claim": (LowLatencyHeader.CONSUMED_DISPATCH, 9),
}
_DISPATCH, _COMBINE = ("D d0", "D"), ("D d0 C0 c0", "D d0 C0")
_CLAIM = LowLatencyHeader.CONSUMED_COMBINE
_THIRD = "D d0 C0 C0 c0 C0"
_LIES: dict[str, Lie] = {
    **{
        f"dispatch, {name}": Lie(_DISPATCH, "dispatch_recv", 0, _of_dispatch(0, *word))
        for name, word in {**_HEADER, "return offset": (LowLatencyHeader.RETURN_OFFSET, 8)}.items()
    },
    "dispatch, room": Lie(_DISPATCH, "dispatch_recv", 0, _too_far),
    **{
        f"dispatch, {name}": Lie(_DISPATCH, "dispatch_recv", 0, tell)
        for name, tell in {
            "more pairs than slots": _of_pairs(CASE.tokens * CASE.topk + 1),
            "less pairs than none": _of_pairs(-1),
            "more rows of an expert than rows": _of_count(CASE.tokens + 1),
            "less rows of an expert than none": _of_count(-1),
            "a token too high": _of_meta(_TOKEN, CASE.tokens),
            "a token too low": _of_meta(_TOKEN, -1),
            "a foreign expert": _of_meta(_PLACE, CASE.experts // _RANKS << PLACE_SHIFT),
            "a position too high": _of_meta(_PLACE, CASE.tokens),
            "no place": _of_meta(_PLACE, -2),
        }.items()
    },
    **{
        f"dispatch, {name}": Lie(_DISPATCH, "dispatch_recv", 0, _of_meta(_PAIRS, value), EXPANDED)
        for name, value in {
            "pairs before none": -1,
            "pairs behind all": CASE.tokens * CASE.topk,
            "pairs that wrap": (1 << 31) - 1,
        }.items()
    },
    **{f"combine, {name}": Lie(_COMBINE, "combine_recv", 0, _of_combine(0, *word)) for name, word in _HEADER.items()},
    "combine, pairs": Lie(
        _COMBINE, "combine_recv", 0, _of_combine(0, LowLatencyHeader.ROWS, CASE.tokens * CASE.topk + 1), EXPANDED
    ),
    "notice, tag, dispatch": Lie(("D d0 D D", "D d0"), "dispatch_send", 2, _of_notice(1, 0)),
    "notice, claim, dispatch": Lie(("D d0 D D", "D d0"), "dispatch_send", 2, _of_notice(Notice.TAG_VALUE, 9)),
    "next dispatch, claim, dispatch": Lie(("D d0 D D", "D d0 D"), "dispatch_send", 2, _of_dispatch(1, _CLAIM, 9)),
    "next combine, claim, dispatch": Lie(("D d0 C0 D D", "D d0 C0"), "dispatch_send", 2, _of_combine(0, _CLAIM, 9)),
    "notice, tag, combine": Lie((_THIRD, "D d0 C0 C0"), "combine_send", 2, _of_notice(1, 0)),
    "notice, claim, combine": Lie((_THIRD, "D d0 C0 C0"), "combine_send", 2, _of_notice(Notice.TAG_VALUE, 9)),
    "next dispatch, claim, combine": Lie((_THIRD, "D d0 C0 C0 D"), "combine_send", 2, _of_dispatch(1, _CLAIM, 9)),
    "next combine, claim, combine": Lie((_THIRD, "D d0 C0 C0"), "combine_send", 2, _of_combine(1, _CLAIM, 9)),
}
_FICKLE: dict[str, Fickle] = {
    **{
        f"dispatch, {name}": Fickle(
            _DISPATCH, "dispatch_recv", lambda seen, at=word[0]: seen.dispatch(0) + 8 * at, word[1]
        )
        for name, word in _HEADER.items()
    },
    **{
        f"combine, {name}": Fickle(_COMBINE, "combine_recv", lambda seen, at=word[0]: seen.combine(0) + 8 * at, word[1])
        for name, word in _HEADER.items()
    },
}
LIES: dict[str, Play] = {
    **{f"a lie: {name}": lie.play for name, lie in _LIES.items()},
    **{f"a word that changes: {name}": fickle.play for name, fickle in _FICKLE.items()},
}
"""By where the claim stands, what it is, and who looks."""
