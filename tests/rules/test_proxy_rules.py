"""Each rule of the stream that lives in the proxy, and the proof that its test notices when the rule is taken out.

Every scenario runs three times: on the production loop, on the family of mutants with all rules in force, and with one
rule taken out, where it must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.rules.proxy_mutants import RULES, Mutants
from tests.support.driver_flush import Driver
from tests.support.world import SLOT, Link, World, drive
from uccl_ep_serving.errors import UcclEpError
from uccl_ep_serving.protocol import imm
from uccl_ep_serving.protocol.command import Command, encode
from uccl_ep_serving.protocol.context import ERROR_CODE, FAILURE_PEER_LOST, FAILURE_PROTOCOL
from uccl_ep_serving.protocol.imm import SEQUENCE_WINDOW, Immediate
from uccl_ep_serving.protocol.ring import lap_of
from uccl_ep_serving.protocol.streams import CREDIT, CREDIT_WRITES, HOST, LL_DISPATCH
from uccl_ep_serving.proxy import loop, words
from uccl_ep_serving.proxy.sequence import TICKET
from uccl_ep_serving.proxy.stats import in_flight
from uccl_ep_serving.proxy.transport.base import ARRIVED, DOWN, SENT
from uccl_ep_serving.proxy.transport.fake import Adversary

Step = Callable[[int], int]
_HALF = 1 << 15


def _message(world: World, rank: int, peer: int, length: int = 0) -> None:
    """Put a message of one command into the ring of ``rank``."""
    world.producer(rank, LL_DISPATCH).put(
        Command(rank=peer, stream=LL_DISPATCH, source=0, target=_HALF, length=length, last=True)
    )


def _exchange(
    step: Step,
    adversary: Adversary,
    seed: int = 1,
    *,
    parts: int = 3,
    sizes: Sequence[int] = (256, 64, 0, 128),
    rounds: int = 30,
    **settings: object,
) -> None:
    """Two ranks, both directions, every byte of every message checked."""
    world = World(2, 1 << 16, seed, adversary, step=step, **settings)
    links = [
        Link(
            world, a, 1 - a, LL_DISPATCH, a * SLOT * 4, _HALF + a * SLOT * 4, list(sizes) * rounds, parts=parts, slots=4
        )
        for a in range(2)
    ]
    assert drive(world, links, 5000), f"stuck: {world.services[0].counters()['streams']}"
    for service in world.services:
        service.check()
        assert all(entry["held_back"] == 0 for entry in service.counters()["streams"]), "something is held for ever"


def _flood(step: Step, adversary: Adversary, messages: int, depth: int = 8192) -> None:
    """Empty messages as fast as the rules allow, over a network that holds thousands of them."""
    world = World(2, 1 << 16, 5, adversary, step=step, fabric_options={"depth": depth}, writes_in_flight=1 << 16)
    sent = 0

    def done() -> bool:
        nonlocal sent
        producer = world.producer(0, LL_DISPATCH)
        while sent < messages and producer.room:
            _message(world, 0, 1)
            sent += 1
        assert world.arrived(1, 0, LL_DISPATCH) <= sent, "more arrived than was sent"
        assert world.completed(0, 1, LL_DISPATCH) <= sent
        return world.arrived(1, 0, LL_DISPATCH) == messages == world.completed(0, 1, LL_DISPATCH)

    assert world.run(done, 3000), f"stuck: {world.services[1].counters()['streams']}"
    for _ in range(50):
        world.step()
    assert done(), "late repeats were counted"
    for service in world.services:
        service.check()


def reordered_writes(step: Step) -> None:
    _exchange(step, Adversary(reorder=0.5))


def repeated_writes(step: Step) -> None:
    # Over more than a window of writes: a repeat that is taken for new stands for the write 1,024 later.
    _exchange(step, Adversary(reorder=0.4, duplicate=0.5), rounds=150)


def held_back_writes_are_repeated(step: Step) -> None:
    _exchange(step, Adversary(reorder=0.6, duplicate=0.7), seed=2)


def a_receiver_far_behind(step: Step) -> None:
    _flood(step, Adversary(reorder=0.9), 6000)


def a_sender_whose_completions_linger(step: Step) -> None:
    _flood(step, Adversary(duplicate=0.02, linger=0.95), 6000)


def more_writes_than_the_window(step: Step) -> None:
    _flood(step, Adversary(), 3 * SEQUENCE_WINDOW)


def caps_smaller_than_a_write(step: Step) -> None:
    _exchange(step, Adversary(), parts=1, bytes_in_flight=32, peer_bytes_in_flight=16, writes_in_flight=1)


def caps_are_kept(step: Step) -> None:
    """Bytes and writes in flight stay under the caps, unless a single write alone is larger."""
    world = World(3, 1 << 16, step=step, bytes_in_flight=8192, peer_bytes_in_flight=4096, writes_in_flight=6)
    for _ in range(40):
        _message(world, 0, 1, 1024)
        _message(world, 0, 2, 1024)
    state = world.services[0].states[0]

    def watch(rank: int) -> None:
        load = state.word(words.LOAD)
        assert load >> words.LOAD_SHIFT <= 6
        assert load & words.LOAD_BYTES <= 8192

    world.watchers.append(watch)
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == world.arrived(2, 0, LL_DISPATCH) == 40, 500)


def a_large_write_behind_endless_small_ones(step: Step) -> None:
    """Small writes of another stream would fit under the cap at any time, the large one only when they stand back."""
    world = World(2, 1 << 16, 3, Adversary(linger=0.9), step=step, channels=2, peer_bytes_in_flight=4096)

    def done() -> bool:
        for _ in range(min(8, world.producer(0, LL_DISPATCH).room)):
            world.producer(0, LL_DISPATCH).put(
                Command(rank=1, stream=LL_DISPATCH + 1, source=0, target=0, length=64, last=True)
            )
        return world.arrived(1, 0, LL_DISPATCH) == 1

    assert not world.run(done, 20)
    _message(world, 0, 1, 4096)
    assert world.run(done, 300), "the large write waits for ever"
    assert world.arrived(1, 0, LL_DISPATCH + 1) > 100
    assert world.run(lambda: not in_flight(world.services[0].states[0]), 2000)


def credits_while_everything_else_is_full(step: Step) -> None:
    """Rank 1's own writes are stuck behind rank 2; the credits that it owes rank 0 must go out all the same."""
    world = World(3, 1 << 16, step=step, writes_in_flight=1, ring_slots=64, fabric_options={"depth": 4})
    world.asleep.add(2)
    for _ in range(32):
        _message(world, 1, 2, 16)
    sent = 0

    def done() -> bool:
        nonlocal sent
        while sent < 2 * SEQUENCE_WINDOW and world.producer(0, LL_DISPATCH).room:
            _message(world, 0, 1)
            sent += 1
        return world.arrived(1, 0, LL_DISPATCH) == 2 * SEQUENCE_WINDOW

    assert world.run(done, 20_000), "rank 0 never got its credits"


