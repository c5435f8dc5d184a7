"""How waits of compiled kernels end on the machine's clock: named, in time, and nothing is published after."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.late_kernels import told_too_late  # noqa: E402
from tests.ptx.product.ranks import ModelGroup  # noqa: E402
from tests.ptx.product.test_low_latency import SHAPES, compiled  # noqa: E402
from tests.support.fake_ranks import HOSTILE  # noqa: E402
from tests.support.ll_cases import arguments, run_rank  # noqa: E402
from uccl_ep_serving.config import Settings  # noqa: E402
from uccl_ep_serving.errors import PeerLost, PeerTimeout, ProxyDied, UcclEpError  # noqa: E402
from uccl_ep_serving.kernels.triton.launch import Launch, Variant  # noqa: E402
from uccl_ep_serving.protocol.context import FAILURE_PEER_LOST  # noqa: E402
from uccl_ep_serving.proxy.transport.fake import Adversary  # noqa: E402

#: UCCL_EP_TIMEOUT of the ranks: seconds of the machine's clock.
TIMEOUT = 3.0
#: A wait that nobody ends is over before that: the clock of an idle machine goes in long steps.
LATEST = 1.25 * TIMEOUT
#: Within so much of it a wait ends that the host ends: many spins of a kernel that looks every 20 us.
SOON = 1e-3
#: Steps of an idle machine before its clock goes faster: less than usual, since here it is idle for long.
PATIENCE = 500
SLOWER = pytest.param("weak", marks=pytest.mark.model)
Body = Callable[[Any, Any], object]


@dataclass
class Ended:
    """How the second dispatch of a rank ended.

    Attributes:
        error: what it raised.
        at, took: on the machine's clock, when and after how many seconds.
        again: what the next call raised.
    """

    error: UcclEpError
    at: float
    took: float
    again: UcclEpError


def second_dispatch(group: ModelGroup, low_latency: Any, rank: int) -> Ended:
    """It fails."""
    case = SHAPES["bf16"]
    started = group.machine.now_ns / 1e9
    with pytest.raises(UcclEpError) as first:
        low_latency.dispatch(**arguments(case, rank))
    at = group.machine.now_ns / 1e9
    with pytest.raises(UcclEpError) as again:
        low_latency.dispatch(**arguments(case, rank))
    return Ended(first.value, at, at - started, again.value)


def play(memory: str, path: str, seed: int, body: Body, adversary: Adversary = HOSTILE, **settings: Any) -> list[Any]:
    """One layer that is right on every rank, then ``body`` of the rank's runtime and its mode; results by rank.

    With all seeds here CTAs start in any order: kernels for those that start in order would be compiled beside.
    """
    machine = trials.machine_of(memory, seed)
    machine.patience = PATIENCE
    given = Settings(timeout=TIMEOUT, window="host", **settings)
    with trials.group_of(machine, compiled(memory), 2, path, given, adversary) as group:

        def whole(runtime: Any) -> object:
            low_latency = group.low_latency(runtime)
            case = SHAPES["bf16"]
            run_rank(case, low_latency, runtime.rank, case.inputs())
            return body(runtime, low_latency)

        found: list[Any] = group.run(whole, limit_steps=trials.LIMIT_STEPS)
    return found


@pytest.mark.parametrize("path", trials.PATHS)
@pytest.mark.parametrize("memory", ["sequential", SLOWER])
def test_a_silent_peer_is_named_at_the_deadline(memory: str, path: str) -> None:
    """Rank 1 makes no second dispatch."""

    def body(runtime: Any, low_latency: Any) -> Ended | None:
        return second_dispatch(runtime.group, low_latency, 0) if runtime.rank == 0 else None

    ended, _ = play(memory, path, 9, body)
    assert isinstance(ended.error, PeerTimeout)
    assert ended.error.peer == 1
    assert "rank 1 is silent" in str(ended.error)
    assert f"within {TIMEOUT:g} s (UCCL_EP_TIMEOUT)" in str(ended.error)
    assert TIMEOUT <= ended.took < LATEST
    assert "rank 1 is silent" in str(ended.again)


@pytest.mark.parametrize("memory", ["sequential", SLOWER])
def test_a_proxy_that_hangs_is_a_silent_peer(memory: str) -> None:
    """Rank 1's proxy takes no more turns: neither rank hears of the other, and both say so at the deadline."""

    def body(runtime: Any, low_latency: Any) -> Ended:
        runtime.group.services[1].step = lambda proxy: 0
        return second_dispatch(runtime.group, low_latency, runtime.rank)

    # a write that no proxy takes is repeated for ever, and the machine is never idle
    calm = replace(HOSTILE, duplicate=0.0)
    for rank, ended in enumerate(play(memory, "proxied", 2, body, calm)):
        assert isinstance(ended.error, PeerTimeout)
        assert ended.error.peer == 1 - rank
        assert TIMEOUT <= ended.took < LATEST


@pytest.mark.parametrize("memory", ["sequential", SLOWER])
def test_a_proxy_that_dies_ends_the_waits_of_its_rank_soon(memory: str) -> None:
    """Both die in the second dispatch, at their third command."""

    def body(runtime: Any, low_latency: Any) -> Ended:
        return second_dispatch(runtime.group, low_latency, runtime.rank)

    for ended in play(memory, "proxied", 5, body, fault_proxy_after=3):
        assert isinstance(ended.error, ProxyDied)
        assert ended.took < SOON
        assert isinstance(ended.again, ProxyDied)


@pytest.mark.parametrize("path", trials.PATHS)
@pytest.mark.parametrize("memory", ["sequential", SLOWER])
def test_the_host_ends_a_wait_soon(memory: str, path: str) -> None:
    """The host hears that rank 1 is lost while a kernel waits for it."""
    told: list[float] = []

    def body(runtime: Any, low_latency: Any) -> Ended | None:
        if runtime.rank == 1:
            machine = runtime.group.machine
            machine.sleep(0.1)
            assert runtime.group.spaces[0].fail(FAILURE_PEER_LOST, 1)
            told.append(machine.now_ns / 1e9)
            return None
        return second_dispatch(runtime.group, low_latency, 0)

    ended, _ = play(memory, path, 4, body)
    assert isinstance(ended.error, PeerLost)
    assert ended.error.peer == 1
    assert ended.took > 0.1
    assert ended.at - told[0] < SOON
    assert isinstance(ended.again, PeerLost)


@pytest.mark.parametrize("memory", ["sequential", pytest.param("weak", marks=pytest.mark.model)])
def test_a_program_that_has_failed_moves_nothing(memory: str) -> None:
    """Nor do some of its lanes, when what it waited for comes then: another program tells it late."""

    def body(runtime: Any, low_latency: Any) -> list[int]:
        if runtime.rank != 0:
            return []
        state, space = low_latency._session._shared
        out = torch.full((32,), 7)
        variant = Variant(told_too_late, {"LANES": 32})
        Launch(variant, (2, 1, 1), (space.context, state.address, 1 << 40, out.data_ptr())).run()
        runtime.group.synchronise()
        return out.tolist()

    for seed in (2, 4, 5, 9):
        assert play(memory, "mapped", seed, body)[0] == [0] * 32
