"""What is made from an open device: protection domains, memory regions, queues, queue pairs and address handles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ....errors import TransportError
from . import codes
from .abi import AH, AH_ATTR, CQ, MR, PD, QP, QP_ATTR, QP_INIT_ATTR, Block, Struct
from .device import Context, VerbsObject


class ProtectionDomain(VerbsObject):
    """A protection domain of ``context``. Raises TransportError."""

    def __init__(self, context: Context) -> None:
        address = context.library.pointer(
            "ibv_alloc_pd", context.address, device=context.device, doing="making a protection domain"
        )
        super().__init__(context.library, context.device, address, "ibv_dealloc_pd", [context])
        self.context = context
        self.check(PD, context=context.address)


class MemoryRegion(VerbsObject):
    """Registered memory: ``nbytes`` bytes at ``start``, with its local and remote key.

    Args:
        pd: protection domain.
        start, nbytes: the memory.
        access: ``ACCESS_*``.
        dmabuf: descriptor and offset of a dma-buf that ``start`` is a mapping of, for device memory.

    Raises:
        TransportError: the NIC or the kernel refused.
    """

    def __init__(
        self, pd: ProtectionDomain, start: int, nbytes: int, access: int, dmabuf: tuple[int, int] | None = None
    ) -> None:
        library, doing = pd.library, f"registering {nbytes} bytes of memory"
        relaxed = bool(access & codes.ACCESS_RELAXED_ORDERING)
        if dmabuf is not None:
            if "ibv_reg_dmabuf_mr" not in library:
                raise TransportError(f"{pd.device}: {library.name} is older than rdma-core 34 and knows no dma-buf")
            descriptor, offset = dmabuf
            address = library.pointer(
                "ibv_reg_dmabuf_mr",
                pd.address,
                offset,
                nbytes,
                start,
                descriptor,
                access,
                device=pd.device,
                doing=f"{doing} by dma-buf",
            )
        elif relaxed and "ibv_reg_mr_iova2" in library:
            address = library.pointer(
                "ibv_reg_mr_iova2", pd.address, start, nbytes, start, access, device=pd.device, doing=doing
            )
        else:
            access &= ~codes.ACCESS_RELAXED_ORDERING
            address = library.pointer("ibv_reg_mr", pd.address, start, nbytes, access, device=pd.device, doing=doing)
        super().__init__(library, pd.device, address, "ibv_dereg_mr", [pd])
        self.check(MR, pd=pd.address, length=nbytes)
        self.start, self.nbytes = start, nbytes
        self.lkey, self.rkey = MR.get(address, "lkey"), MR.get(address, "rkey")


class CompletionQueue(VerbsObject):
    """A completion queue of at least ``entries`` entries. Raises TransportError."""

    def __init__(self, context: Context, entries: int) -> None:
        address = context.library.pointer(
            "ibv_create_cq",
            context.address,
            entries,
            0,
            0,
            0,
            device=context.device,
            doing=f"making a completion queue of {entries} entries",
        )
        super().__init__(context.library, context.device, address, "ibv_destroy_cq", [context])
        self.check(CQ, context=context.address)
        self.entries = CQ.get(address, "cqe")
        if self.entries < entries:
            self.close()
            raise TransportError(f"{context.device}: asked for {entries} completions, got {self.entries}")


@dataclass(frozen=True, slots=True)
class Path:
    """How packets reach a peer, in the numbers of verbs.

    Attributes:
        port: local port.
        gid_index: of the local GID.
        gid, lid: of the peer; the GID is used on Ethernet, and on InfiniBand when ``routed``.
        mtu: of the path: 1 = 256 bytes … 5 = 4096.
        traffic_class, service_level: marks of the packets.
        timeout: of an acknowledgement, 4.096 us << timeout; NICs may take up to four times as long.
        retries: before completion status 12.
        rnr_retries: 7 = without end.
        rnr_timer: the delay that a receiver without receives asks for: 12 = 0.64 ms.
    """

    port: int
    gid_index: int
    gid: bytes
    lid: int = 0
    mtu: int = 3
    routed: bool = True
    traffic_class: int = 0
    service_level: int = 0
    timeout: int = 14
    retries: int = 7
    rnr_retries: int = 7
    rnr_timer: int = 12

    def write(self, address: int, struct: Struct, prefix: str = "") -> None:
        """Fill the ``ibv_ah_attr`` whose fields ``struct`` has under ``prefix``."""
        for field, value in {
            "grh.sgid_index": self.gid_index,
            "grh.hop_limit": 255,
            "grh.traffic_class": self.traffic_class,
            "dlid": self.lid,
            "sl": self.service_level,
            "is_global": int(self.routed),
            "port_num": self.port,
        }.items():
            struct.set(address, prefix + field, value)
        struct.set_bytes(address, prefix + "grh.dgid", self.gid)


class QueuePair(VerbsObject):
    """A reliable-connection queue pair over one CQ, in state RESET.

    Args:
        pd, cq: what it is made from.
        send_depth, receive_depth: work requests.

    Raises:
        TransportError: the NIC or the kernel refused.
    """

    def __init__(self, pd: ProtectionDomain, cq: CompletionQueue, *, send_depth: int, receive_depth: int) -> None:
        attributes = Block(QP_INIT_ATTR, send_cq=cq.address, recv_cq=cq.address, qp_type=codes.QPT_RC)
        attributes["cap.max_send_wr"], attributes["cap.max_recv_wr"] = send_depth, receive_depth
        attributes["cap.max_send_sge"], attributes["cap.max_recv_sge"] = 1, 1
        library = pd.library
        address = library.call("ibv_create_qp", pd.address, attributes.address)
        if not address:
            raise library.refused(
                "ibv_create_qp",
                ctypes.get_errno(),
                pd.device,
                f"making a queue pair ({send_depth} sends, {receive_depth} receives)",
            )
        super().__init__(library, pd.device, address, "ibv_destroy_qp", [pd, cq])
        self.check(
            QP,
            context=pd.context.address,
            pd=pd.address,
            send_cq=cq.address,
            recv_cq=cq.address,
            qp_type=codes.QPT_RC,
            state=codes.QPS_RESET,
        )
        self.number = QP.get(address, "qp_num")

    def modify(self, attributes: Block, mask: int, doing: str) -> None:
        """Raises TransportError when the NIC or the kernel refuses."""
        self.library.status(
            "ibv_modify_qp",
            self.address,
            attributes.address,
            mask,
            device=self.device,
            doing=f"{doing} (ibv_modify_qp)",
        )

    def initialise(self, port: int, access: int = codes.ACCESS_REMOTE_WRITE, pkey_index: int = 0) -> None:
        """RESET -> INIT on ``port``, with ``access`` for the other end; receives may be posted from here on."""
        attributes = Block(
            QP_ATTR, qp_state=codes.QPS_INIT, port_num=port, qp_access_flags=access, pkey_index=pkey_index
        )
        mask = codes.QP_STATE | codes.QP_PKEY_INDEX | codes.QP_PORT | codes.QP_ACCESS_FLAGS
        self.modify(attributes, mask, f"preparing a queue pair on port {port}")

    def connect(self, path: Path, number: int, doing: str, *, psn: int = 0, peer_psn: int = 0) -> None:
        """INIT -> RTR -> RTS, to queue pair ``number`` at the other end of ``path``; ``psn`` and ``peer_psn``: numbers
        of the first packets of this end and of the other."""
        attributes = Block(
            QP_ATTR,
            qp_state=codes.QPS_RTR,
            path_mtu=path.mtu,
            dest_qp_num=number,
            rq_psn=peer_psn,
            max_dest_rd_atomic=1,
            min_rnr_timer=path.rnr_timer,
        )
        path.write(attributes.address, QP_ATTR, "ah_attr.")
        mask = codes.QP_STATE | codes.QP_AV | codes.QP_PATH_MTU | codes.QP_DEST_QPN | codes.QP_RQ_PSN
        self.modify(attributes, mask | codes.QP_MAX_DEST_RD_ATOMIC | codes.QP_MIN_RNR_TIMER, doing)
        attributes = Block(
            QP_ATTR,
            qp_state=codes.QPS_RTS,
            timeout=path.timeout,
            retry_cnt=path.retries,
            rnr_retry=path.rnr_retries,
            sq_psn=psn,
            max_rd_atomic=1,
        )
        mask = codes.QP_STATE | codes.QP_TIMEOUT | codes.QP_RETRY_CNT | codes.QP_RNR_RETRY | codes.QP_SQ_PSN
        self.modify(attributes, mask | codes.QP_MAX_QP_RD_ATOMIC, doing)


class AddressHandle(VerbsObject):
    """Where unconnected sends go: the far end of ``path``. Raises TransportError."""

    def __init__(self, pd: ProtectionDomain, path: Path) -> None:
        attributes = Block(AH_ATTR)
        path.write(attributes.address, AH_ATTR)
        address = pd.library.pointer(
            "ibv_create_ah", pd.address, attributes.address, device=pd.device, doing="making an address handle"
        )
        super().__init__(pd.library, pd.device, address, "ibv_destroy_ah", [pd])
        self.check(AH, context=pd.context.address, pd=pd.address)
