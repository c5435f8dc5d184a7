"""Every wait of low latency's kernels, for what never comes: it ends at its deadline, or when the host says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.ptx.faults.alone import before_launch, hide, leave_out, meeting, peek, poke, release, run
from tests.ptx.faults.scenes import Play
from tests.ptx.machine.machine import Machine
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import TIMEOUT, ModelGroup
from uccl_ep_serving.errors import PeerLost, PeerTimeout, TransportError, UcclEpError
from uccl_ep_serving.kernels.blocks.low_latency import COMBINE_NUMBER, DISPATCH_NUMBER, NOTICE_RECV
from uccl_ep_serving.kernels.blocks.low_latency_device import ARRIVALS, PLACED, state_word
from uccl_ep_serving.protocol.context import HEADS
from uccl_ep_serving.protocol.message import HEADER_BYTES, NOTICE_SLOTS, Notice
from uccl_ep_serving.protocol.ring import TAIL
from uccl_ep_serving.protocol.streams import LL_COMBINE, LL_DISPATCH, NOTICE, ll_stream

__all__ = ["WAITS"]

#: ns of the machine within which a kernel ends that the host releases.
_SOON_NS = 1e9
#: Words of the state block that count what a kernel sends.
_NUMBERS = {"dispatch_send": DISPATCH_NUMBER, "combine_send": COMBINE_NUMBER}


@dataclass(frozen=True)
class Wait:
    """What rank 0's last kernels wait for in vain.

    Attributes:
        programs: of each rank (:class:`tests.support.ll_player.Player`).
        kernel, number: the launch of rank 0 that waits.
        counts: addresses of counts that stay where they are, which is at most at ``most``.
        absent: program of that launch that never starts; -1: all do.
        path, ring_slots: how peers are reached.
        notices: what rank 0 takes for its notices under way when it comes to that launch.
        known: of the ring's tail, what it knows then, and sees; -1: it sees ``most`` from the beginning.
        crowded: notices of rank 1 come all the while, as a NIC writes them, and tell nothing new: each lands on the
            last one that is counted.
        error, told: what it raises at its deadline.
    """

    programs: tuple[str, ...]
    kernel: str
    number: int
    counts: Callable[[ModelGroup], list[int]] = lambda group: []
    most: int = 0
    absent: int = -1
    path: str = "mapped"
    ring_slots: int = 1024
    notices: int = 0
    known: int = -1
    crowded: bool = False
    error: type[UcclEpError] = PeerTimeout
    told: str = "rank 1 is silent"

    def play(self, compiled: Compiled, memory: str, seed: int, *, released: bool) -> Machine:
        """The machine on which the wait ended as it must."""
        ranks, reached = len(self.programs), {"path": self.path, "ring_slots": self.ring_slots}
        with meeting(compiled, memory, seed, ranks=ranks, **reached) as (machine, group):
            begin, since = release(machine, group)
            state = [0]

            def waits(arguments: tuple[int, ...]) -> None:
                state[0] = arguments[1]
                if self.notices:
                    poke(arguments[1] + 8 * state_word("NOTICES_SENT", 1), self.notices)
                if self.known >= 0:
                    poke(peek(peek(arguments[0] + 8 * HEADS) + 8 * NOTICE) + 8, self.known)
                    hide(group, self.counts(group), self.known)
                if self.absent >= 0:
                    leave_out(machine, self.absent)
                if released:
                    begin()

            def first() -> None:
                if self.known < 0:
                    hide(group, self.counts(group), self.most)
                before_launch(group, self.kernel, self.number, waits)

            def ended(error: UcclEpError) -> None:
                if released:
                    assert isinstance(error, PeerLost), error
                    assert machine.now_ns - since() < _SOON_NS, f"{TIMEOUT} s were waited all the same"
                    self._check_tidy(state[0], ranks)
                else:
                    assert isinstance(error, self.error), error
                    assert self.told in str(error), error
                    # all words of it, and not some
                    assert " 0 needed" not in str(error), error
                    assert not isinstance(error, PeerTimeout) or error.arrived < error.expected, error

            if self.crowded:
                machine.actor("who sends notices", _crowd(group, state))
            run(group, self.programs, first, ended)
        return machine

    def _check_tidy(self, state: int, ranks: int) -> None:
        """No kernel that may follow takes what this one has left for its own."""
        assert [peek(state + 8 * state_word("FINISHED", rank)) for rank in range(ranks)] == [0] * ranks
        assert peek(state + 8 * PLACED) == peek(state + 8 * ARRIVALS) == 0
        if self.kernel in _NUMBERS:
            assert peek(state + 8 * _NUMBERS[self.kernel]) == self.number + 1


def _crowd(group: ModelGroup, state: list[int]) -> Callable[[], bool]:
    """What lands and counts notices of rank 1 for rank 0, once that has a state block."""
    landed, counted = [0], [0]

    def step() -> bool:
        if not state[0]:
            return False
        count = int(group.spaces[0]._arrived[1, NOTICE])
        if not landed[0]:
            landed[0] = counted[0] = peek(count)
        if landed[0] < counted[0] + NOTICE_SLOTS:
            slot = NOTICE_SLOTS + landed[0] % NOTICE_SLOTS
            notice = int(group.spaces[0].window) + peek(state[0] + 8 * NOTICE_RECV) + slot * HEADER_BYTES
            old = landed[0] // NOTICE_SLOTS & 1
            for word, value in (
                (Notice.TAG, Notice.TAG_VALUE),
                (Notice.NUMBER, landed[0]),
                (Notice.CONSUMED_DISPATCH, old),
                (Notice.CONSUMED_COMBINE, old),
            ):
                poke(notice + 8 * word, value)
            landed[0] += 1
        else:
            counted[0] += 1
            poke(count, counted[0])
        return False

    return step


def _arrived(*streams: int) -> Callable[[ModelGroup], list[int]]:
    return lambda group: [int(group.spaces[0]._arrived[1, stream]) for stream in streams]


def _completed(stream: int) -> Callable[[ModelGroup], list[int]]:
    return lambda group: [int(group.spaces[0]._completed[1, stream])]


def _tail(group: ModelGroup) -> list[int]:
    return [int(group.spaces[0]._ring[NOTICE]) + TAIL]


_D0, _D1 = ll_stream(LL_DISPATCH, 0, 0), ll_stream(LL_DISPATCH, 1, 0)
_C0, _C1 = ll_stream(LL_COMBINE, 0, 0), ll_stream(LL_COMBINE, 1, 0)
_NO_ROOM = {"path": "proxied", "error": TransportError, "told": "commands"}
_THIRD = "D d0 C0 C0 c0 C0"
_READY = {"absent": 1}
_WAITS: dict[str, Wait] = {
    "a dispatch": Wait(("D d0 D d1", "D d0"), "dispatch_recv", 1, _arrived(_D1)),
    "a combine": Wait(("D d0 C0 c0", "D d0"), "combine_recv", 0, _arrived(_C0)),
    "that a dispatch is read": Wait(("D d0 D D", "D d0"), "dispatch_send", 2, _arrived(NOTICE, _D1, _C0)),
    "that a combine is read": Wait((_THIRD, "D d0 C0 C0"), "combine_send", 2, _arrived(NOTICE, _D1)),
    "news of a dispatch": Wait(("D d0 C0 c0 D d1 D D", "D d0 C0 c0 D"), "dispatch_send", 3, crowded=True),
    "news of a combine": Wait(("D d0 C0 C0 c0 C0 c1 C0", "D d0 C0 C0 c0 C0"), "combine_send", 3, crowded=True),
    "the combine before": Wait((_THIRD, "D d0 C0"), "combine_send", 2, _arrived(_C1)),
    "the end of a dispatch of its own": Wait(
        ("D d0 D D", "D d0 D"), "dispatch_send", 2, _completed(_D0), path="proxied"
    ),
    "the end of a combine of its own": Wait(
        ("D d0 C0 C0", "D d0 C0"), "combine_send", 1, _completed(_C0), path="proxied"
    ),
    "the end of a notice, dispatch": Wait(
        ("D D d0 D", "D"), "dispatch_send", 2, _completed(NOTICE), path="proxied", notices=NOTICE_SLOTS
    ),
    "the end of a notice, combine": Wait(
        (_THIRD, "D d0 C0 C0"), "combine_send", 2, _completed(NOTICE), path="proxied", notices=NOTICE_SLOTS
    ),
    "room for a dispatch": Wait(("D d0 D D", "D d0 D"), "dispatch_send", 2, _tail, ring_slots=2, **_NO_ROOM),
    "room for a combine": Wait(("D d0 C0 C0", "D d0 C0"), "combine_send", 1, _tail, ring_slots=2, **_NO_ROOM),
    "room for two dispatches": Wait(
        ("D d0 D D", "D d0 D", "D d0 D"), "dispatch_send", 2, _tail, ring_slots=4, **_NO_ROOM
    ),
    "room for two combines": Wait(
        ("D d0 C0 C0", "D d0 C0", "D d0 C0"), "combine_send", 1, _tail, ring_slots=4, **_NO_ROOM
    ),
    # as if no command before had left its slot
    "room for a notice, dispatch": Wait(
        ("D D d0 D", "D"), "dispatch_send", 2, _tail, known=0, ring_slots=2, **_NO_ROOM
    ),
    "room for a notice, combine": Wait(
        (_THIRD, "D d0 C0 C0"), "combine_send", 2, _tail, known=1, ring_slots=2, **_NO_ROOM
    ),
}
#: Where the program that serves rank 1 never starts, the host ends nothing: the programs that wait for it do.
_UNSERVED: dict[str, Wait] = {
    "room in a message": Wait(("D", "D"), "dispatch_send", 0, **_READY),
    "places of rows": Wait(("D d0", "D"), "dispatch_recv", 0, **_READY),
    "room in what returns": Wait(("D d0 C0", "D d0"), "combine_send", 0, **_READY),
    "what returns": Wait(("D d0 C0 c0", "D d0 C0"), "combine_recv", 0, **_READY),
}
WAITS: dict[str, Play] = {
    f"{how}: {name}": partial(wait.play, released=released)
    for name, wait in _WAITS.items()
    for how, released in (("in vain", False), ("released", True))
} | {f"in vain: {name}": partial(wait.play, released=False) for name, wait in _UNSERVED.items()}
"""By what is waited for, and how that ends."""
