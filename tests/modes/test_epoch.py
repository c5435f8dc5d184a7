"""Ready, stale, broken, in flight: what an operation is told, the same in every mode, and what a new epoch forgets."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from uccl_ep_serving.data_plane.turn import Turn
from uccl_ep_serving.errors import AFTER_INTERRUPTION, ConfigError, TransportError, UcclEpError
from uccl_ep_serving.handles import LowLatencyHandle
from uccl_ep_serving.modes.epoch import Epoch, InFlight, RecvHook
from uccl_ep_serving.protocol.layout import LowLatencyPlan

PLAN = LowLatencyPlan(ranks=2, tokens=8, hidden=128, experts=8, topk=4, element=2)
WIDER = LowLatencyPlan(ranks=2, tokens=8, hidden=128, experts=8, topk=4, element=4)


class Ranks:
    """A Runtime that rebuilds when it is asked, and notes what for."""

    def __init__(self) -> None:
        self.epoch, self.stale, self.rebuild_requested, self.begun, self.interrupted = 0, "", False, 0, ""
        self.turn = Turn()
        self.layout = SimpleNamespace(low_latency=PLAN.room)
        self.objections: list[str] = []

    def check(self, phase: str) -> None:
        pass

    def begin_operation(self, plan: LowLatencyPlan | None = None, combines: bool = False) -> None:
        self.begun += 1

    def interrupt(self, operation: str) -> None:
        self.interrupted = operation

    def call_off(self, why: str) -> None:
        raise ConfigError(f"rank 0: {why}")

    def rebuild(
        self, plan: LowLatencyPlan | None, objection: str = "", compile: Callable[[], object] = lambda: None
    ) -> None:
        self.objections.append(objection)
        if objection:
            raise ConfigError(objection)
        compile()
        self.epoch, self.stale, self.interrupted = self.epoch + 1, "", ""
        if plan is not None:
            self.layout.low_latency = self.layout.low_latency.with_room_for(plan.room)


def nothing() -> None:
    pass


@pytest.fixture
def ranks() -> Any:
    return Ranks()


def entered(ranks: Any, *flights: InFlight, gpu: Any = None) -> Epoch:
    epoch = Epoch(ranks, flights, gpu)
    epoch.enter()
    return epoch


def test_counters_restart_once_in_every_epoch(ranks: Any) -> None:
    flight = InFlight("dispatches")
    epoch = Epoch(ranks, (flight,))
    assert [epoch.enter(), epoch.enter()] == [True, False]
    with epoch.operation("dispatch", flight):
        pass
    assert (flight.count, ranks.begun) == (1, 1)
    ranks.rebuild(PLAN)
    assert [epoch.enter(), epoch.number, flight.count] == [True, 1, 0]


def test_what_needs_an_earlier_dispatch_is_void_once_a_rank_is_masked(ranks: Any) -> None:
    epoch = entered(ranks)
    ranks.stale = "rank 1 was masked"
    epoch.check("dispatch", begins=True)
    words = "combine: rank 1 was masked, so what was sent before is void. Next step: go on with a dispatch on every"
    with pytest.raises(ConfigError, match=words):
        epoch.check("combine")


def test_an_interrupted_operation_has_one_next_step_for_both_modes_and_a_new_epoch_forgets_it(ranks: Any) -> None:
    epoch, other = entered(ranks), entered(ranks)
    with pytest.raises(KeyboardInterrupt), epoch.operation("dispatch"):
        raise KeyboardInterrupt
    for mode in (epoch, other):
        for begins in (True, False):
            words = rf"an earlier dispatch \(KeyboardInterrupt\) was .*{AFTER_INTERRUPTION}"
            with pytest.raises(UcclEpError, match=words):
                mode.check("combine", begins=begins)
    ranks.rebuild(PLAN)
    epoch.check("dispatch", begins=True)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
    ],
    ids=str,
)
def test_a_process_that_runs_short_hears_what_the_others_hear(error: Exception, ranks: Any) -> None:
    epoch = entered(ranks)
    words = r"rank 0: dispatch ended with .*leave this process more memory"
    with pytest.raises(ConfigError, match=words), epoch.operation("dispatch"):
        raise error


@pytest.mark.parametrize("error", [TimeoutError("step timer"), RuntimeError("step timer"), OSError("step timer")])
def test_an_error_of_the_callers_own_stays_his_own_and_the_others_are_told(error: Exception, ranks: Any) -> None:
    """A timer whose signal handler raises, say."""
    epoch, told = entered(ranks), []
    ranks.call_off = lambda why: told.append(why)
    with pytest.raises(type(error), match="step timer") as caught, epoch.operation("dispatch"):
        raise error
    assert caught.value is error
    assert told == [
        f"dispatch ended with {type(error).__name__}: step timer. Next step: read the log of that rank: the error is "
        "none of this package"
    ]


def test_what_all_ranks_refuse_alike_interrupts_nothing(ranks: Any) -> None:
    epoch = entered(ranks)
    operation = epoch.operation("dispatch")
    operation.void = True
    with pytest.raises(ConfigError, match="different"), operation:
        raise ConfigError("different operations")
    epoch.check("dispatch")


def test_what_is_only_captured_interrupts_nothing(ranks: Any) -> None:
    order = SimpleNamespace(capturing=True)
    gpu = SimpleNamespace(order=order, take_report=lambda: None, check_ids=lambda phase: None)
    flight = InFlight("dispatches")
    epoch = entered(ranks, flight, gpu=gpu)
    for capturing in (True, False):
        order.capturing = capturing
        epoch.check("dispatch")
        with pytest.raises(TransportError), epoch.operation("dispatch", flight):
            raise TransportError("out of resources")
        assert flight.count == 0
    with pytest.raises(UcclEpError, match=r"an earlier dispatch \(TransportError: out of resources\) was interrupted"):
        epoch.check("dispatch")


def test_at_most_two_are_in_flight_in_whatever_order_they_are_received() -> None:
    flight = InFlight("dispatches")
    first = flight.start()
    assert flight.has_room
    second = flight.start()
    assert not flight.has_room
    words = (
        "dispatch: of the dispatches that were sent, the one before last is not received: at most two at a time. Next"
    )
    assert words in str(flight.refusal("dispatch"))
    flight.end(second)
    assert not flight.has_room
    flight.end(first)
    assert (flight.count, flight.has_room) == (0, True)


def test_an_operation_that_was_not_sent_takes_no_slot() -> None:
    flight = InFlight("combines")
    flight.start()
    flight.withdraw(flight.start())
    assert (flight.count, flight.has_room) == (1, True)


def test_other_sizes_are_refused_on_every_rank_while_an_operation_is_in_flight(ranks: Any) -> None:
    flight = InFlight("dispatches")
    epoch = entered(ranks, flight)
    epoch.make_room("dispatch", PLAN, nothing, nothing)
    assert ranks.objections == []
    with epoch.operation("dispatch", flight) as operation:
        pass
    with pytest.raises(ConfigError, match=r"is in flight\. Next step: call its recv hook first"):
        epoch.make_room("dispatch", WIDER, nothing, nothing)
    operation.received()
    epoch.make_room("dispatch", WIDER, nothing, nothing)
    assert [bool(objection) for objection in ranks.objections] == [True, False]


def test_what_keeps_this_rank_from_new_windows_is_told_to_the_others(ranks: Any) -> None:
    compiled: list[Any] = []

    def check() -> None:
        raise ConfigError("a ring is too short")

    with pytest.raises(ConfigError, match="a ring is too short"):
        Epoch(ranks).make_room("dispatch", WIDER, check, lambda: compiled.append(WIDER))
    assert ranks.objections == ["a ring is too short"]
    assert compiled == []
    # a peer asks for other windows: this rank meets it, although its own have room
    ranks.rebuild_requested = True
    epoch = Epoch(ranks)
    for _ in range(2):
        # who makes room ahead leaves that to the next call: the peer may have made this one already
        epoch.make_room("reserve", PLAN, nothing, nothing, ahead=True)
        assert ranks.epoch == 0
    epoch.make_room("dispatch", PLAN, nothing, nothing)
    assert ranks.epoch == 1


def test_a_hook_runs_once_and_only_in_its_epoch(ranks: Any) -> None:
    flight, calls = InFlight("dispatches"), []
    epoch = entered(ranks, flight)

    def receive() -> None:
        calls.append("receive")
        if len(calls) == 1:
            raise KeyboardInterrupt

    def sent() -> RecvHook:
        with epoch.operation("dispatch", flight) as operation:
            pass
        return RecvHook(epoch, operation, "dispatch recv", receive, lambda nanoseconds: calls.append("received"))

    hook = sent()
    with pytest.raises(KeyboardInterrupt):
        hook()
    assert flight.count == 1
    hook()
    hook()
    assert (calls, flight.count) == (["receive", "receive", "received"], 0)
    late = sent()
    ranks.rebuild(PLAN)
    with pytest.raises(
        ConfigError, match=r"the windows were rebuilt since this operation was sent .* so what was sent"
    ):
        late()


def test_a_handle_of_another_epoch_or_buffer_is_refused(ranks: Any) -> None:
    epoch, owner, nothing = entered(ranks), object(), torch.empty(0)
    handle = LowLatencyHandle.build(
        (nothing, nothing),
        owner=owner,
        epoch=epoch.number,
        plan=PLAN,
        route=None,
        topk_idx=nothing,
        topk_weights=None,
        dtype=torch.bfloat16,
    )
    epoch.check_handle("combine", handle, owner)
    for wrong, of in ((handle, object()), ((1, 2, 3, 4, 5), owner)):
        with pytest.raises(ConfigError, match="the handle must be what low-latency dispatch of the same Buffer"):
            epoch.check_handle("combine", wrong, of)
    ranks.rebuild(PLAN)
    words = "the windows were rebuilt since the dispatch of this handle was sent .* go on with a dispatch on every rank"
    with pytest.raises(ConfigError, match=words):
        epoch.check_handle("combine", handle, owner)


def test_a_receive_in_place_of_a_dropped_hook_is_made_again_after_an_interruption() -> None:
    flight, made = InFlight("dispatches"), list[int]()

    def receive() -> None:
        made.append(len(made))
        if len(made) == 1:
            raise KeyboardInterrupt

    number, received = flight.start(), list[int]()
    flight.drop(number, receive, lambda: received.append(flight.count), None)
    with pytest.raises(KeyboardInterrupt):
        flight.receive_dropped(None)
    assert (flight.has_dropped, received) == (True, [])
    flight.receive_dropped(None)
    assert (made, received, flight.has_dropped, flight.count) == ([0, 1], [1], False, 0)
