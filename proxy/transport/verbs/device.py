"""Control path of verbs through ctypes: devices, PD, MR, CQ as objects that end in the right order.

Every object checks at birth that the fields this package reads of it lie where :mod:`.abi` says, against values
that it knows otherwise; nothing compiled sees a raw pointer before that. Closing an object closes what was made from
it first, so nothing leaks however a caller fails; all of them are context managers. Queue pairs and address handles are
in :mod:`.objects`.

pyverbs is not used here: it exposes no raw pointer, which the compiled data path needs, and has to match the installed
rdma-core. Where it is installed, ``uccl-ep doctor`` adds what it reports of the devices.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import functools
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ....errors import ConfigError, TransportError
from ..nic.gid import Gid
from . import codes
from .abi import (
    ASYNC_EVENT,
    CONTEXT,
    CQ,
    DEVICE,
    DEVICE_ATTR,
    GID_ENTRY,
    MR,
    PD,
    PORT_ATTR,
    Block,
    Struct,
)
from .library import VerbsLibrary

__all__ = [
    "CompletionQueue",
    "Context",
    "DeviceLimits",
    "MemoryRegion",
    "Port",
    "ProtectionDomain",
    "VerbsObject",
    "open_device",
]

_log = logging.getLogger("uccl_ep_serving")

_EXTENDED = (1 << 64) - 1
#: Most GIDs read of a port; NICs have up to 1,024.
_GIDS = 1024
#: Most reports kept of a device, and read at once.
_REPORTS = 16


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
    """A port: its number (from 1), LINK_*, PORT_*, path MTU (the verbs number), LID and longest message in bytes."""

    number: int
    link_layer: int
    state: int
    mtu: int
    lid: int
    max_message: int


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
        if self.address:
            descriptor = CONTEXT.get(self.address, "async_fd")
            # The call waits for an event otherwise.
            if 2 < descriptor < 1 << 20:
                os.set_blocking(descriptor, False)
            event = Block(ASYNC_EVENT)
            for _ in range(_REPORTS):
                if self.library.call("ibv_get_async_event", self.address, event.address) != 0:
                    break
                if event["event_type"] not in codes.HARMLESS_EVENTS:
                    self._reported.append(codes.event_words(event["event_type"]))
                # Destroying the object that an event is about waits until it is acknowledged.
                self.library.call("ibv_ack_async_event", event.address)
        return tuple(self._reported)

    def operation(self, name: str) -> int:
        """Address of a data-path function of the provider: ``poll_cq``, ``post_send``, ``post_recv``.

        Raises TransportError when the provider has none.
        """
        function = CONTEXT.get(self.address, f"ops.{name}")
        if not function:
            raise TransportError(f"{self.device}: its driver has no {name}", device=self.device)
        return function

    @property
    def extended(self) -> bool:
        """Whether the extended operations (``verbs_context``) exist."""
        return CONTEXT.get(self.address, "abi_compat") == _EXTENDED


class ProtectionDomain(VerbsObject):
    """A protection domain of ``context``. Raises TransportError."""

    def __init__(self, context: Context) -> None:
        address = context.library.pointer(
            "ibv_alloc_pd", context.address, device=context.device, doing="making a protection domain"
        )
        super().__init__(context.library, context.device, address, "ibv_dealloc_pd", [context])
        self.context = context
        self.check(PD, context=context.address)


class MemoryRegion(VerbsObject):
    """Registered memory: ``nbytes`` bytes at ``start``, with its local and remote key.

    Args:
        pd: protection domain.
        start, nbytes: the memory.
        access: ``ACCESS_*``.
        dmabuf: descriptor and offset of a dma-buf that ``start`` is a mapping of, for device memory.

    Raises:
        TransportError: the NIC or the kernel refused.
    """

    def __init__(
        self, pd: ProtectionDomain, start: int, nbytes: int, access: int, dmabuf: tuple[int, int] | None = None
    ) -> None:
        library, doing = pd.library, f"registering {nbytes} bytes of memory"
        relaxed = bool(access & codes.ACCESS_RELAXED_ORDERING)
        if dmabuf is not None:
            if "ibv_reg_dmabuf_mr" not in library:
                raise TransportError(f"{pd.device}: {library.name} is older than rdma-core 34 and knows no dma-buf")
            descriptor, offset = dmabuf
            address = library.pointer(
                "ibv_reg_dmabuf_mr",
                pd.address,
                offset,
                nbytes,
                start,
                descriptor,
                access,
                device=pd.device,
                doing=f"{doing} by dma-buf",
            )
        elif relaxed and "ibv_reg_mr_iova2" in library:
            address = library.pointer(
                "ibv_reg_mr_iova2", pd.address, start, nbytes, start, access, device=pd.device, doing=doing
            )
        else:
            access &= ~codes.ACCESS_RELAXED_ORDERING
            address = library.pointer("ibv_reg_mr", pd.address, start, nbytes, access, device=pd.device, doing=doing)
        super().__init__(library, pd.device, address, "ibv_dereg_mr", [pd])
        self.check(MR, pd=pd.address, length=nbytes)
        self.start, self.nbytes = start, nbytes
        self.lkey, self.rkey = MR.get(address, "lkey"), MR.get(address, "rkey")


class CompletionQueue(VerbsObject):
    """A completion queue of at least ``entries`` entries. Raises TransportError."""

    def __init__(self, context: Context, entries: int) -> None:
        address = context.library.pointer(
            "ibv_create_cq",
            context.address,
            entries,
            0,
            0,
            0,
            device=context.device,
            doing=f"making a completion queue of {entries} entries",
        )
        super().__init__(context.library, context.device, address, "ibv_destroy_cq", [context])
        self.check(CQ, context=context.address)
        self.entries = CQ.get(address, "cqe")
        if self.entries < entries:
            self.close()
            raise TransportError(f"{context.device}: asked for {entries} completions, got {self.entries}")


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
            raise ConfigError(f"no RDMA device {name!r}; {library.name} sees: {', '.join(devices) or 'none'}")
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
