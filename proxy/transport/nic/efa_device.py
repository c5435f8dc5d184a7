"""EFA's own part of verbs: what libefa and a device offer, asked of them and put into words, and SRD queue pairs."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass

from ....errors import TransportError
from ..verbs import codes
from ..verbs.abi import (
    EFA_AH_ATTR,
    EFA_DEVICE_ATTR,
    EFA_QP_INIT_ATTR,
    QP,
    QP_ATTR,
    QP_EX,
    QP_INIT_ATTR_EX,
    Block,
)
from ..verbs.device import Context, VerbsObject
from ..verbs.library import VerbsLibrary, bind, load_libibverbs
from ..verbs.objects import AddressHandle, CompletionQueue, ProtectionDomain

_SIGNATURES = {"efadv_query_device": "i:ppu", "efadv_create_qp_ex": "p:pppu", "efadv_query_ah": "i:ppu"}

#: What the NIC itself says of a failed write (the vendor code of its completion) and its usual cause.
#: Source: enum efa_io_comp_status, providers/efa/efa_io_defs.h of rdma-core 59.
_VENDOR = {
    1: "flushed: the queue pair was closed before",
    2: "internal error of the queue pair",
    3: "the device does not support the operation",
    4: "the address handle is not valid any more",
    5: "source bytes outside registered memory: a fault of this package",
    6: "longer than the device's max_rdma_size",
    7: "the peer's window is not where it was: its memory was released, or versions differ",
    8: "the peer reset the connection",
    9: "the peer has no such queue pair: it closed, or its process ended",
    10: "the peer has no receive posted: its proxy thread stands still",
    11: "the peer's receive is too short",
    12: "the peer answered with an unknown status",
    13: "the peer stopped answering: its process or host ended, or the network between",
    14: "the peer has no address handle for this NIC: it has not connected, or was started again",
    15: "the peer never answered: the security group must allow all traffic from and to itself, both ways",
    18: "feature mismatch: the peer's queue pair does not take writes of this kind (with or without receives). Install "
    "the same EFA driver and rdma-core on all hosts",
}

#: Releases of rdma-core whose libefa knows RDMA writes, writes without receives, and service levels of a queue pair.
RDMA_WRITE_RELEASE, UNSOLICITED_RELEASE, SERVICE_LEVEL_RELEASE = 46, 52, 55
#: Least send queue worth having.
_LEAST_SENDS = 64
#: Receives asked for where incoming writes need none.
_UNUSED_RECEIVES = 64

#: EFA's service level for low-latency traffic (EFA_QP_LOW_LATENCY_SERVICE_LEVEL of libfabric); libraries and devices
#: that do not know it refuse it, and take 0.
_LOW_LATENCY = 8
#: Functions of an ``ibv_qp_ex`` that the data path calls.
_OPERATIONS = ("wr_start", "wr_rdma_write_imm", "wr_set_ud_addr", "wr_set_sge", "wr_complete")


@functools.cache
def load_libefa() -> VerbsLibrary:
    """libibverbs and libefa of this machine as one library.

    Raises:
        TransportError: one of them is not installed, or too old.
    """
    verbs = load_libibverbs()
    functions, addresses = bind("libefa.so.1", _SIGNATURES, (), "rdma-core 31 or newer")
    return verbs.extended(functions, addresses, "libefa")


@dataclass(frozen=True, slots=True)
class EfaLimits:
    """What ``efadv_query_device`` says.

    Attributes:
        sends, receives: work requests that a queue pair can hold.
        max_write: most bytes of one RDMA write.
        write: the device and the library can write.
        unsolicited: an incoming write needs no receive.
        endless_retry: a write to a receiver without receives can be retried without end.
        release: of the rdma-core that is installed, 0 = not known.
    """

    sends: int
    receives: int
    max_write: int
    write: bool
    unsolicited: bool
    endless_retry: bool
    release: int = 0

    def missing(self, device: str) -> str:
        """Why SRD writes cannot be had from ``device``, in words; "" when they can."""
        if self.write and self.max_write > 0:
            return ""
        if 0 < self.release < RDMA_WRITE_RELEASE:
            return (
                f"{device} offers no RDMA write to rdma-core {self.release}, which is installed here: release "
                f"{RDMA_WRITE_RELEASE} or newer is needed. Next step: run the current AWS EFA installer in this "
                "container (Ubuntu 22.04 brings rdma-core 39, Debian 12 brings 44, Ubuntu 24.04 brings 50)"
            )
        return (
            f"{device} offers no RDMA write: either the instance has a first-generation EFA (p4d, c5n), or the "
            f"software is older than the NIC: rdma-core before {RDMA_WRITE_RELEASE} and kernel drivers of its time do "
            "not know the capability. Next step: run the current AWS EFA installer, on the host and in the container"
        )

    def words(self) -> str:
        """For reports."""
        write = f"RDMA write up to {self.max_write >> 20} MiB" if self.write else "no RDMA write"
        unsolicited = "unsolicited write receive"
        if not self.unsolicited:
            old = f", {self.release} is installed" if 0 < self.release < UNSOLICITED_RELEASE else ""
            unsolicited = f"receives posted for writes (without: rdma-core {UNSOLICITED_RELEASE}{old})"
        return f"{write}, {unsolicited}, send queue {self.sends}, receive queue {self.receives}"


def query_limits(context: Context) -> EfaLimits:
    """Ask an open device. Raises TransportError when it is no EFA device or does not answer."""
    found = Block(EFA_DEVICE_ATTR)
    context.library.status(
        "efadv_query_device",
        context.address,
        found.address,
        EFA_DEVICE_ATTR.nbytes,
        device=context.device,
        doing="asking for its EFA attributes",
    )
    capabilities = found["device_caps"]
    limits = EfaLimits(
        # the library's limit, which the memory of the send queue sets, may be below the device's
        sends=min(found["max_sq_wr"], context.limits.max_qp_wr or found["max_sq_wr"]),
        receives=found["max_rq_wr"],
        max_write=found["max_rdma_size"],
        write=bool(capabilities & codes.EFA_CAP_RDMA_WRITE),
        unsolicited=bool(capabilities & codes.EFA_CAP_UNSOLICITED_WRITE_RECV),
        endless_retry=bool(capabilities & codes.EFA_CAP_RNR_RETRY),
        release=context.library.release,
    )
    if limits.sends == 0:
        raise TransportError(f"{context.device}: libefa reports a send queue of 0 work requests", device=context.device)
    return limits


def explain_completion(status: int, vendor: int) -> str:
    """A failed write's completion in words; what the NIC itself says is more exact than the verbs status."""
    if vendor in _VENDOR:
        return f"completion status {status}, EFA code {vendor}: {_VENDOR[vendor]}"
    return codes.completion_words(status, vendor)


