"""pyverbs as far as the control path uses it, over the functions of NICs in memory.

Its objects hold the addresses of their structs in memory of their own, as those of the real one do, and show none.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from uccl_ep_serving.proxy.transport.verbs.abi import AH_ATTR, QP_INIT_ATTR, Block
from uccl_ep_serving.proxy.transport.verbs.library import VerbsLibrary

__all__ = ["Refused", "classes"]


class Refused(Exception):
    """What pyverbs raises."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


class _Held(bytes):
    """An object whose memory holds words, the address of a struct among them."""

    library: VerbsLibrary
    ends: str
    address: int
    closed: bool

    def close(self) -> None:
        assert not self.closed, "ended twice"
        self.closed = True
        if status := self.library.call(self.ends, self.address):
            raise Refused(f"Failed to call {self.ends}", status)


def _held(library: VerbsLibrary, makes: str, ends: str, *arguments: int, hidden: bool = False) -> _Held:
    address = library.call(makes, *arguments)
    if not address:
        raise Refused(f"Failed to call {makes}. Errno: {ctypes.get_errno()}", ctypes.get_errno())
    words = [0x10, 3, 0xDEAD0000BEEF, 0 if hidden else address]
    made = _Held(b"".join(word.to_bytes(8, "little") for word in words))
    made.library, made.ends, made.address, made.closed = library, ends, address, False
    return made


def classes(library: VerbsLibrary, hidden: tuple[str, ...] = ()) -> SimpleNamespace:
    """By name.

    Args:
        hidden: kinds whose objects do not hold the address of their struct anywhere.
    """

    def context(name: str) -> Any:
        count = ctypes.c_int(0)
        table = library.call("ibv_get_device_list", ctypes.addressof(count))
        devices = list((ctypes.c_uint64 * count.value).from_address(table))
        named = {ctypes.string_at(library.call("ibv_get_device_name", one)).decode(): one for one in devices}
        return _held(library, "ibv_open_device", "ibv_close_device", named[name], hidden="Context" in hidden)

    def pd(of: _Held) -> Any:
        return _held(library, "ibv_alloc_pd", "ibv_dealloc_pd", of.address, hidden="PD" in hidden)

    def mr(of: _Held, length: int, access: int, address: int) -> Any:
        return _held(library, "ibv_reg_mr", "ibv_dereg_mr", of.address, address, length, access)

    def cq(of: _Held, entries: int) -> Any:
        return _held(library, "ibv_create_cq", "ibv_destroy_cq", of.address, entries, 0, 0, 0)

    def qp(of: _Held, given: SimpleNamespace) -> Any:
        block = Block(QP_INIT_ATTR, send_cq=given.scq.address, recv_cq=given.rcq.address, qp_type=given.qp_type)
        block["sq_sig_all"] = getattr(given, "sq_sig_all", 1)
        for name, value in vars(given.cap).items():
            block[f"cap.{name}"] = value
        return _held(library, "ibv_create_qp", "ibv_destroy_qp", of.address, block.address)

    def ah(of: _Held, attr: SimpleNamespace) -> Any:
        block = Block(AH_ATTR)
        for name, value in vars(attr).items():
            if name != "gr":
                block[name] = value
        for name, value in vars(attr.gr).items():
            if name != "dgid":
                block[f"grh.{name}"] = value
        AH_ATTR.set_bytes(block.address, "grh.dgid", bytes.fromhex(attr.gr.dgid.replace(":", "")))
        return _held(library, "ibv_create_ah", "ibv_destroy_ah", of.address, block.address)

    return SimpleNamespace(
        Context=context,
        PD=pd,
        MR=mr,
        CQ=cq,
        QP=qp,
        AH=ah,
        QPCap=SimpleNamespace,
        QPInitAttr=SimpleNamespace,
        AHAttr=SimpleNamespace,
        GlobalRoute=SimpleNamespace,
        GID=str,
    )
