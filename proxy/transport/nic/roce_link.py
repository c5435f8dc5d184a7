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
from . import roce_words as rc
from . import words

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
    return peek(context + 8 * words.LINKS) + index * (8 * rc.LINK_WORDS)


@inlined
def link_count(context: int) -> int:
    """Links of the endpoint, connected or not."""
    return peek(context + 8 * words.RANKS) * peek(context + 8 * rc.PEER_LINKS)


@inlined
def add_request(
    context: int, index: int, link: int, opcode: int, local: int, nbytes: int, lkey: int, target: int, rkey: int,
    imm: int, ticket: int,
) -> None:  # fmt: skip
    """Append a work request to the link's chain; the caller has looked at the room in the send queue.

    Eleven arguments: the fields of a work request, inlined where they are known.

    ``imm`` is big-endian; ``ticket`` is wr_id + 1 of the write that is over when this completes, 0 = none.
    """
    if peek(context + 8 * rc.POOL_USED) == rc.POOL_SLOTS:
        ring(context)
    used = peek(context + 8 * rc.POOL_USED)
    poke(context + 8 * rc.POOL_USED, used + 1)
    request = peek(context + 8 * rc.POOL) + used * rc.SLOT_BYTES
    number, flags = peek(link + 8 * rc.POSTED), 0
    if number + 1 - peek(link + 8 * rc.SIGNALED) >= peek(context + 8 * rc.SIGNAL_EVERY):
        flags = _SIGNALED
        poke(link + 8 * rc.SIGNALED, number + 1)
        poke(context + 8 * rc.SIGNALS, peek(context + 8 * rc.SIGNALS) + 1)
    poke(request + _WR_ID, index << 32 | (number & _LOW32))
    poke(request + _NEXT, 0)
    poke(request + _NUM_SGE, (1 if nbytes > 0 else 0) | opcode << 32)
    poke(request + _SEND_FLAGS, flags | imm << 32)
    poke(request + _REMOTE, target)
    poke(request + _RKEY, rkey)
    poke(request + _SGE, local)
    poke(request + _SGE + _LENGTH, nbytes | lkey << 32)
    poke(peek(link + 8 * rc.TICKETS) + number % peek(context + 8 * rc.SEND_SLOTS) * 8, ticket)
    poke(link + 8 * rc.POSTED, number + 1)
    tail = peek(link + 8 * rc.CHAIN_TAIL)
    if tail != 0:
        poke(tail + _NEXT, request)
    else:
        poke(link + 8 * rc.CHAIN_HEAD, request)
        _mark_dirty(context, index, link)
    poke(link + 8 * rc.CHAIN_TAIL, request)


@inlined
def _mark_dirty(context: int, index: int, link: int) -> None:
    flags = peek(link + 8 * rc.FLAGS)
    if flags & rc.DIRTY_LINK == 0:
        poke(link + 8 * rc.FLAGS, flags | rc.DIRTY_LINK)
        count = peek(context + 8 * rc.DIRTY_COUNT)
        poke(peek(context + 8 * rc.DIRTY) + count * 8, index)
        poke(context + 8 * rc.DIRTY_COUNT, count + 1)


