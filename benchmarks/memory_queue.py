"""A send queue in memory behind the pointers of an ``ibv_qp_ex``: it builds a 64-byte work request per write, as libefa
does for an EFA device, and completes it in order. What remains to be measured is what a caller does for a write.

The work requests of a session become visible with ``wr_complete``, which stores the doorbell word.
"""

from __future__ import annotations

import numpy as np

from uccl_ep_serving.native.atomics import peek, poke, poke32, store64
from uccl_ep_serving.native.jit import c_function
from uccl_ep_serving.proxy.state import aligned_zeros
from uccl_ep_serving.proxy.transport.verbs.abi import QP_EX, WC

__all__ = ["DEPTH", "MemoryQueue"]

DEPTH = 4096
#: Words behind the ibv_qp_ex: writes built, doorbell, completions handed out, then from REQUESTS the work requests.
BUILT, DOORBELL, TAKEN, REQUESTS = 384, 448, 512, 576
REQUEST = 64

_WR_ID = QP_EX["wr_id"]
_MASK = DEPTH - 1
_WC_BYTES, _WC_STATUS = WC.nbytes, WC["status"]


@c_function("void(int64)")
def wr_start(qp: int) -> None:
    pass


@c_function("void(int64, uint32, int64, uint32)")
def wr_rdma_write_imm(qp: int, rkey: int, remote: int, imm: int) -> None:
    built = peek(qp + BUILT)
    request = qp + REQUESTS + (built & _MASK) * REQUEST
    poke(request, peek(qp + _WR_ID))
    poke(request + 8, remote)
    poke32(request + 16, int(rkey))
    poke32(request + 20, int(imm))
    poke(qp + BUILT, built + 1)


@c_function("void(int64, int64, uint32, uint32)")
def wr_set_ud_addr(qp: int, ah: int, qpn: int, qkey: int) -> None:
    request = qp + REQUESTS + ((peek(qp + BUILT) - 1) & _MASK) * REQUEST
    poke(request + 24, ah)
    poke32(request + 32, int(qpn))
    poke32(request + 36, int(qkey))


@c_function("void(int64, uint32, int64, uint32)")
def wr_set_sge(qp: int, lkey: int, address: int, length: int) -> None:
    request = qp + REQUESTS + ((peek(qp + BUILT) - 1) & _MASK) * REQUEST
    poke(request + 40, address)
    poke32(request + 48, int(lkey))
    poke32(request + 52, int(length))


@c_function("int32(int64)")
def wr_complete(qp: int) -> int:
    store64(qp + DOORBELL, peek(qp + BUILT))
    return 0


@c_function("int32(int64, int32, int64)")
def poll_cq(qp: int, limit: int, completions: int) -> int:
    taken = peek(qp + TAKEN)
    found = min(int(limit), peek(qp + DOORBELL) - taken)
    for index in range(found):
        poke(completions + index * _WC_BYTES, peek(qp + REQUESTS + ((taken + index) & _MASK) * REQUEST))
        poke32(completions + index * _WC_BYTES + _WC_STATUS, 0)
    poke(qp + TAKEN, taken + found)
    return found


class MemoryQueue:
    """The queue; its address is that of the ``ibv_qp_ex`` and of the ``ibv_cq``."""

    operations = (wr_start, wr_rdma_write_imm, wr_set_ud_addr, wr_set_sge, wr_complete)

    def __init__(self) -> None:
        self.memory = aligned_zeros(REQUESTS + DEPTH * REQUEST)
        self.address = int(self.memory.ctypes.data)
        for operation in self.operations:
            QP_EX.set(self.address, operation.__name__, operation.address)
        self.poll_cq: int = poll_cq.address

    @property
    def requests(self) -> np.ndarray:
        """uint8[DEPTH, 64]: the work requests built so far, by number modulo DEPTH."""
        return self.memory[REQUESTS:].reshape(DEPTH, REQUEST)

    @property
    def posted(self) -> int:
        """Writes behind the doorbell."""
        return int(self.memory.view(np.int64)[DOORBELL // 8])
