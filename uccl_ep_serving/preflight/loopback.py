"""A NIC to itself: writes with immediate of nothing, 8 bytes and 1 MiB, between two endpoints of one process, and
between our endpoint and a peer written with pyverbs where that is installed; in host memory, and in that of a GPU.
Without proxies: what the NIC does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..check import faults
from ..check.faults import Wrong
from ..config import Settings
from ..data_plane.nics import HostNics, makes_verbs_objects
from ..gpu.memory import memory_of
from ..proxy.transport import base
from ..proxy.transport.select import ROCE
from .causes import explained
from .facts import Rail
from .job import Finding, Place
from .pyverbs_peer import PyverbsPeer
from .ways import DEVICE
from .wire import device_bytes, size_words

__all__ = ["try_nic"]

_PART = "NIC to itself"
_SIZES = (0, 8, 1 << 20)
#: Half of a window is sent from, the other half written to.
_HALF = 1 << 20
_SECONDS = 10.0
_POST = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)
_ONE, _THREE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64), ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
_EVENTS, _STREAM = 16, 8


def _odd(where: str, expected: str, found: str) -> Wrong:
    """No kernel of ours has run: only the NIC."""
    return Wrong(where, expected, found, "a defect of the NIC's driver, of rdma-core or of the transport here")


class _End:
    """One of our endpoints, driven through its C functions.

    Args:
        endpoint: connected.
        start: of its window in host memory, by which writes are told.
        memory: uint8 tensor over the window, wherever the NIC reads and writes it.
        rank: of it, of two.
    """

    def __init__(self, endpoint: base.Endpoint, start: int, memory: torch.Tensor, rank: int) -> None:
        self._start, self._memory, self._rank = start, memory, rank
        path = endpoint.data_path()
        self._context = path.context
        self._post, self._flush, self._poll = _POST(path.post), _ONE(path.flush), _THREE(path.poll)
        self._events = np.zeros((_EVENTS, base.EVENT_BYTES // 8), np.int64)

    def write(self, nbytes: int, immediate: int) -> None:
        """From the first half of the own window to the second of the peer's."""
        arguments = 1 - self._rank, _STREAM, self._start, _HALF, nbytes, immediate, immediate
        # one is on its way at a time: no queue is ever full
        if status := self._post(self._context, *arguments):
            raise _odd("posting a write", "it is accepted", f"status {status}")
        if status := self._flush(self._context):
            raise _odd("ringing the doorbell", "0", f"status {status}")

    def poll(self) -> Iterator[tuple[str, int, int]]:
        """What has happened: "sent" or "arrived", immediate and bytes."""
        count = self._poll(self._context, self._events.ctypes.data, _EVENTS)
        if count < 0:
            raise _odd("polling the NIC", "events", f"status {count}")
        for kind, value, _, status in self._events[:count].tolist():
            if kind == base.SENT:
                yield "sent", value, 0
            elif kind == base.ARRIVED:
                yield "arrived", value, status
            else:
                raise _odd("the connection to itself", "it stays", f"event {kind} with status {status}")

    def take(self, nbytes: int) -> bytes:
        """What lies where the peer wrote."""
        return self._memory[_HALF : _HALF + nbytes].cpu().numpy().tobytes()

    def put(self, content: bytes) -> None:
        """What :meth:`write` will send."""
        self._memory[: len(content)] = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        if self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)


class _Second:
    """The pyverbs peer, with the methods of :class:`_End`."""

    def __init__(self, peer: PyverbsPeer) -> None:
        self._peer = peer

    def write(self, nbytes: int, immediate: int) -> None:
        self._peer.write(0, nbytes, _HALF, immediate)
        self._sent = immediate

    def poll(self) -> Iterator[tuple[str, int, int]]:
        for entry in self._peer.poll():
            if entry.opcode == self._peer.enums.IBV_WC_RECV_RDMA_WITH_IMM:
                yield "arrived", socket.ntohl(entry.imm_data), entry.byte_len
            else:
                yield "sent", self._sent, 0

    def take(self, nbytes: int) -> bytes:
        return bytes(self._peer.window.read(nbytes, _HALF))

    def put(self, content: bytes) -> None:
        self._peer.window.write(content, len(content), 0)


def try_nic(
    rail: Rail, place: Place, settings: Settings, device: torch.device | None, say: Callable[[str], None]
) -> list[Finding]:
    """What this rank finds of one of its NICs; ``device``: its GPU, None without one."""
    where = f"{rail.name} on node {place.node}"
    own = replace(settings, transport=rail.transport, nics=rail.alone, proxies=1, channels=0)
    found = []
    parts: dict[str, Callable[[contextlib.ExitStack, Rail, Settings], tuple[Any, Any]]] = {_PART: _ours}
    if device is not None and settings.window != "host":
        parts[f"{_PART}, {DEVICE}"] = functools.partial(_ours, device=device)
    if rail.transport == ROCE and makes_verbs_objects(settings).startswith("pyverbs"):
        parts[f"{_PART}, pyverbs"] = _with_pyverbs
    for part, ends in parts.items():
        say(f"{part}: {rail.name}")
        try:
            with contextlib.ExitStack() as stack:
                found.append(Finding(part, where, _between(*ends(stack, rail, own))))
        except Exception as error:  # of any kind, those of pyverbs included: it is what the check is for
            found.append(Finding(part, where, fault=explained(faults.of(error, f"{where}, {part}"))))
    return found


