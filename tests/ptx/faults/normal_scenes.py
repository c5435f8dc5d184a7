"""What ranks do in normal mode while a kernel of theirs is wrong, or one of them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.ptx.faults.scenes import HOST_SHARE, SLOW, Play, hold, machine_of
from tests.ptx.machine.machine import Machine
from tests.ptx.product import normal_failures, trials
from tests.ptx.product.compiled import Compiled
from tests.ptx.product.normal_failures import NEVER_SENT, TOO_MANY, told
from tests.ptx.product.ranks import TIMEOUT, ModelRuntime
from tests.support import node_cases, normal_cases
from tests.support.bits import check_bits
from tests.support.fake_ranks import HOSTILE
from tests.support.normal_cases import Case
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, PeerTimeout, ProtocolError
from uccl_ep_serving.kernels.blocks.normal_device import ROUTE_SEND

__all__ = ["SCENES"]

#: Each token goes to both ranks: through both channels of every pipe more rows than a ring holds.
_MANY = Case(tokens=(16, 15), hidden=64, experts=4, topk=4, dtype=torch.float32, lost=0.0, seed=5)
_FEW = Case(tokens=(4, 3), hidden=128, experts=4, topk=2, lost=0.0)
#: Bytes of the shortest message of rows.
_ROWS_BYTES = 256
#: Steps of waiting after which the clock goes faster: programs of eight warps take thousands to look at their peers.
_PATIENCE = 4000


def _play(
    body: Callable[[Any, ModelRuntime], None],
    compiled: Compiled,
    memory: str,
    seed: int,
    *,
    ranks: int = 2,
    path: str = "mapped",
    held: bool = False,
    **options: Any,
) -> Machine:
    """The machine on which ``body`` did of every rank's normal mode what it must.

    Args:
        held: rows are there long before their writes are over.
        options: of the group.
    """
    machine = machine_of(memory, seed)
    if path == "proxied":
        machine.host_share = max(machine.host_share, HOST_SHARE)
    settings, adversary = Settings(timeout=TIMEOUT, window="host", programs=2), SLOW if held else HOSTILE
    with trials.group_of(machine, compiled, ranks, path, settings, adversary, **options) as group:
        if held:
            hold(machine, group, lambda nbytes: nbytes >= _ROWS_BYTES, patience=_PATIENCE)
        group.run(lambda runtime: body(group.normal_mode(runtime), runtime), limit_steps=trials.LIMIT_STEPS)
    return machine


def _go_on(normal: Any, rank: int, case: Case) -> None:
    inputs = case.inputs()
    normal_cases.check_rank(inputs, rank, normal_cases.round_trip(normal, inputs, rank))


def _many_rows(normal: Any, runtime: ModelRuntime) -> None:
    trials.round_trips(normal, runtime.rank, _MANY)


def _other_operations(normal: Any, runtime: ModelRuntime) -> None:
    """Rank 1 dispatches rows of another size: both are told, and go on."""
    case = replace(_FEW, hidden=256) if runtime.rank else _FEW
    error = told(normal, ConfigError, lambda: normal_cases.dispatch(normal, case.inputs(), runtime.rank))
    assert "the ranks were given different operations, nothing was sent" in str(error), error
    _go_on(normal, runtime.rank, _FEW)


def _other_rows(normal: Any, runtime: ModelRuntime) -> None:
    """Rank 1 tells of one row more than the handle knows: rank 0 names it, and goes no further."""
    inputs, rank = _FEW.inputs(), runtime.rank
    handle = normal_cases.dispatch(normal, inputs, rank)[4]
    if rank == 1:
        handle.route[ROUTE_SEND, 0, 0] += 1
    error: Any = told(
        normal, PeerTimeout if rank else ProtocolError, lambda: normal.dispatch(inputs.rows(rank), handle=handle)
    )
    assert error.peer == 1 - rank, error


def _bad_ids(normal: Any, runtime: ModelRuntime) -> None:
    """Rank 0 gives ids that are no experts': they count as none, it is told, and both go on."""
    inputs, rank = _FEW.inputs(), runtime.rank
    ids = inputs.topk_idx[0].clone()
    ids[1, 1], ids[2, 0] = _FEW.experts, (1 << 33) + 1
    inputs.topk_idx[0][1, 1] = inputs.topk_idx[0][2, 0] = -1
    if rank == 0:
        given = replace(inputs, topk_idx=[ids] * 2)
        error = told(normal, ConfigError, lambda: normal_cases.dispatch(normal, given, rank, counted=False))
        assert "an expert id outside -1 .. 3, at position 3 of topk_idx" in str(error), error
    else:
        received = normal_cases.dispatch(normal, inputs, rank)[0]
        check_bits("rows", received, inputs.delivered[rank].rows(inputs.x))
    _go_on(normal, rank, _FEW)


def _sums(normal: Any, runtime: ModelRuntime) -> None:
    node_cases.exact_sums(normal, runtime.rank)


def _broken_promise(normal: Any, runtime: ModelRuntime) -> None:
    """More rows come than were promised, and the combine is there before the host knows: it is told."""
    session, rank = normal._session, runtime.rank
    error = told(normal, ConfigError, lambda: node_cases.broken_promise(normal, session, rank, _FEW.tokens[0]))
    assert "arrived where num_worst_tokens promised fewer" in str(error), error


_NODES: dict[str, Any] = {"path": "proxied", "ranks": 4, "node_ranks": 2}
SCENES: dict[str, Play] = {
    "mapped": partial(_play, _many_rows, sizes=trials.NARROW),
    "proxied": partial(_play, _many_rows, path="proxied", held=True, sizes=trials.NARROW),
    "nodes": partial(_play, _sums, **_NODES),
    "a broken promise": partial(_play, _broken_promise, **_NODES),
    "other operations": partial(_play, _other_operations),
    "other rows": partial(_play, _other_rows),
    "ids of no expert": partial(_play, _bad_ids),
    **{
        failure: partial(_play, partial(normal_failures.fail, phase="dispatch", failure=failure))
        for failure in (TOO_MANY, NEVER_SENT)
    },
}
"""What is right, and what must fail as it is promised; each raises what is not."""
