"""The reliable-connection provider: ``post_send``, ``post_recv``, ``poll_cq`` and ``modify_qp`` over the network.

Writes of a queue pair land and complete in the order in which they were posted, as RC promises; nothing else is
ordered. A write to a queue pair that does not answer fails after RETRY_NS with status 12 and takes its queue pair to
the error state, which flushes the rest.
"""

from __future__ import annotations

from tests.support.provider.provider_network import (
    CQ_NETWORK,
    CURSOR,
    DELAY,
    F_DESTINATION,
    FIRST_NUMBER,
    LANDED,
    LINGER,
    POSTS,
    QP_ALIVE,
    QP_COMPLETED,
    QP_COUNT,
    QP_DESTINATION,
    QP_LANDED,
    QP_NETWORK,
    QP_POSTED,
    QP_RQ_PSN,
    QP_SQ_PSN,
    QP_WAITING_SINCE,
    STEPS,
    accept,
    answers,
    chance,
    enter_error,
    finish,
    flight_at,
    given_up,
    injected,
    land,
    lock,
    post_receives,
    qp_at,
    take_completions,
    unlock,
)
from uccl_ep_serving.native.atomics import peek, peek32, poke, poke32
from uccl_ep_serving.native.jit import c_function, compiled
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.abi import QP, QP_ATTR, SEND_WR, SGE

__all__ = ["modify_qp", "poll_cq", "post_recv", "post_send"]

_WR_ID, _NEXT, _SG_LIST, _NUM_SGE = SEND_WR["wr_id"], SEND_WR["next"], SEND_WR["sg_list"], SEND_WR["num_sge"]
_OPCODE, _SEND_FLAGS, _IMM = SEND_WR["opcode"], SEND_WR["send_flags"], SEND_WR["imm_data"]
_REMOTE, _RKEY = SEND_WR["wr.rdma.remote_addr"], SEND_WR["wr.rdma.rkey"]
_ADDR, _LENGTH, _LKEY = SGE["addr"], SGE["length"], SGE["lkey"]
_STATE = QP["state"]
_ATTR_STATE, _ATTR_DESTINATION = QP_ATTR["qp_state"], QP_ATTR["dest_qp_num"]
_RQ_PSN, _SQ_PSN = QP_ATTR["rq_psn"], QP_ATTR["sq_psn"]
_SIGNALED = codes.SEND_SIGNALED
_DESTINATION_MASK, _RQ_PSN_MASK, _SQ_PSN_MASK = codes.QP_DEST_QPN, codes.QP_RQ_PSN, codes.QP_SQ_PSN
_RTS, _ERR, _RESET = codes.QPS_RTS, codes.QPS_ERR, codes.QPS_RESET
_RETRY = codes.RETRY_EXC_ERR
_ENOMEM, _EINVAL = 12, 22


@compiled
def _advance(network: int, qp: int) -> None:
    """One step of one queue pair."""
    posted, done = peek(qp + QP_POSTED), peek(qp + QP_COMPLETED)
    if done == posted or peek32(qp + _STATE) != _RTS or peek(qp + QP_ALIVE) == 0:
        return
    if chance(network, DELAY):
        return
    landed = peek(qp + QP_LANDED)
    if landed < posted:
        flight = flight_at(qp, landed)
        status = injected(qp, landed)
        if status == 0 and not answers(network, peek(flight + F_DESTINATION)):
            if done == landed and given_up(network, qp):
                status = _RETRY
        elif status == 0:
            poke(qp + QP_WAITING_SINCE, 0)
            outcome = land(network, qp, flight, True)
            if outcome == LANDED:
                poke(qp + QP_LANDED, landed + 1)
            elif outcome < 0:
                status = -outcome
        # Completions keep their order: a failure is told when everything before it is.
        if status != 0 and done == landed:
            finish(network, qp, flight, status)
            poke(qp + QP_COMPLETED, landed + 1)
            poke(qp + QP_LANDED, landed + 1)
            enter_error(network, qp)
            return
    if done < peek(qp + QP_LANDED) and not chance(network, LINGER):
        finish(network, qp, flight_at(qp, done), 0)
        poke(qp + QP_COMPLETED, done + 1)


