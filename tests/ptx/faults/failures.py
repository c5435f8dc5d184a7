"""What kernels do when a peer, the host or the caller is wrong, each held to what the product promises."""

from __future__ import annotations

from dataclasses import replace

from tests.ptx.faults.alone import meeting, raised_by
from tests.ptx.faults.lies import LIES
from tests.ptx.faults.scenes import CASE, Play
from tests.ptx.faults.waits import WAITS
from tests.ptx.machine.machine import Machine
from tests.ptx.product import trials
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.ranks import ModelRuntime
from tests.support import ll_cases
from tests.support.ll_player import Player
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.protocol.layout import LowLatencyRoom

__all__ = ["FAILURES"]


def _other_shape(compiled: Compiled, memory: str, seed: int) -> Machine:
    """Ranks call with other sizes, for both of which there is room: both are told."""
    with meeting(compiled, memory, seed) as (machine, group):
        wide, narrow = replace(CASE, hidden=256), CASE

        def body(runtime: ModelRuntime) -> None:
            player = Player(group.low_latency(runtime), runtime.rank, wide, narrow if runtime.rank else wide)
            player.play("D d0")
            error = raised_by(player, "D d1")
            assert "another shape" in str(error), error

        group.run(body, limit_steps=trials.LIMIT_STEPS)
    return machine


def _bad_ids(compiled: Compiled, memory: str, seed: int) -> Machine:
    """Rank 0 gives ids that are no experts': they count as none, it is told, and both go on."""
    with meeting(compiled, memory, seed) as (machine, group):
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


def _masked_rank(compiled: Compiled, memory: str, seed: int) -> Machine:
    """Ranks 0 and 1 go on without rank 2, which they have masked: nothing goes there, and nobody waits for it."""
    with meeting(compiled, memory, seed, ranks=3) as (machine, group):
        given, build = replace(CASE, ranks=3, experts=6, counts=(4, 3, 0)), group.build

        def masked(room: LowLatencyRoom | None) -> None:
            build(room)
            for space in group.spaces[:2]:
                # kernels of a device have a copy of it, as it is when windows are built
                space.mask[2] = 1

        group.build = masked  # type: ignore[method-assign]

        def body(runtime: ModelRuntime) -> None:
            low_latency = group.low_latency(runtime)
            ll_cases.reserve(low_latency, given)
            if runtime.rank == 2:
                return
            player = Player(low_latency, runtime.rank, given)
            for number in range(2):
                case = replace(given, seed=number)
                inputs = case.inputs()
                ids = inputs[runtime.rank].topk_idx.clone()
                for one in inputs:
                    one.topk_idx[one.topk_idx >= 4] = -1
                player.dispatch_of(case, inputs, ids)
                player.play(f"d{number} C{number} c{number}")

        group.run(body, limit_steps=trials.LIMIT_STEPS)
    return machine


FAILURES: dict[str, Play] = {
    "a masked rank": _masked_rank,
    "another shape": _other_shape,
    "ids of no expert": _bad_ids,
    **WAITS,
    **LIES,
}
"""By what goes wrong, how it is played; each raises what is not as promised."""
