"""A network of NICs in memory, compiled: what queue pairs post here lands in other windows, in a seeded order.

The shared core of the in-memory providers. It knows queue pairs, completion queues and memory regions by their C
structs (at the offsets of ``verbs_abi``), each followed by private words of its own; it moves bytes and writes
completions. *When* a write may land is the business of the provider: :mod:`provider_rc` lands the oldest of a queue
pair, an SRD provider any of them.

Every entry point (post, poll, modify) takes the network's lock, so endpoints may run in one thread or in many. Nothing
happens by itself: the wires move whenever somebody polls, a few steps each time, as on the ``fake`` transport.

A write goes through: POSTED -> (its first half is in place) -> LANDED: all of it is in place, and its immediate, if
any, took a receive and made a completion there -> DONE: its sender has its completion.
"""

from __future__ import annotations

import numpy as np

from uccl_ep_serving.native.atomics import compare_exchange, copy, load64, pause, peek, peek32, poke, poke32, store64
from uccl_ep_serving.native.calls import monotonic_ns
from uccl_ep_serving.native.jit import compiled
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.abi import CQ, QP, WC

# --- the network: int64 words --------------------------------------------------------------------------------
LOCK = 0
RANDOM = 8  # state of the generator, never 0
QPS = 16  # address of int64[MAX_QPS]: address of the QP with this index, 0 = none
QP_COUNT = 24  # indices used so far
MRS = 32  # address of MR records
MR_COUNT = 40
DELAY = 48  # probability * 2**32 that a queue pair is passed over in a step
LINGER = 56  # probability * 2**32 that a landed write waits for another step before it completes
REPEAT = 64  # probability * 2**32 that an uncompleted payload is landed again (SRD)
RETRY_NS = 72  # how long an unanswered write is tried before it fails
STEPS = 80  # steps that one poll moves the network
OVERRUNS = 88  # completions for which a CQ had no room: a fault of whoever sized it
NOT_READY = 96  # times that an immediate found no receive posted
POSTS = 104  # calls of post (doorbells)
WRITES = 112  # work requests posted
IMMEDIATES = 120  # of them, with an immediate
BYTES = 128
CURSOR = 136  # index of the QP that the next step looks at first
READS = 152  # RDMA reads that have read
HALF = 144  # probability * 2**32 that only the first half of a payload lands in a step
NETWORK_BYTES = 256

MAX_QPS = 4096
MAX_MRS = 4096

# --- a memory region: looked up by key >> 8, the low byte guards against keys of regions that are gone
#: Where a region's rkey differs from its lkey: a NIC need not have one number for both.
REMOTE_KEY = 0x80
MR_KEY, MR_START, MR_BYTES, MR_ACCESS, MR_OWNER = range(0, 40, 8)
MR_RECORD = 64

# --- private words of a CQ, from the start of its struct
CQ_NETWORK = 512
CQ_RING = 520  # address of WC records
CQ_SLOTS = 528
CQ_HEAD = 536
CQ_TAIL = 544
CQ_BYTES = 640

# --- private words of a QP, from the start of its struct
QP_NETWORK = 512
QP_INDEX = 520
QP_SEND_RING = 528  # address of FLIGHT records
QP_SEND_SLOTS = 536
QP_POSTED = 544  # work requests accepted
QP_LANDED = 552  # of them, landed without a gap (RC)
QP_COMPLETED = 560  # of them, completed without a gap
QP_RECEIVE_RING = 568  # address of int64 wr_ids
QP_RECEIVE_SLOTS = 576
QP_RECEIVES = 584  # receives posted
QP_RECEIVED = 592  # of them, used
QP_DESTINATION = 600  # index of the connected QP, -1 = none (RC)
QP_ALIVE = 608  # 0: its process is gone
QP_WAITING_SINCE = 616  # when the oldest write first found nobody, 0 = it has not
QP_FAIL_AT = 624  # injected: the work request with this number fails, -1 = none
QP_FAIL_STATUS = 632
QP_SIGNAL_ALL = 640
QP_OWNER = 648  # device (rank) that it belongs to
QP_SQ_PSN = 656  # of the first packet of this end (RC)
QP_RQ_PSN = 664  # of the first packet that the other end is expected to send (RC)
QP_PRIVATE_SRD = 672  # words of the SRD provider from here on
QP_BYTES = 1024

