"""The handshake as two generators that talk to each other: what each side learns, and whom each refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.tcp_peers import identity
from uccl_ep_serving.protocol import frame
from uccl_ep_serving.protocol.frame import Verdict
from uccl_ep_serving.protocol.handshake import Handshake, Proven, Refused, accept, connect


def talk(one: Handshake, other: Handshake, alter: Callable[[bytes], bytes] = lambda said: said) -> list[object]:
    """Results of both, a Proven or what was raised; ``alter`` changes what ``one`` says."""
    sides, wires, results = [one, other], [b"", b""], [None, None]
    wants: list[object] = [next(one), next(other)]
    while None in results:
        moved = False
        for me in (0, 1):
            if results[me] is not None:
                continue
            want, heard = wants[me], b""
            if isinstance(want, bytes):
                wires[1 - me] += alter(want) if me == 0 else want
            elif len(wires[me]) >= want:
                heard, wires[me] = wires[me][:want], wires[me][want:]
            else:
                continue
            moved = True
            try:
                wants[me] = sides[me].send(heard)
            except StopIteration as end:
                results[me] = end.value
            except (Refused, ValueError) as error:
                results[me] = error
        if not moved:
            break
    return results


def test_each_side_learns_what_the_other_has_taken_and_their_keys_meet() -> None:
    asked = []

    def count(peer: int, connection: int) -> int:
        asked.append((peer, connection))
        return 7

    ours, theirs = talk(connect(identity(1), 0, 1, 5), accept(identity(0), frozenset([1]), count))
    assert isinstance(ours, Proven)
    assert isinstance(theirs, Proven)
    assert (ours.key, ours.count) == ((0, 1), 7)
    assert (theirs.key, theirs.count) == ((1, 1), 5)
    assert (ours.send_key, ours.receive_key) == (theirs.receive_key, theirs.send_key)
    assert ours.send_key != ours.receive_key
    assert asked == [(1, 1)]
    assert ours.send_key.hex() not in repr(ours)
    assert "send_key" not in repr(ours)


@pytest.mark.parametrize("verdict", [Verdict.LEFT, Verdict.CROSSED])
def test_a_side_that_has_done_with_the_peer_says_so_once_it_is_proven(verdict: Verdict) -> None:
    ours, theirs = talk(connect(identity(1), 0, 0), accept(identity(0), frozenset([1]), lambda *key: verdict))
    assert isinstance(ours, Refused)
    assert isinstance(theirs, Refused)
    assert ours.verdict == theirs.verdict == verdict


def test_nobody_is_asked_for_a_count_before_the_proof() -> None:
    def count(peer: int, connection: int) -> int:
        raise AssertionError("a stranger must not get at a connection")

    stranger = connect(identity(1, secret=bytes(32)), 0, 0)
    _, theirs = talk(stranger, accept(identity(0), frozenset([1]), count))
    assert isinstance(theirs, Refused) or theirs is None


@pytest.mark.parametrize("kind", [frame.KIND_PROOF, frame.KIND_WELCOME])
def test_a_changed_count_is_refused(kind: int) -> None:
    def alter(said: bytes) -> bytes:
        return said[:8] + bytes([said[8] ^ 1]) + said[9:] if frame.decode_prefix(said[:8])[1] == kind else said

    connector, acceptor = connect(identity(1), 0, 0, 2), accept(identity(0), frozenset([1]))
    sides = (connector, acceptor) if kind == frame.KIND_PROOF else (acceptor, connector)
    refused = talk(*sides, alter)[1]
    assert isinstance(refused, Refused)
    assert refused.verdict == Verdict.WRONG_SECRET


def test_another_shape_is_refused() -> None:
    other = replace(identity(0), window_bytes=1)
    ours, theirs = talk(connect(identity(1), 0, 0), accept(other, frozenset([1])))
    assert isinstance(ours, Refused)
    assert ours.verdict == Verdict.OTHER_SHAPE
    assert isinstance(theirs, Refused)
    assert theirs.claimed == 1
