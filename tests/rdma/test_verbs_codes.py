"""The numbers of the verbs interface against the enums of rdma-core, in the order in which its headers list them."""

from __future__ import annotations

import pytest

from uccl_ep_serving.proxy.transport.verbs import codes

#: By enum, what it begins with, and its names (those without a name of ours stand for their place); "<<" where each
#: is a bit.
ENUMS = {
    "ibv_access_flags": ("<<", "ACCESS_LOCAL_WRITE ACCESS_REMOTE_WRITE ACCESS_REMOTE_READ REMOTE_ATOMIC"),
    "ibv_qp_type": (2, "QPT_RC UC UD"),
    "ibv_qp_state": (0, "QPS_RESET QPS_INIT QPS_RTR QPS_RTS SQD SQE QPS_ERR"),
    "ibv_qp_attr_mask": (
        "<<",
        "QP_STATE CUR_STATE EN_SQD_ASYNC_NOTIFY QP_ACCESS_FLAGS QP_PKEY_INDEX QP_PORT QP_QKEY QP_AV QP_PATH_MTU "
        "QP_TIMEOUT QP_RETRY_CNT QP_RNR_RETRY QP_RQ_PSN QP_MAX_QP_RD_ATOMIC ALT_PATH QP_MIN_RNR_TIMER QP_SQ_PSN "
        "QP_MAX_DEST_RD_ATOMIC PATH_MIG_STATE CAP QP_DEST_QPN",
    ),
    "ibv_qp_init_attr_mask": (
        "<<",
        "INIT_ATTR_PD XRCD CREATE_FLAGS MAX_TSO_HEADER IND_TABLE RX_HASH INIT_ATTR_SEND_OPS_FLAGS",
    ),
    "ibv_qp_create_send_ops_flags": ("<<", "OPS_RDMA_WRITE OPS_RDMA_WRITE_WITH_IMM"),
    "ibv_wr_opcode": (0, "WR_RDMA_WRITE WR_RDMA_WRITE_WITH_IMM SEND SEND_WITH_IMM WR_RDMA_READ"),
    "ibv_send_flags": ("<<", "FENCE SEND_SIGNALED SOLICITED INLINE IP_CSUM"),
    "ibv_wc_opcode": (0, "SEND WC_RDMA_WRITE RDMA_READ COMP_SWAP FETCH_ADD"),
    "ibv_wc_opcode, of receives": (128, "RECV WC_RECV_RDMA_WITH_IMM"),
    "ibv_wc_flags": ("<<", "GRH WC_WITH_IMM"),
    "ibv_port_state": (0, "NOP PORT_DOWN INIT ARMED PORT_ACTIVE"),
    "flags of ibv_port_attr": ("<<", "PORT_NEEDS_GRH"),
    "link layers": (0, "LINK_UNSPECIFIED LINK_INFINIBAND LINK_ETHERNET"),
    "ibv_gid_type": (0, "GID_TYPE_IB GID_TYPE_ROCE_V1 GID_TYPE_ROCE_V2"),
    "efadv_driver_qp_type": (0, "EFA_DRIVER_TYPE_SRD"),
    "efadv_qp_flags": ("<<", "EFA_FLAG_UNSOLICITED_WRITE_RECV"),
    "efadv_device_caps": (
        "<<",
        "EFA_CAP_RDMA_READ EFA_CAP_RNR_RETRY CQ_WITH_SGID EFA_CAP_RDMA_WRITE EFA_CAP_UNSOLICITED_WRITE_RECV",
    ),
    "ibv_wc_status": (
        0,
        "SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR LOC_EEC_OP_ERR LOC_PROT_ERR WR_FLUSH_ERR MW_BIND_ERR BAD_RESP_ERR "
        "LOC_ACCESS_ERR REM_INV_REQ_ERR REM_ACCESS_ERR REM_OP_ERR RETRY_EXC_ERR RNR_RETRY_EXC_ERR LOC_RDD_VIOL_ERR "
        "REM_INV_RD_REQ_ERR REM_ABORT_ERR INV_EECN_ERR INV_EEC_STATE_ERR FATAL_ERR RESP_TIMEOUT_ERR GENERAL_ERR",
    ),
}
#: Those that begin elsewhere.
APART = {"ACCESS_RELAXED_ORDERING": 1 << 20, "QPT_DRIVER": 0xFF}


@pytest.mark.parametrize("enum", ENUMS)
def test_numbers_are_the_places_in_their_enum(enum: str) -> None:
    begin, names = ENUMS[enum]
    for place, name in enumerate(names.split()):
        if hasattr(codes, name):
            assert getattr(codes, name) == (1 << place if begin == "<<" else int(begin) + place), name


def test_every_number_is_held_against_an_enum() -> None:
    ours = {name for name, value in vars(codes).items() if name.isupper() and type(value) is int}
    assert ours == {name for _, names in ENUMS.values() for name in names.split() if name in ours} | set(APART)
    assert {name: getattr(codes, name) for name in APART} == APART


def test_events_are_told_by_their_number() -> None:
    """Of ibv_event_type: of a QP that is gone, of the device, of a port that is back."""
    words = {1: "QP fatal", 8: "device fatal", 9: "port active", 10: "port error", 18: "GID change"}
    assert all(codes.event_words(event).startswith(said) for event, said in words.items())
    assert codes.event_words(99) == "event 99"