# --- a work request under way
F_STATE = 0
F_WR_ID = 8
F_OPCODE = 16
F_LOCAL = 24
F_NBYTES = 32
F_LKEY = 40
F_REMOTE = 48
F_RKEY = 56
F_IMM = 64  # as in the work request: big-endian
F_SIGNALED = 72
F_DESTINATION = 80  # index of the QP it goes to
F_BAD = 88  # the completion's status where it failed
FLIGHT = 128

FREE, POSTED, HALFWAY, LANDED, DONE = range(5)

#: QP numbers are indices plus this: a number that is used as an index by mistake finds nothing.
FIRST_NUMBER = 0x40

_STATE, _NUMBER = QP["state"], QP["qp_num"]
_SEND_CQ, _RECV_CQ = QP["send_cq"], QP["recv_cq"]
_WR_ID, _STATUS, _OPCODE, _BYTE_LEN = WC["wr_id"], WC["status"], WC["opcode"], WC["byte_len"]
_IMM, _QP_NUM, _SRC_QP, _FLAGS = WC["imm_data"], WC["qp_num"], WC["src_qp"], WC["wc_flags"]
_WC_BYTES = WC.nbytes
_CQ_CONTEXT = CQ["context"]
_ERR, _RTR, _RTS = codes.QPS_ERR, codes.QPS_RTR, codes.QPS_RTS
_FLUSHED, _RETRY = codes.WR_FLUSH_ERR, codes.RETRY_EXC_ERR
_LOCAL_PROTECTION, _REMOTE_ACCESS = codes.LOC_PROT_ERR, codes.REM_ACCESS_ERR
_REMOTE_WRITE, _REMOTE_READ = codes.ACCESS_REMOTE_WRITE, codes.ACCESS_REMOTE_READ
_READ = codes.WR_RDMA_READ
_WRITE_IMM, _WRITE = codes.WR_RDMA_WRITE_WITH_IMM, codes.WR_RDMA_WRITE
_WC_WRITE, _WC_RECV_IMM, _WITH_IMM = codes.WC_RDMA_WRITE, codes.WC_RECV_RDMA_WITH_IMM, codes.WC_WITH_IMM


@compiled
def lock(network: int) -> None:
    """Take the lock; the holders' work is short and bounded."""
    while not compare_exchange(network + LOCK, 0, 1):
        pause()


@compiled
def unlock(network: int) -> None:
    """Let the lock go."""
    store64(network + LOCK, 0)


@compiled
def draw(network: int) -> int:
    """32 random bits (xorshift64)."""
    word = np.uint64(peek(network + RANDOM))
    word ^= word << np.uint64(13)
    word ^= word >> np.uint64(7)
    word ^= word << np.uint64(17)
    poke(network + RANDOM, np.int64(word))
    return np.int64(word >> np.uint64(32))


@compiled
def chance(network: int, knob: int) -> bool:
    """True with the probability that stands in ``knob``; a knob of 0 draws nothing."""
    probability = peek(network + knob)
    return probability > 0 and draw(network) < probability


@compiled
def push_completion(
    network: int, cq: int, qp: int, wr_id: int, status: int, opcode: int, nbytes: int, imm: int, flags: int, source: int
) -> None:
    """Append a completion to ``cq``; one that finds no room is lost and counted, as it would be on a NIC."""
    head = peek(cq + CQ_HEAD)
    if head - peek(cq + CQ_TAIL) >= peek(cq + CQ_SLOTS):
        poke(network + OVERRUNS, peek(network + OVERRUNS) + 1)
        return
    place = peek(cq + CQ_RING) + head % peek(cq + CQ_SLOTS) * _WC_BYTES
    poke(place + _WR_ID, wr_id)
    poke32(place + _STATUS, status)
    poke32(place + _OPCODE, opcode)
    poke32(place + _BYTE_LEN, nbytes)
    poke32(place + _IMM, imm)
    poke32(place + _QP_NUM, peek32(qp + _NUMBER))
    poke32(place + _SRC_QP, source)
    poke32(place + _FLAGS, flags)
    poke(cq + CQ_HEAD, head + 1)


@compiled
def take_completions(cq: int, limit: int, target: int) -> int:
    """Move up to ``limit`` completions of ``cq`` to the array at ``target``; returns how many."""
    count = 0
    tail = peek(cq + CQ_TAIL)
    while count < limit and tail < peek(cq + CQ_HEAD):
        copy(target + count * _WC_BYTES, peek(cq + CQ_RING) + tail % peek(cq + CQ_SLOTS) * _WC_BYTES, _WC_BYTES)
        tail += 1
        count += 1
    poke(cq + CQ_TAIL, tail)
    return count


