"""What the compiled ``roce`` data path does on one link: build and hand over work requests, credits, receives, failure.

Completions of one queue pair come in order, so a completion stands for all work requests before it: only the last of
every chain, and one in SIGNAL_EVERY, asks for one.
"""

from __future__ import annotations

from ....native.atomics import load64, peek, peek32, poke, poke32
from ....native.calls import call3, call3_int, monotonic_ns
from ....native.jit import compiled, inlined
from ..base import FAULT_BAD_FRAME
from ..verbs import codes
from ..verbs.abi import SEND_WR, SGE
from .roce_words import (
    ALLOWED,
    BAD,
    CHAIN_HEAD,
    CHAIN_TAIL,
    CREDIT_IN,
    CREDIT_LKEY,
    CREDIT_OUT,
    CREDIT_RKEY,
    CREDIT_TARGET,
    DIRTY,
    DIRTY_COUNT,
    DIRTY_LINK,
    DOORBELLS,
    ENDED_AT,
    ENDING,
    ENDING_PEER,
    FAILED_LINK,
    FLAGS,
    GRANTED,
    IMMEDIATES,
    LINK_LOAD,
    LINK_RECEIVES,
    LINK_WORDS,
    LINKS,
    LOAD,
    MODIFY_QP,
    OWED,
    OWES,
    PEER,
    PEER_LINKS,
    PEER_WORDS,
    PEERS,
    POOL,
    POOL_SLOTS,
    POOL_USED,
    POST_RECV,
    POST_SEND,
    POSTED,
    POSTED_RECEIVES,
    PROBLEM,
    QP,
    RAIL,
    RANKS,
    READY,
    READY_HEAD,
    READY_LINK,
    RECEIVE_BATCH,
    RECEIVE_CHAIN,
    RECEIVE_SLOTS,
    RECEIVED,
    RETIRED,
    SEND_SLOTS,
    SIGNAL_EVERY,
    SIGNALED,
    SIGNALS,
    SLOT_BYTES,
    STATE,
    STATUS,
    STOP,
    TICKETS,
    UP,
    VENDOR,
)

__all__ = [
    "add_request",
    "fail_peer",
    "grant",
    "link_count",
    "link_record",
    "owe_credit",
    "peer_record",
    "renew_receives",
    "retire",
    "ring",
    "stop_links",
    "take_credit",
]

_WR_ID, _NEXT, _NUM_SGE = SEND_WR["wr_id"], SEND_WR["next"], SEND_WR["num_sge"]
_SEND_FLAGS, _REMOTE, _RKEY = SEND_WR["send_flags"], SEND_WR["wr.rdma.remote_addr"], SEND_WR["wr.rdma.rkey"]
# Pairs of 32-bit fields that are stored as one word.
assert (SEND_WR["opcode"], SEND_WR["imm_data"]) == (_NUM_SGE + 4, _SEND_FLAGS + 4)
assert (SGE["addr"], SGE["lkey"]) == (0, SGE["length"] + 4)
_SGE = SEND_WR.nbytes
_LENGTH = SGE["length"]
_SIGNALED = codes.SEND_SIGNALED
_WRITE = codes.WR_RDMA_WRITE
_STATE_ONLY = codes.QP_STATE
_LOW32 = 0xFFFFFFFF


@inlined
def link_record(context: int, index: int) -> int:
    """Address of link ``index``."""
    return peek(context + 8 * LINKS) + index * (8 * LINK_WORDS)


@inlined
def link_count(context: int) -> int:
    """Links of the endpoint, connected or not."""
    return peek(context + 8 * RANKS) * peek(context + 8 * PEER_LINKS)


@inlined
def peer_record(context: int, peer: int) -> int:
    """Address of the record of ``peer``."""
    return peek(context + 8 * PEERS) + peer * (8 * PEER_WORDS)