def _ours(
    stack: contextlib.ExitStack, rail: Rail, settings: Settings, device: torch.device | None = None
) -> tuple[_End, _End]:
    """Two endpoints of ours, whose windows lie in memory of ``device`` where that is given."""
    nics = HostNics(settings)
    windows = [np.zeros(2 * _HALF, np.uint8) for _ in range(2)]
    endpoints = [_endpoint(stack, nics, rail, rank, window) for rank, window in enumerate(windows)]
    _connect(endpoints, [endpoint.address() for endpoint in endpoints])
    memories = [torch.from_numpy(window) for window in windows]
    if device is not None:
        memories = _move(stack, endpoints, device)
    ends = (_End(endpoint, int(windows[at].ctypes.data), memories[at], at) for at, endpoint in enumerate(endpoints))
    return next(ends), next(ends)


def _with_pyverbs(stack: contextlib.ExitStack, rail: Rail, settings: Settings) -> tuple[_End, _Second]:
    """An endpoint of ours and a peer written with pyverbs."""
    nics = HostNics(settings)
    window = np.zeros(2 * _HALF, np.uint8)
    endpoint = _endpoint(stack, nics, rail, 0, window)
    port, gid = nics.place_of(rail.transport)
    peer = PyverbsPeer(rail.name, gid, 2 * _HALF, port, settings.nic_pkey_index)
    stack.callback(peer.close)
    peer.connect(endpoint.address())
    _connect([endpoint], [b"", peer.address()])
    return _End(endpoint, int(window.ctypes.data), torch.from_numpy(window), 0), _Second(peer)


def _endpoint(
    stack: contextlib.ExitStack, nics: HostNics, rail: Rail, rank: int, window: npt.NDArray[np.uint8]
) -> base.Endpoint:
    """Endpoint ``rank`` of two, not connected."""
    endpoint = nics.endpoint(
        rail.transport,
        rank,
        2,
        0,
        window=int(window.ctypes.data),
        window_bytes=window.nbytes,
        peers=[1 - rank],
        local_offers=[nics.offers[rail.transport]] * 2,
    )
    stack.callback(endpoint.close)
    return endpoint


def _connect(endpoints: Sequence[base.Endpoint], addresses: Sequence[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    for rank, endpoint in enumerate(endpoints):
        endpoint.connect([None if rank == at else one for at, one in enumerate(addresses)], deadline)
    for endpoint in endpoints:
        if isinstance(endpoint, base.Watchful):
            endpoint.established()


def _move(stack: contextlib.ExitStack, endpoints: Sequence[base.Endpoint], device: torch.device) -> list[torch.Tensor]:
    """Have both endpoints use memory of ``device`` for their windows; views of it."""
    memory, nbytes, starts = memory_of(device, device.type == "cpu"), 2 * _HALF, []
    for _ in endpoints:
        starts.append(memory.allocate(nbytes))
        stack.callback(memory.free, starts[-1])
    offers = []
    for endpoint, start in zip(endpoints, starts, strict=True):
        assert isinstance(endpoint, base.DeviceReach)
        stack.callback(endpoint.release_device)
        offers.append(endpoint.offer_device(start, nbytes, memory.export_dmabuf))
    for rank, endpoint in enumerate(endpoints):
        assert isinstance(endpoint, base.DeviceReach)
        endpoint.accept_device([None if rank == at else offer for at, offer in enumerate(offers)])
    return [device_bytes(start, nbytes, device) for start in starts]


def _between(one: Any, other: Any) -> str:
    """Write each size both ways, verified; what was measured, in words."""
    words, number = [], 0
    for nbytes in _SIZES:
        taken = []
        for sender, receiver in ((one, other), (other, one)) * 4:
            number += 1
            content = np.random.default_rng(number).integers(0, 256, nbytes, np.uint8).tobytes()
            sender.put(content)
            immediate = (0 if sender is one else 1) << 20 | _STREAM << 12 | number
            begun = time.perf_counter()
            sender.write(nbytes, immediate)
            _wait(sender, receiver, immediate, nbytes)
            taken.append(time.perf_counter() - begun)
            if receiver.take(nbytes) != content:
                raise _odd(f"a write of {nbytes} bytes", "the bytes that were sent", "others")
        words.append(f"{size_words(nbytes)} {float(np.median(taken)) * 1e6:.0f} us")
    return ", ".join(words)


def _wait(sender: Any, receiver: Any, immediate: int, nbytes: int) -> None:
    """Until the write has completed here and arrived there."""
    seen: set[str] = set()
    deadline = time.monotonic() + _SECONDS
    while len(seen) < 2:
        for end, kind in ((sender, "sent"), (receiver, "arrived")):
            for event, value, length in end.poll():
                if (event, value) != (kind, immediate) or (event == "arrived" and length != nbytes):
                    found = f"{event} {value:#x} with {length} bytes"
                    raise _odd(f"a write of {nbytes} bytes", f"{kind} {immediate:#x}", found)
                seen.add(event)
        if time.monotonic() > deadline:
            missing = " and ".join({"sent", "arrived"} - seen)
            cause = "the NIC does not reach itself: its port, GID or switch does not return packets"
            raise Wrong(
                f"a write of {nbytes} bytes", f"it is {missing} within {_SECONDS:.0f} s", "nothing", cause,
                "another GID (UCCL_EP_NIC_GID_INDEX), or this NIC out (UCCL_EP_NICS)",
            )  # fmt: skip
