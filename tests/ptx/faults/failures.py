"""What kernels do when a peer, the host or the caller is wrong, each held to what the product promises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from tests.ptx.faults.scenes import CASE, Play
from tests.ptx.machine.machine import Machine
from tests.ptx.product import trials
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import TIMEOUT, ModelGroup, ModelRuntime
from tests.support.ll_player import Player
from uccl_ep_serving.errors import ConfigError, PeerLost, PeerTimeout, UcclEpError
from uccl_ep_serving.protocol.context import FAILURE_PEER_LOST

__all__ = ["FAILURES"]

#: ns of the machine within which a kernel ends that the host releases.
_SOON_NS = 1e9
#: Steps without anything but waiting after which the clock goes faster: deadlines come soon.
_PATIENCE = 100
#: Turns of the host after which it does so: the kernel waits by then.
_TURNS = 10


@contextlib.contextmanager
def _group(
    compiled: Compiled, memory: str, seed: int, patience: int = _PATIENCE
) -> Iterator[tuple[Machine, ModelGroup]]:
    machine = trials.machine_of(memory, seed)
    machine.patience = patience
    with trials.group_of(machine, compiled, 2, "mapped") as group:
        # an engine may look at what a kernel has reported while another thread waits for that kernel
        machine.actor("who looks at reports", lambda: _look(group))
        yield machine, group


def _look(group: ModelGroup) -> bool:
    for context in group.contexts:
        context.take_report()
    return False


def _alone(player: Player, words: str) -> UcclEpError:
    """What is raised when rank 0 plays ``words`` and calls once more, while its peer is silent."""
    try:
        # what the kernels leave after a failure is not what the program expects
        with contextlib.suppress(AssertionError):
            player.play(words)
        player.dispatch()
    except UcclEpError as error:
        return error
    raise AssertionError("nothing was raised")


def _silent(words: str, phase: str) -> Play:
    """Rank 1 makes one dispatch and no more; rank 0 is told whom it waits for."""

    def play(compiled: Compiled, memory: str, seed: int) -> Machine:
        with _group(compiled, memory, seed) as (machine, group):

            def body(runtime: ModelRuntime) -> None:
                player = Player(group.low_latency(runtime), runtime.rank, CASE)
                player.play("D d0")
                if runtime.rank == 0:
                    error = _alone(player, words)
                    assert isinstance(error, PeerTimeout), error
                    assert error.peer == 1, error
                    assert phase in str(error), error

            group.run(body, limit_steps=trials.LIMIT_STEPS)
        return machine

    return play


def _released(compiled: Compiled, memory: str, seed: int) -> Machine:
    """The host sets the sticky error while a kernel waits, which then ends long before its deadline."""
    with _group(compiled, memory, seed, patience=20 * _PATIENCE) as (machine, group):
        turns, since = [0], [0]

        def lose() -> bool:
            turns[0] += turns[0] > 0
            if turns[0] != _TURNS:
                return False
            since[0] = machine.now_ns
            return group.spaces[0].fail(FAILURE_PEER_LOST, peer=1)

        machine.actor("who loses rank 1", lose)

        def body(runtime: ModelRuntime) -> None:
            player = Player(group.low_latency(runtime), runtime.rank, CASE)
            player.play("D d0")
            if runtime.rank == 0:
                turns[0] = 1
                error = _alone(player, "D d1")
                assert isinstance(error, PeerLost), error
                assert machine.now_ns - since[0] < _SOON_NS, f"{TIMEOUT} s were waited all the same"

        group.run(body, limit_steps=trials.LIMIT_STEPS)
    return machine


def _other_shape(compiled: Compiled, memory: str, seed: int) -> Machine:
    """Ranks call with other sizes, for both of which there is room: both are told."""
    with _group(compiled, memory, seed) as (machine, group):
        wide, narrow = replace(CASE, hidden=256), CASE

        def body(runtime: ModelRuntime) -> None:
            player = Player(group.low_latency(runtime), runtime.rank, wide, narrow if runtime.rank else wide)
            player.play("D d0")
            error = _alone(player, "D d1")
            assert "another shape" in str(error), error

        group.run(body, limit_steps=trials.LIMIT_STEPS)
    return machine


def _bad_ids(compiled: Compiled, memory: str, seed: int) -> Machine:
    """Rank 0 gives ids that are no experts': they count as none, it is told, and both go on."""
    with _group(compiled, memory, seed) as (machine, group):
        wrong = {(0, 0): (1 << 33) + 1, (1, 0): CASE.experts, (1, 1): -(1 << 40) + CASE.experts - 1}

        def body(runtime: ModelRuntime) -> None:
            player = Player(group.low_latency(runtime), runtime.rank, CASE)
            inputs = replace(CASE, seed=0).inputs()
            mine = inputs[runtime.rank]
            ids = mine.topk_idx.clone()
            # beside the first stands an expert of the rank that it would name if it were cut to 32 bits
            inputs[0].topk_idx[0, 1] = 0
            if runtime.rank == 0:
                ids[0, 1] = 0
            for place, value in wrong.items():
                inputs[0].topk_idx[place] = -1
                if runtime.rank == 0:
                    ids[place] = value
            player.dispatch_of(replace(CASE, seed=0), inputs, ids)
            told = ""
            if runtime.rank == 0:
                try:
                    player.play("d0")
                except ConfigError as error:
                    told = str(error)
                assert "an expert id outside -1 .. 3, at position 0 of topk_idx" in told, told
            player.play("d0")

        group.run(body, limit_steps=trials.LIMIT_STEPS)
    return machine


FAILURES: dict[str, Play] = {
    "a silent peer, dispatch": _silent("D d1", "low-latency dispatch"),
    "a silent peer, combine": _silent("C0 c0", "low-latency combine"),
    "released": _released,
    "another shape": _other_shape,
    "ids of no expert": _bad_ids,
}
"""By what goes wrong, how it is played; each raises what is not as promised."""
