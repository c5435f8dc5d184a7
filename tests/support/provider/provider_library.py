"""RDMA devices in memory, behind the C functions that the control path calls.

:class:`MemoryNetwork` has one device per rank, or several. :meth:`MemoryNetwork.library` gives libibverbs' functions as
Python functions over structs at their real offsets, so that production's control path runs unchanged; the data path
runs on the compiled functions of :mod:`provider_rc` (or of another provider) whose addresses the structs hold. Objects
that still have parts refuse to go (EBUSY), and :attr:`MemoryNetwork.objects` says what has not been closed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import ipaddress
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.provider import provider_network as net
from uccl_ep_serving.proxy.state import aligned_zeros
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.abi import (
    ASYNC_EVENT,
    CONTEXT,
    CQ,
    DEVICE,
    DEVICE_ATTR,
    GID_ENTRY,
    MR,
    PD,
    PORT_ATTR,
    QP,
    QP_INIT_ATTR,
    WC,
    Struct,
)
from uccl_ep_serving.proxy.transport.verbs.device import Gid
from uccl_ep_serving.proxy.transport.verbs.library import VerbsLibrary

__all__ = ["DataFunctions", "DeviceTraits", "MemoryNetwork", "reliable_connection"]


@dataclass(frozen=True, slots=True)
class DataFunctions:
    """Addresses of a provider's compiled functions."""

    post_send: int
    post_recv: int
    poll_cq: int
    modify_qp: int


@functools.cache
def reliable_connection() -> DataFunctions:
    """Those of :mod:`provider_rc`, compiled or loaded."""
    from tests.support.provider import provider_rc as rc

    return DataFunctions(rc.post_send.address, rc.post_recv.address, rc.poll_cq.address, rc.modify_qp.address)


@dataclass(slots=True)
class DeviceTraits:
    """What a device says of itself; a test changes it before it is opened."""

    vendor: int = 0xFFFFFF
    part: int = 0
    max_qp_wr: int = 16384
    max_cqe: int = 1 << 20
    max_mr_size: int = 1 << 40
    max_message: int = 1 << 31
    max_inline: int = 0  # nothing here may need it: Broadcom's NICs are reported to fail at inline writes
    state: int = codes.PORT_ACTIVE
    link_layer: int = codes.LINK_ETHERNET
    flags: int = 0
    lid: int = 0
    mtu: int = 3
    gids: Sequence[Gid] = field(default_factory=list)


def _gid(index: int, kind: int, address: str) -> Gid:
    parsed = ipaddress.ip_address(address)
    mapped = ipaddress.IPv6Address(f"::ffff:{parsed}") if parsed.version == 4 else parsed
    return Gid(index, kind, mapped.packed, interface=2)


