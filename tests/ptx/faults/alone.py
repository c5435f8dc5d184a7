"""Rank 0 comes to a wait or a check that must fail: who it is alone with, and what the host puts in its way."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.ptx.faults.scenes import CASE, HOST_SHARE, machine_of
from tests.ptx.machine.machine import Machine
from tests.ptx.memory.weak import Weak
from tests.ptx.product import trials
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import TIMEOUT, ModelGroup, ModelRuntime
from tests.support import ll_cases
from tests.support.ll_cases import Case
from tests.support.ll_player import Player
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import UcclEpError
from uccl_ep_serving.protocol.context import FAILURE_PEER_LOST

__all__ = ["before_launch", "hide", "leave_out", "meeting", "peek", "poke", "raised_by", "release", "run"]

#: Steps without anything but waiting after which the clock goes faster: so many that nobody's deadline comes while
#: another one is on its way, lane by lane, to what is waited for.
_PATIENCE = 500
#: Chance that lanes part: what only some of them store is seen before what the others store.
_PARTING = 0.6
#: Turns of the host after which it releases a kernel, which will wait. Of every other seed it does: that many steps of
#: nothing else.
_TURNS, _WAITING = 5, 100
#: Where the host can see stores late, some always are. Of every other seed most are seen soon, but in no order: a word
#: of a report before the others.
_LAG, _SOON = 0.01, 0.5


def peek(address: int) -> int:
    """int64 of real memory, as the host sees it."""
    return ctypes.c_int64.from_address(address).value


def poke(address: int, value: int, nbytes: int = 8) -> None:
    """The host stores."""
    ctypes.memmove(address, value.to_bytes(nbytes, "little", signed=True), nbytes)


@contextlib.contextmanager
def meeting(
    compiled: Compiled,
    memory: str,
    seed: int,
    *,
    ranks: int = 2,
    path: str = "mapped",
    ring_slots: int = 1024,
) -> Iterator[tuple[Machine, ModelGroup]]:
    """A machine and its ranks, of which somebody looks at reports all the time."""
    machine = machine_of(memory, seed)
    machine.patience = _PATIENCE
    machine.host_share = max(machine.host_share, HOST_SHARE)
    machine.parting = _PARTING
    if isinstance(machine.memory, Weak):
        machine.memory.lag = _SOON if seed % 2 else machine.memory.lag or _LAG
    settings = Settings(timeout=TIMEOUT, window="host", ring_slots=ring_slots)
    with trials.group_of(machine, compiled, ranks, path, settings) as group:
        # an engine may look at what a kernel has reported while another thread waits for that kernel
        machine.actor("who looks at reports", lambda: _look(group))
        if isinstance(machine.memory, Weak):
            _look_at_once(machine.memory, group)
        yield machine, group


def _look(group: ModelGroup) -> bool:
    for context in group.contexts:
        context.take_report()
    return False


def _look_at_once(memory: Weak, group: ModelGroup) -> None:
    """Somebody looks also after each store that the host gets to see while kernels run: before the next one."""
    show = memory.host.show_some

    def shown() -> bool:
        found = show()
        if found:
            _look(group)
        return found

    memory.host.show_some = shown  # type: ignore[method-assign]


def raised_by(player: Player, words: str) -> UcclEpError:
    """What is raised when a rank plays ``words``, whose last kernels fail, and calls once more."""
    try:
        # what the kernels leave after a failure is not what the program expects
        with contextlib.suppress(AssertionError):
            player.play(words)
        player.dispatch()
    except UcclEpError as error:
        return error
    raise AssertionError("nothing was raised")


def run(
    group: ModelGroup,
    programs: Sequence[str],
    first: Callable[[], None],
    ended: Callable[[UcclEpError], None],
    case: Case = CASE,
) -> None:
    """Every rank plays its program, rank 0 one that must fail.

    Args:
        first: called once all windows are there, before rank 0 plays.
        ended: called with what rank 0 raised.
    """
    case = replace(case, ranks=len(programs), experts=2 * len(programs))

    def body(runtime: ModelRuntime) -> None:
        low_latency = group.low_latency(runtime)
        ll_cases.reserve(low_latency, case)
        player = Player(low_latency, runtime.rank, case)
        if runtime.rank == 0:
            first()
            ended(raised_by(player, programs[0]))
        else:
            player.play(programs[runtime.rank])

    group.run(body, limit_steps=trials.LIMIT_STEPS)


def before_launch(group: ModelGroup, kernel: str, number: int, do: Callable[[Any], None]) -> None:
    """Before rank 0 launches ``kernel`` for the time ``number``, from 0, all it launched has ended and ``do`` is called
    with the arguments."""
    count, original = itertools.count(), group.launch

    def launch(one: Any) -> None:
        if group.calling == 0 and one.kernel.fn.__name__ == kernel and next(count) == number:
            group.synchronise()
            do(one.arguments)
        original(one)

    group.launch = launch  # type: ignore[method-assign]


def leave_out(machine: Machine, program: int) -> None:
    """Of the next kernel ``program`` never starts."""

    def others(programs: int) -> list[int]:
        del machine.order
        return [number for number in machine.order(programs) if number != program]

    machine.order = others  # type: ignore[method-assign]


def hide(group: ModelGroup, addresses: Sequence[int], most: int) -> None:
    """Rank 0's kernels never see more than ``most`` in counts that its proxies store; less at every other look, so that
    there is always a store that they have not heard of."""
    service, real, turns = group.services[0], dict[int, int](), itertools.count()
    step = service.step

    def cover() -> None:
        for address in addresses:
            real[address] = peek(address)
            poke(address, min(real[address], most - next(turns) % 2))

    def hiding(proxy: int) -> int:
        for address, value in real.items():
            poke(address, value)
        done = step(proxy)
        cover()
        return done

    cover()
    service.step = hiding  # type: ignore[method-assign]


def release(machine: Machine, group: ModelGroup) -> tuple[Callable[[], None], Callable[[], float]]:
    """Some time after the first is called the host loses rank 1; the second tells when it did, in ns."""
    turns, since = [0], [0.0]

    def lose() -> bool:
        if since[0] or not turns[0]:
            return False
        turns[0] += 1
        early = turns[0] < _TURNS if machine.seed % 2 else machine.waited < _WAITING
        if early:
            return False
        since[0] = machine.now_ns
        return group.spaces[0].fail(FAILURE_PEER_LOST, peer=1)

    def begin() -> None:
        turns[0] = 1

    machine.actor("who loses rank 1", lose)
    return begin, lambda: since[0]
