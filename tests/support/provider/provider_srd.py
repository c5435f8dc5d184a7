"""The data path of an SRD NIC in memory: what ``ibv_qp_ex`` and ``ops.poll_cq`` point at, and what the network does.

Every function lies behind a pointer of the C signature, at the real offsets, so the code under test calls it exactly as
it calls libefa. Nothing is handed over at once: writes wait in flight, and each poll lets a seeded choice of them take
a step. A write's steps are: payload lands (perhaps again and again, with what the source holds by then), the target's
completion, the payload once more perhaps, the sender's completion. Steps of different writes interleave in any order.

What hardware would do quietly wrong is recorded as a violation, for tests to look at: polling inside a posting session
(a deadlock there), a completion queue that overflows, a receive queue posted beyond its depth.
"""

from __future__ import annotations

import functools

from uccl_ep_serving.native.atomics import compare_exchange, copy, pause, peek, peek32, poke, poke32, store64
from uccl_ep_serving.native.jit import c_function, compiled
from uccl_ep_serving.proxy.transport.verbs.abi import CQ, QP_EX, RECV_WR, WC
from uccl_ep_serving.proxy.transport.verbs.codes import (
    GENERAL_ERR,
    LOC_LEN_ERR,
    LOC_PROT_ERR,
    LOC_QP_OP_ERR,
    REM_ACCESS_ERR,
    REM_INV_REQ_ERR,
    REM_OP_ERR,
    RESP_TIMEOUT_ERR,
    SEND_SIGNALED,
    SUCCESS,
    WC_RDMA_WRITE,
    WC_RECV_RDMA_WITH_IMM,
    WC_WITH_IMM,
    WR_FLUSH_ERR,
)

# --- the fabric: one per test ---------------------------------------------------------------------------------------
RANDOM = 0  # state of the generator
FLIGHT = 1  # address of the writes in flight, FLIGHT_WORDS each
FLIGHT_COUNT = 2
REPEAT = 3  # of 256: how often a payload lands once more before it completes
PACE = 4  # writes that take a step per poll; 0 = the network stands still
VIOLATION = 5  # VIOLATION_*, the first one
FAIL_AFTER = 6  # the write so many posts from now fails; -1 = none
FAIL_VENDOR = 7  # with this code
WRITES = 8  # posted on all QPs
WRITE_BYTES = 9
RETRIES = 10  # deliveries put off because no receive was posted
LOCK = 11  # 1 while a function works on what QPs share: ranks may be threads
FABRIC_WORDS = 16

VIOLATION_DEADLOCK, VIOLATION_OVERFLOW, VIOLATION_RECEIVES, VIOLATION_NO_SESSION = 1, 2, 3, 4

# --- a write in flight ----------------------------------------------------------------------------------------------
(F_QP, F_WR_ID, F_LOCAL, F_LENGTH, F_LKEY, F_REMOTE, F_RKEY, F_IMM, F_AH, F_QPN, F_QKEY, F_STAGE, F_FAIL, F_FLAGS) = (
    range(14)
)
FLIGHT_WORDS = 16
STAGE_PAYLOAD, STAGE_ARRIVE, STAGE_COMPLETE = 0, 1, 2

#: Where a registration's rkey differs from its lkey: a NIC need not have one number for both.
REMOTE_KEY = 1 << 16

# --- a device -------------------------------------------------------------------------------------------------------
D_FABRIC = 0
D_KEYS = 1  # address of the registrations by key: start, length, access flags (0 = none)
D_KEY_COUNT = 2
D_QPS = 3  # address of the records of QPs by number
D_QP_COUNT = 4
D_AHS = 5  # address of AHs by device: the number under which this device knows it, -1 = not at all
D_INDEX = 6
D_DEAD = 7
D_MAX_RDMA = 8
D_BYTES = 9  # of the writes that were posted
DEVICE_WORDS = 16
KEY_WORDS = 4

