"""The state block: its capacity, its laziness, and what it refuses."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import numpy as np
import pytest

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.protocol.command import HIGH, KIND_WRITE, LOW
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.protocol.ring import SLOTS
from uccl_ep_serving.protocol.streams import LL_DISPATCH
from uccl_ep_serving.proxy import words
from uccl_ep_serving.proxy.loop import step
from uccl_ep_serving.proxy.state import ProxyState
from uccl_ep_serving.proxy.stats import stream_states
from uccl_ep_serving.proxy.transport.base import Capabilities
from uccl_ep_serving.proxy.transport.fake import FakeFabric


def _state(ranks: int = 2, **changes: object) -> ProxyState:
    fabric = FakeFabric(2, 1 << 16)
    settings = Settings(
        ring_slots=64,
        quantum=1 << 20,
        bytes_in_flight=1 << 26,
        peer_bytes_in_flight=1 << 24,
        writes_in_flight=4096,
    )
    arguments: dict[str, object] = {
        "rank": 0,
        "ranks": ranks,
        "proxy": 0,
        "window": 1 << 20,
        "window_bytes": 1 << 16,
        "error": 1 << 20,
        "endpoints": [fabric.endpoint(0)],
        "route": [-1, *[0] * (ranks - 1)],
    }
    return ProxyState(settings, **{**arguments, **changes})  # type: ignore[arg-type]


def _endpoint(max_write: int) -> SimpleNamespace:
    """An endpoint whose transport writes at most ``max_write`` bytes at once."""
    offered = Capabilities("small", proves_source=True, max_write=max_write)
    return SimpleNamespace(capabilities=offered, data_path=FakeFabric(2, 1 << 16).endpoint(0).data_path)


def test_4096_ranks_cost_address_space_and_not_memory() -> None:
    _state()  # compiles the fabric where no cache has it, which takes memory of its own
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = _state(4096)
    assert state.send.shape[:2] == state.receive.shape[:2] == (4096, 256)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, f"{grown} KiB were committed"


def test_the_last_of_4096_ranks_is_reached() -> None:
    """A command for rank 4095 goes through the real loop: every table is indexed right at its end."""
    fabric = FakeFabric(4096, 1 << 16, proxies=1, depth=1)
    windows = {rank: np.zeros(1 << 16, np.uint8) for rank in (0, 4095)}
    windows[0][:64] = 7
    errors = {rank: np.zeros(ERROR_WORDS, np.int64) for rank in (0, 4095)}
    states = {}
    for rank, window in windows.items():
        fabric.register_window(rank, window.ctypes.data)
        fabric.endpoint(rank).connect([], 0.0)
        states[rank] = _state(
            4096,
            rank=rank,
            route=[-1 if peer == rank else 0 for peer in range(4096)],
            window=window.ctypes.data,
            error=errors[rank].ctypes.data,
            endpoints=[fabric.endpoint(rank)],
        )
    ring = states[0]._ring.view(np.int64)
    ring[SLOTS // 8] = LOW.pack(lap=1, length=4)
    ring[SLOTS // 8 + 1] = HIGH.pack(lap=1, target=64, rank=4095, stream=LL_DISPATCH, kind=KIND_WRITE, last=1)
    ring[0] = 1
    for _ in range(4):
        for state in states.values():
            assert step(state.address) >= 0
    assert states[4095].arrived[0, LL_DISPATCH] == 1
    assert (windows[4095][1024:1088] == 7).all()
    assert states[0].completed[4095, LL_DISPATCH] == 1
    assert [entry["peer"] for entry in stream_states(states[0])] == [4095]
    assert not errors[0].any()
    assert not errors[4095].any()


def test_header_groups_keep_to_their_cache_lines() -> None:
    """The host's control words, the constants and the loop's own words are on lines of their own."""
    assert words.SPIN < words.STOP // 64 * 64
    assert words.REQUESTS // 64 == words.STOP // 64
    assert words.TAIL // 64 > words.STOP // 64
    assert words.FAULT_VALUE < words.HEADER_BYTES
    state = _state(2)
    for address in (state.address, state.ring, state.arrived_address(0, 0), state.completed_address(0, 0)):
        assert address % 64 == 0
    assert state.arrived_address(1, 3) == state.arrived[1, 3:].ctypes.data
    assert state.completed_address(1, 3) == state.completed[1, 3:].ctypes.data


def test_the_quantum_is_what_the_transport_can_write() -> None:
    state = _state(2, endpoints=[_endpoint(1000)])
    assert state.word(words.QUANTUM) == 992


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2}, "rank 2 of 2"),
        ({"ranks": 4097, "route": [-1, *[0] * 4096]}, "up to 4096"),
        ({"route": [-1]}, "route"),
        ({"route": [-1, 1]}, "route"),
        ({"route": [0, 0]}, "route"),
        ({"window_bytes": 0}, "window of 0 bytes"),
        ({"window_bytes": (1 << 40) + 16}, "window of"),
        ({"endpoints": [_endpoint(8)]}, "fewer than 16 bytes"),
    ],
)
def test_contradictions_are_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _state(**wrong)  # type: ignore[arg-type]
