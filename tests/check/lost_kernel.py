"""Operations of a GPU one of whose kernels does nothing, for the check to find it."""

from __future__ import annotations

import pytest

from uccl_ep_serving.check import operations
from uccl_ep_serving.check.place import Place
from uccl_ep_serving.control_plane.bootstrap import Exchange
from uccl_ep_serving.kernels.triton.launch import Launch


def without(place: Place, exchange: Exchange, kernel: str, mode: str) -> str:
    """``operations.<mode>`` over memory that both ranks map, without ``kernel``."""
    run = Launch.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", lambda one: None if one.kernel.__name__ == kernel else run(one))
        return str(getattr(operations, mode)(place, exchange, "ipc"))
