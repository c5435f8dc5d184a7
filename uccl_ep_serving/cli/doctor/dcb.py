"""What the kernel says of a network interface's priority flow control: DCB netlink, which any user may ask.

The message is that of ``dcb pfc show dev X``; numbers are those of ``linux/dcbnl.h`` and ``linux/rtnetlink.h``.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Dcb", "DcbError", "ask", "read_reply", "request"]

_RTM_GETDCB, _NLMSG_ERROR, _REQUEST = 78, 2, 1
_IEEE_GET = 21
_IFNAME, _IEEE, _PFC, _APP_TABLE, _APP = 1, 13, 2, 3, 1
#: Selector of an entry of the APP table that maps a DSCP.
_DSCP = 5
_HEADER, _ATTRIBUTE, _DCB_MESSAGE = struct.Struct("=IHHII"), struct.Struct("=HH"), struct.Struct("=BBH")
#: Nested attributes may be marked in their type.
_TYPE_MASK = 0x3FFF
_SECONDS = 1.0


class DcbError(Exception):
    """The kernel or the driver does not say; the reason in words."""


@dataclass(frozen=True, slots=True)
class Dcb:
    """Flow control of an interface.

    Attributes:
        pfc: priorities whose frames are paused and not dropped.
        dscp: priority by DSCP, as far as a table was set.
    """

    pfc: frozenset[int]
    dscp: dict[int, int] = field(default_factory=dict)


def ask(interface: str) -> Dcb:
    """Flow control of ``interface``. Raises DcbError."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
            netlink.settimeout(_SECONDS)
            netlink.bind((0, 0))
            netlink.send(request(interface))
            return read_reply(netlink.recv(1 << 16))
    except OSError as error:
        raise DcbError(f"asking the kernel: {error.strerror or error}") from None


def request(interface: str) -> bytes:
    """The message that asks for the IEEE attributes of ``interface``."""
    name = interface.encode() + b"\0"
    body = _DCB_MESSAGE.pack(socket.AF_UNSPEC, _IEEE_GET, 0) + _ATTRIBUTE.pack(4 + len(name), _IFNAME) + name
    body += bytes(-len(body) % 4)
    return _HEADER.pack(_HEADER.size + len(body), _RTM_GETDCB, _REQUEST, 1, 0) + body


def read_reply(reply: bytes) -> Dcb:
    """What a reply says. Raises DcbError when it is a refusal, or says nothing of flow control."""
    if len(reply) < _HEADER.size + 4:
        raise DcbError("the kernel's answer is cut short")
    length, kind, *_ = _HEADER.unpack_from(reply)
    body = reply[_HEADER.size : length]
    if kind == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", body)[0]
        raise DcbError(f"the driver does not tell ({os.strerror(number)})")
    ieee = dict(_attributes(body[_DCB_MESSAGE.size :])).get(_IEEE, b"")
    told = dict(_attributes(ieee))
    if len(told.get(_PFC, b"")) < 2:
        raise DcbError("the driver tells nothing of PFC")
    enabled = told[_PFC][1]
    entries = [struct.unpack_from("=BBH", one) for kind, one in _attributes(told.get(_APP_TABLE, b"")) if kind == _APP]
    dscp = {protocol: priority for selector, priority, protocol in entries if selector == _DSCP}
    return Dcb(frozenset(priority for priority in range(8) if enabled >> priority & 1), dscp)


def _attributes(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and payload of each attribute, as far as they are whole."""
    place = 0
    while place + _ATTRIBUTE.size <= len(text):
        length, kind = _ATTRIBUTE.unpack_from(text, place)
        if length < _ATTRIBUTE.size or place + length > len(text):
            return
        yield kind & _TYPE_MASK, text[place + _ATTRIBUTE.size : place + length]
        place += length + -length % 4
