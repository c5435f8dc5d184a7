"""What stands in for a Runtime in tests speaks its names; what ends a wait is named and keeps nothing alive."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.direct_ranks import DirectGroup, DirectRuntime
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane import watch
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.runtime import Runtime
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.data_plane.watch import PlaneWatch
from uccl_ep_serving.errors import PeerLost, UcclEpError
from uccl_ep_serving.protocol import context as ctx
from uccl_ep_serving.protocol.layout import NormalPlan, WindowLayout

#: Attributes of a Runtime that its construction sets.
_SET = {"turn", "settings", "rank", "ranks", "record", "check", "opening"}
#: What only the stand-in has, for tests.
_OWN = {"group", "records"}


@pytest.fixture
def space() -> Any:
    """Kernel space of rank 0 of 2, given away: the test has the only reference to it."""
    layout = WindowLayout(2, None, NormalPlan(2, heap=4096, rounds=65536, chunk=4096, depth=1))
    return [KernelSpace(0, 2, 1, Segment.create("window", layout.nbytes), layout, timeout=20.0)]


@pytest.mark.parametrize(
    ("code", "watched", "raised"),
    [
        (ctx.FAILURE_PEER_LOST, False, "rank 1 is lost"),
        (ctx.FAILURE_PEER_LOST, True, "rank 0 is at the root"),
        (ctx.FAILURE_TRANSPORT, True, "the transport to rank 1 failed"),
    ],
)
def test_what_ends_a_wait_is_named_and_keeps_no_window_mapped(
    space: list[KernelSpace], code: int, watched: bool, raised: str
) -> None:
    if watched:
        liveness = SimpleNamespace(
            settle=lambda error, group: PeerLost("rank 0 is at the root", peer=0, phase="dispatch"),
            fail=lambda why: None,
        )
        mesh: Any = SimpleNamespace(rank=0, liveness=liveness, steps=None)
        space[0].raise_named = PlaneWatch(mesh, lambda plane: None).raise_named
    space[0].fail(code, 1)
    seen = weakref.ref(space[0])
    gc.disable()  # a cycle would end with the next collection only
    logging.disable()  # pytest keeps what is logged
    try:
        with pytest.raises(UcclEpError, match=raised) as caught:
            space[0].wait("dispatch", lambda slice_end: ctx.STATUS_POISONED)
        del caught
        space.clear()
        assert seen() is None
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


def test_a_rank_that_closes_is_blamed_once_what_it_had_sent_has_had_time_to_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, blamed, closing = [100.0], list[int](), dict[int, bytes]()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    liveness = SimpleNamespace(any_heard=False, masked=frozenset(), accuse=lambda peer, why, phase: blamed.append(peer))
    steps = SimpleNamespace(requested=lambda name: closing if name == "close" else {})
    mesh: Any = SimpleNamespace(rank=0, liveness=liveness, steps=steps)
    plane = SimpleNamespace(
        space=SimpleNamespace(failed_with=(ctx.FAILURE_NONE, -1), awaited=1, phase="dispatch", mismatch=""),
        service=SimpleNamespace(check=lambda: None),
    )
    watched: Any = PlaneWatch(mesh, lambda words, apart: None)
    watched.plane = plane

    def look(at: float) -> bool:
        clock[0] = at
        watched.look()
        return bool(blamed)

    # however long this rank has waited before: the last message may be under way when the peer closes
    assert [look(100.0), look(200.0)] == [False, False]
    closing[1] = b""
    assert [look(200.1), look(202.0), look(202.2)] == [False, False, True]


def test_the_stand_in_has_no_name_that_a_runtime_lacks() -> None:
    stand_in = DirectRuntime(DirectGroup(1), 0, Settings())
    names = {name for name in (*vars(stand_in), *vars(DirectRuntime)) if not name.startswith("_")}
    assert names - _OWN - _SET <= set(dir(Runtime))
    assert names >= _SET