# --- a QP: the private record behind the ibv_qp_ex ------------------------------------------------------------------
Q_DEVICE = 0
Q_NUMBER = 1
Q_CQ = 2
Q_DEPTH = 3
Q_USED = 4  # sends posted and not polled
Q_LOCKED = 5
Q_ERROR = 6
Q_PENDING = 7  # address of the session's writes, FLIGHT_WORDS each
Q_COUNT = 8
Q_UNSOLICITED = 9
Q_RECEIVES = 10  # receives posted
Q_RECEIVE_DEPTH = 11
Q_QKEY = 12
Q_RECEIVE_IDS = 13  # address of the wr_ids of posted receives
Q_READY = 14  # in state RTS
QP_WORDS = 16
#: Where a QP's memory holds the address of its record.
QP_PRIVATE = QP_EX.nbytes + 32

# --- a CQ -----------------------------------------------------------------------------------------------------------
C_ENTRIES = 0  # address of completions: WC.nbytes each, and the QP whose send it was
C_CAPACITY = 1
C_HEAD = 2
C_TAIL = 3
C_FABRIC = 4
CQ_WORDS = 8
CQE_BYTES = 64
CQE_QP = WC.nbytes
CQ_PRIVATE = CQ.nbytes + 32

#: An address handle's memory holds the record of the device it leads to, and the QKEYs are the QPs' own.
AH_DEVICE = 64

#: What the NIC says -> the status that libefa makes of it (providers/efa/verbs.c, to_ibv_status).
_STATUS = {5: LOC_PROT_ERR, 6: LOC_LEN_ERR, 7: REM_ACCESS_ERR, 9: 15, 13: RESP_TIMEOUT_ERR, 14: REM_OP_ERR}
_STATUS[18] = REM_INV_REQ_ERR
_STATUS |= {1: WR_FLUSH_ERR, 2: LOC_QP_OP_ERR, 3: LOC_QP_OP_ERR, 4: LOC_QP_OP_ERR}
_V_LKEY, _V_LENGTH, _V_ADDRESS, _V_QPN, _V_SILENT, _V_UNKNOWN = 5, 6, 7, 9, 13, 14

_WR_ID, _WR_FLAGS = QP_EX["wr_id"], QP_EX["wr_flags"]
_EINVAL, _ENOMEM = 22, 12
_OK, _GENERAL = int(SUCCESS), int(GENERAL_ERR)
_STATUSES = tuple(int(_STATUS.get(vendor, GENERAL_ERR)) if vendor else _OK for vendor in range(19))
_SIGNALED, _WITH_IMM = int(SEND_SIGNALED), int(WC_WITH_IMM)
_WRITE, _RECEIVE = int(WC_RDMA_WRITE), int(WC_RECV_RDMA_WITH_IMM)
_WC_BYTES = WC.nbytes
(_W_ID, _W_STATUS, _W_OPCODE, _W_VENDOR, _W_LENGTH, _W_IMM, _W_QPN, _W_SOURCE, _W_FLAGS, _W_SLID) = (
    WC[name]
    for name in (
        "wr_id",
        "status",
        "opcode",
        "vendor_err",
        "byte_len",
        "imm_data",
        "qp_num",
        "src_qp",
        "wc_flags",
        "slid",
    )
)
_R_NEXT, _R_ID, _R_PIECES = RECV_WR["next"], RECV_WR["wr_id"], RECV_WR["num_sge"]


@compiled
def chance(fabric: int, limit: int) -> int:
    """A number below ``limit`` (xorshift, Marsaglia 2003)."""
    x = peek(fabric + 8 * RANDOM)
    x ^= (x << 13) & 0x7FFFFFFFFFFFFFFF
    x ^= x >> 7
    x ^= (x << 17) & 0x7FFFFFFFFFFFFFFF
    poke(fabric + 8 * RANDOM, x)
    return (x >> 11) % limit


@compiled
def lock(fabric: int) -> None:
    """The holders' work is short and bounded."""
    while not compare_exchange(fabric + 8 * LOCK, 0, 1):
        pause()