def forged_credits(step: Step) -> None:
    """A credit for writes that were never sent must not be believed."""
    world = World(2, 1 << 16, step=step)
    word = imm.encode(Immediate(source=1, stream=CREDIT | LL_DISPATCH, sequence=0, last=True))
    world.fabric.endpoint(0).inject(ARRIVED, word, 1)
    world.step()
    assert world.errors[0][ERROR_CODE] == FAILURE_PROTOCOL


def one_destination_asleep(step: Step) -> None:
    """Rank 1 takes nothing; rank 2, behind it in the same ring, gets everything."""
    world = World(3, 1 << 16, step=step, fabric_options={"depth": 8})
    world.asleep.add(1)
    for _ in range(100):
        _message(world, 0, 1, 64)
        _message(world, 0, 2, 64)
    assert world.run(lambda: world.arrived(2, 0, LL_DISPATCH) == 100, 500), "rank 2 waits for rank 1"
    world.asleep.clear()
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == 100, 500)


def a_small_command_behind_a_large_one(step: Step) -> None:
    """The large one waits for the byte cap, the small one would fit under it."""
    _exchange(step, Adversary(busy=0.2), parts=1, sizes=[256, 256, 16, 16], peer_bytes_in_flight=320)


def commands_longer_than_the_quantum(step: Step) -> None:
    _exchange(step, Adversary(reorder=0.2), parts=1, quantum=64)


