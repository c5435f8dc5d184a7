"""Wrong commands and malformed writes: named, nothing of them moves, and only the pair of ranks they concern ends."""

from __future__ import annotations

import pytest

from tests.support.world import World
from uccl_ep_serving.errors import PeerLost, ProtocolError
from uccl_ep_serving.protocol import imm
from uccl_ep_serving.protocol.command import HIGH, LOW, Command
from uccl_ep_serving.protocol.context import ERROR_CODE, ERROR_PEER, FAILURE_PEER_LOST, FAILURE_PROTOCOL
from uccl_ep_serving.protocol.imm import Immediate
from uccl_ep_serving.protocol.ring import lap_of
from uccl_ep_serving.protocol.streams import CREDIT, HOST, LL_DISPATCH, NORMAL_GRANT
from uccl_ep_serving.proxy.transport.base import (
    ARRIVED,
    DOWN,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_BITS,
    FAULT_NUMBER,
    FAULT_OUTSIDE_WINDOW,
    FAULT_TOO_LONG,
    FAULT_WRONG_SOURCE,
)

#: Units of a window of 64 KiB.
_UNITS = 4096


def _put(world: World, rank: int, peer: int, stream: int = LL_DISPATCH, length: int = 64) -> None:
    world.producer(rank, stream).put(Command(rank=peer, stream=stream, source=0, target=4096, length=length, last=True))


def _put_words(world: World, low: int, high: int, stream: int = LL_DISPATCH) -> None:
    producer = world.producer(0, stream)
    lap = lap_of(world.services[0].counters()["total"]["commands"], producer.capacity)
    producer.put_words(low | lap, high | lap)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        ({"length": 1}, {"kind": 9}, r"unknown kind.*kind 9"),
        ({"length": 1}, {"stream": LL_DISPATCH + 1}, "does not own.*channel 1"),
        ({"length": 1}, {"stream": CREDIT | LL_DISPATCH}, "does not own"),
        ({"length": 1}, {"stream": 5}, "does not own.*no stream 5"),
        ({"length": _UNITS + 1}, {}, r"outside the window.*65552 bytes"),
        ({"length": 1, "source": _UNITS}, {}, r"outside the window.*from offset 65536 to offset 0 of rank 1"),
        ({"length": 1}, {"target": _UNITS}, r"outside the window.*to offset 65536 of rank 1.*have 65536 bytes"),
        ({"length": LOW["length"].limit}, {}, "outside the window"),
    ],
)
def test_a_wrong_command_of_an_operation_ends_it_for_the_pair(
    low: dict[str, int], high: dict[str, int], words: str
) -> None:
    """Nothing of it is posted; both ends are told by name at once; everybody else goes on."""
    world = World(3, 1 << 16, proxies=2)
    before = world.windows[1].copy()
    _put_words(world, LOW.pack(**low), HIGH.pack(**{"rank": 1, "stream": LL_DISPATCH, "kind": 1, "last": 1, **high}))
    # A later message must not be taken for the one that is missing.
    _put(world, 0, 1)
    for sender, receiver in ((0, 2), (1, 2), (2, 1), (2, 0)):
        _put(world, sender, receiver)
    pairs = ((2, 0), (2, 1), (1, 2), (0, 2))
    assert world.run(lambda: all(world.arrived(a, b, LL_DISPATCH) == 1 for a, b in pairs), 50)
    assert world.arrived(1, 0, LL_DISPATCH) == 0
    assert (world.windows[1][:4096] == before[:4096]).all()
    total = world.services[0].counters()["total"]
    assert (total["refused"], total["discarded"]) == (1, 1)
    assert tuple(world.errors[0][: ERROR_PEER + 1]) == (FAILURE_PROTOCOL, 1)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=rf"a kernel of this rank enqueued.*{words}") as caught:
            world.services[0].check()
        assert caught.value.peer == 1
    world.run(lambda: bool(world.errors[1][ERROR_CODE]), 50)
    assert tuple(world.errors[1][: ERROR_PEER + 1]) == (FAILURE_PEER_LOST, 0)
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        world.services[1].check()
    assert world.errors[2][ERROR_CODE] == 0
    # Masked, the pair is history and both go on with rank 2.
    world.services[0].forget(1)
    world.services[1].forget(0)
    for service in world.services:
        service.check()


@pytest.mark.parametrize("peer", [0, 9])
def test_a_command_for_nobody_ends_all_of_its_rank(peer: int) -> None:
    """It cannot be told which operation it was part of."""
    world = World(2, 1 << 16)
    _put_words(world, LOW.pack(length=1), HIGH.pack(rank=peer, stream=LL_DISPATCH, kind=1))
    world.step()
    assert world.errors[0][ERROR_CODE] == FAILURE_PROTOCOL
    with pytest.raises(ProtocolError, match=r"a kernel of this rank enqueued.*no proxy reaches"):
        world.services[0].check()