class SrdQueuePair(VerbsObject):
    """A queue pair of EFA's scalable reliable datagram, ready to send and receive.

    Args:
        pd, cq: what it is made from; one CQ takes both directions.
        limits: of the device; decide on unsolicited writes and on retries.
        sends: work requests that it should hold; half as many, and so on, where that is refused.
        receives: that it holds; at least 64 where incoming writes need none.
        qkey: what senders must know.

    Attributes:
        number: QP number, unique on its device only.
        sends: work requests that it holds.
        extended: address of the ``ibv_qp_ex``.
        operations: by name, addresses of the functions of the ``ibv_qp_ex``.
        service_level: that was granted.

    Raises:
        TransportError: the NIC or the library refused.
    """

    def __init__(
        self, pd: ProtectionDomain, cq: CompletionQueue, limits: EfaLimits, *, sends: int, receives: int, qkey: int
    ) -> None:
        if limits.unsolicited:
            receives = max(min(_UNUSED_RECEIVES, limits.receives), 1)
        smaller = [sends >> halved for halved in range(1, sends.bit_length()) if sends >> halved >= _LEAST_SENDS]
        address, refusal = 0, 0
        for self.sends, self.service_level in itertools.product((sends, *smaller), (_LOW_LATENCY, 0)):
            address = self._create(pd, cq, limits, self.sends, receives, self.service_level)
            if address:
                break
            refusal = refusal or ctypes.get_errno()
        if not address:
            doing = f"making an SRD queue pair ({sends} sends, {receives} receives)"
            raise pd.library.refused("efadv_create_qp_ex", refusal, pd.device, doing)
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
