"""A peer written with pyverbs, which shares no code with this package but the format of addresses and immediates."""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.contract import Group, Port, pattern
from tests.support.device_endpoints import MAX_WRITE, devices
from uccl_ep_serving.config import Settings
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, SENT
from uccl_ep_serving.proxy.transport.nic.roce import NicPort, RoceEndpoint

# Debian's package, for the interpreter of the same version
sys.path.append("/usr/lib/python3/dist-packages")
pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(300)]

WINDOW = 1 << 16
RECEIVES = 64
ROUNDS = 32


class PyverbsPeer:
    """Rank 1 of two: a window, a queue pair, and memory for one credit word."""

    def __init__(self, device: str, gid_index: int) -> None:
        enums = pytest.importorskip("pyverbs.enums", reason="apt-get install python3-pyverbs")
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        self.enums, self.gid_index = enums, gid_index
        self.context = Context(name=device)
        self.pd = PD(self.context)
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        self.window, self.credits = MR(self.pd, WINDOW, access), MR(self.pd, 64, access)
        self.cq = CQ(self.context, 1024)
        cap = QPCap(max_send_wr=64, max_recv_wr=256, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.attributes = QPAttr(port_num=1)
        self.attributes.qp_access_flags = access
        self.qp = QP(self.pd, init)
        self.qp.to_init(self.attributes)
        self.gid = ipaddress.IPv6Address(str(self.context.query_gid(1, gid_index).gid))
        for _ in range(RECEIVES):
            self.post_receive()

    def post_receive(self) -> None:
        from pyverbs.wr import SGE, RecvWR

        # an immediate writes nowhere, but this pyverbs wants an entry
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.credits.buf, 0, self.credits.lkey)]))

    def address(self) -> bytes:
        """A ``RoceAddress``: one NIC, one region, one queue pair, for rank 0."""
        rail = {
            "gid": self.gid.packed,
            "lid": 0,
            "mtu": 3,  # 1024
            "keys": {"shift": 62, "keys": [self.window.rkey]},
            "credit_key": self.credits.rkey,
            "numbers": {0: [self.qp.qp_num]},
        }
        head = {"type": "roce 2", "rank": 1, "ranks": 2, "proxy": 0, "qps": 1, "receives": RECEIVES}
        places = {"window": self.window.buf, "window_bytes": WINDOW, "credits": self.credits.buf}
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
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attributes.dest_qp_num, attributes.path_mtu = number, 3
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
        assert all(entry.status == 0 for entry in completions), [entry.status for entry in completions]
        return list(completions)


def test_a_pyverbs_program_receives_what_we_send_and_sends_what_we_receive() -> None:
    window = np.zeros(WINDOW, np.uint8)
    names = devices()
    ours = RoceEndpoint(
        0, 2, 0, window=window.ctypes.data, window_bytes=WINDOW, peers=[1], settings=Settings(),
        nics=[NicPort(names[0])],
        max_write=MAX_WRITE,
    )  # fmt: skip
    try:
        # the devices' tables are alike
        peer = PyverbsPeer(names[-1], ours._rails[0].gid.index)
        peer.connect(ours.address())
        ours.connect([None, peer.address()], time.monotonic() + 5)
        ours.established()
        port = Port(Group([ours], [window], lambda rank: None), 0)
        deadline = time.monotonic() + 120
        for number in range(ROUNDS):
            place, nbytes = number % 8 * 2048, 16 * (1 + number * 37 % 128)
            there, here = pattern(number, nbytes), pattern(1000 + number, nbytes)
            window[place : place + nbytes] = there
            assert port.post(1, place, 32768 + place, nbytes, number, number) == ACCEPTED
            port.flush()
            peer.window.write(here.tobytes(), nbytes, place)
            peer.write(place, nbytes, 32768 + place, 1 << 20 | number)
            seen: set[str] = set()
            while len(seen) < 4:
                for event in port.poll():
                    if event.kind == SENT:
                        assert event.value == number
                        seen.add("our write completed")
                    elif event.kind == ARRIVED:
                        assert (event.value, event.peer, event.status) == (1 << 20 | number, 1, nbytes)
                        assert np.array_equal(window[32768 + place : 32768 + place + nbytes], here)
                        seen.add("its write arrived")
                for entry in peer.poll():
                    if entry.opcode == peer.enums.IBV_WC_RECV_RDMA_WITH_IMM:
                        assert socket.ntohl(entry.imm_data) == number
                        assert peer.window.read(nbytes, 32768 + place) == there.tobytes()
                        seen.add("our write arrived")
                    else:
                        seen.add("its write completed")
                assert time.monotonic() < deadline, (number, seen)
    finally:
        ours.close()
