"""Devices of verbs through ctypes, and what all C objects have in common: they end in the right order.

Every object checks at birth that the fields this package reads of it lie where :mod:`.abi` says, against values that it
knows otherwise; nothing compiled sees a raw pointer before that. Closing an object closes what was made from it first,
so nothing leaks however a caller fails; all of them are context managers. :mod:`.objects` has what is made from a
device.

The library may have pyverbs make the objects (:mod:`.bindings`): here they are addresses of structs either way.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import functools
import ipaddress
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ....errors import ConfigError, TransportError
from . import codes
from .abi import ASYNC_EVENT, CONTEXT, DEVICE, DEVICE_ATTR, GID_ENTRY, PORT_ATTR, Block, Struct
from .library import PACKAGES, VerbsLibrary

_log = logging.getLogger("uccl_ep_serving")

#: Why a library may see no device though sysfs shows one.
_NONE = (
    "none. Next step: give the container /dev/infiniband (docker --device=/dev/infiniband, Kubernetes: the resource of "
    f"the NIC's device plugin), and install the NIC's provider. {PACKAGES}"
)
#: Most GIDs read of a port; NICs have up to 1,024.
_GIDS = 1024
#: Most reports kept of a device, and read at once.
_REPORTS = 16


_TYPE_WORDS = {codes.GID_TYPE_IB: "IB", codes.GID_TYPE_ROCE_V1: "RoCE v1", codes.GID_TYPE_ROCE_V2: "RoCE v2"}


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table.

    Attributes:
        index: place in the table.
        kind: ``GID_TYPE_*``.
        raw: its 16 bytes.
        interface: index of the network interface it belongs to, 0 = none.
    """

    index: int
    kind: int
    raw: bytes
    interface: int = 0

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The IP address it stands for; v4-mapped GIDs are IPv4."""
        address = ipaddress.IPv6Address(self.raw)
        return address.ipv4_mapped or address

    @property
    def usable(self) -> bool:
        """Neither zero nor link-local."""
        address = self.address
        return not (address.is_unspecified or address.is_link_local)

    def __str__(self) -> str:
        return f"GID {self.index} ({_TYPE_WORDS.get(self.kind, f'type {self.kind}')}, {self.address})"


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What ``ibv_query_device`` says, as far as it is used: counts of objects and of entries in them."""

    vendor: int
    part: int
    firmware: str
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_cqe: int
    max_mr_size: int
    ports: int


@dataclass(frozen=True, slots=True)
class Port:
    """A port: its number (from 1), LINK_*, PORT_*, path MTU (the verbs number), LID, longest message in bytes, and
    whether every packet must have a global route header."""

    number: int
    link_layer: int
    state: int
    mtu: int
    lid: int
    max_message: int
    needs_route: bool


