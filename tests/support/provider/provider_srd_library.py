"""EFA devices in memory: libibverbs and libefa as functions over structs, on the data path of :mod:`provider_srd`.

Each rank has devices of its own. As on real hosts, keys and QP numbers are numbers of a device: those of different
hosts are the same, so code that takes one for the other's fails here.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.support.provider import provider_srd as nic
from tests.support.provider.provider_library import DataFunctions, DeviceTraits, MemoryNetwork
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.abi import (
    AH,
    AH_ATTR,
    CQ,
    DEVICE,
    EFA_AH_ATTR,
    EFA_DEVICE_ATTR,
    EFA_QP_INIT_ATTR,
    MR,
    PD,
    QP,
    QP_ATTR,
    QP_EX,
    QP_INIT_ATTR_EX,
)
from uccl_ep_serving.proxy.transport.verbs.device import Gid
from uccl_ep_serving.proxy.transport.verbs.library import VerbsLibrary

__all__ = ["OFFERED", "EfaTraits", "SrdNetwork"]

_KEYS = 64
_QPS = 64
_FIRST_QPN = 5


#: What devices are able to do unless a test says otherwise; a run over posted receives takes one thing away.
OFFERED = {
    "capabilities": codes.EFA_CAP_RDMA_READ
    | codes.EFA_CAP_RNR_RETRY
    | codes.EFA_CAP_RDMA_WRITE
    | codes.EFA_CAP_UNSOLICITED_WRITE_RECV
}


@dataclass(slots=True)
class EfaTraits:
    """What libefa says of the devices; a test changes it before they are opened.

    ``old`` is a libefa that knows neither flags nor service levels of a queue pair (rdma-core 44), ``release`` what its
    file says, ``granted`` the longest send queue that the kernel makes, whatever the device says (0 = any).
    """

    sends: int = 256
    receives: int = 256
    max_write: int = 1 << 30
    capabilities: int = field(default_factory=lambda: OFFERED["capabilities"])
    old: bool = False
    release: int = 0
    granted: int = 0
    tells_ah_numbers: bool = True


@dataclass(slots=True)
class _Device:
    """One device: its record for the compiled side, and what the record points at."""

    index: int
    record: np.ndarray
    keys: np.ndarray
    qps: np.ndarray
    ahs: np.ndarray
    queue_pairs: dict[int, np.ndarray] = field(default_factory=dict)


class SrdNetwork(MemoryNetwork):
    """``ranks`` hosts with ``rails`` EFA devices each, named ``efa<rail>`` on every host.

    Args:
        ranks, rails: of the group.
        seed: of everything random.
        repeat: probability that a payload lands once more before it completes.
        pace: writes that take a step per poll.

    Attributes:
        efa: traits of all devices.
    """

    def __init__(self, ranks: int, rails: int = 1, seed: int = 1, *, repeat: float = 0.25, pace: int = 16) -> None:
        functions = nic.nic_functions()
        unused = DataFunctions(post_send=0, post_recv=functions["post_recv"], poll_cq=functions["poll_cq"], modify_qp=0)
        super().__init__(0, seed, functions=unused)
        self.efa = EfaTraits()
        self.ranks, self.rails = ranks, rails
        self._flight = np.zeros((1 << 16, nic.FLIGHT_WORDS), np.int64)
        self.fabric = np.zeros(nic.FABRIC_WORDS, np.int64)
        self.fabric[nic.RANDOM] = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % (1 << 63) or 1
        self.fabric[nic.FLIGHT] = self._flight.ctypes.data
        self.fabric[nic.REPEAT] = round(repeat * 256)
        self.fabric[nic.PACE] = pace
        self.fabric[nic.FAIL_AFTER] = -1
        self.count = count = ranks * rails
        self._hardware = [self._hardware_of(index, count) for index in range(count)]
        self.traits = [
            DeviceTraits(
                vendor=0x1D0F,
                link_layer=codes.LINK_UNSPECIFIED,
                max_cqe=1 << 15,
                gids=[Gid(0, codes.GID_TYPE_IB, ipaddress.IPv6Address(f"fe80::{index + 1:x}").packed)],
            )
            for index in range(count)
        ]
        self._by_gid = {traits.gids[0].raw: index for index, traits in enumerate(self.traits)}
        self._devices = [self._device_named(index) for index in range(count)]
        self._index: dict[int, int] = {}  # of the device of a context or PD
        self._key: dict[int, tuple[int, int]] = {}  # device and key of an MR
        self._ah: dict[int, tuple[int, int]] = {}  # device and target of an AH
        self._qp: dict[int, tuple[int, int]] = {}  # device and number of a QP

    # --- what tests do to it ------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """The host of ``rank`` is gone: nothing of it answers or is sent."""
        for device in self._of(rank):
            self._hardware[device].record[nic.D_DEAD] = 1

    def fail(self, after: int, vendor: int) -> None:  # type: ignore[override]
        """The write posted ``after`` writes from now fails with the NIC's code ``vendor``."""
        self.fabric[nic.FAIL_VENDOR], self.fabric[nic.FAIL_AFTER] = vendor, after

    def forge(self, rank: int, rail: int, imm: int, source_qp: int, address: int) -> None:
        """A completion at ``rank`` of a write that QP ``source_qp`` behind address handle ``address`` made."""
        device = self._hardware[self._of(rank)[rail]]
        (record,) = device.queue_pairs.values()
        swapped = int.from_bytes(imm.to_bytes(4, "little"), "big")
        cq = int(record[nic.Q_CQ])
        nic.complete(cq, 0, 0, codes.WC_RECV_RDMA_WITH_IMM, 0, 0, swapped, _FIRST_QPN, source_qp, address)

    def address_of(self, rank: int, rail: int, peer: int, peer_rail: int) -> int:
        """The number under which a device knows the address of another one, -1 = it does not."""
        return int(self._hardware[self._of(rank)[rail]].ahs[self._of(peer)[peer_rail]])

    def senders_to(self, rank: int) -> set[int]:
        """Ranks with a write in flight to ``rank``."""
        records = {int(self._hardware[device].record.ctypes.data): device // self.rails for device in range(self.count)}
        found = set()
        for write in self._flight[: self.in_flight]:
            target = self._get(int(write[nic.F_AH]), nic.AH_DEVICE)
            if records[target] == rank:
                found.add(records[self._get(int(write[nic.F_QP]), 8 * nic.Q_DEVICE)])
        return found

    def bytes_of(self, rank: int) -> list[int]:
        """Bytes that ``rank`` has posted, by rail."""
        return [int(self._hardware[device].record[nic.D_BYTES]) for device in self._of(rank)]

    @property
    def violation(self) -> int:
        """VIOLATION_* that came first, 0 = none."""
        return int(self.fabric[nic.VIOLATION])

    @property
    def in_flight(self) -> int:
        """Writes that have not completed."""
        return int(self.fabric[nic.FLIGHT_COUNT])

    # --- the libraries ------------------------------------------------------------------------------------------

    def library(self, rank: int) -> VerbsLibrary:
        """libibverbs with libefa as the process of ``rank`` sees them."""
        named: dict[str, Callable[..., int | None]] = {
            "ibv_get_device_list": functools.partial(self._list_devices, rank),
            "ibv_free_device_list": self._free,
            "ibv_get_device_name": lambda device: device + DEVICE["name"],
            "ibv_open_device": self._open,
            "ibv_get_async_event": self._take_event,
            "ibv_ack_async_event": lambda event: self.acknowledged.append(event),
            "ibv_close_device": lambda context: self._destroy("context", context),
            "ibv_query_device": lambda context, found: self._query_device(self._index[context], context, found),
            "ibv_query_port": lambda context, port, found: self._query_port(self._index[context], context, port, found),
            "_ibv_query_gid_table": lambda context, *rest: self._query_gid_table(self._index[context], context, *rest),
            "ibv_alloc_pd": self._make_pd,
            "ibv_dealloc_pd": lambda pd: self._destroy("pd", pd),
            "ibv_reg_mr": self._register_directly,
            "ibv_reg_dmabuf_mr": lambda pd, offset, nbytes, start, fd, access: self._register(
                pd, start, nbytes, access
            ),
            "ibv_dereg_mr": self._deregister,
            "ibv_create_cq": self._make_cq,
            "ibv_destroy_cq": lambda cq: self._destroy("cq", cq),
            "ibv_destroy_qp": self._drop_qp,
            "ibv_modify_qp": self._change_qp,
            "ibv_qp_to_qp_ex": lambda qp: qp,
            "ibv_create_ah": self._make_ah,
            "ibv_destroy_ah": self._drop_ah,
            "efadv_query_device": self._query_efa,
            "efadv_create_qp_ex": self._make_qp,
            "efadv_query_ah": self._query_ah,
        }
        functions = {name: self._refusable(name, function) for name, function in named.items()}
        return VerbsLibrary(functions, {}, name="memory EFA", release=self.efa.release)

    def _of(self, rank: int) -> range:
        return range(rank * self.rails, (rank + 1) * self.rails)

    def _hardware_of(self, index: int, count: int) -> _Device:
        device = _Device(
            index,
            np.zeros(nic.DEVICE_WORDS, np.int64),
            np.zeros((_KEYS, nic.KEY_WORDS), np.int64),
            np.zeros(_QPS, np.int64),
            np.full(count, -1, np.int64),
        )
        for word, value in {
            nic.D_FABRIC: self.fabric.ctypes.data,
            nic.D_KEYS: device.keys.ctypes.data,
            nic.D_KEY_COUNT: _KEYS,
            nic.D_QPS: device.qps.ctypes.data,
            nic.D_QP_COUNT: _QPS,
            nic.D_AHS: device.ahs.ctypes.data,
            nic.D_INDEX: index,
        }.items():
            device.record[word] = value
        return device

    def _device_named(self, index: int) -> int:
        address = self._new(DEVICE.nbytes)
        DEVICE.set_bytes(address, "name", f"efa{index % self.rails}".encode())
        return address

    def _list_devices(self, rank: int, count: int) -> int:
        devices = self._of(rank)
        ctypes.c_int.from_address(count).value = len(devices)
        table = self._new(8 * (len(devices) + 1))
        for place, device in enumerate(devices):
            self._set(table, 8 * place, self._devices[device])
        return table

    def _open(self, device: int) -> int:
        context = self._open_device(0, device)
        self._index[context] = self._devices.index(device)
        return context

    def _make_pd(self, context: int) -> int:
        pd = self._alloc_pd(context)
        self._index[pd] = self._index[context]
        return pd

    def _register_directly(self, pd: int, start: int, nbytes: int, access: int) -> int:
        if self._is_device_memory(start, nbytes):
            ctypes.set_errno(errno.EFAULT)
            return 0
        return self._register(pd, start, nbytes, access)

    def _register(self, pd: int, start: int, nbytes: int, access: int) -> int:
        index = self._index[pd]
        keys = self._hardware[index].keys
        key = next((key for key in range(1, _KEYS) if keys[key, 2] == 0), 0)
        if not key or nbytes == 0:
            ctypes.set_errno(errno.ENOMEM)
            return 0
        keys[key] = start, nbytes, access, 0
        values = {"context": PD.get(pd, "context"), "pd": pd, "addr": start, "length": nbytes, "lkey": key}
        values["rkey"] = key ^ nic.REMOTE_KEY
        mr = self._create("mr", MR, 128, [pd], **values)
        self._key[mr] = index, key
        return mr

    def _deregister(self, mr: int) -> int:
        index, key = self._key.pop(mr)
        self._hardware[index].keys[key] = 0
        return self._destroy("mr", mr)

    def _make_cq(self, context: int, entries: int, cookie: int, channel: int, vector: int) -> int:
        entries = 1 << (entries - 1).bit_length()  # libefa rounds up
        cq = self._create("cq", CQ, 256, [context], context=context, cqe=entries)
        ring = np.zeros(entries * nic.CQE_BYTES // 8, np.int64)
        record = np.zeros(nic.CQ_WORDS, np.int64)
        record[nic.C_ENTRIES], record[nic.C_CAPACITY] = ring.ctypes.data, entries
        record[nic.C_FABRIC] = self.fabric.ctypes.data
        self._memory[cq + 1], self._memory[cq + 2] = ring, record
        self._set(cq, nic.CQ_PRIVATE, record.ctypes.data)
        return cq

    def _query_efa(self, context: int, found: int, nbytes: int) -> int:
        if nbytes < EFA_DEVICE_ATTR.nbytes:
            return errno.EINVAL
        for name, value in {
            "max_sq_wr": self.efa.sends,
            "max_rq_wr": self.efa.receives,
            "max_sq_sge": 2,
            "max_rq_sge": 1,
            "inline_buf_size": 32,
            "device_caps": self.efa.capabilities,
            "max_rdma_size": self.efa.max_write,
        }.items():
            EFA_DEVICE_ATTR.set(found, name, value)
        return 0

    def _make_qp(self, context: int, attributes: int, efa: int, nbytes: int) -> int:
        get = functools.partial(QP_INIT_ATTR_EX.get, attributes)
        flags, level = EFA_QP_INIT_ATTR.get(efa, "flags"), EFA_QP_INIT_ATTR.get(efa, "sl")
        writes = codes.OPS_RDMA_WRITE | codes.OPS_RDMA_WRITE_WITH_IMM
        offered = self.efa.capabilities
        number = 0
        if (
            get("qp_type") != codes.QPT_DRIVER
            or get("comp_mask") != codes.INIT_ATTR_PD | codes.INIT_ATTR_SEND_OPS_FLAGS
        ):
            number = errno.EINVAL
        elif self.efa.old and (flags or level):
            number = errno.EINVAL  # the bytes are reserved there
        elif (get("send_ops_flags") & writes and not offered & codes.EFA_CAP_RDMA_WRITE) or (
            flags & codes.EFA_FLAG_UNSOLICITED_WRITE_RECV and not offered & codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        ):
            number = errno.EOPNOTSUPP
        elif self.efa.granted and get("cap.max_send_wr") > self.efa.granted:
            number = errno.ENOMEM
        elif get("cap.max_send_wr") > self.efa.sends or get("cap.max_recv_wr") > self.efa.receives:
            number = errno.EINVAL
        if number:
            ctypes.set_errno(number)
            return 0
        pd, cq = get("pd"), get("send_cq")
        index = self._index[context]
        device = self._hardware[index]
        values = {"context": context, "pd": pd, "send_cq": cq, "recv_cq": get("recv_cq"), "qp_type": codes.QPT_DRIVER}
        qp = self._create("qp", QP, 512, [pd, cq], **values)
        qpn = next(n for n in range(_FIRST_QPN, _QPS) if device.qps[n] == 0)
        QP.set(qp, "qp_num", qpn)
        for name, address in nic.nic_functions().items():
            if name.startswith("wr_"):
                QP_EX.set(qp, name, address)
        record = np.zeros(nic.QP_WORDS, np.int64)
        depth, receives = get("cap.max_send_wr"), get("cap.max_recv_wr")
        self._memory[qp + 1] = pending = np.zeros((depth, nic.FLIGHT_WORDS), np.int64)
        self._memory[qp + 2] = ids = np.zeros(receives, np.int64)
        for word, value in {
            nic.Q_DEVICE: device.record.ctypes.data,
            nic.Q_NUMBER: qpn,
            nic.Q_CQ: self._get(cq, nic.CQ_PRIVATE),
            nic.Q_DEPTH: depth,
            nic.Q_PENDING: pending.ctypes.data,
            nic.Q_UNSOLICITED: flags & codes.EFA_FLAG_UNSOLICITED_WRITE_RECV,
            nic.Q_RECEIVE_DEPTH: receives,
            nic.Q_RECEIVE_IDS: ids.ctypes.data,
        }.items():
            record[word] = value
        device.queue_pairs[qpn] = record
        device.qps[qpn] = record.ctypes.data
        device.record[nic.D_MAX_RDMA] = self.efa.max_write
        self._set(qp, nic.QP_PRIVATE, record.ctypes.data)
        self._qp[qp] = index, qpn
        return qp

    def _change_qp(self, qp: int, attributes: int, mask: int) -> int:
        index, qpn = self._qp[qp]
        record = self._hardware[index].queue_pairs[qpn]
        before, after = QP.get(qp, "state"), QP_ATTR.get(attributes, "qp_state")
        needed = {
            (codes.QPS_RESET, codes.QPS_INIT): codes.QP_STATE | codes.QP_PKEY_INDEX | codes.QP_PORT | codes.QP_QKEY,
            (codes.QPS_INIT, codes.QPS_RTR): codes.QP_STATE,
            (codes.QPS_RTR, codes.QPS_RTS): codes.QP_STATE | codes.QP_SQ_PSN,
        }.get((before, after))
        if needed is None or mask & needed != needed:
            return errno.EINVAL
        if mask & codes.QP_QKEY:
            record[nic.Q_QKEY] = QP_ATTR.get(attributes, "qkey")
        record[nic.Q_READY] = after == codes.QPS_RTS
        QP.set(qp, "state", after)
        return 0

    def _drop_qp(self, qp: int) -> int:
        index, qpn = self._qp.pop(qp)
        device = self._hardware[index]
        record = device.queue_pairs[qpn].ctypes.data
        # other ranks may be threads that poll
        nic.lock(self.fabric.ctypes.data)
        try:
            device.qps[qpn] = 0
            # What it had in flight is gone with it.
            flying = [list(write) for write in self._flight[: self.in_flight] if write[nic.F_QP] != record]
            self._flight[: len(flying)] = np.array(flying, np.int64).reshape(-1, nic.FLIGHT_WORDS)
            self.fabric[nic.FLIGHT_COUNT] = len(flying)
        finally:
            nic.unlock(self.fabric.ctypes.data)
        del device.queue_pairs[qpn]
        return self._destroy("qp", qp)

    def _make_ah(self, pd: int, attributes: int) -> int:
        target = self._by_gid.get(AH_ATTR.get_bytes(attributes, "grh.dgid"))
        if target is None or not AH_ATTR.get(attributes, "is_global"):
            ctypes.set_errno(errno.EINVAL)
            return 0
        index = self._index[pd]
        ah = self._create("ah", AH, 128, [pd], context=PD.get(pd, "context"), pd=pd)
        self._set(ah, nic.AH_DEVICE, self._hardware[target].record.ctypes.data)
        # Numbers of a device's own, and not the index of the other one.
        self._hardware[index].ahs[target] = 100 + (target * 7 + index) % 997
        self._ah[ah] = index, target
        return ah

    def _drop_ah(self, ah: int) -> int:
        index, target = self._ah.pop(ah)
        if (index, target) not in self._ah.values():
            self._hardware[index].ahs[target] = -1
        return self._destroy("ah", ah)

    def _query_ah(self, ah: int, found: int, nbytes: int) -> int:
        if not self.efa.tells_ah_numbers:
            return errno.EOPNOTSUPP
        index, target = self._ah[ah]
        EFA_AH_ATTR.set(found, "ahn", int(self._hardware[index].ahs[target]))
        return 0
