"""What ranks of normal mode do where one of them is wrong on the model machine, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tests.ptx.faults.alone import poke
from tests.ptx.product.ranks import ModelRuntime
from tests.support import normal_cases
from tests.support.normal_cases import Case
from uccl_ep_serving.errors import PeerTimeout, ProtocolError, UcclEpError
from uccl_ep_serving.kernels.blocks import normal_device as block
from uccl_ep_serving.protocol import pipe
from uccl_ep_serving.protocol.streams import NORMAL_CHANNELS

__all__ = ["FAILURES", "NEVER_SENT", "SILENT", "TOO_MANY", "fail", "told"]

_Error = TypeVar("_Error", bound=UcclEpError)
_CASE = Case(tokens=(5, 6), experts=4, topk=4, lost=0.0, seed=3)
#: Rows that there are not.
_FALSE = 1000
#: What rank 1 does, and what rank 0 raises.
SILENT, TOO_MANY, NEVER_SENT = "moves nothing", "tells of rows that it has not", "has read rows that were not sent"
FAILURES = {SILENT: PeerTimeout, TOO_MANY: ProtocolError, NEVER_SENT: ProtocolError}


def told(normal: Any, kind: type[_Error], operate: Callable[[], object]) -> _Error:
    """The error of this ``kind`` that ``operate`` raises, or the next call would."""
    try:
        operate()
        normal._session.check("afterwards")
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def fail(normal: Any, runtime: ModelRuntime, phase: str, failure: str) -> None:
    """Rank 1 opens an operation and moves nothing of it; rank 0 names it."""
    inputs, rank = _CASE.inputs(), runtime.rank
    outcome = normal_cases.round_trip(normal, inputs, rank)
    normal_cases.check_rank(inputs, rank, outcome)
    present = normal._session._present
    if rank == 1:
        _only_open(present.kernels)
    elif failure != SILENT:
        which = pipe.ARRIVED if failure == TOO_MANY else pipe.FREED
        number = int(present.state.words[block.NUMBER])
        place = runtime.layout.pipe_words + 8 * (which * NORMAL_CHANNELS * pipe.pipe_count(2) + 1)
        poke(runtime.space.window + place, (number + 1) << pipe.STAMP_SHIFT | _FALSE)

    def operate() -> None:
        if phase == "dispatch":
            normal_cases.dispatch(normal, inputs, rank)
        else:
            normal.combine(normal_cases.expert_outputs(outcome.rows, rank), outcome.handle)

    if rank == 1:
        operate()
        normal._session.check("afterwards")
    else:
        error: Any = told(normal, FAILURES[failure], operate)
        assert error.peer == 1, error
        # not what came of it
        assert failure == SILENT or f"got {_FALSE:#x}, expected" in str(error), error


def _only_open(kernels: Any) -> None:
    """From now on operations are opened, and their rows do not move."""
    kernels.dispatch = lambda *_: ()
    kernels.combine = lambda context, state, form, opening, *_: kernels.open(context, state, form, opening, 0)