@compiled
def ring(context: int) -> None:
    """Hand every chain to the provider, its last work request asking for a completion."""
    for place in range(peek(context + 8 * rc.DIRTY_COUNT)):
        link = link_record(context, peek(peek(context + 8 * rc.DIRTY) + place * 8))
        poke(link + 8 * rc.FLAGS, peek(link + 8 * rc.FLAGS) & ~rc.DIRTY_LINK)
        head, tail = peek(link + 8 * rc.CHAIN_HEAD), peek(link + 8 * rc.CHAIN_TAIL)
        poke(link + 8 * rc.CHAIN_HEAD, 0)
        poke(link + 8 * rc.CHAIN_TAIL, 0)
        if head == 0 or peek(words.peer_record(context, peek(link + 8 * rc.PEER)) + 8 * words.STATE) != words.UP:
            continue
        # rule: roce: the last of a chain asks for a completion
        if peek(link + 8 * rc.SIGNALED) != peek(link + 8 * rc.POSTED):
            poke32(tail + _SEND_FLAGS, peek32(tail + _SEND_FLAGS) | _SIGNALED)
            poke(link + 8 * rc.SIGNALED, peek(link + 8 * rc.POSTED))
            poke(context + 8 * rc.SIGNALS, peek(context + 8 * rc.SIGNALS) + 1)
        poke(context + 8 * rc.DOORBELLS, peek(context + 8 * rc.DOORBELLS) + 1)
        rail = peek(link + 8 * rc.RAIL)
        status = call3_int(peek(rail + 8 * rc.POST_SEND), peek(link + 8 * rc.QP), head, peek(context + 8 * rc.BAD))
        if status != 0:
            # The queue has room by our count: the provider refuses the request itself, or the QP is gone.
            fail_peer(context, link, -abs(status), 0)
    poke(context + 8 * rc.DIRTY_COUNT, 0)
    poke(context + 8 * rc.POOL_USED, 0)


@compiled
def take_credit(context: int, link: int) -> bool:
    """Read what the peer allows; True when one more immediate may go out. A value that cannot be is a fault of it."""
    # Read once: the peer's NIC could change it between a check and its use.
    allowed = load64(peek(link + 8 * rc.CREDIT_IN))
    before, used = peek(link + 8 * rc.ALLOWED), peek(link + 8 * rc.IMMEDIATES)
    # rule: roce: what a peer claims to have posted is checked
    if allowed < before or allowed > used + rc.LINK_RECEIVES:
        poke(words.peer_record(context, peek(link + 8 * rc.PEER)) + 8 * rc.PROBLEM, FAULT_BAD_FRAME)
        return False
    poke(link + 8 * rc.ALLOWED, allowed)
    return used < allowed


@compiled
def owe_credit(context: int, link: int) -> None:
    """The link owes its peer a credit; :func:`grant` sends it as soon as the send queue has room."""
    flags = peek(link + 8 * rc.FLAGS)
    if flags & rc.OWES == 0:
        poke(link + 8 * rc.FLAGS, flags | rc.OWES)
        poke(context + 8 * rc.OWED, peek(context + 8 * rc.OWED) + 1)


@compiled
def grant(context: int) -> None:
    """Send the credits that are owed: the number of receives ever posted, written into the peer's word."""
    for index in range(link_count(context)):
        if peek(context + 8 * rc.OWED) == 0:
            return
        link = link_record(context, index)
        if peek(link + 8 * rc.FLAGS) & rc.OWES == 0:
            continue
        up = peek(words.peer_record(context, peek(link + 8 * rc.PEER)) + 8 * words.STATE) == words.UP
        if up and peek(link + 8 * rc.POSTED) - peek(link + 8 * rc.REPORTED) >= peek(context + 8 * rc.SEND_SLOTS):
            continue
        poke(link + 8 * rc.FLAGS, peek(link + 8 * rc.FLAGS) & ~rc.OWES)
        poke(context + 8 * rc.OWED, peek(context + 8 * rc.OWED) - 1)
        if up:
            granted = peek(link + 8 * rc.POSTED_RECEIVES)
            poke(link + 8 * rc.GRANTED, granted)
            # The NIC may read the word later than now: what stands there by then is no less true. It never travels
            # inside the work request: Broadcom's NICs are reported to fail at inline writes, and credits are too few
            # for the difference to show.
            source = peek(link + 8 * rc.CREDIT_OUT)
            poke(source, granted)
            add_request(
                context, index, link, _WRITE, source, 8, peek(peek(link + 8 * rc.RAIL) + 8 * rc.CREDIT_LKEY),
                peek(link + 8 * rc.CREDIT_TARGET), peek(link + 8 * rc.CREDIT_RKEY), 0, 0,
            )  # fmt: skip


