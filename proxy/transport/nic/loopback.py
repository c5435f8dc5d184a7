"""A flush by the NICs themselves: each reads a word of the window in device memory over a queue pair to itself.

The read follows the NIC's earlier writes on their way to the device and returns only behind them: once it has completed
they are there. It is a fence (:mod:`uccl_ep_serving.proxy.fence`) for devices whose driver has no flush.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import numpy as np

from ....native.atomics import pause, peek, peek32
from ....native.calls import call3_int, monotonic_ns
from ....native.jit import compiled
from ....native.pages import own_pages
from ..verbs import codes
from ..verbs.abi import SEND_WR, SGE, WC, Block
from ..verbs.device import Gid, Port
from ..verbs.objects import CompletionQueue, MemoryRegion, Path, ProtectionDomain, QueuePair
from .defaults import route

# --- a fence: its C function, how many NICs, then a record for each ---------------------------------------------------
_CALL, _NICS, _RECORDS = 0, 8, 16
# --- a record: addresses of the provider's functions and of what they take --------------------------------------------
_POST_SEND, _QP, _REQUEST, _BAD, _POLL_CQ, _CQ, _COMPLETION = range(0, 56, 8)
_RECORD = 56
#: A read of eight bytes takes microseconds. A NIC that has not answered by then never will.
_LIMIT_NS = 2_000_000_000
_STATUS = WC["status"]
_EIO, _ETIMEDOUT = errno.EIO, errno.ETIMEDOUT


@compiled
def flush_by_reading(fence: int) -> int:
    """A fence: 0, the status of a read that failed, or a negative errno."""
    nics = peek(fence + _NICS)
    for nic in range(nics):
        record = fence + _RECORDS + nic * _RECORD
        status = call3_int(peek(record + _POST_SEND), peek(record + _QP), peek(record + _REQUEST), peek(record + _BAD))
        if status != 0:
            return -abs(status)
    end = monotonic_ns() + _LIMIT_NS
    for nic in range(nics):
        record = fence + _RECORDS + nic * _RECORD
        completion = peek(record + _COMPLETION)
        found = 0
        while found == 0:
            found = call3_int(peek(record + _POLL_CQ), peek(record + _CQ), 1, completion)
            if found < 0:
                return -_EIO
            if found == 0:
                if monotonic_ns() >= end:
                    return -_ETIMEDOUT
                pause()
        if peek32(completion + _STATUS) != 0:
            return peek32(completion + _STATUS)
    return 0


class Loopback:
    """A NIC's queue pair to itself, and the read that it repeats. Everything ends with ``pd``.

    Args:
        pd: of the device.
        port, gid: of the NIC.
        start, key: of the window in device memory, as the NIC calls it.
        pkey_index: of the partition.

    Raises:
        TransportError: the NIC refuses.
    """

    def __init__(self, pd: ProtectionDomain, port: Port, gid: Gid, start: int, key: int, pkey_index: int = 0) -> None:
        self._cq = CompletionQueue(pd.context, 1)
        self._qp = QueuePair(pd, self._cq, send_depth=1, receive_depth=1)
        # a page of its own: what is registered may be missing in a forked child
        self._landing = own_pages(8)
        address = int(self._landing.ctypes.data)
        self._region = MemoryRegion(pd, address, 8, codes.ACCESS_LOCAL_WRITE)
        self._qp.initialise(port.number, codes.ACCESS_REMOTE_READ, pkey_index)
        routed, lid = route(port, gid.raw, gid.raw, port.lid)
        path = Path(
            port=port.number,
            gid_index=gid.index,
            gid=gid.raw,
            lid=lid,
            mtu=port.mtu,
            routed=routed,
        )
        self._qp.connect(path, self._qp.number, f"connecting {gid} to itself")
        self._piece = Block(SGE, addr=address, length=8, lkey=self._region.lkey)
        self._request = Block(
            SEND_WR, sg_list=self._piece.address, num_sge=1, opcode=codes.WR_RDMA_READ, send_flags=codes.SEND_SIGNALED
        )
        self._request["wr.rdma.remote_addr"], self._request["wr.rdma.rkey"] = start, key
        self._completion = Block(WC)
        self._bad = np.zeros(1, np.int64)
        context = pd.context
        #: For :func:`fence_over`.
        self.record = (
            context.operation("post_send"),
            self._qp.address,
            self._request.address,
            int(self._bad.ctypes.data),
            context.operation("poll_cq"),
            self._cq.address,
            self._completion.address,
        )

    def close(self) -> None:
        """Close the queue pair and what was made for it."""
        for part in (self._qp, self._cq, self._region):
            part.close()


def fence_over(loopbacks: Sequence[Loopback]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The words of a fence that has each NIC read; they live as long as the loopbacks."""
    words = [flush_by_reading.address, len(loopbacks)]
    return np.array(words + [word for one in loopbacks for word in one.record], np.int64)
