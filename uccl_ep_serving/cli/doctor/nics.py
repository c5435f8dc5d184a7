"""RDMA devices: what each is, which GPU uses it or why none does, the NICs of each GPU, and flow control."""

from __future__ import annotations

from collections.abc import Iterator

from uccl_ep_serving.cli.doctor.congestion import examine_flow_control
from uccl_ep_serving.cli.doctor.findings import Finding, Status, settings_or_defaults
from uccl_ep_serving.cli.doctor.verbs import examine_with_bindings
from uccl_ep_serving.data_plane.rails import HcaFilter, Rails, choose_rails
from uccl_ep_serving.data_plane.topology import Nic, Topology
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.proxy.transport.select import NIC_TRANSPORTS

__all__ = ["examine_nics", "nics"]


def nics() -> Iterator[Finding]:
    """RDMA devices, as this package sees them, then as the library's own bindings do."""
    settings, topology = settings_or_defaults(), Topology.read()
    try:
        wanted = HcaFilter.of(settings)
    except ConfigError:
        wanted = HcaFilter()  # all; what is wrong is reported under settings or transports
    yield from examine_nics(topology, wanted)
    yield from examine_flow_control(topology, settings)
    yield from examine_with_bindings()


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
        for transport in NIC_TRANSPORTS
        for gpu in topology.gpus
    } or {(transport, ""): choose_rails(topology, transport, wanted=wanted) for transport in NIC_TRANSPORTS}
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
