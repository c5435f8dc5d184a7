"""Numbers of the verbs interface, and the words for them.

Source: the enums of ``infiniband/verbs.h`` and ``infiniband/efadv.h`` (rdma-core 59).
"""

from __future__ import annotations

import errno

# --- ibv_access_flags
ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ = 1, 2, 4
#: Of the optional range: a library or NIC that does not know it ignores it (``ibv_reg_mr_iova2`` only).
ACCESS_RELAXED_ORDERING = 1 << 20

# --- ibv_qp_type, ibv_qp_state, ibv_qp_attr_mask
QPT_RC, QPT_DRIVER = 2, 0xFF
QPS_RESET, QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR = 0, 1, 2, 3, 6
QP_STATE = 1 << 0
QP_ACCESS_FLAGS = 1 << 3
QP_PKEY_INDEX = 1 << 4
QP_PORT = 1 << 5
QP_QKEY = 1 << 6
QP_AV = 1 << 7
QP_PATH_MTU = 1 << 8
QP_TIMEOUT = 1 << 9
QP_RETRY_CNT = 1 << 10
QP_RNR_RETRY = 1 << 11
QP_RQ_PSN = 1 << 12
QP_MAX_QP_RD_ATOMIC = 1 << 13
QP_MIN_RNR_TIMER = 1 << 15
QP_SQ_PSN = 1 << 16
QP_MAX_DEST_RD_ATOMIC = 1 << 17
QP_DEST_QPN = 1 << 20

# --- ibv_qp_init_attr_mask, ibv_qp_create_send_ops_flags
INIT_ATTR_PD, INIT_ATTR_SEND_OPS_FLAGS = 1 << 0, 1 << 6
OPS_RDMA_WRITE, OPS_RDMA_WRITE_WITH_IMM = 1 << 0, 1 << 1

# --- ibv_wr_opcode, ibv_send_flags, ibv_wc_opcode, ibv_wc_flags
WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_RDMA_READ = 0, 1, 4
SEND_SIGNALED = 2
WC_RDMA_WRITE, WC_RECV_RDMA_WITH_IMM = 1, 129
WC_WITH_IMM = 1 << 1

# --- ports and GIDs
PORT_DOWN, PORT_ACTIVE = 1, 4
LINK_UNSPECIFIED, LINK_INFINIBAND, LINK_ETHERNET = 0, 1, 2
PORT_NEEDS_GRH = 1 << 0  # IBV_QPF_GRH_REQUIRED
GID_TYPE_IB, GID_TYPE_ROCE_V1, GID_TYPE_ROCE_V2 = range(3)

# --- efadv
EFA_DRIVER_TYPE_SRD = 0
EFA_FLAG_UNSOLICITED_WRITE_RECV = 1 << 0
EFA_CAP_RDMA_READ, EFA_CAP_RNR_RETRY = 1 << 0, 1 << 1
EFA_CAP_RDMA_WRITE, EFA_CAP_UNSOLICITED_WRITE_RECV = 1 << 3, 1 << 4

# --- ibv_wc_status
(
    SUCCESS,
    LOC_LEN_ERR,
    LOC_QP_OP_ERR,
    LOC_EEC_OP_ERR,
    LOC_PROT_ERR,
    WR_FLUSH_ERR,
    MW_BIND_ERR,
    BAD_RESP_ERR,
    LOC_ACCESS_ERR,
    REM_INV_REQ_ERR,
    REM_ACCESS_ERR,
    REM_OP_ERR,
    RETRY_EXC_ERR,
    RNR_RETRY_EXC_ERR,
) = range(14)
REM_ABORT_ERR, FATAL_ERR, RESP_TIMEOUT_ERR, GENERAL_ERR = 16, 19, 20, 21

