"""The transports: whether each is usable here and why not, then the way to each kind of peer."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
from collections.abc import Iterator

import psutil

from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.addresses import choose_address
from uccl_ep_serving.data_plane import gpu_direct
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.native.descriptors import memfd
from uccl_ep_serving.protocol.listener import listen
from uccl_ep_serving.proxy.transport.select import EFA, NIC_TRANSPORTS, ROCE, Offer, Offers, preview

__all__ = ["control_address", "examine_nic_transports", "transports"]

_ABSENT = {EFA: "no device with the efa driver", ROCE: "no RDMA device other than EFA"}
#: Free ports are counted up to this many.
_ENOUGH_PORTS = 128
_GPU_STEP = (
    "load nvidia-peermem (or AMD's module), or take a kernel (5.12), rdma-core (34) and GPU driver with dma-buf: "
    "windows lie in GPU memory then, and rows cross PCIe half as often"
)
_INSTALL = "install the NIC and its driver, where this transport is wanted"


def transports() -> Iterator[Finding]:
    """Each transport with the reason it is or is not usable, then the way to each kind of peer."""
    yield _shm()
    yield _tcp()
    try:
        in_force = Settings.from_environment()
    except ConfigError:
        return  # reported under settings
    yield from control_address(in_force)
    offers: Offers = {}
    try:
        nics = HostNics(in_force)
    except ConfigError as error:
        if in_force.transport in ("auto", *NIC_TRANSPORTS):  # a Buffer would raise the same
            yield Finding("nics", str(error), Status.PROBLEM, "correct or unset the variable")
            return
        yield Finding("nics", f"not looked at: {error}", Status.NOTE, "correct or unset the variable")
    else:
        offers, writes = gpu_direct.probe(nics, nics.offers, _gpu(in_force))
        yield from examine_nic_transports(offers, in_force)
        if any(offer.gpu for offer in offers.values()):
            yield Finding("NIC writes", f"into GPU memory: {writes.words}")
    for situation, answer in preview(in_force, offers):
        yield Finding("peer", f"{situation}: {answer}")


def _way_out(offer: Offer) -> str:
    return f"unset {offer.asked}" if offer.asked else "UCCL_EP_TRANSPORT=tcp"


def _gpu(settings: Settings) -> gpu_direct.Gpu | None:
    """The GPU that NICs are asked to write, None without one. It gets a context for a moment."""
    if settings.device == "cpu" or settings.window == "host" or "torch" not in sys.modules:
        return None
    import torch

    if not torch.cuda.is_available():
        return None

    def memory() -> gpu_direct.GpuMemory:
        from uccl_ep_serving.gpu.memory import memory_of

        return memory_of(torch.device("cuda"), False)

    return gpu_direct.Gpu(memory)


def _shm() -> Finding:
    try:
        descriptor = memfd("uccl_ep_doctor")
    except OSError as error:
        step = "allow memfd_create in the container's seccomp profile"
        return Finding("shm", f"unusable: memfd_create: {error.strerror}", Status.PROBLEM, step)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[0] = 1
    except OSError as error:
        step = "raise the memory limit of the container"
        return Finding("shm", f"unusable: mapping shared memory: {error.strerror}", Status.PROBLEM, step)
    finally:
        os.close(descriptor)
    return Finding("shm", "usable between ranks of this host")


def _tcp() -> Finding:
    """Addresses that peers could connect to, of both families."""
    up = psutil.net_if_stats()
    addresses = [
        f"{name} {address.address}"
        for name, found in sorted(psutil.net_if_addrs().items())
        for address in found
        if address.family in (socket.AF_INET, socket.AF_INET6) and name in up and up[name].isup
        # with a zone: link-local, which ranks do not take
        if "%" not in address.address
    ]
    if not addresses:
        step = "bring an interface up: ip link set lo up"
        return Finding("tcp", "unusable: no interface is up with an IP address", Status.NOTE, step)
    if all(address.startswith("lo ") for address in addresses):
        return Finding("tcp", f"usable on this host only ({', '.join(addresses)})")
    return Finding("tcp", f"usable over {', '.join(addresses)}")


def control_address(settings: Settings) -> Iterator[Finding]:
    """Where a rank of this host would listen without a process group, whose store decides where there is one; and how
    many of the ports that it may use are free."""
    try:
        choice = choose_address(settings)
    except ConfigError as error:
        yield Finding("control address", str(error), Status.PROBLEM, "correct or unset UCCL_EP_SOCKET_IFNAME")
        return
    words = str(choice)
    if not settings.socket_ifname:
        words += "; with a process group, the route to the host of its TCPStore"
    if choice.ignored:
        words, step = f"{words}. Passed over: {'; '.join(choice.ignored)}", "correct or unset the variable"
        yield Finding("control address", words, Status.NOTE, step)
    else:
        yield Finding("control address", words)
    if settings.port_range is None:
        return
    first, last = settings.port_range
    with contextlib.ExitStack() as opened:
        free, each = 0, 1 + settings.proxies
        with contextlib.suppress(OSError):
            while first <= last and free < _ENOUGH_PORTS:
                listener = opened.enter_context(listen(choice.address, (first, last)))
                first, free = listener.getsockname()[1] + 1, free + 1
    words = f"{free}{' or more' if free == _ENOUGH_PORTS else ''} of {last - settings.port_range[0] + 1} ports of "
    words += "UCCL_EP_PORT_RANGE are free: enough for "
    words += f"{free // each} ranks of this host that connect over tcp at a time, {free} over others"
    few = free < each
    step = "widen UCCL_EP_PORT_RANGE, or end what listens there"
    yield Finding("ports", words, Status.PROBLEM if few else Status.OK, step if few else "")


def examine_nic_transports(offers: Offers, settings: Settings) -> Iterator[Finding]:
    """Each transport over NICs: over which ones it is usable here and whether they write GPU memory, or why not and
    what to do.

    A transport that cannot be used is a problem only where ``settings`` demand it, or name its NICs: there is always
    ``tcp``.
    """
    for transport in NIC_TRANSPORTS:
        offer = offers[transport]
        if offer.nics:
            words = f"usable over {', '.join(offer.nics)} ({offer.fabric}): {offer.reason}"
            if offer.gpu:
                words += f". GPU memory: by {offer.gpu}"
            steps = []
            if offer.no_gpu:
                words += f". No GPU memory: {offer.no_gpu}"
                steps.append(_GPU_STEP)
            if offer.broken:
                words += f". Left out: {'; '.join(offer.broken)}"
                steps.append("correct what is wrong with the NICs that are left out")
            demanded = offer.no_gpu and settings.window == "device"
            status = Status.PROBLEM if demanded else Status.NOTE if steps else Status.OK
            yield Finding(transport, words, status, "; ".join(steps))
            continue
        demanded = settings.transport == transport or bool(offer.asked)
        status = Status.PROBLEM if demanded else Status.NOTE
        if offer.present:
            step = f"see the devices under nics; correct what is named, or {_way_out(offer)}"
            yield Finding(transport, f"unusable: {offer.reason}", status, step)
        else:
            step = "unset UCCL_EP_TRANSPORT, or install the NIC and its driver" if demanded else _INSTALL
            yield Finding(transport, f"unusable: {_ABSENT[transport]}", status, step)
