"""Normal mode on the model machine where a peer falls silent, or says what cannot be: both kinds of copies name it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.faults.alone import poke  # noqa: E402
from tests.ptx.product.ranks import TIMEOUT, ModelRuntime  # noqa: E402
from tests.ptx.product.test_normal import compiled  # noqa: E402
from tests.support import normal_cases  # noqa: E402
from tests.support.normal_cases import Case  # noqa: E402
from tests.support.nvrtc import needs_nvrtc  # noqa: E402
from uccl_ep_serving.config import Settings  # noqa: E402
from uccl_ep_serving.errors import PeerTimeout, ProtocolError  # noqa: E402
from uccl_ep_serving.kernels.blocks import normal_device as block  # noqa: E402
from uccl_ep_serving.protocol import pipe  # noqa: E402
from uccl_ep_serving.protocol.streams import NORMAL_CHANNELS  # noqa: E402

pytestmark += [needs_nvrtc]
CASE = Case(tokens=(5, 6), experts=4, topk=4, lost=0.0, seed=3)
#: What rank 1 does, and what rank 0 raises.
SILENT, TOO_MANY, NEVER_SENT = "moves nothing", "tells of rows that it has not", "has read rows that were not sent"
FAILURES = {SILENT: PeerTimeout, TOO_MANY: ProtocolError, NEVER_SENT: ProtocolError}


def _play(copy: str, memory: str, phase: str, failure: str, seed: int) -> None:
    """Rank 1 opens an operation and moves nothing of it; rank 0 names it."""
    machine = trials.machine_of(memory, seed)
    settings = Settings(timeout=TIMEOUT, window="host", programs=2, copy=copy)
    with trials.group_of(machine, compiled(memory), 2, "mapped", settings) as group:

        def body(runtime: ModelRuntime) -> None:
            normal: Any = group.normal_mode(runtime)
            inputs, rank = CASE.inputs(), runtime.rank
            outcome = normal_cases.round_trip(normal, inputs, rank)
            normal_cases.check_rank(inputs, rank, outcome)
            present = normal._session._present
            if rank == 1:
                only_open(present.kernels)
            elif failure != SILENT:
                which = pipe.ARRIVED if failure == TOO_MANY else pipe.FREED
                number = int(present.state.words[block.NUMBER])
                place = runtime.layout.pipe_words + 8 * (which * NORMAL_CHANNELS * pipe.pipe_count(2) + 1)
                poke(runtime.space.window + place, (number + 1) << pipe.STAMP_SHIFT | 1000)

            def operate() -> None:
                if phase == "dispatch":
                    normal_cases.dispatch(normal, inputs, rank)
                else:
                    normal.combine(normal_cases.expert_outputs(outcome.rows, rank), outcome.handle)
                normal._session.check("afterwards")

            if rank == 1:
                operate()
                return
            with pytest.raises(FAILURES[failure]) as caught:
                operate()
            assert caught.value.peer == 1

        group.run(body, limit_steps=trials.LIMIT_STEPS)


def only_open(kernels: Any) -> None:
    """From now on operations are opened, and their rows do not move."""
    kernels.dispatch = lambda *_: ()
    kernels.combine = lambda context, state, form, opening, *_: kernels.open(context, state, form, opening, 0)


@pytest.mark.parametrize("failure", FAILURES)
def test_is_named(failure: str) -> None:
    _play("tma", "sequential", "dispatch", failure, 0)


@pytest.mark.model
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("copy", ["tma", "triton"])
@pytest.mark.parametrize("memory", trials.MEMORIES)
def test_is_named_by_many_seeds(memory: str, copy: str, phase: str, failure: str) -> None:
    for seed in range(6):
        _play(copy, memory, phase, failure, seed)