#: Status: what happened, its usual cause.
_STATUS = {
    LOC_LEN_ERR: ("local length error", "a write longer than the port's max_msg_sz; lower UCCL_EP_QUANTUM"),
    LOC_QP_OP_ERR: ("local QP operation error", "a work request that this NIC or its driver does not support"),
    LOC_EEC_OP_ERR: ("local EE context error", "a fault of the driver"),
    LOC_PROT_ERR: ("local protection error", "source bytes outside registered memory: a fault of this package"),
    WR_FLUSH_ERR: ("flushed", "the connection failed before; an earlier completion says why"),
    MW_BIND_ERR: ("memory window bind error", "a fault of the driver"),
    BAD_RESP_ERR: ("bad response", "the peer's NIC answered what the protocol forbids"),
    LOC_ACCESS_ERR: ("local access error", "a receive wrote where it may not: a fault of this package"),
    REM_INV_REQ_ERR: (
        "remote invalid request",
        "the peer's NIC refused the kind of request: no receive posted for an immediate, or a write too long",
    ),
    REM_ACCESS_ERR: (
        "remote access error",
        "an address or rkey that the peer's window does not have: its memory was released, or versions differ",
    ),
    REM_OP_ERR: ("remote operation error", "the peer's NIC could not finish the request; look at the peer's log"),
    RETRY_EXC_ERR: (
        "transport retry counter exceeded",
        "no acknowledgement from the peer: its process ended, a link or route is down, the GID at either end cannot be "
        "routed (index 0 of a Broadcom NIC may be link-local: set UCCL_EP_NIC_GID_INDEX), the ends are in different "
        "partitions (InfiniBand: set UCCL_EP_NIC_PKEY_INDEX), or too much is in flight "
        "without flow control on the network (Broadcom Thor-2: lower UCCL_EP_NIC_BYTES_IN_FLIGHT, check PFC and ECN)",
    ),
    RNR_RETRY_EXC_ERR: (
        "receiver-not-ready retry counter exceeded",
        "the peer posted no receives for longer than the NIC retries: its proxy thread stands still",
    ),
    REM_ABORT_ERR: ("remote abort", "the peer's NIC gave the request up"),
    FATAL_ERR: ("fatal error", "the NIC or its driver failed; look at the kernel log"),
    RESP_TIMEOUT_ERR: ("response timeout", "the peer's NIC did not answer; SRD: it may have no address handle for us"),
    GENERAL_ERR: ("general error", "the NIC or its driver failed; look at the kernel log"),
}

#: The errno that a DOWN event carries for a status (ECONNRESET for those that are not here).
STATUS_ERRNO = {
    LOC_LEN_ERR: errno.EMSGSIZE,
    LOC_PROT_ERR: errno.EFAULT,
    LOC_ACCESS_ERR: errno.EFAULT,
    REM_ACCESS_ERR: errno.EACCES,
    REM_INV_REQ_ERR: errno.EPROTO,
    RETRY_EXC_ERR: errno.ETIMEDOUT,
    RNR_RETRY_EXC_ERR: errno.ETIMEDOUT,
    RESP_TIMEOUT_ERR: errno.ETIMEDOUT,
    FATAL_ERR: errno.EIO,
    GENERAL_ERR: errno.EIO,
}

#: Events of every connection's ordinary life: communication established, send queue drained, path migrated.
HARMLESS_EVENTS = frozenset({4, 5, 6})

#: After these a device does nothing more, also not what it was given: CQ error, device fatal error.
FATAL_EVENTS = frozenset({0, 8})

_EVENTS = (
    "CQ error",
    "QP fatal error",
    "QP request error",
    "QP access error",
    "communication established",
    "send queue drained",
    "path migrated",
    "path migration error",
    "device fatal error",
    "port active",
    "port error",
    "LID change",
    "P_Key change",
    "subnet manager change",
    "SRQ error",
    "SRQ limit reached",
    "last WQE reached",
    "client reregister",
    "GID change",
    "WQ fatal error",
)


def completion_words(status: int, vendor: int = 0) -> str:
    """A work completion's status in words, with its usual cause."""
    what, cause = _STATUS.get(
        status, ("a status that verbs.h does not name", "a newer rdma-core or a fault of the NIC")
    )
    return f"work completion status {status}, {what}{f', vendor code {vendor:#x}' if vendor else ''}: {cause}"


def event_words(event: int) -> str:
    """An asynchronous event in words."""
    return _EVENTS[event] if 0 <= event < len(_EVENTS) else f"event {event}"