@compiled
def unlock(fabric: int) -> None:
    store64(fabric + 8 * LOCK, 0)


@compiled
def violate(fabric: int, kind: int) -> None:
    if peek(fabric + 8 * VIOLATION) == 0:
        poke(fabric + 8 * VIOLATION, kind)


@compiled
def complete(
    cq: int, wr_id: int, status: int, opcode: int, vendor: int, length: int, imm: int, qpn: int, source: int, slid: int
) -> int:
    """Append a completion; its address."""
    head, tail = peek(cq + 8 * C_HEAD), peek(cq + 8 * C_TAIL)
    if head - tail >= peek(cq + 8 * C_CAPACITY):
        violate(peek(cq + 8 * C_FABRIC), VIOLATION_OVERFLOW)
    entry = peek(cq + 8 * C_ENTRIES) + head % peek(cq + 8 * C_CAPACITY) * CQE_BYTES
    for word in range(CQE_BYTES // 8):
        poke(entry + 8 * word, 0)
    poke(entry + _W_ID, wr_id)
    poke32(entry + _W_STATUS, status)
    poke32(entry + _W_OPCODE, opcode)
    poke32(entry + _W_VENDOR, vendor)
    poke32(entry + _W_LENGTH, length)
    poke32(entry + _W_IMM, imm)
    poke32(entry + _W_QPN, qpn)
    poke32(entry + _W_SOURCE, source)
    poke32(entry + _W_FLAGS, _WITH_IMM if opcode == _RECEIVE else 0)
    poke32(entry + _W_SLID - 2, slid << 16)
    poke(cq + 8 * C_HEAD, head + 1)
    return entry


@compiled
def covers(device: int, key: int, start: int, length: int, access: int) -> bool:
    """Whether registration ``key`` of ``device`` allows it; a length of 0 needs a valid key and address as well."""
    if not 0 < key < peek(device + 8 * D_KEY_COUNT):
        return False
    entry = peek(device + 8 * D_KEYS) + key * 8 * KEY_WORDS
    first, nbytes = peek(entry), peek(entry + 8)
    return peek(entry + 16) & access == access and start >= first and start + max(length, 1) <= first + nbytes


@compiled
def target_of(write: int) -> int:
    """Record of the QP that a write goes to, 0 = there is none."""
    device = peek(peek(write + 8 * F_AH) + AH_DEVICE)
    number = peek(write + 8 * F_QPN)
    if not 0 < number < peek(device + 8 * D_QP_COUNT):
        return 0
    return peek(peek(device + 8 * D_QPS) + 8 * number)


@compiled
def refusal(write: int) -> int:
    """Why a write cannot land, the NIC's code; 0 = it can."""
    sender = peek(peek(write + 8 * F_QP) + 8 * Q_DEVICE)
    device = peek(peek(write + 8 * F_AH) + AH_DEVICE)
    length = peek(write + 8 * F_LENGTH)
    if length > peek(sender + 8 * D_MAX_RDMA):
        return _V_LENGTH
    if not covers(sender, peek(write + 8 * F_LKEY), peek(write + 8 * F_LOCAL), length, 1):
        return _V_LKEY
    if peek(device + 8 * D_DEAD):
        return _V_SILENT
    target = target_of(write)
    if target == 0:
        return _V_QPN
    if peek(peek(device + 8 * D_AHS) + 8 * peek(sender + 8 * D_INDEX)) < 0:
        return _V_UNKNOWN
    if peek(target + 8 * Q_QKEY) != peek(write + 8 * F_QKEY):
        return _V_SILENT
    if not covers(device, peek(write + 8 * F_RKEY) ^ REMOTE_KEY, peek(write + 8 * F_REMOTE), length, 3):
        return _V_ADDRESS
    return 0


@compiled
def arrive(write: int) -> bool:
    """The target's completion of a landed write; False when it has to wait for a receive."""
    qp = peek(write + 8 * F_QP)
    target = target_of(write)
    wr_id = 0
    if peek(target + 8 * Q_UNSOLICITED) == 0:
        posted = peek(target + 8 * Q_RECEIVES)
        if posted == 0:
            return False
        wr_id = peek(peek(target + 8 * Q_RECEIVE_IDS) + 8 * (posted - 1))
        poke(target + 8 * Q_RECEIVES, posted - 1)
    number = peek(peek(peek(target + 8 * Q_DEVICE) + 8 * D_AHS) + 8 * peek(peek(qp + 8 * Q_DEVICE) + 8 * D_INDEX))
    complete(
        peek(target + 8 * Q_CQ),
        wr_id,
        _OK,
        _RECEIVE,
        0,
        peek(write + 8 * F_LENGTH),
        peek(write + 8 * F_IMM),
        peek(target + 8 * Q_NUMBER),
        peek(qp + 8 * Q_NUMBER),
        number,
    )
    return True


@compiled
def finish(fabric: int, index: int, vendor: int) -> None:
    """The sender's completion; the write is out of flight."""
    flight = peek(fabric + 8 * FLIGHT)
    write = flight + index * 8 * FLIGHT_WORDS
    qp = peek(write + 8 * F_QP)
    if peek(peek(qp + 8 * Q_DEVICE) + 8 * D_DEAD) == 0:
        status = _STATUSES[min(vendor, 18)] if vendor < 19 else _GENERAL
        number, cq = peek(qp + 8 * Q_NUMBER), peek(qp + 8 * Q_CQ)
        # The length and the source of a send's completion are undefined.
        entry = complete(cq, peek(write + 8 * F_WR_ID), status, _WRITE, vendor, 0xDEAD, 0xDEAD, number, 0xDEAD, 0xDEAD)
        poke(entry + CQE_QP, qp)
    last = peek(fabric + 8 * FLIGHT_COUNT) - 1
    if index != last:
        copy(write, flight + last * 8 * FLIGHT_WORDS, 8 * FLIGHT_WORDS)
    poke(fabric + 8 * FLIGHT_COUNT, last)


@compiled
def advance(fabric: int) -> None:
    """One step of one write, whichever chance picks."""
    count = peek(fabric + 8 * FLIGHT_COUNT)
    index = chance(fabric, count)
    write = peek(fabric + 8 * FLIGHT) + index * 8 * FLIGHT_WORDS
    stage = peek(write + 8 * F_STAGE)
    if peek(peek(peek(write + 8 * F_QP) + 8 * Q_DEVICE) + 8 * D_DEAD):
        finish(fabric, index, _V_SILENT)
        return
    vendor = peek(write + 8 * F_FAIL)
    gone = peek(peek(peek(write + 8 * F_AH) + AH_DEVICE) + 8 * D_DEAD)
    if vendor == 0 and (stage != STAGE_COMPLETE or gone):
        vendor = refusal(write)
    if vendor:
        finish(fabric, index, vendor)
        return
    lands = stage == STAGE_PAYLOAD or chance(fabric, 256) < peek(fabric + 8 * REPEAT)
    if lands and refusal(write) == 0 and peek(write + 8 * F_LENGTH) > 0:
        copy(peek(write + 8 * F_REMOTE), peek(write + 8 * F_LOCAL), peek(write + 8 * F_LENGTH))
    if stage == STAGE_PAYLOAD:
        poke(write + 8 * F_STAGE, STAGE_ARRIVE)
    elif lands:
        return
    elif stage == STAGE_ARRIVE:
        if arrive(write):
            poke(write + 8 * F_STAGE, STAGE_COMPLETE)
        else:
            poke(fabric + 8 * RETRIES, peek(fabric + 8 * RETRIES) + 1)
    else:
        finish(fabric, index, 0)


# --- the functions behind the pointers ------------------------------------------------------------------------------
def _wr_start(qp_ex: int) -> None:
    qp = peek(qp_ex + QP_PRIVATE)
    if peek(qp + 8 * Q_LOCKED):
        violate(peek(peek(qp + 8 * Q_DEVICE) + 8 * D_FABRIC), VIOLATION_DEADLOCK)
    poke(qp + 8 * Q_LOCKED, 1)
    poke(qp + 8 * Q_ERROR, 0)
    poke(qp + 8 * Q_COUNT, 0)


def _wr_rdma_write_imm(qp_ex: int, rkey: int, remote: int, imm: int) -> None:
    qp = peek(qp_ex + QP_PRIVATE)
    fabric = peek(peek(qp + 8 * Q_DEVICE) + 8 * D_FABRIC)
    if peek(qp + 8 * Q_LOCKED) == 0:
        violate(fabric, VIOLATION_NO_SESSION)
    if peek(qp + 8 * Q_ERROR):
        return
    if peek32(qp_ex + _WR_FLAGS) != _SIGNALED or peek(qp + 8 * Q_READY) == 0:
        poke(qp + 8 * Q_ERROR, _EINVAL)
        return
    count = peek(qp + 8 * Q_COUNT)
    if peek(qp + 8 * Q_USED) + count >= peek(qp + 8 * Q_DEPTH):
        poke(qp + 8 * Q_ERROR, _ENOMEM)
        return
    write = peek(qp + 8 * Q_PENDING) + count * 8 * FLIGHT_WORDS
    poke(write + 8 * F_QP, qp)
    poke(write + 8 * F_WR_ID, peek(qp_ex + _WR_ID))
    poke(write + 8 * F_RKEY, int(rkey))
    poke(write + 8 * F_REMOTE, remote)
    poke(write + 8 * F_IMM, int(imm))
    poke(write + 8 * F_STAGE, STAGE_PAYLOAD)
    poke(write + 8 * F_FAIL, 0)
    # Neither address nor memory of the last write may count for this one.
    poke(write + 8 * F_AH, 0)
    poke(write + 8 * F_LKEY, 0)
    poke(qp + 8 * Q_COUNT, count + 1)


@compiled
def current(qp: int) -> int:
    return peek(qp + 8 * Q_PENDING) + (peek(qp + 8 * Q_COUNT) - 1) * 8 * FLIGHT_WORDS


def _wr_set_ud_addr(qp_ex: int, ah: int, qpn: int, qkey: int) -> None:
    qp = peek(qp_ex + QP_PRIVATE)
    if peek(qp + 8 * Q_ERROR) == 0:
        write = current(qp)
        poke(write + 8 * F_AH, ah)
        poke(write + 8 * F_QPN, int(qpn))
        poke(write + 8 * F_QKEY, int(qkey))


def _wr_set_sge(qp_ex: int, lkey: int, address: int, length: int) -> None:
    qp = peek(qp_ex + QP_PRIVATE)
    if peek(qp + 8 * Q_ERROR) == 0:
        write = current(qp)
        poke(write + 8 * F_LKEY, int(lkey))
        poke(write + 8 * F_LOCAL, address)
        poke(write + 8 * F_LENGTH, int(length))


def _wr_complete(qp_ex: int) -> int:
    qp = peek(qp_ex + QP_PRIVATE)
    fabric = peek(peek(qp + 8 * Q_DEVICE) + 8 * D_FABRIC)
    if peek(qp + 8 * Q_LOCKED) == 0:
        violate(fabric, VIOLATION_NO_SESSION)
    poke(qp + 8 * Q_LOCKED, 0)
    error = peek(qp + 8 * Q_ERROR)
    if error:
        return error  # and all of the session's writes are taken back
    count = peek(qp + 8 * Q_COUNT)
    lock(fabric)
    for index in range(count):
        write = peek(qp + 8 * Q_PENDING) + index * 8 * FLIGHT_WORDS
        after = peek(fabric + 8 * FAIL_AFTER)
        if after >= 0:
            poke(fabric + 8 * FAIL_AFTER, after - 1)
            if after == 0:
                poke(write + 8 * F_FAIL, peek(fabric + 8 * FAIL_VENDOR))
        in_flight = peek(fabric + 8 * FLIGHT_COUNT)
        copy(peek(fabric + 8 * FLIGHT) + in_flight * 8 * FLIGHT_WORDS, write, 8 * FLIGHT_WORDS)
        poke(fabric + 8 * FLIGHT_COUNT, in_flight + 1)
        device = peek(qp + 8 * Q_DEVICE)
        poke(device + 8 * D_BYTES, peek(device + 8 * D_BYTES) + peek(write + 8 * F_LENGTH))
        poke(fabric + 8 * WRITE_BYTES, peek(fabric + 8 * WRITE_BYTES) + peek(write + 8 * F_LENGTH))
    poke(fabric + 8 * WRITES, peek(fabric + 8 * WRITES) + count)
    poke(qp + 8 * Q_USED, peek(qp + 8 * Q_USED) + count)
    unlock(fabric)
    return 0


def _post_recv(ibv_qp: int, request: int, bad: int) -> int:
    qp = peek(ibv_qp + QP_PRIVATE)
    fabric = peek(peek(qp + 8 * Q_DEVICE) + 8 * D_FABRIC)
    lock(fabric)
    while request:
        posted = peek(qp + 8 * Q_RECEIVES)
        if posted >= peek(qp + 8 * Q_RECEIVE_DEPTH) or peek(qp + 8 * Q_UNSOLICITED):
            violate(fabric, VIOLATION_RECEIVES)
            poke(bad, request)
            unlock(fabric)
            return _ENOMEM
        # libefa puts one entry on the queue for each piece of memory: a receive without any is none.
        if peek32(request + _R_PIECES) > 0:
            poke(peek(qp + 8 * Q_RECEIVE_IDS) + 8 * posted, peek(request + _R_ID))
            poke(qp + 8 * Q_RECEIVES, posted + 1)
        request = peek(request + _R_NEXT)
    unlock(fabric)
    return 0


def _poll_cq(ibv_cq: int, limit: int, completions: int) -> int:
    cq = peek(ibv_cq + CQ_PRIVATE)
    fabric = peek(cq + 8 * C_FABRIC)
    lock(fabric)
    for _ in range(peek(fabric + 8 * PACE)):
        if peek(fabric + 8 * FLIGHT_COUNT) == 0:
            break
        advance(fabric)
    found = min(int(limit), peek(cq + 8 * C_HEAD) - peek(cq + 8 * C_TAIL))
    for index in range(found):
        tail = peek(cq + 8 * C_TAIL)
        entry = peek(cq + 8 * C_ENTRIES) + tail % peek(cq + 8 * C_CAPACITY) * CQE_BYTES
        copy(completions + index * _WC_BYTES, entry, _WC_BYTES)
        poke(cq + 8 * C_TAIL, tail + 1)
        qp = peek(entry + CQE_QP)
        if qp:
            # libefa gives the slot back under the lock that a session holds.
            if peek(qp + 8 * Q_LOCKED):
                violate(fabric, VIOLATION_DEADLOCK)
            poke(qp + 8 * Q_USED, peek(qp + 8 * Q_USED) - 1)
    unlock(fabric)
    return found


_SIGNATURES = {
    "wr_start": ("void(int64)", _wr_start),
    "wr_rdma_write_imm": ("void(int64, uint32, int64, uint32)", _wr_rdma_write_imm),
    "wr_set_ud_addr": ("void(int64, int64, uint32, uint32)", _wr_set_ud_addr),
    "wr_set_sge": ("void(int64, uint32, int64, uint32)", _wr_set_sge),
    "wr_complete": ("int32(int64)", _wr_complete),
    "post_recv": ("int32(int64, int64, int64)", _post_recv),
    "poll_cq": ("int32(int64, int32, int64)", _poll_cq),
}


@functools.cache
def nic_functions() -> dict[str, int]:
    """Addresses of the functions above, by the field of ``ibv_qp_ex`` or ``ibv_context.ops`` that points at them."""
    functions = {name: c_function(signature)(function) for name, (signature, function) in _SIGNATURES.items()}
    return {name: function.address for name, function in functions.items()}