def a_command_beyond_the_window(step: Step) -> None:
    world = World(2, 1 << 16, step=step)
    guard = np.zeros(1 << 17, np.uint8)
    world.fabric.register_window(1, guard.ctypes.data)
    world.windows[0][:] = 1
    world.producer(0, LL_DISPATCH).put(
        Command(rank=1, stream=LL_DISPATCH, source=0, target=(1 << 16) - 16, length=32, last=True)
    )
    for _ in range(5):
        world.step()
    assert not guard.any(), "bytes were written outside the window"
    assert world.errors[0][ERROR_CODE] == FAILURE_PROTOCOL


def an_immediate_for_another_proxy(step: Step) -> None:
    world = World(2, 1 << 16, step=step, proxies=2)
    word = imm.encode(Immediate(source=1, stream=LL_DISPATCH + 1, sequence=0, last=True))
    world.fabric.endpoint(0, 0).inject(ARRIVED, word, 1)
    world.step()
    assert world.errors[0][ERROR_CODE] == FAILURE_PROTOCOL


def an_immediate_of_somebody_else(step: Step) -> None:
    world = World(3, 1 << 16, step=step)
    word = imm.encode(Immediate(source=2, stream=LL_DISPATCH, sequence=0, last=True))
    world.fabric.endpoint(0).inject(ARRIVED, word, 1)
    world.step()
    assert world.arrived(0, 2, LL_DISPATCH) == 0
    assert world.errors[0][ERROR_CODE] == FAILURE_PROTOCOL
    assert world.errors[0][1] == 1, "the forger is named, not its victim"


def a_voice_from_the_past(step: Step) -> None:
    """What still comes from a forgotten peer changes nothing."""
    world = World(2, 1 << 16, step=step)
    world.services[0].forget(1)
    world.step()
    word = imm.encode(Immediate(source=1, stream=LL_DISPATCH, sequence=0, last=True))
    world.fabric.endpoint(0).inject(ARRIVED, word, 1)
    world.step()
    assert world.arrived(0, 1, LL_DISPATCH) == 0
    assert world.errors[0][ERROR_CODE] == 0


def a_kernel_waiting_for_a_lost_peer(step: Step) -> None:
    """Its own messages to the peer count as completed, so its send slots come free."""
    world = World(2, 1 << 16, step=step, fabric_options={"depth": 4})
    world.asleep.add(1)
    for _ in range(20):
        _message(world, 0, 1, 64)
    world.step()
    assert world.completed(0, 1, LL_DISPATCH) == 0
    world.fabric.endpoint(0).inject(DOWN, 0, 1, 104)
    world.step()
    assert world.errors[0][ERROR_CODE] == FAILURE_PEER_LOST
    assert world.completed(0, 1, LL_DISPATCH) == 20


def a_lost_peer_whose_bytes_a_nic_may_still_read(step: Step) -> None:
    """What is packed over them would be sent to it: they are given back when it is forgotten, not before."""
    world = World(3, 1 << 16, step=step, fabric_options={"depth": 4, "reads_after_drop": True})
    world.asleep |= {1, 2}
    for peer in (1, 2):
        for _ in range(20):
            _message(world, 0, peer, 64)
    world.step()
    world.fabric.endpoint(0).inject(DOWN, 0, 1, 104)
    world.services[0].forget(2)
    world.step()
    assert world.errors[0][ERROR_CODE] == FAILURE_PEER_LOST
    _message(world, 0, 1, 64)
    world.step()
    assert world.completed(0, 1, LL_DISPATCH) == 0
    assert world.completed(0, 2, LL_DISPATCH) == 20


