"""The table of struct offsets against C declarations that ctypes lays out, where no header is installed.

The declarations are those of rdma-core's ``infiniband/verbs.h`` and ``infiniband/efadv.h``, whole, in their order: an
offset follows from all fields before it, so that one wrong number of the table does not fit.
"""

from __future__ import annotations

import ctypes
import operator
from typing import Any

import pytest

from uccl_ep_serving.proxy.transport.verbs import abi

U8, U16, U32, U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
INT, POINTER = ctypes.c_int, ctypes.c_void_p


def _declared(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """A C struct; each item is a type and the names that are declared with it, as C writes them."""
    each = [(one, kind) for kind, names in fields for one in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": each})


#: A union of bytes and of two words, which is aligned as these.
_GID = U64 * 2
_GLOBAL_ROUTE = _declared(
    "ibv_global_route", (_GID, "dgid"), (U32, "flow_label"), (U8, "sgid_index hop_limit traffic_class")
)
_AH_ATTR = _declared(
    "ibv_ah_attr", (_GLOBAL_ROUTE, "grh"), (U16, "dlid"), (U8, "sl src_path_bits static_rate is_global port_num")
)
_QP_CAP = _declared("ibv_qp_cap", (U32, "max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data"))
_RDMA = _declared("rdma", (U64, "remote_addr"), (U32, "rkey"))

DECLARED = (
    _declared(
        "ibv_device_attr",
        (ctypes.c_char * 64, "fw_ver"),
        (U64, "node_guid sys_image_guid max_mr_size page_size_cap"),
        (U32, "vendor_id vendor_part_id hw_ver"),
        (INT, "max_qp max_qp_wr"),
        (U32, "device_cap_flags"),
        (INT, "max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom"),
        (INT, "max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp"),
        (INT, "max_raw_ethy_qp max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr"),
        (INT, "max_map_per_fmr max_srq max_srq_wr max_srq_sge"),
        (U16, "max_pkeys"),
        (U8, "local_ca_ack_delay phys_port_cnt"),
    ),
    _declared(
        "ibv_port_attr",
        (INT, "state max_mtu active_mtu gid_tbl_len"),
        (U32, "port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr"),
        (U16, "pkey_tbl_len lid sm_lid"),
        (U8, "lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state link_layer"),
        (U8, "flags"),
        (U16, "port_cap_flags2"),
    ),
    _declared("ibv_gid_entry", (_GID, "gid"), (U32, "gid_index port_num gid_type ndev_ifindex")),
    _declared("ibv_sge", (U64, "addr"), (U32, "length lkey")),
    _declared(
        "ibv_send_wr",
        (U64, "wr_id"),
        (POINTER, "next sg_list"),
        (INT, "num_sge opcode"),
        (U32, "send_flags imm_data"),
        (_declared("wr", (_RDMA, "rdma")), "wr"),
    ),
    _declared("ibv_recv_wr", (U64, "wr_id"), (POINTER, "next sg_list"), (INT, "num_sge")),
    _declared(
        "ibv_wc",
        (U64, "wr_id"),
        (INT, "status opcode"),
        (U32, "vendor_err byte_len imm_data qp_num src_qp wc_flags"),
        (U16, "pkey_index slid"),
        (U8, "sl dlid_path_bits"),
    ),
    _declared(
        "ibv_qp_init_attr", (POINTER, "qp_context send_cq recv_cq srq"), (_QP_CAP, "cap"), (INT, "qp_type sq_sig_all")
    ),
    _AH_ATTR,
    _declared(
        "ibv_qp_attr",
        (INT, "qp_state cur_qp_state path_mtu path_mig_state"),
        (U32, "qkey rq_psn sq_psn dest_qp_num qp_access_flags"),
        (_QP_CAP, "cap"),
        (_AH_ATTR, "ah_attr alt_ah_attr"),
        (U16, "pkey_index alt_pkey_index"),
        (U8, "en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout"),
        (U8, "retry_cnt rnr_retry alt_port_num alt_timeout"),
        (U32, "rate_limit"),
    ),
    _declared("efadv_qp_init_attr", (U64, "comp_mask"), (U32, "driver_qp_type"), (U16, "flags"), (U8, "sl reserved")),
    _declared(
        "efadv_device_attr",
        (U64, "comp_mask"),
        (U32, "max_sq_wr max_rq_wr"),
        (U16, "max_sq_sge max_rq_sge inline_buf_size reserved"),
        (U32, "device_caps max_rdma_size"),
    ),
    _declared("efadv_ah_attr", (U64, "comp_mask"), (U16, "ahn"), (U8 * 6, "reserved")),
)


def _place(struct: type[ctypes.Structure], path: str) -> tuple[int, int]:
    """Offset and bytes of a field by its C path, as ctypes lays ``struct`` out."""
    offset, kind = 0, struct
    for name in path.split("."):
        offset += getattr(kind, name).offset
        kind = dict(kind._fields_)[name]  # type: ignore[misc, assignment]
    return offset, ctypes.sizeof(kind)


@pytest.mark.parametrize("declared", DECLARED, ids=operator.attrgetter("__name__"))
def test_offsets_are_those_of_the_declarations(declared: type[ctypes.Structure]) -> None:
    (struct,) = (one for one in abi.STRUCTS if one.name == declared.__name__)
    for path, field in struct.fields.items():
        assert (field.offset, field.nbytes) == _place(declared, path), path
    # work requests have a union at their end, of which only RDMA is declared here
    if struct.name != "ibv_send_wr":
        assert struct.nbytes == ctypes.sizeof(declared)