@compiled
def _progress(network: int) -> None:
    """STEPS queue pairs in turn, each as far as one step takes it."""
    count = peek(network + QP_COUNT)
    if count == 0:
        return
    cursor = peek(network + CURSOR)
    for _ in range(min(peek(network + STEPS), 4 * count)):
        cursor = (cursor + 1) % count
        qp = qp_at(network, cursor)
        if qp != 0:
            _advance(network, qp)
    poke(network + CURSOR, cursor)


@c_function("int64(int64, int64, int64)")
def post_send(qp: int, first: int, bad: int) -> int:
    """``ops.post_send``."""
    network = peek(qp + QP_NETWORK)
    status = 0
    lock(network)
    poke(network + POSTS, peek(network + POSTS) + 1)
    state = peek32(qp + _STATE)
    if state != _RTS and state != _ERR:
        status = _EINVAL
    while first != 0 and status == 0:
        sges = peek(first + _SG_LIST)
        local, nbytes, lkey = 0, 0, 0
        if peek32(first + _NUM_SGE) > 0:
            local, nbytes, lkey = peek(sges + _ADDR), peek32(sges + _LENGTH), peek32(sges + _LKEY)
        accepted = accept(
            network,
            qp,
            peek(first + _WR_ID),
            peek32(first + _OPCODE),
            local,
            nbytes,
            lkey,
            peek(first + _REMOTE),
            peek32(first + _RKEY),
            peek32(first + _IMM),
            peek32(first + _SEND_FLAGS) & _SIGNALED,
            peek(qp + QP_DESTINATION),
        )
        if not accepted:
            status = _ENOMEM
            break
        first = peek(first + _NEXT)
    if state == _ERR and status == 0:
        # Accepted and flushed at once, as real QPs do.
        poke32(qp + _STATE, _RTS)
        enter_error(network, qp)
    if status != 0:
        poke(bad, first)
    unlock(network)
    return status


@c_function("int64(int64, int64, int64)")
def post_recv(qp: int, first: int, bad: int) -> int:
    """``ops.post_recv``."""
    network = peek(qp + QP_NETWORK)
    lock(network)
    refused = post_receives(qp, first)
    unlock(network)
    if refused != 0:
        poke(bad, refused)
        return _ENOMEM
    return 0


@c_function("int64(int64, int64, int64)")
def poll_cq(cq: int, limit: int, target: int) -> int:
    """``ops.poll_cq``: the network moves, then completions are handed out."""
    network = peek(cq + CQ_NETWORK)
    lock(network)
    _progress(network)
    count = take_completions(cq, limit, target)
    unlock(network)
    return count


@c_function("int64(int64, int64, int64)")
def modify_qp(qp: int, attributes: int, mask: int) -> int:
    """``ibv_modify_qp``."""
    network = peek(qp + QP_NETWORK)
    state = peek32(attributes + _ATTR_STATE)
    now = peek32(qp + _STATE)
    if state == _ERR:
        lock(network)
        if now != _RESET:
            enter_error(network, qp)
        unlock(network)
        return 0
    if state != now + 1 or state > _RTS:
        return _EINVAL
    if mask & _DESTINATION_MASK:
        poke(qp + QP_DESTINATION, peek32(attributes + _ATTR_DESTINATION) - FIRST_NUMBER)
    if mask & _RQ_PSN_MASK:
        poke(qp + QP_RQ_PSN, peek32(attributes + _RQ_PSN))
    if mask & _SQ_PSN_MASK:
        poke(qp + QP_SQ_PSN, peek32(attributes + _SQ_PSN))
    poke32(qp + _STATE, state)
    return 0