@inlined
def add_request(
    context: int, index: int, link: int, opcode: int, local: int, nbytes: int, lkey: int, target: int, rkey: int,
    imm: int, ticket: int,
) -> None:  # fmt: skip
    """Append a work request to the link's chain; the caller has looked at the room in the send queue.

    ``imm`` is big-endian; ``ticket`` is wr_id + 1 of the write that is over when this completes, 0 = none.
    """
    if peek(context + 8 * POOL_USED) == POOL_SLOTS:
        ring(context)
    used = peek(context + 8 * POOL_USED)
    poke(context + 8 * POOL_USED, used + 1)
    request = peek(context + 8 * POOL) + used * SLOT_BYTES
    number, flags = peek(link + 8 * POSTED), 0
    if number + 1 - peek(link + 8 * SIGNALED) >= peek(context + 8 * SIGNAL_EVERY):
        flags = _SIGNALED
        poke(link + 8 * SIGNALED, number + 1)
        poke(context + 8 * SIGNALS, peek(context + 8 * SIGNALS) + 1)
    poke(request + _WR_ID, index << 32 | (number & _LOW32))
    poke(request + _NEXT, 0)
    poke(request + _NUM_SGE, (1 if nbytes > 0 else 0) | opcode << 32)
    poke(request + _SEND_FLAGS, flags | imm << 32)
    poke(request + _REMOTE, target)
    poke(request + _RKEY, rkey)
    poke(request + _SGE, local)
    poke(request + _SGE + _LENGTH, nbytes | lkey << 32)
    poke(peek(link + 8 * TICKETS) + number % peek(context + 8 * SEND_SLOTS) * 8, ticket)
    poke(link + 8 * POSTED, number + 1)
    tail = peek(link + 8 * CHAIN_TAIL)
    if tail != 0:
        poke(tail + _NEXT, request)
    else:
        poke(link + 8 * CHAIN_HEAD, request)
        _mark_dirty(context, index, link)
    poke(link + 8 * CHAIN_TAIL, request)


@inlined
def _mark_dirty(context: int, index: int, link: int) -> None:
    flags = peek(link + 8 * FLAGS)
    if flags & DIRTY_LINK == 0:
        poke(link + 8 * FLAGS, flags | DIRTY_LINK)
        count = peek(context + 8 * DIRTY_COUNT)
        poke(peek(context + 8 * DIRTY) + count * 8, index)
        poke(context + 8 * DIRTY_COUNT, count + 1)


@compiled
def ring(context: int) -> None:
    """Hand every chain to the provider, its last work request asking for a completion."""
    for place in range(peek(context + 8 * DIRTY_COUNT)):
        link = link_record(context, peek(peek(context + 8 * DIRTY) + place * 8))
        poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) & ~DIRTY_LINK)
        head, tail = peek(link + 8 * CHAIN_HEAD), peek(link + 8 * CHAIN_TAIL)
        poke(link + 8 * CHAIN_HEAD, 0)
        poke(link + 8 * CHAIN_TAIL, 0)
        if head == 0 or peek(peer_record(context, peek(link + 8 * PEER)) + 8 * STATE) != UP:
            continue
        # rule: roce: the last of a chain asks for a completion
        if peek(link + 8 * SIGNALED) != peek(link + 8 * POSTED):
            poke32(tail + _SEND_FLAGS, peek32(tail + _SEND_FLAGS) | _SIGNALED)
            poke(link + 8 * SIGNALED, peek(link + 8 * POSTED))
            poke(context + 8 * SIGNALS, peek(context + 8 * SIGNALS) + 1)
        poke(context + 8 * DOORBELLS, peek(context + 8 * DOORBELLS) + 1)
        rail = peek(link + 8 * RAIL)
        status = call3_int(peek(rail + 8 * POST_SEND), peek(link + 8 * QP), head, peek(context + 8 * BAD))
        if status != 0:
            # The queue has room by our count: the provider refuses the request itself, or the QP is gone.
            fail_peer(context, link, -abs(status), 0)
    poke(context + 8 * DIRTY_COUNT, 0)
    poke(context + 8 * POOL_USED, 0)


@compiled
def take_credit(context: int, link: int) -> bool:
    """Read what the peer allows; True when one more immediate may go out. A value that cannot be is a fault of it."""
    # Read once: the peer's NIC could change it between a check and its use.
    allowed = load64(peek(link + 8 * CREDIT_IN))
    before, used = peek(link + 8 * ALLOWED), peek(link + 8 * IMMEDIATES)
    # rule: roce: what a peer claims to have posted is checked
    if allowed < before or allowed > used + LINK_RECEIVES:
        poke(peer_record(context, peek(link + 8 * PEER)) + 8 * PROBLEM, FAULT_BAD_FRAME)
        return False
    poke(link + 8 * ALLOWED, allowed)
    return used < allowed


@compiled
def owe_credit(context: int, link: int) -> None:
    """The link owes its peer a credit; :func:`grant` sends it as soon as the send queue has room."""
    flags = peek(link + 8 * FLAGS)
    if flags & OWES == 0:
        poke(link + 8 * FLAGS, flags | OWES)
        poke(context + 8 * OWED, peek(context + 8 * OWED) + 1)


