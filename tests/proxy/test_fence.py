"""A fence stands between the completions of a batch and the counts that kernels trust."""

from __future__ import annotations

import pytest

from tests.support.driver_flush import Driver
from tests.support.world import World
from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.protocol.command import Command
from uccl_ep_serving.protocol.context import ERROR_CODE, FAILURE_TRANSPORT
from uccl_ep_serving.protocol.streams import LL_DISPATCH


def put(world: World, messages: int) -> None:
    for number in range(messages):
        source = 64 * number
        world.producer(0, LL_DISPATCH).put(
            Command(rank=1, stream=LL_DISPATCH, source=source, target=4096 + source, length=64, last=True)
        )


def test_a_batch_is_flushed_once_before_its_messages_count() -> None:
    world = World(2, 1 << 16)
    driver = Driver(world)
    world.asleep.add(1)
    put(world, 5)
    for _ in range(50):
        world.step()
    world.asleep.clear()
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == 5)
    assert driver.calls == [("select", 0x1234), ("flush", 0, 100, 0)]
    put(world, 1)
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == 6)
    assert driver.calls[2:] == [("select", 0x1234), ("flush", 0, 100, 5)]
    # the other rank's own completions are no arrivals
    for service in world.services:
        service.check()


@pytest.mark.parametrize(("select", "flush"), [(201, 0), (0, 719)])
def test_a_flush_that_fails_is_named_and_nothing_counts(select: int, flush: int) -> None:
    world = World(2, 1 << 16)
    driver = Driver(world, select, flush)
    put(world, 1)
    assert world.run(lambda: bool(driver.calls) and world.errors[1][ERROR_CODE] != 0)
    assert world.errors[1][ERROR_CODE] == FAILURE_TRANSPORT
    assert world.arrived(1, 0, LL_DISPATCH) == 0
    words = rf"the flush of what NICs wrote into GPU memory failed.*status {select or flush}"
    with pytest.raises(TransportError, match=words):
        world.services[1].check()
    # it is not tried again
    calls = len(driver.calls)
    put(world, 1)
    for _ in range(50):
        world.step()
    assert len(driver.calls) == calls
    assert world.arrived(1, 0, LL_DISPATCH) == 0