@compiled
def covers(network: int, key: int, start: int, nbytes: int, access: int) -> bool:
    """Whether the region with ``key`` exists, holds [start, start + nbytes) and allows ``access``."""
    index = key >> 8
    if index < 0 or index >= peek(network + MR_COUNT):
        return False
    record = peek(network + MRS) + index * MR_RECORD
    first = peek(record + MR_START)
    return (
        peek(record + MR_KEY) == key
        and start >= first
        and start + nbytes <= first + peek(record + MR_BYTES)
        and peek(record + MR_ACCESS) & access == access
    )


@compiled
def qp_at(network: int, index: int) -> int:
    """Address of the QP with ``index``, 0 when there is none."""
    if index < 0 or index >= peek(network + QP_COUNT):
        return 0
    return peek(peek(network + QPS) + index * 8)


@compiled
def answers(network: int, index: int) -> bool:
    """Whether the QP with ``index`` acknowledges: it exists, its process lives, and it is ready to receive."""
    qp = qp_at(network, index)
    if qp == 0 or peek(qp + QP_ALIVE) == 0:
        return False
    state = peek32(qp + _STATE)
    return state in (_RTR, _RTS)


@compiled
def flight_at(qp: int, number: int) -> int:
    """Address of the record of work request ``number``."""
    return peek(qp + QP_SEND_RING) + number % peek(qp + QP_SEND_SLOTS) * FLIGHT


@compiled
def accept(
    network: int, qp: int, wr_id: int, opcode: int, local: int, nbytes: int, lkey: int, remote: int, rkey: int,
    imm: int, signaled: int, destination: int,
) -> bool:  # fmt: skip
    """Enter a work request; False when the send queue is full."""
    number = peek(qp + QP_POSTED)
    if number - peek(qp + QP_COMPLETED) >= peek(qp + QP_SEND_SLOTS):
        return False
    flight = flight_at(qp, number)
    poke(flight + F_WR_ID, wr_id)
    poke(flight + F_OPCODE, opcode)
    poke(flight + F_LOCAL, local)
    poke(flight + F_NBYTES, nbytes)
    poke(flight + F_LKEY, lkey)
    poke(flight + F_REMOTE, remote)
    poke(flight + F_RKEY, rkey)
    poke(flight + F_IMM, imm)
    poke(flight + F_SIGNALED, signaled)
    poke(flight + F_DESTINATION, destination)
    poke(flight + F_BAD, 0)
    poke(flight + F_STATE, POSTED)
    poke(qp + QP_POSTED, number + 1)
    poke(network + WRITES, peek(network + WRITES) + 1)
    poke(network + BYTES, peek(network + BYTES) + nbytes)
    if opcode == _WRITE_IMM:
        poke(network + IMMEDIATES, peek(network + IMMEDIATES) + 1)
    return True


@compiled
def enter_error(network: int, qp: int) -> None:
    """The QP goes to the error state: what it has not completed is flushed, then its receives are."""
    if peek32(qp + _STATE) == _ERR:
        return
    poke32(qp + _STATE, _ERR)
    for number in range(peek(qp + QP_COMPLETED), peek(qp + QP_POSTED)):
        flight = flight_at(qp, number)
        if peek(flight + F_STATE) != DONE:
            poke(flight + F_STATE, DONE)
            push_completion(
                network, peek(qp + _SEND_CQ), qp, peek(flight + F_WR_ID), _FLUSHED, _WC_WRITE, 0, 0, 0, 0
            )  # fmt: skip
    poke(qp + QP_COMPLETED, peek(qp + QP_POSTED))
    poke(qp + QP_LANDED, peek(qp + QP_POSTED))
    for number in range(peek(qp + QP_RECEIVED), peek(qp + QP_RECEIVES)):
        wr_id = peek(peek(qp + QP_RECEIVE_RING) + number % peek(qp + QP_RECEIVE_SLOTS) * 8)
        push_completion(network, peek(qp + _RECV_CQ), qp, wr_id, _FLUSHED, _WC_RECV_IMM, 0, 0, 0, 0)
    poke(qp + QP_RECEIVED, peek(qp + QP_RECEIVES))


@compiled
def injected(qp: int, number: int) -> int:
    """The status that work request ``number`` was told to fail with, 0 = none."""
    return peek(qp + QP_FAIL_STATUS) if peek(qp + QP_FAIL_AT) == number else 0


