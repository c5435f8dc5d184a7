"""A peer of ``roce`` written with pyverbs: it shares no code with the transport but the format of addresses and
immediates, and so has an opinion of its own of what a NIC does."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import msgspec

from ..errors import TransportError

__all__ = ["PyverbsPeer"]

#: Posted by the peer: as many messages may be sent to it.
_RECEIVES = 64
#: Number of its first packet.
_PSN = 0x5EED


class PyverbsPeer:
    """Rank 1 of two: a window, a queue pair, and memory for one credit word.

    Args:
        device, port: of the NIC.
        gid_index, pkey_index: of its port.
        window_bytes: of its window.
    """

    def __init__(self, device: str, gid_index: int, window_bytes: int, port: int = 1, pkey_index: int = 0) -> None:
        from pyverbs import enums
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        self.enums, self.gid_index, self.port, self.nbytes = enums, gid_index, port, window_bytes
        self.device = device
        self.context = Context(name=device)
        self.pd = PD(self.context)
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        self.window, self.credits = MR(self.pd, window_bytes, access), MR(self.pd, 64, access)
        self.cq = CQ(self.context, 1024)
        cap = QPCap(max_send_wr=64, max_recv_wr=256, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.attributes = QPAttr(port_num=port)
        self.attributes.qp_access_flags, self.attributes.pkey_index = access, pkey_index
        self.qp = QP(self.pd, init)
        self.qp.to_init(self.attributes)
        self.gid = ipaddress.IPv6Address(str(self.context.query_gid(port, gid_index).gid))
        place = self.context.query_port(port)
        self.lid = place.lid
        # IBV_QPF_GRH_REQUIRED: pyverbs has no name for it
        self.routed = place.link_layer == enums.IBV_LINK_LAYER_ETHERNET or bool(place.flags & 1)
        for _ in range(_RECEIVES):
            self.post_receive()

    def post_receive(self) -> None:
        from pyverbs.wr import SGE, RecvWR

        # an immediate writes nowhere, but this pyverbs wants an entry
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.credits.buf, 0, self.credits.lkey)]))

    def address(self) -> bytes:
        """A ``RoceAddress``: one NIC, one region, one queue pair, for rank 0."""
        rail = {
            "gid": self.gid.packed,
            "lid": self.lid,
            "mtu": 3,  # 1024
            "keys": {"shift": 62, "keys": [self.window.rkey]},
            "credit_key": self.credits.rkey,
            "psn": _PSN,
            "numbers": {0: [self.qp.qp_num]},
        }
        head = {"type": "roce 3", "rank": 1, "ranks": 2, "proxy": 0, "qps": 1, "receives": _RECEIVES}
        places = {"window": self.window.buf, "window_bytes": self.nbytes, "credits": self.credits.buf}
        return msgspec.msgpack.encode({**head, **places, "rails": [rail]})

    def connect(self, address: bytes) -> None:
        """To rank 0's address: take what is needed of it, INIT -> RTR -> RTS."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute

        there = msgspec.msgpack.decode(address)
        (rail,) = there["rails"]
        self.target, self.rkey = there["window"], rail["keys"]["keys"][0]
        (number,) = rail["numbers"][1]
        route = GlobalRoute(
            dgid=GID(ipaddress.IPv6Address(rail["gid"]).exploded), sgid_index=self.gid_index, hop_limit=64
        )
        attributes = self.attributes
        attributes.ah_attr = AHAttr(gr=route, dlid=rail["lid"], is_global=int(self.routed), port_num=self.port)
        attributes.dest_qp_num, attributes.path_mtu = number, 3
        attributes.rq_psn, attributes.sq_psn = rail["psn"], _PSN
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 12, 14, 7, 7
        self.qp.to_rtr(attributes)
        self.qp.to_rts(attributes)

    def write(self, offset: int, nbytes: int, target: int, imm: int) -> None:
        """RDMA_WRITE_WITH_IMM into rank 0's window."""
        from pyverbs.wr import SGE, SendWR

        sge = SGE(self.window.buf + offset, nbytes, self.window.lkey)
        opcode, flags = self.enums.IBV_WR_RDMA_WRITE_WITH_IMM, self.enums.IBV_SEND_SIGNALED
        request = SendWR(opcode=opcode, num_sge=1, imm_data=socket.htonl(imm), sg=[sge], send_flags=flags)
        request.set_wr_rdma(self.rkey, self.target + target)
        self.qp.post_send(request)

    def poll(self) -> list[Any]:
        """Completions, all of them good."""
        _, completions = self.cq.poll(16)
        if bad := [entry.status for entry in completions if entry.status]:
            raise TransportError(f"{self.device}: a completion of the pyverbs peer has status {bad[0]}", status=bad[0])
        return list(completions)

    def close(self) -> None:
        """End its objects, the device last."""
        for part in (self.qp, self.cq, self.window, self.credits, self.pd, self.context):
            part.close()