@compiled
def grant(context: int) -> None:
    """Send the credits that are owed: the number of receives ever posted, written into the peer's word."""
    for index in range(link_count(context)):
        if peek(context + 8 * OWED) == 0:
            return
        link = link_record(context, index)
        if peek(link + 8 * FLAGS) & OWES == 0:
            continue
        up = peek(peer_record(context, peek(link + 8 * PEER)) + 8 * STATE) == UP
        if up and peek(link + 8 * POSTED) - peek(link + 8 * RETIRED) >= peek(context + 8 * SEND_SLOTS):
            continue
        poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) & ~OWES)
        poke(context + 8 * OWED, peek(context + 8 * OWED) - 1)
        if up:
            granted = peek(link + 8 * POSTED_RECEIVES)
            poke(link + 8 * GRANTED, granted)
            # The NIC may read the word later than now: what stands there by then is no less true. It never travels
            # inside the work request: Broadcom's NICs are reported to fail at inline writes, and credits are too few
            # for the difference to show.
            source = peek(link + 8 * CREDIT_OUT)
            poke(source, granted)
            add_request(
                context, index, link, _WRITE, source, 8, peek(peek(link + 8 * RAIL) + 8 * CREDIT_LKEY),
                peek(link + 8 * CREDIT_TARGET), peek(link + 8 * CREDIT_RKEY), 0, 0,
            )  # fmt: skip


@inlined
def renew_receives(context: int, link: int) -> None:
    """A receive was used: post anew in batches, and owe the peer a credit for every quarter of them."""
    received = peek(link + 8 * RECEIVED) + 1
    poke(link + 8 * RECEIVED, received)
    posted = peek(link + 8 * POSTED_RECEIVES)
    if posted - received > peek(context + 8 * RECEIVE_SLOTS) - RECEIVE_BATCH:
        return
    # rule: roce: receives that were used are posted anew
    _post_receives(context, link, posted)


@compiled
def _post_receives(context: int, link: int, posted: int) -> None:
    chain = peek(link + 8 * RECEIVE_CHAIN)
    function = peek(peek(link + 8 * RAIL) + 8 * POST_RECV)
    status = call3_int(function, peek(link + 8 * QP), chain, peek(context + 8 * BAD))
    if status != 0:
        fail_peer(context, link, -abs(status), 0)
        return
    poke(link + 8 * POSTED_RECEIVES, posted + RECEIVE_BATCH)
    if (posted + RECEIVE_BATCH - peek(link + 8 * GRANTED)) * 4 >= peek(context + 8 * RECEIVE_SLOTS):
        # rule: roce: receives that were posted are told to the peer
        owe_credit(context, link)


@inlined
def retire(context: int, index: int, link: int, low: int) -> None:
    """Everything up to the work request whose number ends in the 32 bits ``low`` has completed."""
    before = peek(link + 8 * RETIRED)
    after = before + ((low + 1 - before) & _LOW32)
    if after <= before or after > peek(link + 8 * POSTED):
        return
    poke(link + 8 * RETIRED, after)
    flags = peek(link + 8 * FLAGS)
    if flags & READY_LINK == 0:
        poke(link + 8 * FLAGS, flags | READY_LINK)
        head = peek(context + 8 * READY_HEAD)
        poke(peek(context + 8 * READY) + head % link_count(context) * 8, index)
        poke(context + 8 * READY_HEAD, head + 1)


@compiled
def stop_links(context: int, peer: int) -> None:
    """Put every queue pair of ``peer`` into the error state: the NIC neither reads our memory for it any more, nor
    lets it write. A short call into the kernel, made once per peer that is lost or dropped."""
    links = peek(context + 8 * PEER_LINKS)
    for place in range(links):
        link = link_record(context, peer * links + place)
        qp, rail = peek(link + 8 * QP), peek(link + 8 * RAIL)
        poke(link + 8 * CHAIN_HEAD, 0)
        poke(link + 8 * CHAIN_TAIL, 0)
        if qp != 0:
            # rule: roce: what was under way to a lost peer weighs no more
            poke(rail + 8 * LOAD, peek(rail + 8 * LOAD) - peek(link + 8 * LINK_LOAD))
            poke(link + 8 * LINK_LOAD, 0)
            call3(peek(context + 8 * MODIFY_QP), qp, peek(context + 8 * STOP), _STATE_ONLY)


@compiled
def fail_peer(context: int, link: int, status: int, vendor: int) -> None:
    """A queue pair failed: stop the others of its peer too; DOWN follows once what has arrived is delivered."""
    peer = peek(link + 8 * PEER)
    record = peer_record(context, peer)
    if peek(record + 8 * STATE) != UP:
        return
    poke(record + 8 * FAILED_LINK, (link - peek(context + 8 * LINKS)) // (8 * LINK_WORDS))
    poke(record + 8 * STATE, ENDING_PEER)
    poke(record + 8 * STATUS, status)
    poke(record + 8 * VENDOR, vendor)
    poke(record + 8 * ENDED_AT, monotonic_ns())
    poke(context + 8 * ENDING, peek(context + 8 * ENDING) + 1)
    stop_links(context, peer)
