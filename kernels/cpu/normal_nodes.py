"""Nodes in normal mode: who is near and who is far, who forwards for whom, and the rows that go over the rails.

Ranks are counted node by node. A rank is *near* when it is on this rank's node, *far* when not. The *rail* peers of a
rank are the far ranks with its own place in their nodes: only they exchange rows with it, each row on behalf of a
whole node. All of this is so only where NODE_RANKS is not 0; else every rank is near.
"""

from __future__ import annotations

from ...native.atomics import peek, peek8, poke, poke32, zero
from ...native.jit import compiled, inlined
from ...protocol.message import META_LINE, NormalNotify
from ..blocks import normal as block
from .context import own_rank, rank_count
from .words import get, put

__all__ = [
    "forwarder",
    "is_far",
    "is_rail",
    "lane_of",
    "lanes",
    "meta_room",
    "node_of",
    "place_of",
    "prepare_nodes",
    "route_nodes",
    "slot_bytes",
    "take_rails",
]

_COMBINE = NormalNotify.OPERATION_COMBINE


@inlined
def node_of(operation: int, rank: int) -> int:
    """Node of a rank; NODE_RANKS must not be 0."""
    return rank // get(operation, block.NODE_RANKS)


@inlined
def place_of(operation: int, rank: int) -> int:
    """Place of a rank in its node."""
    return rank % get(operation, block.NODE_RANKS)


@inlined
def is_far(operation: int, me: int, rank: int) -> bool:
    """True when ``rank`` is on another node than ``me``."""
    size = get(operation, block.NODE_RANKS)
    return size != 0 and rank // size != me // size


@inlined
def is_rail(operation: int, me: int, rank: int) -> bool:
    """True when ``rank`` is far and has the place of ``me`` in its node."""
    size = get(operation, block.NODE_RANKS)
    return size != 0 and rank != me and rank % size == me % size


@inlined
def forwarder(operation: int, me: int, far: int) -> int:
    """The rank of the node of ``me`` through which rows of, and to, rank ``far`` pass."""
    size = get(operation, block.NODE_RANKS)
    return me // size * size + far % size


@inlined
def meta_room(nbytes: int) -> int:
    """Bytes taken by a rank's meta."""
    return (nbytes + META_LINE - 1) // META_LINE * META_LINE


@inlined
def lanes(operation: int, ranks: int) -> int:
    """Into how many lanes of two slots the landing area for rounds is cut."""
    size = get(operation, block.NODE_RANKS)
    return ranks if size == 0 else size + ranks // size


@inlined
def slot_bytes(operation: int, ranks: int) -> int:
    """Bytes of a landing slot: those of two for each rank are dealt to the peers from which rows can come."""
    return get(operation, block.ROUND_SLOT) * ranks // lanes(operation, ranks) // META_LINE * META_LINE


@inlined
def lane_of(operation: int, me: int, rank: int) -> int:
    """Lane of a near rank or of a rail peer."""
    size = get(operation, block.NODE_RANKS)
    if size == 0:
        return rank
    return size + rank // size if rank // size != me // size else rank % size


@compiled
def route_nodes(in_rank: int, tokens: int, ranks: int, node_ranks: int, me: int, rows: int, lists: int) -> None:
    """List the tokens that have an expert on each other node, in ascending order.

    Args:
        in_rank: address of bool [tokens, ranks]: the token has an expert on the rank.
        rows: address of int64 [nodes], written: tokens of each node, 0 for that of rank ``me``.
        lists: address of int32 [nodes, tokens], written.
    """
    for node in range(ranks // node_ranks):
        count = 0
        if node != me // node_ranks:
            for token in range(tokens):
                marks = in_rank + token * ranks + node * node_ranks
                for index in range(node_ranks):
                    if peek8(marks + index) != 0:
                        poke32(lists + 4 * (node * tokens + count), token)
                        count += 1
                        break
        poke(rows + 8 * node, count)


@compiled
def prepare_nodes(context: int, operation: int, peers: int, given: int, taken: int, lists: int) -> None:
    """After ``prepare``: what goes over the rails, from what the dispatch of the handle sent and received on them.

    Args:
        context: address of the kernel context block.
        operation, peers: addresses of the blocks of ``normal_block``.
        given: address of int64 [nodes], rows that the dispatch sends to each node.
        taken: address of int64 [nodes], rows that this rank hands on from each node; 0 when that is not known yet.
        lists: address of int32 [nodes, TOKENS], tokens for each node.
    """
    me, combine = own_rank(context), get(operation, block.KIND) == _COMBINE
    for rank in range(rank_count(context)):
        if not is_rail(operation, me, rank):
            continue
        state, node = peers + 8 * block.PEER_WORDS * rank, node_of(operation, rank)
        sent = peek(given + 8 * node)
        came = peek(taken + 8 * node) if taken != 0 else 0
        put(state, block.RAIL_SEND, came if combine else sent)
        put(state, block.RAIL_RECV, sent if combine else came)
        put(state, block.RAIL_LIST, lists + 4 * node * get(operation, block.TOKENS))
    zero(get(operation, block.CURSORS), 8 * rank_count(context))


@compiled
def take_rails(context: int, operation: int, peers: int) -> None:
    """When all ranks have spoken: from here on the rows of far ranks are those on the rails."""
    me, combine = own_rank(context), get(operation, block.KIND) == _COMBINE
    meta = get(operation, block.META_BYTES)
    remote = room = relayed = 0
    for rank in range(rank_count(context)):
        state = peers + 8 * block.PEER_WORDS * rank
        if is_far(operation, me, rank):
            passing = get(state, block.SEND_ROWS) if combine else get(state, block.RECV_ROWS)
            sends, takes = get(state, block.RAIL_SEND), get(state, block.RAIL_RECV)
            put(state, block.PASS_ROWS, passing)
            put(state, block.SEND_ROWS, sends)
            put(state, block.RECV_ROWS, takes)
            put(state, block.RECV_LIST if combine else block.SEND_LIST, get(state, block.RAIL_LIST))
            put(state, block.RELAY_FIRST, relayed)
            relayed += sends if combine else takes
            remote += takes if combine else passing
            if combine:
                room += meta_room(takes * meta)
        elif rank != me:
            remote += get(state, block.RECV_ROWS)
            room += meta_room(get(state, block.RECV_ROWS) * meta)
    put(operation, block.RECV_REMOTE, remote)
    put(operation, block.META_ROOM, room)