def a_goodbye_overtaken_by_the_closed_connection(step: Step) -> None:
    """forget() works from the moment it returns, even when the DOWN was already on its way."""
    world = World(2, 1 << 16, step=step)
    world.step()
    world.fabric.endpoint(0).inject(DOWN, 0, 1, 104)
    # As forget() does, before the loop has looked at its requests.
    world.services[0].states[0].peers[1, words.PEER_REQUEST // 8] = 1
    world.step()
    assert world.errors[0][ERROR_CODE] == 0
    world.services[0].check()


def an_old_completion(step: Step) -> None:
    """A send queue that was torn down may still complete what it held: an unknown source to the books."""
    world = World(2, 1 << 16, step=step)
    world.asleep.add(1)
    for _ in range(3):
        _message(world, 0, 1, 64)
    world.step()
    world.services[0].forget(1)
    world.step()
    state = world.services[0].states[0]
    completed = world.completed(0, 1, LL_DISPATCH)
    assert (completed, state.word(words.LOAD)) == (3, 0)
    world.fabric.endpoint(0).inject(SENT, TICKET.pack(sequence=0, last=1, stream=LL_DISPATCH, peer=1, length=4), 1)
    world.step()
    assert (world.completed(0, 1, LL_DISPATCH), state.word(words.LOAD)) == (completed, 0)
    world.services[0].check()


def a_completion_told_twice(step: Step) -> None:
    """Counted again, behind a gap, it would open the caps for writes that are not over."""
    world = World(2, 1 << 16, step=step)
    world.asleep.add(1)
    for _ in range(3):
        _message(world, 0, 1, 64)
    world.step()
    state = world.services[0].states[0]
    for _ in range(2):
        world.fabric.endpoint(0).inject(SENT, TICKET.pack(sequence=1, last=1, stream=LL_DISPATCH, peer=1, length=4), 1)
        world.step()
    assert state.word(words.LOAD) >> words.LOAD_SHIFT == 2


def a_command_written_by_half(step: Step) -> None:
    """The low word is there, in the high one still lies what the lap before left."""
    world = World(2, 1 << 16, step=step, ring_slots=2)
    producer = world.producer(0, LL_DISPATCH)
    for number in range(3):
        _message(world, 0, 1, 16)
        assert world.run(lambda number=number: world.completed(0, 1, LL_DISPATCH) == number + 1, 50)
    low, high = encode(
        Command(rank=1, stream=LL_DISPATCH + 1, source=0, target=_HALF, length=32, last=True), lap_of(3, 2)
    )
    producer.put_half(3, 0, low)
    for _ in range(5):
        world.step()
    assert world.arrived(1, 0, LL_DISPATCH) == 3, "half a command was carried out"
    producer.put_half(3, 1, high)
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH + 1) == 1, 50)


def a_message_missing_in_an_operation(step: Step) -> None:
    """The next message of the stream must not be taken for the one that was refused."""
    world = World(2, 1 << 16, step=step)
    for target in (1 << 16, 0):
        world.producer(0, LL_DISPATCH).put(
            Command(rank=1, stream=LL_DISPATCH, source=0, target=target, length=16, last=True)
        )
    for _ in range(20):
        world.step()
    assert world.arrived(1, 0, LL_DISPATCH) == 0, "a later message took the number of the missing one"
    assert world.errors[0][ERROR_CODE] == FAILURE_PROTOCOL
    assert world.errors[1][ERROR_CODE] == FAILURE_PEER_LOST


def a_stray_command(step: Step) -> None:
    world = World(2, 1 << 16, step=step)
    for target in (0, 1 << 16, 0):
        world.producer(0, HOST).put(Command(rank=1, stream=HOST, source=0, target=target, length=16, last=True))
    assert world.run(lambda: world.arrived(1, 0, HOST) == 2, 50)
    assert not world.errors[0].any()


def a_gap_on_an_ordered_connection(step: Step) -> None:
    world = World(2, 1 << 16, step=step, fabric_options={"in_sequence": True})
    word = imm.encode(Immediate(source=1, stream=LL_DISPATCH, sequence=1, last=True))
    world.fabric.endpoint(0).inject(ARRIVED, word, 1)
    world.step()
    assert world.errors[0][ERROR_CODE] == FAILURE_PROTOCOL


def arrivals_behind_a_flush(step: Step) -> None:
    world = World(2, 1 << 16, step=step)
    driver = Driver(world)
    _message(world, 0, 1, 16)
    assert world.run(lambda: world.arrived(1, 0, LL_DISPATCH) == 1, 50)
    assert driver.calls[-1:] == [("flush", 0, 100, 0)], "kernels were told of what they may not see yet"


def a_connection_that_ends(step: Step) -> None:
    world = World(2, 1 << 16, step=step)
    world.fabric.endpoint(0).inject(DOWN, 0, 1, 104)
    world.step()
    assert world.errors[0][ERROR_CODE] == FAILURE_PEER_LOST, "waiting kernels are not released"


