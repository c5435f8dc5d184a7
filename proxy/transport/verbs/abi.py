"""Where the fields of libibverbs' and libefa's structs lie: the one table of offsets that this package relies on.

The control path (:mod:`.device`) fills and reads these structs through ctypes, and the compiled data path reads and
writes some of them directly, so that neither needs a compiler or headers. The offsets are those of the 64-bit System V
ABI (x86-64 and aarch64 agree). rdma-core appends to these structs and never moves a field: sizes here are the *least* a
library may use. They are held in two ways: a test compiles an ``offsetof`` program against the installed headers, and
:meth:`.device.VerbsObject.check` compares them with live objects before a raw pointer is used.

Field names are the C paths (``wr.rdma.rkey``), so that the test can be generated from this table. ``since`` is the
first rdma-core, of those compared, whose header names a field; older libraries refuse or ignore it, never misread it.

Source of every row: ``infiniband/verbs.h`` and ``infiniband/efadv.h`` of rdma-core 44 (Debian 12) and 59.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

_INTEGERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


@dataclass(frozen=True, slots=True)
class Field:
    """Offset and length of a field in bytes, and the first rdma-core that has it (0: all that are supported)."""

    offset: int
    nbytes: int
    since: int = 0


@dataclass(frozen=True)
class Struct:
    """One C struct.

    Attributes:
        name: its C name, without ``struct``.
        header: the header that declares it.
        nbytes: its size, the least of all supported versions.
        fields: by C path.
    """

    name: str
    nbytes: int
    fields: Mapping[str, Field]
    header: str = "infiniband/verbs.h"

    def __getitem__(self, field: str) -> int:
        """Offset of ``field``: bind it to a module constant for compiled code."""
        return self.fields[field].offset

    def get(self, address: int, field: str) -> int:
        """Unsigned value of an integer or pointer field of the struct at ``address``."""
        place = self.fields[field]
        return int(_INTEGERS[place.nbytes].from_address(address + place.offset).value)

    def set(self, address: int, field: str, value: int) -> None:
        """Store an integer or pointer field of the struct at ``address``."""
        place = self.fields[field]
        _INTEGERS[place.nbytes].from_address(address + place.offset).value = value

    def get_bytes(self, address: int, field: str) -> bytes:
        """All bytes of a field."""
        place = self.fields[field]
        return ctypes.string_at(address + place.offset, place.nbytes)

    def set_bytes(self, address: int, field: str, value: bytes) -> None:
        """Store ``value`` at the start of a field; it must not be longer than the field."""
        place = self.fields[field]
        if len(value) > place.nbytes:
            raise ValueError(f"{len(value)} bytes for {self.name}.{field}, which has {place.nbytes}")
        ctypes.memmove(address + place.offset, value, len(value))


class Block:
    """A zeroed struct in memory of ours, with room for fields that newer libraries append.

    Freed with the object: keep it as long as C may use :attr:`address`.
    """

    _SPARE = 256

    def __init__(self, struct: Struct, **values: int) -> None:
        self.struct = struct
        self._memory = (ctypes.c_uint64 * ((struct.nbytes + self._SPARE + 7) // 8))()
        self.address = ctypes.addressof(self._memory)
        for field, value in values.items():
            self[field] = value

    def __getitem__(self, field: str) -> int:
        return self.struct.get(self.address, field)

    def __setitem__(self, field: str, value: int) -> None:
        self.struct.set(self.address, field, value)


def _fields(**places: tuple[int, int] | tuple[int, int, int]) -> dict[str, Field]:
    """``name=(offset, bytes[, since])``; a double underscore in a name stands for the dot of a C path."""
    return {name.replace("__", "."): Field(*place) for name, place in places.items()}


# --- devices and contexts ---------------------------------------------------------------------------------------------
DEVICE = Struct(
    "ibv_device",
    664,
    _fields(node_type=(16, 4), transport_type=(20, 4), name=(24, 64), dev_name=(88, 64), ibdev_path=(408, 256)),
)
CONTEXT = Struct(
    "ibv_context",
    328,
    _fields(
        device=(0, 8),
        ops__poll_cq=(96, 8),
        ops__req_notify_cq=(104, 8),
        ops__post_send=(208, 8),
        ops__post_recv=(216, 8),
        cmd_fd=(264, 4),
        async_fd=(268, 4),
        num_comp_vectors=(272, 4),
    ),
)
DEVICE_ATTR = Struct(
    "ibv_device_attr",
    232,
    _fields(
        fw_ver=(0, 64),
        max_mr_size=(80, 8),
        vendor_id=(96, 4),
        vendor_part_id=(100, 4),
        max_qp=(108, 4),
        max_qp_wr=(112, 4),
        device_cap_flags=(116, 4),
        max_sge=(120, 4),
        max_cq=(128, 4),
        max_cqe=(132, 4),
        max_mr=(136, 4),
        phys_port_cnt=(227, 1),
    ),
)
PORT_ATTR = Struct(
    "ibv_port_attr",
    52,
    _fields(
        state=(0, 4),
        max_mtu=(4, 4),
        active_mtu=(8, 4),
        gid_tbl_len=(12, 4),
        port_cap_flags=(16, 4),
        max_msg_sz=(20, 4),
        lid=(34, 2),
        active_width=(43, 1),
        active_speed=(44, 1),
        phys_state=(45, 1),
        link_layer=(46, 1),
        flags=(47, 1),
    ),
)
GID_ENTRY = Struct(
    "ibv_gid_entry",
    32,
    _fields(gid=(0, 16), gid_index=(16, 4), port_num=(20, 4), gid_type=(24, 4), ndev_ifindex=(28, 4)),
)
ASYNC_EVENT = Struct("ibv_async_event", 16, _fields(element=(0, 8), event_type=(8, 4)))

# --- objects ----------------------------------------------------------------------------------------------------------
PD = Struct("ibv_pd", 16, _fields(context=(0, 8), handle=(8, 4)))
MR = Struct("ibv_mr", 48, _fields(context=(0, 8), pd=(8, 8), addr=(16, 8), length=(24, 8), lkey=(36, 4), rkey=(40, 4)))
CQ = Struct("ibv_cq", 128, _fields(context=(0, 8), handle=(24, 4), cqe=(28, 4)))
AH = Struct("ibv_ah", 24, _fields(context=(0, 8), pd=(8, 8), handle=(16, 4)))
QP = Struct(
    "ibv_qp",
    160,
    _fields(
        context=(0, 8),
        pd=(16, 8),
        send_cq=(24, 8),
        recv_cq=(32, 8),
        srq=(40, 8),
        handle=(48, 4),
        qp_num=(52, 4),
        state=(56, 4),
        qp_type=(60, 4),
    ),
)
QP_EX = Struct(
    "ibv_qp_ex",
    352,
    _fields(
        qp_base=(0, 160),
        comp_mask=(160, 8),
        wr_id=(168, 8),
        wr_flags=(176, 4),
        wr_rdma_read=(216, 8),
        wr_rdma_write=(224, 8),
        wr_rdma_write_imm=(232, 8),
        wr_send=(240, 8),
        wr_send_imm=(248, 8),
        wr_set_ud_addr=(272, 8),
        wr_set_inline_data=(288, 8),
        wr_set_sge=(304, 8),
        wr_set_sge_list=(312, 8),
        wr_start=(320, 8),
        wr_complete=(328, 8),
        wr_abort=(336, 8),
    ),
)
# --- work requests and completions ------------------------------------------------------------------------------------
SGE = Struct("ibv_sge", 16, _fields(addr=(0, 8), length=(8, 4), lkey=(12, 4)))
SEND_WR = Struct(
    "ibv_send_wr",
    128,
    _fields(
        wr_id=(0, 8),
        next=(8, 8),
        sg_list=(16, 8),
        num_sge=(24, 4),
        opcode=(28, 4),
        send_flags=(32, 4),
        imm_data=(36, 4),
        wr__rdma__remote_addr=(40, 8),
        wr__rdma__rkey=(48, 4),
    ),
)
RECV_WR = Struct("ibv_recv_wr", 32, _fields(wr_id=(0, 8), next=(8, 8), sg_list=(16, 8), num_sge=(24, 4)))
WC = Struct(
    "ibv_wc",
    48,
    _fields(
        wr_id=(0, 8),
        status=(8, 4),
        opcode=(12, 4),
        vendor_err=(16, 4),
        byte_len=(20, 4),
        imm_data=(24, 4),
        qp_num=(28, 4),
        src_qp=(32, 4),
        wc_flags=(36, 4),
        pkey_index=(40, 2),
        slid=(42, 2),
    ),
)
# --- what objects are made from ---------------------------------------------------------------------------------------
_CAP = {"max_send_wr": 0, "max_recv_wr": 4, "max_send_sge": 8, "max_recv_sge": 12, "max_inline_data": 16}
_INIT = _fields(
    qp_context=(0, 8),
    send_cq=(8, 8),
    recv_cq=(16, 8),
    srq=(24, 8),
    qp_type=(52, 4),
    sq_sig_all=(56, 4),
) | {f"cap.{name}": Field(32 + offset, 4) for name, offset in _CAP.items()}
QP_INIT_ATTR = Struct("ibv_qp_init_attr", 64, _INIT)
QP_INIT_ATTR_EX = Struct(
    "ibv_qp_init_attr_ex", 136, _INIT | _fields(comp_mask=(60, 4), pd=(64, 8), send_ops_flags=(128, 8))
)
_AH = {
    "grh.dgid": (0, 16),
    "grh.flow_label": (16, 4),
    "grh.sgid_index": (20, 1),
    "grh.hop_limit": (21, 1),
    "grh.traffic_class": (22, 1),
    "dlid": (24, 2),
    "sl": (26, 1),
    "is_global": (29, 1),
    "port_num": (30, 1),
}
AH_ATTR = Struct("ibv_ah_attr", 32, {name: Field(*place) for name, place in _AH.items()})
QP_ATTR = Struct(
    "ibv_qp_attr",
    144,
    _fields(
        qp_state=(0, 4),
        cur_qp_state=(4, 4),
        path_mtu=(8, 4),
        qkey=(16, 4),
        rq_psn=(20, 4),
        sq_psn=(24, 4),
        dest_qp_num=(28, 4),
        qp_access_flags=(32, 4),
        pkey_index=(120, 2),
        max_rd_atomic=(126, 1),
        max_dest_rd_atomic=(127, 1),
        min_rnr_timer=(128, 1),
        port_num=(129, 1),
        timeout=(130, 1),
        retry_cnt=(131, 1),
        rnr_retry=(132, 1),
    )
    | {f"ah_attr.{name}": Field(56 + offset, nbytes) for name, (offset, nbytes) in _AH.items()},
)

# --- EFA --------------------------------------------------------------------------------------------------------------
EFA_QP_INIT_ATTR = Struct(
    "efadv_qp_init_attr",
    16,
    _fields(comp_mask=(0, 8), driver_qp_type=(8, 4), flags=(12, 2, 59), sl=(14, 1, 59)),
    header="infiniband/efadv.h",
)
EFA_DEVICE_ATTR = Struct(
    "efadv_device_attr",
    32,
    _fields(
        comp_mask=(0, 8),
        max_sq_wr=(8, 4),
        max_rq_wr=(12, 4),
        max_sq_sge=(16, 2),
        max_rq_sge=(18, 2),
        inline_buf_size=(20, 2),
        device_caps=(24, 4),
        max_rdma_size=(28, 4),
    ),
    header="infiniband/efadv.h",
)

EFA_AH_ATTR = Struct("efadv_ah_attr", 16, _fields(comp_mask=(0, 8), ahn=(8, 2)), header="infiniband/efadv.h")

#: Every struct above, for the checks.
STRUCTS: tuple[Struct, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Struct))