@inlined
def renew_receives(context: int, link: int) -> None:
    """A receive was used: post anew in batches, and owe the peer a credit for every quarter of them."""
    received = peek(link + 8 * rc.RECEIVED) + 1
    poke(link + 8 * rc.RECEIVED, received)
    posted = peek(link + 8 * rc.POSTED_RECEIVES)
    if posted - received > peek(context + 8 * rc.RECEIVE_SLOTS) - rc.RECEIVE_BATCH:
        return
    # rule: roce: receives that were used are posted anew
    _post_receives(context, link, posted)


@compiled
def _post_receives(context: int, link: int, posted: int) -> None:
    chain = peek(link + 8 * rc.RECEIVE_CHAIN)
    function = peek(peek(link + 8 * rc.RAIL) + 8 * words.POST_RECV)
    status = call3_int(function, peek(link + 8 * rc.QP), chain, peek(context + 8 * rc.BAD))
    if status != 0:
        fail_peer(context, link, -abs(status), 0)
        return
    poke(link + 8 * rc.POSTED_RECEIVES, posted + rc.RECEIVE_BATCH)
    if (posted + rc.RECEIVE_BATCH - peek(link + 8 * rc.GRANTED)) * 4 >= peek(context + 8 * rc.RECEIVE_SLOTS):
        # rule: roce: receives that were posted are told to the peer
        owe_credit(context, link)


@inlined
def retire(context: int, index: int, link: int, low: int) -> None:
    """Everything up to the work request whose number ends in the 32 bits ``low`` has completed."""
    before = peek(link + 8 * rc.RETIRED)
    after = before + ((low + 1 - before) & _LOW32)
    if after <= before or after > peek(link + 8 * rc.POSTED):
        return
    poke(link + 8 * rc.RETIRED, after)
    flags = peek(link + 8 * rc.FLAGS)
    if flags & rc.READY_LINK == 0:
        poke(link + 8 * rc.FLAGS, flags | rc.READY_LINK)
        head = peek(context + 8 * rc.READY_HEAD)
        poke(peek(context + 8 * rc.READY) + head % link_count(context) * 8, index)
        poke(context + 8 * rc.READY_HEAD, head + 1)


@compiled
def stop_links(context: int, peer: int) -> None:
    """Put every queue pair of ``peer`` into the error state: the NIC neither reads our memory for it any more, nor
    lets it write. A short call into the kernel, made once per peer that is lost or dropped."""
    links = peek(context + 8 * rc.PEER_LINKS)
    for place in range(links):
        link = link_record(context, peer * links + place)
        qp, rail = peek(link + 8 * rc.QP), peek(link + 8 * rc.RAIL)
        poke(link + 8 * rc.CHAIN_HEAD, 0)
        poke(link + 8 * rc.CHAIN_TAIL, 0)
        if qp != 0:
            # rule: roce: what was under way to a lost peer weighs no more
            poke(rail + 8 * rc.LOAD, peek(rail + 8 * rc.LOAD) - peek(link + 8 * rc.LINK_LOAD))
            poke(link + 8 * rc.LINK_LOAD, 0)
            call3(peek(context + 8 * rc.MODIFY_QP), qp, peek(context + 8 * rc.STOP), _STATE_ONLY)


@compiled
def fail_peer(context: int, link: int, status: int, vendor: int) -> None:
    """A queue pair failed: stop the others of its peer too; DOWN follows once what has arrived is delivered."""
    peer = peek(link + 8 * rc.PEER)
    record = words.peer_record(context, peer)
    if peek(record + 8 * words.STATE) != words.UP:
        return
    poke(record + 8 * rc.FAILED_LINK, (link - peek(context + 8 * words.LINKS)) // (8 * rc.LINK_WORDS))
    poke(record + 8 * words.STATE, rc.ENDING_PEER)
    poke(record + 8 * words.LOST_STATUS, status)
    poke(record + 8 * words.LOST_VENDOR, vendor)
    poke(record + 8 * rc.ENDED_AT, monotonic_ns())
    poke(context + 8 * rc.ENDING, peek(context + 8 * rc.ENDING) + 1)
    stop_links(context, peer)
