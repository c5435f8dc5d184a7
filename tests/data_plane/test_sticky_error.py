"""What stopped a rank's kernels, in words: each failure has one next step, whoever notices it."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.control_threads import ThreadExchange, in_threads, joined
from uccl_ep_serving.control_plane.failures import Liveness
from uccl_ep_serving.control_plane.reports import Note, Promise, Report, Wait
from uccl_ep_serving.data_plane.sticky_error import StickyError
from uccl_ep_serving.errors import PeerLost, PeerTimeout, UcclEpError, after_loss, after_silence
from uccl_ep_serving.protocol import context as ctx
from uccl_ep_serving.protocol.message import CODING_MARK, DTYPE_BF16, DTYPE_FP8, FORM_REDUCED


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


def _agreed(note: Note) -> UcclEpError | None:
    """What rank 0 of 3 raises once rank 2 has said ``note`` and has promised to go on without rank 1."""
    liveness, both = Liveness(0, 3), frozenset({0, 2})
    note = msgspec.structs.replace(note, proposal=both, promises=(Promise(1, both, frozenset({2})),))
    liveness.hear(2, note.encode())
    liveness.advance()
    liveness.publish()
    return liveness.answer("combine")


def test_a_silent_rank_has_one_next_step() -> None:
    silent = Report(1, gave_up=True, waits=Wait(1, "dispatch"))
    told = _agreed(Note(0, frozenset(range(3)), {2: silent, 1: Report(1)}))
    assert isinstance(told, PeerTimeout)
    # who waits in a step, or for no counted message, waits on no channel
    assert (told.channel, told.arrived, told.expected) == (-1, -1, -1)
    for error in (_sticky(ctx.FAILURE_PEER_TIMEOUT), _sticky(ctx.FAILURE_LAYOUT), told, _missing_in_a_step()):
        assert str(error).endswith(f". {after_silence(1)}")


def test_a_lost_rank_has_one_next_step() -> None:
    told = _agreed(Note(0, frozenset(range(3)), {2: Report(1, dead=frozenset({1}))}))
    assert isinstance(told, PeerLost)
    for error in (_sticky(ctx.FAILURE_PEER_LOST), told):
        assert str(error).endswith(f" {after_loss(1)}")


@pytest.mark.parametrize(
    ("got", "expected", "mismatch", "words"),
    [
        (CODING_MARK | DTYPE_FP8, CODING_MARK | DTYPE_BF16, True, "rank 1 sent rows of e4m3 with float32 scales on"),
        (CODING_MARK | FORM_REDUCED << 8, CODING_MARK, True, "rows of bfloat16, one for each rank on"),
        # a coding that nobody sends; an offset of 1 TiB; message numbers
        (CODING_MARK | 99, CODING_MARK, False, "got 0x63, expected 0x0"),
        (1 << 40, 0, False, f"got {1 << 40:#x}, expected 0x0"),
        (-1, CODING_MARK, False, "got -0x1, expected"),
        (3, 0, False, "got 0x3, expected 0x0"),
    ],
)
def test_what_a_peer_claims_is_told_in_words_where_it_is_an_option(
    got: int, expected: int, mismatch: bool, words: str
) -> None:
    sticky = StickyError(ctx.FAILURE_PROTOCOL, 1, 0, got, expected)
    assert bool(sticky.mismatch) == mismatch
    assert words in str(sticky.exception("dispatch", "dispatch, rank 0 of 2", 1.0))
