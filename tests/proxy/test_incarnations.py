"""A rank that comes back is a new Buffer on everybody's side: what is under way of the old one finds no taker."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tcp_peers import WINDOW, connect_all, make
from tests.support.world import World
from uccl_ep_serving.errors import BootstrapError
from uccl_ep_serving.protocol import imm
from uccl_ep_serving.protocol.command import Command
from uccl_ep_serving.protocol.context import ERROR_CODE
from uccl_ep_serving.protocol.imm import Immediate
from uccl_ep_serving.protocol.streams import CREDIT, LL_DISPATCH
from uccl_ep_serving.proxy.sequence import TICKET
from uccl_ep_serving.proxy.transport.base import ARRIVED, DOWN, SENT


def _message(world: World, sender: int, receiver: int) -> None:
    world.producer(sender, LL_DISPATCH).put(
        Command(rank=receiver, stream=LL_DISPATCH, source=0, target=0, length=64, last=True)
    )


@pytest.mark.parametrize("proves_source", [True, False])
def test_nothing_of_an_old_incarnation_reaches_the_new_one(proves_source: bool) -> None:
    """Late immediates, completions, credits and losses of a rank that was dropped are of an unknown source."""
    world = World(3, 1 << 16, fabric_options={"proves_source": proves_source})
    for _ in range(4):
        _message(world, 1, 0)
        _message(world, 0, 1)
    assert world.run(lambda: world.arrived(0, 1, LL_DISPATCH) == world.completed(0, 1, LL_DISPATCH) == 4, 100)
    service, endpoint = world.services[0], world.fabric.endpoint(0)
    service.forget(1)
    world.step()
    before = service.counters()["streams"]
    proven = 1 if proves_source else -1
    for stream in (LL_DISPATCH, LL_DISPATCH | CREDIT):
        word = imm.encode(Immediate(source=1, stream=stream, sequence=4, last=True))
        endpoint.inject(ARRIVED, word, proven)
    endpoint.inject(SENT, TICKET.pack(sequence=3, last=1, stream=LL_DISPATCH, peer=1, length=4), 1)
    endpoint.inject(DOWN, 0, 1, 104)
    world.step()
    assert service.counters()["streams"] == before
    assert world.errors[0][ERROR_CODE] == 0
    service.check()
    # A new Buffer of the same ranks: numbers start at 0 on both sides, and nothing of the old one is in the way.
    again = World(3, 1 << 16, fabric_options={"proves_source": proves_source})
    _message(again, 1, 0)
    assert again.run(lambda: again.arrived(0, 1, LL_DISPATCH) == 1, 100)


def test_an_old_epoch_finds_no_listener_of_the_new_one() -> None:
    """Over TCP the epoch is part of the greeting: connections of two epochs never meet."""
    windows = [np.zeros(WINDOW, np.uint8) for _ in range(2)]
    old, new = make(0, 2, windows[0], job=b"0"), make(1, 2, windows[1], job=b"1")
    raised = connect_all([old, new], seconds=1.5)
    assert all(isinstance(error, BootstrapError) for error in raised)
    assert "different jobs" in str(raised[1])
