"""A device window on a data plane: in which order the ranks register it, and what is undone when one of them cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from uccl_ep_serving.data_plane.plane import DataPlane
from uccl_ep_serving.errors import BootstrapError, TransportError

FENCE = 0x1000


class Endpoint:
    """A NIC that notes what is asked of it, and fails in ``fails``."""

    fence = FENCE

    def __init__(self, events: list[str], fails: dict[str, Exception]) -> None:
        self._events, self._fails = events, fails

    def _do(self, name: str) -> None:
        self._events.append(name)
        if name in self._fails:
            raise self._fails[name]

    def offer_device(self, start: int, nbytes: int, export: Any) -> bytes:
        self._do("offer")
        return b"keys"

    def accept_device(self, offers: Any) -> None:
        assert offers == [b"keys", None]
        self._do("accept")

    def device_way(self) -> str:
        return "dma-buf"

    def release_host(self) -> None:
        self._do("host window let go")

    def release_device(self) -> None:
        self._do("released")


class Stand:
    """The plane of rank 0, which one NIC ties to rank 1; rank 1 is masked."""

    def __init__(self, **fails: Exception) -> None:
        self.events: list[str] = []
        service: Any = SimpleNamespace(use_fence=self._use_fence)
        segment: Any = SimpleNamespace(forget=lambda: None)
        choice: Any = SimpleNamespace(transport="roce", reason="", warning="")
        self.plane = DataPlane(
            layout=None,  # type: ignore[arg-type]
            segments=[segment],
            endpoints=[[Endpoint(self.events, fails)]],  # type: ignore[list-item]
            choices={1: choice},
            service=service,
        )

    def _use_fence(self, proxy: int, index: int, fence: int) -> None:
        self.events.append(f"fence {fence:#x}")

    def _exchange(self, step: str, payload: bytes) -> list[bytes]:
        objection, _ = msgspec.msgpack.decode(payload, type=tuple[str, dict[str, bytes]])
        self.events.append(f"told {objection}".strip())
        return [payload, b""]

    def register(self) -> str:
        return self.plane.register_device_window(1 << 20, 4096, lambda *_: (0, 0), lambda: None, self._exchange)


def test_fences_stand_before_peers_learn_where_to_write() -> None:
    stand = Stand()
    assert stand.register() == "dma-buf"
    assert stand.events == ["offer", "fence 0x1000", "told", "accept", "told", "host window let go"]
    with pytest.raises(AssertionError, match="registered already"):
        stand.register()


@pytest.mark.parametrize(
    ("step", "error", "events", "words"),
    [
        (
            "offer",
            AttributeError("cuMem"),
            ["offer", "told AttributeError: cuMem", "released"],
            "AttributeError: cuMem",
        ),
        (
            "accept",
            BootstrapError("the device window of rank 1: 2 rails, 1 were expected"),
            [
                *("offer", "fence 0x1000", "told", "accept"),
                "told the device window of rank 1: 2 rails, 1 were expected",
                # no proxy calls a fence whose memory is gone
                *("fence 0x0", "released"),
            ],
            "1 were expected",
        ),
    ],
)
def test_a_rank_that_fails_takes_part_in_every_step_and_undoes_its_own(
    step: str, error: Exception, events: list[str], words: str
) -> None:
    stand = Stand(**{step: error})
    with pytest.raises(TransportError, match=f"registering device windows with the NICs: rank 0: .*{words}"):
        stand.register()
    assert stand.events == events
    # nothing of it is left that a second attempt would meet
    assert not stand.plane.releases
    assert not stand.plane.device_window