def test_a_wrong_command_outside_operations_is_named_once_and_everything_goes_on() -> None:
    world = World(2, 1 << 16)
    service = world.services[0]
    _put(world, 0, 1, HOST)
    bad = LOW.pack(length=1), HIGH.pack(rank=1, stream=HOST, kind=1, last=1, target=_UNITS)
    _put_words(world, *bad, stream=HOST)
    _put(world, 0, 1, HOST)
    assert world.run(lambda: world.arrived(1, 0, HOST) == 2, 50), "it has used up a message number"
    assert world.run(lambda: world.completed(0, 1, HOST) == 2, 50)
    assert not world.errors[0].any()
    assert not world.errors[1].any()
    assert service.counters()["total"]["refused"] == 1
    service.check()
    with pytest.raises(
        ProtocolError,
        match=r"refused command 1 of its ring: a write of 16 bytes from offset 0 to offset 65536 of rank 1's window, "
        r"stream 120 \(host\), channel 0.*65536 bytes.*proxy 0 of rank 0",
    ) as caught:
        service.check_commands()
    assert (caught.value.peer, caught.value.channel) == (1, 0)
    service.check_commands()
    # The next ones are named again, together when nobody asked in between.
    for _ in range(2):
        lap = lap_of(3, world.producer(0, HOST).capacity)
        world.producer(0, HOST).put_words(bad[0] | lap, bad[1] | lap)
    world.step()
    with pytest.raises(ProtocolError, match=r"refused command 3 of its ring \(and 1 after it\)"):
        service.check_commands()
    service.check_commands()
    _put(world, 0, 1)
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == 1, 50)


@pytest.mark.parametrize(
    ("fault", "arrived", "expected", "words"),
    [
        (FAULT_BAD_FRAME, 0xBAD, 0x600D, "that the format forbids: 0xbad arrived, 0x600d was expected"),
        (FAULT_NUMBER, 7, 5, "out of sequence: 0x7 arrived, 0x5 was expected"),
        (FAULT_TOO_LONG, 1 << 40, 1 << 28, "longer than any write: .* at most 0x10000000 bytes"),
        (FAULT_OUTSIDE_WINDOW, 1 << 20, 1 << 16, "an offset outside the window: 0x100000 arrived, .* at most 0x10000"),
        (FAULT_WRONG_SOURCE, 2 << 20, 1, "does not prove: 0x200000 arrived, source rank 1 was expected"),
    ],
)
def test_a_malformed_frame_is_the_failure_of_its_sender_alone(
    fault: int, arrived: int, expected: int, words: str
) -> None:
    world = World(3, 1 << 16)
    world.fabric.endpoint(0).inject(FAULT, arrived, 1, fault | expected << FAULT_BITS)
    world.step()
    assert tuple(world.errors[0][: ERROR_PEER + 1]) == (FAILURE_PROTOCOL, 1)
    with pytest.raises(ProtocolError, match=rf"rank 1 \(fake.*\) sent .*{words}.*mask the rank") as caught:
        world.services[0].check()
    assert caught.value.peer == 1
    for sender, receiver in ((0, 2), (2, 0), (1, 2)):
        _put(world, sender, receiver)
    pairs = ((2, 0), (0, 2), (2, 1))
    assert world.run(lambda: all(world.arrived(a, b, LL_DISPATCH) == 1 for a, b in pairs), 50)
    # Its connection is closed: it learns so by name.
    assert world.run(lambda: tuple(world.errors[1][: ERROR_PEER + 1]) == (FAILURE_PEER_LOST, 0), 50)
    world.services[0].forget(1)
    world.services[0].check()


@pytest.mark.parametrize("sequence", [2047, 1024, 500, 1])
def test_a_number_out_of_sequence_is_a_fault_where_the_transport_keeps_order(sequence: int) -> None:
    """Behind, far ahead, or a gap: nothing is counted, nothing is held, the sender is to blame."""
    world = World(3, 1 << 16, fabric_options={"in_sequence": True})
    word = imm.encode(Immediate(source=1, stream=LL_DISPATCH, sequence=sequence, last=True))
    world.fabric.endpoint(0).inject(ARRIVED, word, 1)
    world.step()
    assert world.arrived(0, 1, LL_DISPATCH) == 0
    with pytest.raises(ProtocolError, match=r"out of the sequence.*sequence 0 was expected.*low-latency dispatch"):
        world.services[0].check()
    _put(world, 2, 0)
    assert world.run(lambda: world.arrived(0, 2, LL_DISPATCH) == 1, 50)


@pytest.mark.parametrize("stream", [5, 127, CREDIT | 5])
def test_a_stream_that_does_not_exist_is_refused(stream: int) -> None:
    world = World(2, 1 << 16)
    world.fabric.endpoint(0).inject(ARRIVED, imm.encode(Immediate(source=1, stream=stream, sequence=0, last=True)), 1)
    world.step()
    with pytest.raises(ProtocolError, match=r"does not exist.*no stream"):
        world.services[0].check()


def test_a_frame_cut_off_says_how_much_is_missing() -> None:
    world = World(2, 1 << 16)
    world.fabric.endpoint(0).inject(DOWN, 24, 1, 104)
    world.step()
    with pytest.raises(PeerLost, match="Connection reset by peer; its last frame was cut off, at least 24 bytes"):
        world.services[0].check()


def test_control_streams_exist() -> None:
    """What :func:`exists` leaves out is refused above; what the modes use is not."""
    world = World(2, 1 << 16)
    _put(world, 0, 1, NORMAL_GRANT)
    assert world.run(lambda: world.arrived(1, 0, NORMAL_GRANT) == 1, 50)
