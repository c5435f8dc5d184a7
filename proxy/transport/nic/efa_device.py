"""What libefa and an EFA device offer, asked of them and put into words where it is not enough."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ....errors import TransportError
from ..verbs.abi import EFA_DEVICE_ATTR, Block
from ..verbs.codes import (
    EFA_CAP_RDMA_WRITE,
    EFA_CAP_RNR_RETRY,
    EFA_CAP_UNSOLICITED_WRITE_RECV,
    completion_words,
)
from ..verbs.device import Context
from ..verbs.library import VerbsLibrary, bind, load_libibverbs

__all__ = ["EfaLimits", "explain_completion", "load_libefa", "query_limits"]

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
}


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
    """

    sends: int
    receives: int
    max_write: int
    write: bool
    unsolicited: bool
    endless_retry: bool

    def missing(self, device: str) -> str:
        """Why SRD writes cannot be had from ``device``, in words; "" when they can."""
        if self.write and self.max_write > 0:
            return ""
        return (
            f"{device} offers no RDMA write: either the instance has a first-generation EFA (p4d, c5n), or the "
            "software is older than the NIC: rdma-core 44 (Debian 12) and kernel drivers of its time do not know the "
            "capability. Install the current AWS EFA installer"
        )

    def words(self) -> str:
        """For reports."""
        write = f"RDMA write up to {self.max_write >> 20} MiB" if self.write else "no RDMA write"
        unsolicited = "unsolicited write receive" if self.unsolicited else "receives posted for writes"
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
        sends=found["max_sq_wr"],
        receives=found["max_rq_wr"],
        max_write=found["max_rdma_size"],
        write=bool(capabilities & EFA_CAP_RDMA_WRITE),
        unsolicited=bool(capabilities & EFA_CAP_UNSOLICITED_WRITE_RECV),
        endless_retry=bool(capabilities & EFA_CAP_RNR_RETRY),
    )
    if limits.sends == 0:
        raise TransportError(f"{context.device}: libefa reports a send queue of 0 work requests", device=context.device)
    return limits


def explain_completion(status: int, vendor: int) -> str:
    """A failed write's completion in words; what the NIC itself says is more exact than the verbs status."""
    if vendor in _VENDOR:
        return f"completion status {status}, EFA code {vendor}: {_VENDOR[vendor]}"
    return completion_words(status, vendor)
