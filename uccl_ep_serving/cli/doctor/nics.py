"""NICs for ``uccl-ep doctor``: each device with what it is and who uses it, the NICs of each GPU, what they offer."""

from __future__ import annotations

from collections.abc import Iterator

from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.data_plane.rails import HcaFilter, Rails, choose_rails
from uccl_ep_serving.data_plane.topology import Nic, Topology
from uccl_ep_serving.proxy.transport.select import EFA, NIC_TRANSPORTS, ROCE

__all__ = ["examine_nics", "examine_transports"]

_ABSENT = {EFA: "no device with the efa driver", ROCE: "no RDMA device other than EFA"}
_INSTALL = "install the NIC and its driver, where this transport is wanted"


def examine_nics(topology: Topology, wanted: HcaFilter) -> Iterator[Finding]:
    """One finding per NIC (why it is used or not), then one per GPU (its NICs, or why it has none).

    Ranks without a GPU share all NICs; without a GPU in the machine that is what is reported.
    """
    if not topology.nics:
        step = "load the driver of the NIC, if it has RDMA"
        yield Finding("rdma", "none: /sys/class/infiniband has no device", Status.NOTE, step)
        return
    choices = {
        (transport, gpu.address): choose_rails(topology, transport, gpu=gpu.address, wanted=wanted)
        for transport in ("efa", "roce")
        for gpu in topology.gpus
    } or {(transport, ""): choose_rails(topology, transport, wanted=wanted) for transport in ("efa", "roce")}
    for nic in topology.nics:
        yield _examine_nic(nic, [rails for rails in choices.values() if rails.transport == nic.transport])
    for (transport, gpu), rails in choices.items():
        if any(nic.transport == transport for nic in topology.nics):
            yield _examine_rails(topology, gpu, rails)


def _words(nic: Nic) -> str:
    numa = f"NUMA {nic.numa}" if nic.numa >= 0 else ""
    parts = (nic.driver or "software", nic.address, nic.link, f"{nic.gbps:g} Gb/s", numa)
    return ", ".join(part for part in parts if part)


def _examine_nic(nic: Nic, choices: list[Rails]) -> Finding:
    verdicts = [verdict for rails in choices for verdict in rails.verdicts if verdict.nic == nic]
    users = [index for index, verdict in enumerate(verdicts) if verdict.used]
    if users:
        whom = f"GPU {', '.join(map(str, users))}" if len(verdicts) > 1 else "this machine's ranks"
        return Finding(nic.name, f"{_words(nic)}: {verdicts[users[0]].reason} of {whom}")
    nearest = min(verdicts, key=lambda verdict: verdict.distance)
    value = f"{_words(nic)}: not used: {nearest.reason}"
    if nic.active:
        return Finding(nic.name, value, Status.NOTE, "name it in UCCL_EP_NICS to use it all the same")
    step = f"bring the link up: cat /sys/class/infiniband/{nic.name}/ports/1/state"
    return Finding(nic.name, value, Status.NOTE, step)


def _examine_rails(topology: Topology, address: str, rails: Rails) -> Finding:
    gpu = topology.gpu(address) if address else None
    name = f"rails of GPU {topology.gpus.index(gpu)}" if gpu else "rails"
    if not rails.nics:
        reasons = sorted({verdict.reason for verdict in rails.verdicts if verdict.nic.transport == rails.transport})
        return Finding(name, f"{rails.transport}: none: {'; '.join(reasons)}", Status.NOTE, "see the devices above")
    near = f", {Topology.distance(gpu, rails.nics[0]).name.lower()} from {gpu.address}" if gpu else ""
    speed = sum(nic.gbps for nic in rails.nics)
    names = ", ".join(nic.name for nic in rails.nics)
    cores = topology.near_cpus(rails.nics[0])
    where = f", proxies on {len(cores)} cores of NUMA {rails.nics[0].numa}" if cores else ""
    return Finding(name, f"{rails.transport}: {names}: {speed:g} Gb/s{near}{where}")


def examine_transports(nics: HostNics, settings: Settings) -> Iterator[Finding]:
    """Each transport over NICs: over which ones it is usable here, or why not and what to do.

    A transport that cannot be used is a problem only where ``settings`` demand it: there is always ``tcp``.
    """
    for transport in NIC_TRANSPORTS:
        offer = nics.offers[transport]
        if offer.nics:
            words = f"usable over {', '.join(offer.nics)} ({offer.fabric}): {offer.reason}"
            if offer.broken:
                left_out = f"{words}. Left out: {'; '.join(offer.broken)}"
                yield Finding(transport, left_out, Status.NOTE, "correct what is wrong with the NICs that are left out")
            else:
                yield Finding(transport, words)
            continue
        demanded = settings.transport == transport
        status = Status.PROBLEM if demanded else Status.NOTE
        if offer.present:
            step = "see the devices under nics; correct what is named, or UCCL_EP_TRANSPORT=tcp"
            yield Finding(transport, f"unusable: {offer.reason}", status, step)
        else:
            step = "unset UCCL_EP_TRANSPORT, or install the NIC and its driver" if demanded else _INSTALL
            yield Finding(transport, f"unusable: {_ABSENT[transport]}", status, step)
