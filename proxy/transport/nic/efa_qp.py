"""SRD queue pairs and what they are addressed by."""

from __future__ import annotations

import ctypes

from ..verbs import codes
from ..verbs.abi import EFA_AH_ATTR, EFA_QP_INIT_ATTR, QP, QP_ATTR, QP_EX, QP_INIT_ATTR_EX, Block
from ..verbs.device import CompletionQueue, ProtectionDomain, VerbsObject
from ..verbs.objects import AddressHandle
from .efa_device import EfaLimits

__all__ = ["SrdQueuePair", "address_number"]

#: EFA's service level for low-latency traffic (EFA_QP_LOW_LATENCY_SERVICE_LEVEL of libfabric); libraries and devices
#: that do not know it refuse it, and take 0.
_LOW_LATENCY = 8
#: Functions of an ``ibv_qp_ex`` that the data path calls.
_OPERATIONS = ("wr_start", "wr_rdma_write_imm", "wr_set_ud_addr", "wr_set_sge", "wr_complete")


class SrdQueuePair(VerbsObject):
    """A queue pair of EFA's scalable reliable datagram, ready to send and receive.

    Args:
        pd, cq: what it is made from; one CQ takes both directions.
        limits: of the device; decide on unsolicited writes and on retries.
        sends, receives: work requests it holds; receives are not used with unsolicited writes.
        qkey: what senders must know.

    Attributes:
        number: QP number, unique on its device only.
        extended: address of the ``ibv_qp_ex``.
        operations: by name, addresses of the functions of the ``ibv_qp_ex``.
        service_level: that was granted.

    Raises:
        TransportError: the NIC or the library refused.
    """

    def __init__(
        self, pd: ProtectionDomain, cq: CompletionQueue, limits: EfaLimits, *, sends: int, receives: int, qkey: int
    ) -> None:
        address = 0
        for service_level in (_LOW_LATENCY, 0):
            address = self._create(pd, cq, limits, sends, receives, service_level)
            if address:
                break
        self.service_level = service_level
        if not address:
            raise pd.library.refused(
                "efadv_create_qp_ex",
                ctypes.get_errno(),
                pd.device,
                f"making an SRD queue pair ({sends} sends, {receives} receives)",
            )
        super().__init__(pd.library, pd.device, address, "ibv_destroy_qp", [pd, cq])
        self.check(
            QP,
            context=pd.context.address,
            pd=pd.address,
            send_cq=cq.address,
            recv_cq=cq.address,
            qp_type=codes.QPT_DRIVER,
            state=codes.QPS_RESET,
        )
        self.number = QP.get(address, "qp_num")
        try:
            self.extended = pd.library.pointer(
                "ibv_qp_to_qp_ex", address, device=pd.device, doing="finding the queue pair's posting functions"
            )
            self.operations = {name: QP_EX.get(self.extended, name) for name in _OPERATIONS}
            if not all(self.operations.values()):
                absent = ", ".join(name for name, function in self.operations.items() if not function)
                raise pd.library.refused("ibv_qp_to_qp_ex", 0, pd.device, f"{absent} is missing")
            self._ready(limits, qkey)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _create(
        pd: ProtectionDomain, cq: CompletionQueue, limits: EfaLimits, sends: int, receives: int, service_level: int
    ) -> int:
        """Address of a new ibv_qp, 0 when refused."""
        attributes = Block(
            QP_INIT_ATTR_EX,
            send_cq=cq.address,
            recv_cq=cq.address,
            qp_type=codes.QPT_DRIVER,
            sq_sig_all=1,
            comp_mask=codes.INIT_ATTR_PD | codes.INIT_ATTR_SEND_OPS_FLAGS,
            pd=pd.address,
            send_ops_flags=codes.OPS_RDMA_WRITE | codes.OPS_RDMA_WRITE_WITH_IMM,
        )
        attributes["cap.max_send_wr"], attributes["cap.max_recv_wr"] = sends, receives
        attributes["cap.max_send_sge"] = attributes["cap.max_recv_sge"] = 1
        efa = Block(EFA_QP_INIT_ATTR, driver_qp_type=codes.EFA_DRIVER_TYPE_SRD, sl=service_level)
        efa["flags"] = codes.EFA_FLAG_UNSOLICITED_WRITE_RECV if limits.unsolicited else 0
        return pd.library.call(
            "efadv_create_qp_ex", pd.context.address, attributes.address, efa.address, EFA_QP_INIT_ATTR.nbytes
        )

    def _ready(self, limits: EfaLimits, qkey: int) -> None:
        """RESET -> INIT -> RTR -> RTS; SRD needs no peer for that."""
        attributes = Block(QP_ATTR, qp_state=codes.QPS_INIT, port_num=1, qkey=qkey)
        mask = codes.QP_STATE | codes.QP_PKEY_INDEX | codes.QP_PORT | codes.QP_QKEY
        self._modify(attributes, mask, "INIT")
        self._modify(Block(QP_ATTR, qp_state=codes.QPS_RTR), codes.QP_STATE, "RTR")
        attributes = Block(QP_ATTR, qp_state=codes.QPS_RTS)
        mask = codes.QP_STATE | codes.QP_SQ_PSN
        if limits.endless_retry:
            attributes["rnr_retry"] = 7
            mask |= codes.QP_RNR_RETRY
        self._modify(attributes, mask, "RTS")

    def _modify(self, attributes: Block, mask: int, state: str) -> None:
        self.library.status(
            "ibv_modify_qp",
            self.address,
            attributes.address,
            mask,
            device=self.device,
            doing=f"preparing an SRD queue pair ({state})",
        )


def address_number(handle: AddressHandle) -> int:
    """What completions name as the sender's address when it is that of ``handle``; -1 where the library cannot tell."""
    found = Block(EFA_AH_ATTR)
    status = handle.library.call("efadv_query_ah", handle.address, found.address, EFA_AH_ATTR.nbytes)
    return -1 if status else found["ahn"]
