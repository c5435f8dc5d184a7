"""What stopped a rank's kernels, in words: each failure has one next step, whoever notices it."""

from __future__ import annotations

import pytest

from tests.support.control_threads import ThreadExchange, in_threads, joined
from uccl_ep_serving.control_plane.failure_report import FailureReport
from uccl_ep_serving.control_plane.failures import Liveness
from uccl_ep_serving.data_plane.sticky_error import StickyError
from uccl_ep_serving.errors import PeerLost, PeerTimeout, UcclEpError, after_loss, after_silence
from uccl_ep_serving.protocol import context as ctx


def _sticky(code: int) -> UcclEpError:
    return StickyError(code, 1, 0, 4, 5).exception("dispatch", "dispatch, rank 0 of 2", 1.0)


def _missing_in_a_step() -> Exception:
    def body(exchange: ThreadExchange) -> Exception | None:
        mesh = joined(exchange)
        try:
            mesh.steps.gather("all here")
            if exchange.rank == 0:
                with pytest.raises(PeerTimeout) as caught:
                    mesh.steps.gather("alone", timeout=0.1)
                return caught.value
            return None
        finally:
            exchange.all_gather(b"")
            mesh.close()

    error = in_threads(2, body)[0]
    assert isinstance(error, PeerTimeout)
    return error


def test_a_silent_rank_has_one_next_step() -> None:
    told = FailureReport(2, 1, True, phase="dispatch").error(PeerTimeout("", peer=2, phase="combine"), 0)
    for error in (_sticky(ctx.FAILURE_PEER_TIMEOUT), _sticky(ctx.FAILURE_LAYOUT), told, _missing_in_a_step()):
        assert str(error).endswith(f". {after_silence(1)}")


def test_a_lost_rank_has_one_next_step() -> None:
    liveness = Liveness(0, 3)
    liveness.note_lost(1, "")
    with pytest.raises(PeerLost) as caught:
        liveness.check("dispatch")
    told = FailureReport(2, 1, False, phase="dispatch").error(PeerLost("", peer=2, phase="combine"), 0)
    for error in (_sticky(ctx.FAILURE_PEER_LOST), told, caught.value):
        assert str(error).endswith(f" {after_loss(1)}")