class MemoryNetwork:
    """NICs and what connects them.

    Args:
        ranks: how many hosts.
        rails: devices of each: that of rank n is called ``mem<n>``, of several each ``mem<n>r<rail>``.
        seed: of everything random.
        delay, linger, half, repeat: probabilities, see :mod:`provider_network`.
        retry_ms: how long an unanswered write is tried.
        functions: the provider's data path.

    Attributes:
        traits: of each device, those of rank 0 first.
        refuse: C function name -> errno: calls of it fail, once each time it is set.
        objects: live C objects by kind.
        calls: how often each C function was called.
    """

    def __init__(
        self,
        ranks: int,
        seed: int = 1,
        *,
        rails: int = 1,
        delay: float = 0.0,
        linger: float = 0.0,
        half: float = 0.0,
        repeat: float = 0.0,
        retry_ms: float = 40.0,
        functions: DataFunctions | None = None,
    ) -> None:
        self.functions = functions or reliable_connection()
        self.ranks, self.rails = ranks, rails
        self._one_at_a_time = threading.Lock()
        #: Asynchronous events that the devices will report, and those that were acknowledged.
        self.events: list[int] = []
        self.acknowledged: list[int] = []
        self.traits = [
            DeviceTraits(
                gids=[
                    _gid(0, codes.GID_TYPE_ROCE_V2, f"fe80::{rank + 1}"),
                    _gid(1, codes.GID_TYPE_ROCE_V2, f"10.0.{rank // 250}.{rank % 250 + 1}"),
                ]
            )
            for rank in range(ranks * rails)
        ]
        self.refuse: dict[str, int] = {}
        self.objects: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        #: Memory of a GPU without a peer-memory module, (address, bytes): registered by dma-buf only.
        self.device_memory: list[tuple[int, int]] = []
        self._memory: dict[int, np.ndarray] = {}
        self._parts: Counter[int] = Counter()
        self._owners: dict[int, list[int]] = {}
        self._qps = np.zeros(net.MAX_QPS, np.int64)
        self._mrs = aligned_zeros(net.MAX_MRS * net.MR_RECORD)
        self._header = aligned_zeros(net.NETWORK_BYTES)
        self.words = self._header.view(np.int64)
        self.address = int(self._header.ctypes.data)
        for word, value in {
            net.RANDOM: (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % (1 << 63) or 1,
            net.QPS: self._qps.ctypes.data,
            net.MRS: self._mrs.ctypes.data,
            net.MR_COUNT: 1,
            net.DELAY: round(delay * (1 << 32)),
            net.LINGER: round(linger * (1 << 32)),
            net.HALF: round(half * (1 << 32)),
            net.REPEAT: round(repeat * (1 << 32)),
            net.RETRY_NS: round(retry_ms * 1e6),
            net.STEPS: 32,
        }.items():
            self.words[word // 8] = value
        self._modify = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(self.functions.modify_qp)
        self._devices = [self._device(index) for index in range(ranks * rails)]
        self._keys: dict[int, int] = {}

    def word(self, name: int) -> int:
        """A counter or knob of the network."""
        return int(self.words[name // 8])

    @property
    def violation(self) -> int:
        """Completions that found no room and immediates that found no receive: faults of whoever posts."""
        return self.word(net.OVERRUNS) + self.word(net.NOT_READY)

    def library(self, rank: int) -> VerbsLibrary:
        """libibverbs as the process of ``rank`` sees it: with its own device only."""
        named: dict[str, Callable[..., int | None]] = {
            "ibv_fork_init": lambda: 0,
            "ibv_get_device_list": functools.partial(self._get_device_list, rank),
            "ibv_free_device_list": self._free,
            "ibv_get_device_name": lambda device: device + DEVICE["name"],
            "ibv_open_device": functools.partial(self._open_device, rank),
            "ibv_get_async_event": self._take_event,
            "ibv_ack_async_event": lambda event: self.acknowledged.append(ASYNC_EVENT.get(event, "event_type")),
            "ibv_close_device": lambda context: self._destroy("context", context),
            "ibv_query_device": functools.partial(self._of_device, self._query_device),
            "ibv_query_port": functools.partial(self._of_device, self._query_port),
            "_ibv_query_gid_table": functools.partial(self._of_device, self._query_gid_table),
            "ibv_alloc_pd": self._alloc_pd,
            "ibv_dealloc_pd": lambda pd: self._destroy("pd", pd),
            "ibv_reg_mr": functools.partial(self._reg_directly, rank),
            "ibv_reg_dmabuf_mr": functools.partial(self._reg_dmabuf_mr, rank),
            "ibv_dereg_mr": self._dereg_mr,
            "ibv_create_cq": self._create_cq,
            "ibv_destroy_cq": lambda cq: self._destroy("cq", cq),
            "ibv_create_qp": functools.partial(self._create_qp, rank),
            "ibv_destroy_qp": self._destroy_qp,
            "ibv_modify_qp": self._modify,
        }
        functions = {name: self._refusable(name, function) for name, function in named.items()}
        return VerbsLibrary(functions, {"ibv_modify_qp": self.functions.modify_qp}, name="memory verbs")

    def _index_of(self, context: int) -> int:
        """Of the device that was opened."""
        return self._devices.index(CONTEXT.get(context, "device"))

    def _of_device(self, function: Callable[..., int], context: int, *arguments: int) -> int:
        return function(self._index_of(context), context, *arguments)

    def kill(self, rank: int) -> None:
        """The process of ``rank`` is gone, and its queue pairs with it: nothing answers, nothing is sent."""
        for qp in self.queue_pairs(rank):
            self._set(qp, net.QP_ALIVE, 0)

    def queue_pairs(self, rank: int) -> list[int]:
        """Addresses of the live QPs of a device, in the order of their making."""
        return [int(qp) for qp in self._qps if qp and self._get(int(qp), net.QP_OWNER) == rank]

    def fail(self, qp: int, number: int, status: int) -> None:
        """Work request ``number`` (from 0, counted over the QP's life) completes with ``status``."""
        self._set(qp, net.QP_FAIL_STATUS, status)
        self._set(qp, net.QP_FAIL_AT, number)

    def posted(self, qp: int) -> int:
        """Work requests posted to a QP so far."""
        return self._get(qp, net.QP_POSTED)

    # --- memory ------------------------------------------------------------------------------------------------

    def _new(self, nbytes: int) -> int:
        memory = aligned_zeros(nbytes)
        address = int(memory.ctypes.data)
        self._memory[address] = memory
        return address

    def _free(self, address: int) -> None:
        del self._memory[address]

    @staticmethod
    def _get(address: int, offset: int) -> int:
        return int(ctypes.c_int64.from_address(address + offset).value)

    @staticmethod
    def _set(address: int, offset: int, value: int) -> None:
        ctypes.c_int64.from_address(address + offset).value = value

    # --- objects -----------------------------------------------------------------------------------------------

    def _refusable(self, name: str, function: Callable[..., int | None]) -> Callable[..., int | None]:
        pointer = name.startswith(("ibv_create", "efadv_create", "ibv_open", "ibv_alloc", "ibv_reg"))

        def call(*arguments: int) -> int | None:
            # ranks may be threads of one process: to the network each is a process of its own
            with self._one_at_a_time:
                self.calls[name] += 1
                number = self.refuse.pop(name, 0)
                if number:
                    ctypes.set_errno(number)
                    return 0 if pointer else number
                return function(*arguments)

        return call

    def _create(self, kind: str, struct: Struct, nbytes: int, owners: Sequence[int], **values: int) -> int:
        address = self._new(nbytes)
        for name, value in values.items():
            struct.set(address, name, value)
        self.objects[kind] += 1
        for owner in owners:
            self._parts[owner] += 1
        self._owners[address] = list(owners)
        return address

    def _destroy(self, kind: str, address: int) -> int:
        if self._parts[address]:
            return errno.EBUSY
        for owner in self._owners.pop(address):
            self._parts[owner] -= 1
        self.objects[kind] -= 1
        # Rings of queues are kept under the addresses after the struct's own.
        for place in (address, address + 1, address + 2):
            self._memory.pop(place, None)
        return 0

    def device_name(self, rank: int, rail: int = 0) -> str:
        """Name of a device."""
        return f"mem{rank}r{rail}" if self.rails > 1 else f"mem{rank}"

    def _device(self, index: int) -> int:
        address = self._new(DEVICE.nbytes)
        DEVICE.set_bytes(address, "name", self.device_name(*divmod(index, self.rails)).encode())
        return address

    def _get_device_list(self, rank: int, count: int) -> int:
        ctypes.c_int.from_address(count).value = self.rails
        table = self._new(8 * (self.rails + 1))
        for rail in range(self.rails):
            self._set(table, 8 * rail, self._devices[rank * self.rails + rail])
        return table

    def _take_event(self, context: int, event: int) -> int:
        """Its descriptor does not block: without an event the call fails."""
        if not self.events:
            ctypes.set_errno(errno.EAGAIN)
            return -1
        ASYNC_EVENT.set(event, "event_type", self.events.pop(0))
        return 0

    def _open_device(self, rank: int, device: int) -> int:
        context = self._create("context", CONTEXT, 512, (), device=device, cmd_fd=0, async_fd=0)
        for name in ("poll_cq", "post_send", "post_recv"):
            CONTEXT.set(context, f"ops.{name}", getattr(self.functions, name))
        return context

    def _query_device(self, index: int, context: int, found: int) -> int:
        traits = self.traits[index]
        DEVICE_ATTR.set_bytes(found, "fw_ver", b"1.0")
        for name, value in {
            "vendor_id": traits.vendor,
            "vendor_part_id": traits.part,
            "max_qp": net.MAX_QPS,
            "max_qp_wr": traits.max_qp_wr,
            "max_sge": 2,
            "max_cqe": traits.max_cqe,
            "max_mr_size": traits.max_mr_size,
            "phys_port_cnt": 1,
        }.items():
            DEVICE_ATTR.set(found, name, value)
        return 0

    def _query_port(self, index: int, context: int, port: int, found: int) -> int:
        traits = self.traits[index]
        if port != 1:
            return errno.EINVAL
        for name, value in {
            "state": traits.state,
            "active_mtu": traits.mtu,
            "max_msg_sz": traits.max_message,
            "link_layer": traits.link_layer,
            "flags": traits.flags,
            "lid": traits.lid,
            "gid_tbl_len": 16,
        }.items():
            PORT_ATTR.set(found, name, value)
        return 0

    def _query_gid_table(self, index: int, context: int, entries: int, limit: int, flags: int, nbytes: int) -> int:
        gids = self.traits[index].gids
        for place, gid in enumerate(gids):
            entry = entries + place * nbytes
            GID_ENTRY.set_bytes(entry, "gid", gid.raw)
            values = {"gid_index": gid.index, "port_num": 1, "gid_type": gid.kind, "ndev_ifindex": gid.interface}
            for name, value in values.items():
                GID_ENTRY.set(entry, name, value)
        return len(gids)

    def _alloc_pd(self, context: int) -> int:
        return self._create("pd", PD, 128, [context], context=context)

    def _is_device_memory(self, start: int, nbytes: int) -> bool:
        return any(first < start + nbytes and start < first + length for first, length in self.device_memory)

    def _reg_directly(self, rank: int, pd: int, start: int, nbytes: int, access: int) -> int:
        if self._is_device_memory(start, nbytes):
            ctypes.set_errno(errno.EFAULT)
            return 0
        return self._reg_mr(rank, pd, start, nbytes, access)

    def _reg_mr(self, rank: int, pd: int, start: int, nbytes: int, access: int) -> int:
        index = self.word(net.MR_COUNT)
        key = index << 8 | (index * 37 + 11) % 127
        record = int(self._mrs.ctypes.data) + index * net.MR_RECORD
        for offset, value in (
            (net.MR_KEY, key),
            (net.MR_START, start),
            (net.MR_BYTES, nbytes),
            (net.MR_ACCESS, access),
            (net.MR_OWNER, rank),
        ):
            self._set(record, offset, value)
        self.words[net.MR_COUNT // 8] += 1
        context = PD.get(pd, "context")
        mr = self._create(
            "mr", MR, 128, [pd], context=context, pd=pd, addr=start, length=nbytes, lkey=key, rkey=key ^ net.REMOTE_KEY
        )  # fmt: skip
        self._keys[mr] = record
        return mr

    def _reg_dmabuf_mr(
        self, rank: int, pd: int, offset: int, nbytes: int, start: int, descriptor: int, access: int
    ) -> int:
        os.fstat(descriptor)  # it must be open while the region is made
        return self._reg_mr(rank, pd, start, nbytes, access)

    def _dereg_mr(self, mr: int) -> int:
        # From here on the NIC knows the key no more.
        self._set(self._keys.pop(mr), net.MR_KEY, -1)
        return self._destroy("mr", mr)

    def _create_cq(self, context: int, entries: int, cookie: int, channel: int, vector: int) -> int:
        cq = self._create("cq", CQ, net.CQ_BYTES, [context], context=context, cqe=entries)
        ring = aligned_zeros(entries * WC.nbytes)
        self._memory[cq + 1] = ring  # goes with the queue, below
        self._set(cq, net.CQ_NETWORK, self.address)
        self._set(cq, net.CQ_RING, ring.ctypes.data)
        self._set(cq, net.CQ_SLOTS, entries)
        return cq

    def _create_qp(self, rank: int, pd: int, attributes: int) -> int:
        send_cq, recv_cq = QP_INIT_ATTR.get(attributes, "send_cq"), QP_INIT_ATTR.get(attributes, "recv_cq")
        sends = QP_INIT_ATTR.get(attributes, "cap.max_send_wr")
        receives = QP_INIT_ATTR.get(attributes, "cap.max_recv_wr")
        traits = self.traits[self._index_of(PD.get(pd, "context"))]
        if sends > traits.max_qp_wr or QP_INIT_ATTR.get(attributes, "cap.max_inline_data") > traits.max_inline:
            ctypes.set_errno(errno.EINVAL)
            return 0
        return self.new_qp(
            rank,
            pd,
            send_cq,
            recv_cq,
            sends,
            receives,
            signal_all=QP_INIT_ATTR.get(attributes, "sq_sig_all"),
            kind=QP_INIT_ATTR.get(attributes, "qp_type"),
        )

    def new_qp(
        self, rank: int, pd: int, send_cq: int, recv_cq: int, sends: int, receives: int, *, signal_all: int, kind: int
    ) -> int:
        """A queue pair of ``rank`` in state RESET; also what other providers make theirs from."""
        index = self.word(net.QP_COUNT)
        if index >= net.MAX_QPS:
            ctypes.set_errno(errno.ENOMEM)
            return 0
        qp = self._create(
            "qp",
            QP,
            net.QP_BYTES,
            [pd, *{send_cq, recv_cq}],
            context=PD.get(pd, "context"),
            pd=pd,
            send_cq=send_cq,
            recv_cq=recv_cq,
            qp_num=index + net.FIRST_NUMBER,
            qp_type=kind,
        )
        send_ring, receive_ring = aligned_zeros(max(sends, 1) * net.FLIGHT), aligned_zeros(max(receives, 1) * 8)
        self._memory[qp + 1], self._memory[qp + 2] = send_ring, receive_ring
        for offset, value in {
            net.QP_NETWORK: self.address,
            net.QP_INDEX: index,
            net.QP_SEND_RING: send_ring.ctypes.data,
            net.QP_SEND_SLOTS: sends,
            net.QP_RECEIVE_RING: receive_ring.ctypes.data,
            net.QP_RECEIVE_SLOTS: receives,
            net.QP_DESTINATION: -1,
            net.QP_ALIVE: 1,
            net.QP_FAIL_AT: -1,
            net.QP_SIGNAL_ALL: signal_all,
            net.QP_OWNER: rank,
        }.items():
            self._set(qp, offset, value)
        self._qps[index] = qp
        self.words[net.QP_COUNT // 8] += 1
        return qp

    def _destroy_qp(self, qp: int) -> int:
        self._qps[self._get(qp, net.QP_INDEX)] = 0
        return self._destroy("qp", qp)