def a_long_queue_beside_a_short_one(step: Step) -> None:
    """1,000 writes wait to one rank, two to another: the two do not wait for the thousand."""
    world = World(3, 1 << 16, step=step, ring_slots=4096, writes_in_flight=1 << 16, fabric_options={"depth": 1024})
    # Nothing leaves until the queues are filled: both destinations are busy.
    state = world.services[0].states[0]
    state.header[words.WRITE_CAP // 8] = 0
    for peer in (1, 2):
        _message(world, 0, peer, 16)
    for _ in range(900):
        _message(world, 0, 1, 16)
    _message(world, 0, 2, 16)
    for _ in range(30):
        world.services[0].states[0].header[words.WRITE_CAP // 8] = 0
        step(state.address)
    state.header[words.WRITE_CAP // 8] = 1 << 16
    world.asleep.update((1, 2))
    step(state.address)
    posted = state.send[1, LL_DISPATCH, words.NEXT // 8], state.send[2, LL_DISPATCH, words.NEXT // 8]
    assert posted[1] == 2, f"the short queue waits: {posted}"
    assert posted[0] <= 40, f"one time slice has no end: {posted}"


def a_ring_full_of_commands(step: Step) -> None:
    """What arrives, and what is queued, is served after every batch."""
    world = World(2, 1 << 16, step=step, ring_slots=4096, fabric_options={"depth": 4096})
    for _ in range(1000):
        _message(world, 0, 1)
    world.services[0].counters()
    step(world.services[0].states[0].address)
    assert world.services[0].counters()["total"]["commands"] <= 64


SCENARIOS: dict[str, Callable[[Step], None]] = {
    "only a prefix is published": reordered_writes,
    "a repeat behind the prefix changes nothing": repeated_writes,
    "a repeat of a held write changes nothing": held_back_writes_are_repeated,
    "outstanding writes need credits": a_receiver_far_behind,
    "outstanding writes need local completion": a_sender_whose_completions_linger,
    "one write to an idle peer is always admitted": caps_smaller_than_a_write,
    "bytes and writes in flight are capped": caps_are_kept,
    "room under the caps goes to the write that waits for it": a_large_write_behind_endless_small_ones,
    "credits pass by the caps": credits_while_everything_else_is_full,
    "credits are returned": more_writes_than_the_window,
    "credits are bounded by what was sent": forged_credits,
    "a blocked destination does not block its ring": one_destination_asleep,
    "commands do not overtake queued ones of their stream": a_small_command_behind_a_large_one,
    "only the last piece of a split command ends the message": commands_longer_than_the_quantum,
    "commands stay inside the window": a_command_beyond_the_window,
    "a stream has one owner": an_immediate_for_another_proxy,
    "the source must be proven": an_immediate_of_somebody_else,
    "nothing is believed from a peer that was dropped": a_voice_from_the_past,
    "a completion of a peer that was dropped changes nothing": an_old_completion,
    "a completion counts once": a_completion_told_twice,
    "a command is taken when both of its words are written": a_command_written_by_half,
    "a wrong command of an operation ends the pair": a_message_missing_in_an_operation,
    "a wrong command outside operations ends nothing": a_stray_command,
    "a number out of sequence is a fault where order is kept": a_gap_on_an_ordered_connection,
    "what a NIC wrote is made visible before it counts": arrivals_behind_a_flush,
    "a lost peer sets the sticky error": a_connection_that_ends,
    "a stream gets time slices": a_long_queue_beside_a_short_one,
    "the proxy takes a bounded batch of commands": a_ring_full_of_commands,
    "writes to a lost peer count as completed": a_kernel_waiting_for_a_lost_peer,
    "bytes that a NIC may still read are not given back": a_lost_peer_whose_bytes_a_nic_may_still_read,
    "a forgotten peer causes no error": a_goodbye_overtaken_by_the_closed_connection,
}


@pytest.fixture(scope="module")
def mutants() -> Mutants:
    """One compiled family for all tests of this module."""
    return Mutants()


def test_every_rule_has_a_scenario() -> None:
    assert SCENARIOS.keys() == RULES.keys()


@pytest.mark.parametrize("rule", SCENARIOS)
def test_rule(rule: str) -> None:
    SCENARIOS[rule](loop.step)


@pytest.mark.mutants
@pytest.mark.parametrize("rule", SCENARIOS)
def test_the_scenario_fails_without_its_rule(rule: str, mutants: Mutants) -> None:
    SCENARIOS[rule](mutants.step)
    with mutants.without(rule), pytest.raises((AssertionError, UcclEpError)):
        SCENARIOS[rule](mutants.step)


def test_credits_are_a_quarter_of_the_window() -> None:
    """The figure that the scenarios rely on: a credit is under way long before the sender must stop."""
    assert CREDIT_WRITES * 4 == SEQUENCE_WINDOW