@compiled
def bounds_status(network: int, flight: int) -> int:
    """0, or the status of a write whose source or target is not registered for it."""
    nbytes = peek(flight + F_NBYTES)
    if nbytes == 0:
        return 0
    if not covers(network, peek(flight + F_LKEY), peek(flight + F_LOCAL), nbytes, 0):
        return _LOCAL_PROTECTION
    access = _REMOTE_READ if peek(flight + F_OPCODE) == _READ else _REMOTE_WRITE
    if not covers(network, peek(flight + F_RKEY) ^ REMOTE_KEY, peek(flight + F_REMOTE), nbytes, access):
        return _REMOTE_ACCESS
    return 0


@compiled
def land(network: int, qp: int, flight: int, needs_receive: bool) -> int:
    """Move a posted write on: LANDED, HALFWAY, POSTED (its receiver is not ready), or a negative status.

    ``needs_receive``: an immediate takes a receive of the destination.
    """
    status = bounds_status(network, flight)
    if status != 0:
        return -status
    nbytes, remote, local = peek(flight + F_NBYTES), peek(flight + F_REMOTE), peek(flight + F_LOCAL)
    target = qp_at(network, peek(flight + F_DESTINATION))
    if peek(target + QP_RQ_PSN) != peek(qp + QP_SQ_PSN):
        # its packets are none that the other end waits for
        return -_RETRY
    immediate = peek(flight + F_OPCODE) == _WRITE_IMM
    if peek(flight + F_OPCODE) == _READ:
        remote, local = local, remote
        poke(network + READS, peek(network + READS) + 1)
    empty = peek(target + QP_RECEIVED) == peek(target + QP_RECEIVES)
    if immediate and needs_receive and empty:
        poke(network + NOT_READY, peek(network + NOT_READY) + 1)
        return POSTED
    if peek(flight + F_STATE) == POSTED and nbytes > 1 and chance(network, HALF):
        copy(remote, local, nbytes // 2)
        poke(flight + F_STATE, HALFWAY)
        return HALFWAY
    if nbytes > 0:
        copy(remote, local, nbytes)
    if immediate:
        wr_id = 0
        if needs_receive:
            used = peek(target + QP_RECEIVED)
            wr_id = peek(peek(target + QP_RECEIVE_RING) + used % peek(target + QP_RECEIVE_SLOTS) * 8)
            poke(target + QP_RECEIVED, used + 1)
        push_completion(
            network, peek(target + _RECV_CQ), target, wr_id, 0, _WC_RECV_IMM, nbytes, peek(flight + F_IMM), _WITH_IMM,
            peek32(qp + _NUMBER),
        )  # fmt: skip
    poke(flight + F_STATE, LANDED)
    return LANDED


@compiled
def finish(network: int, qp: int, flight: int, status: int) -> None:
    """The sender's completion of a landed or failed write."""
    poke(flight + F_STATE, DONE)
    if status != 0 or peek(flight + F_SIGNALED) != 0 or peek(qp + QP_SIGNAL_ALL) != 0:
        nbytes = peek(flight + F_NBYTES)
        push_completion(network, peek(qp + _SEND_CQ), qp, peek(flight + F_WR_ID), status, _WC_WRITE, nbytes, 0, 0, 0)


@compiled
def given_up(network: int, qp: int) -> bool:
    """Called when the oldest write finds nobody: True once it has been tried long enough."""
    now = monotonic_ns()
    since = peek(qp + QP_WAITING_SINCE)
    if since == 0:
        poke(qp + QP_WAITING_SINCE, now)
        return False
    return now - since > peek(network + RETRY_NS)


@compiled
def post_receives(qp: int, first: int) -> int:
    """Enter the chain of ``ibv_recv_wr`` at ``first``; address of the one that found no room, else 0."""
    while first != 0:
        number = peek(qp + QP_RECEIVES)
        if number - peek(qp + QP_RECEIVED) >= peek(qp + QP_RECEIVE_SLOTS) or peek32(qp + _STATE) == 0:
            return first
        poke(peek(qp + QP_RECEIVE_RING) + number % peek(qp + QP_RECEIVE_SLOTS) * 8, load64(first))
        poke(qp + QP_RECEIVES, number + 1)
        if peek32(qp + _STATE) == _ERR:
            poke(qp + QP_RECEIVED, number + 1)
            push_completion(
                peek(qp + QP_NETWORK), peek(qp + _RECV_CQ), qp, load64(first), _FLUSHED, _WC_RECV_IMM, 0, 0, 0, 0
            )  # fmt: skip
        first = peek(first + 8)
    return 0