class VerbsObject:
    """A C object. Owns what is made from it, and is owned by what it is made from.

    Attributes:
        address: of the C struct, 0 once closed.
        library, device: for calls and messages.
    """

    def __init__(
        self, library: VerbsLibrary, device: str, address: int, destroy: str, owners: Sequence[VerbsObject] = ()
    ) -> None:
        self.library, self.device, self.address = library, device, address
        self._destroy = destroy
        self._parts: list[VerbsObject] = []
        self._owners = list(owners)
        for owner in owners:
            owner._parts.append(self)

    def check(self, struct: Struct, **expected: int) -> None:
        """Raise TransportError unless the C struct holds ``expected``: the library lays it out otherwise."""
        for field, value in expected.items():
            found = struct.get(self.address, field)
            if found != value:
                self.close()
                raise TransportError(
                    f"{self.device}: {struct.name}.{field} of {self.library.name} is {found:#x} where {value:#x} "
                    "must stand: this rdma-core lays its structs out in an unknown way. Releases 44 and 59 are known "
                    "to work",
                    device=self.device,
                )

    def close(self) -> None:
        """Destroy what was made from this object, last first, then the object. Never raises, may be called twice."""
        while self._parts:
            self._parts[-1].close()
        address, self.address = self.address, 0
        for owner in self._owners:
            if self in owner._parts:
                owner._parts.remove(self)
        if address:
            status = self.library.call(self._destroy, address)
            if status:
                number = status if status > 0 else ctypes.get_errno()
                _log.error("%s", self.library.refused(self._destroy, number, self.device, "closing"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Context(VerbsObject):
    """An open device. See :func:`open_device`."""

    def __init__(self, library: VerbsLibrary, name: str, device: int) -> None:
        address = library.pointer("ibv_open_device", device, device=name, doing="opening the device")
        super().__init__(library, name, address, "ibv_close_device")
        self._reported: collections.deque[str] = collections.deque(maxlen=_REPORTS)
        self._lost = False
        # the thread that reads the control connections asks as well, and the host closes
        self._asking = threading.Lock()
        self.check(CONTEXT, device=device)
        _open.add(self)

    @functools.cached_property
    def limits(self) -> DeviceLimits:
        """Limits of the device. Raises TransportError when it does not answer."""
        found = Block(DEVICE_ATTR)
        self.library.status(
            "ibv_query_device", self.address, found.address, device=self.device, doing="asking for its limits"
        )
        return DeviceLimits(
            vendor=found["vendor_id"],
            part=found["vendor_part_id"],
            firmware=DEVICE_ATTR.get_bytes(found.address, "fw_ver").split(b"\0")[0].decode(errors="replace"),
            max_qp=found["max_qp"],
            max_qp_wr=found["max_qp_wr"],
            max_sge=found["max_sge"],
            max_cqe=found["max_cqe"],
            max_mr_size=found["max_mr_size"],
            ports=found["phys_port_cnt"],
        )

    def port(self, number: int) -> Port:
        """Attributes of a port now. Raises TransportError."""
        found = Block(PORT_ATTR)
        self.library.status(
            "ibv_query_port", self.address, number, found.address, device=self.device, doing=f"asking for port {number}"
        )
        return Port(
            number=number,
            link_layer=found["link_layer"],
            state=found["state"],
            mtu=found["active_mtu"],
            lid=found["lid"],
            max_message=found["max_msg_sz"],
            needs_route=bool(found["flags"] & codes.PORT_NEEDS_GRH),
        )

    def gids(self, port: int) -> list[Gid]:
        """Valid entries of a port's GID table. Raises TransportError."""
        entries = (ctypes.c_uint8 * (_GIDS * GID_ENTRY.nbytes))()
        start = ctypes.addressof(entries)
        count = self.library.call("_ibv_query_gid_table", self.address, start, _GIDS, 0, GID_ENTRY.nbytes)
        if count < 0:
            raise self.library.refused("ibv_query_gid_table", -count, self.device, "reading the GID table")
        found = []
        for entry in range(start, start + count * GID_ENTRY.nbytes, GID_ENTRY.nbytes):
            if GID_ENTRY.get(entry, "port_num") == port:
                found.append(
                    Gid(
                        index=GID_ENTRY.get(entry, "gid_index"),
                        kind=GID_ENTRY.get(entry, "gid_type"),
                        raw=GID_ENTRY.get_bytes(entry, "gid"),
                        interface=GID_ENTRY.get(entry, "ndev_ifindex"),
                    )
                )
        return sorted(found, key=lambda gid: gid.index)

    def reports(self) -> Sequence[str]:
        """What the device has reported of itself so far (a port that went down, a fatal error), in words, the latest
        :data:`_REPORTS`. Asks the device; never waits, never raises."""
        with self._asking:
            if self.address:
                self._take_events()
            return tuple(self._reported)

    def _take_events(self) -> None:
        descriptor = CONTEXT.get(self.address, "async_fd")
        # The call waits for an event otherwise.
        if 2 < descriptor < 1 << 20:
            os.set_blocking(descriptor, False)
        event = Block(ASYNC_EVENT)
        for _ in range(_REPORTS):
            if self.library.call("ibv_get_async_event", self.address, event.address) != 0:
                break
            kind = event["event_type"]
            self._lost |= kind in codes.FATAL_EVENTS
            if kind not in codes.HARMLESS_EVENTS:
                self._reported.append(codes.event_words(kind))
            # Destroying the object that an event is about waits until it is acknowledged.
            self.library.call("ibv_ack_async_event", event.address)

    def is_lost(self) -> bool:
        """Whether the device has reported that it does nothing more. Asks it, as :meth:`reports` does."""
        self.reports()
        return self._lost

    def close(self) -> None:
        """See :class:`VerbsObject`."""
        with self._asking:
            super().close()

    def operation(self, name: str) -> int:
        """Address of a data-path function of the provider: ``poll_cq``, ``post_send``, ``post_recv``.

        Raises TransportError when the provider has none.
        """
        function = CONTEXT.get(self.address, f"ops.{name}")
        if not function:
            raise TransportError(f"{self.device}: its driver has no {name}", device=self.device)
        return function


@contextlib.contextmanager
def _device_list(library: VerbsLibrary) -> Iterator[dict[str, int]]:
    """Address of every device by name, valid inside. Raises TransportError when the library cannot say."""
    count = ctypes.c_int(0)
    table = library.call("ibv_get_device_list", ctypes.addressof(count))
    if not table:
        number = ctypes.get_errno()
        if number not in (0, errno.ENOSYS):
            raise library.refused("ibv_get_device_list", number, library.name, "listing the devices")
        yield {}  # the kernel has no verbs at all
        return
    try:
        found = {}
        for address in (ctypes.c_uint64 * count.value).from_address(table):
            name = DEVICE.get_bytes(address, "name").split(b"\0")[0].decode(errors="replace")
            spoken = ctypes.string_at(library.call("ibv_get_device_name", address)).decode(errors="replace")
            if name != spoken:
                raise TransportError(f"{library.name} calls a device {spoken!r}, its struct {name!r}: unknown layout")
            found[name] = address
        yield found
    finally:
        library.call("ibv_free_device_list", table)


def open_device(library: VerbsLibrary, name: str) -> Context:
    """Open device ``name``.

    Raises:
        ConfigError: there is no such device; those that exist are named.
        TransportError: it cannot be opened.
    """
    with _device_list(library) as devices:
        if name not in devices:
            raise ConfigError(f"no RDMA device {name!r}; {library.name} sees: {', '.join(devices) or _NONE}")
        return Context(library, name, devices[name])


#: Open devices, to be let go in a forked child.
_open: weakref.WeakSet[Context] = weakref.WeakSet()


def _close_in_child() -> None:
    """A child that kept the descriptors would keep a killed rank's queue pairs alive, and its peers waiting."""
    for context in list(_open):
        if context.address:
            for field in ("cmd_fd", "async_fd"):
                descriptor = CONTEXT.get(context.address, field)
                if 2 < descriptor < 1 << 20:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)
