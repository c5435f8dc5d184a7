"""Flow control of RoCE NICs: PFC, and ECN with DCQCN, as far as this machine shows them to any user.

| what | where |
|---|---|
| PFC, priority of a DSCP | DCB netlink (:mod:`.dcb`): drivers of Broadcom, Mellanox and others |
| ECN of Mellanox | ``/sys/class/net/X/ecn/roce_{np,rp}/enable/P``: the driver of NVIDIA's own packages only |
| ECN of Broadcom | ``/sys/kernel/config/bnxt_re/D/ports/P/cc/``, once root has made the directory D |
| what has happened | ``/sys/class/infiniband/D/ports/P/hw_counters/`` |

What none of them shows is said to be unknown: it is not guessed from the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from uccl_ep_serving.cli.doctor import dcb
from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.topology import SYSFS, Nic, Topology, entries_of, number_of, text_of
from uccl_ep_serving.proxy.transport.nic.defaults import Family, family_of

__all__ = ["FlowControl", "examine_flow_control", "judge"]

#: Hardware counters, summed by what they tell.
_COUNTERS = {
    "congestion notifications": ("np_cnp_sent", "rp_cnp_handled", "tx_cnp_pkts", "rx_cnp_pkts"),
    "packets marked by ECN": ("np_ecn_marked_roce_packets", "rx_ecn_marked_pkts"),
    "acknowledgements that came too late": ("local_ack_timeout_err", "to_retransmits"),
}
_BROADCOM = "Broadcom"


@dataclass(frozen=True, slots=True)
class FlowControl:
    """What was found of one NIC.

    Attributes:
        family: of the NIC.
        interface: its network interface.
        dscp, priority: of our packets.
        paused_dscp: one that leads to a priority that is paused, -1 = unknown.
        pfc: priorities that are paused and not dropped; None = unknown, why is in ``pfc_unknown``.
        ecn: whether ECN works for our priority; None = unknown, why is in ``ecn_unknown``.
        counters: what has happened since the driver was loaded, in words.
    """

    family: Family
    interface: str
    dscp: int
    priority: int
    paused_dscp: int
    pfc: frozenset[int] | None
    pfc_unknown: str
    ecn: bool | None
    ecn_unknown: str
    counters: str = ""


def examine_flow_control(
    topology: Topology, settings: Settings, sysfs: Path = SYSFS, ask: Callable[[str], dcb.Dcb] = dcb.ask
) -> Iterator[Finding]:
    """One finding per active RoCE NIC."""
    for nic in topology.nics:
        if nic.transport == "roce" and nic.link == "Ethernet" and nic.active and not nic.is_software:
            yield judge(nic.name, _look(nic, settings, sysfs, ask))


def _look(nic: Nic, settings: Settings, sysfs: Path, ask: Callable[[str], dcb.Dcb]) -> FlowControl:
    entry = sysfs / "class/infiniband" / nic.name
    family = family_of(number_of(entry / "device/vendor", 0))
    dscp = (family.traffic_class if settings.nic_traffic_class < 0 else settings.nic_traffic_class) >> 2
    # without a table the upper three bits of a DSCP are its priority
    priority, paused, pfc, pfc_unknown = dscp >> 3, -1, None, "its interface is not in this network namespace"
    interface = next((one.name for one in entries_of(entry / "device/net")), "")
    if interface:
        try:
            told = ask(interface)
        except dcb.DcbError as error:
            pfc_unknown = str(error)
        else:
            priority, pfc, pfc_unknown = told.dscp.get(dscp, priority), told.pfc, ""
            leading = [one for one, goes in sorted(told.dscp.items()) if goes in told.pfc]
            paused = next(iter([*leading, *(one << 3 for one in sorted(told.pfc))]), -1)
    port = min(nic.ports, default=1)
    places = [sysfs / "class/net" / interface / f"ecn/roce_{end}/enable/{priority}" for end in ("np", "rp")]
    unknown = "the driver shows it to root only, below /sys/kernel/debug"
    if family.name == _BROADCOM:
        places = [sysfs / f"kernel/config/bnxt_re/{nic.name}/ports/{port}/cc/ecn_enable"]
        unknown = f"root has to make the directory first: mkdir /sys/kernel/config/bnxt_re/{nic.name}"
    values = [text_of(place) for place in places]
    ecn = None if "" in values else all(_is_on(value) for value in values)
    counters = entry / f"ports/{port}/hw_counters"
    seen = {what: [text_of(counters / name) for name in names] for what, names in _COUNTERS.items()}
    words = [f"{sum(map(int, filter(str.isdigit, found)))} {what}" for what, found in seen.items() if any(found)]
    return FlowControl(
        family=family,
        interface=interface,
        dscp=dscp,
        priority=priority,
        paused_dscp=paused,
        pfc=pfc,
        pfc_unknown=pfc_unknown,
        ecn=ecn,
        ecn_unknown="" if ecn is not None else unknown,
        counters=", ".join(words),
    )


def judge(device: str, found: FlowControl) -> Finding:
    """What was found in words, whether it is enough, and what to do."""
    ours = f"our packets have DSCP {found.dscp}, priority {found.priority}"
    pfc = f"PFC unknown ({found.pfc_unknown})"
    if found.pfc is not None:
        pfc = f"PFC on {', '.join(map(str, sorted(found.pfc))) or 'no priority'}"
    ecn = f"ECN unknown ({found.ecn_unknown})"
    if found.ecn is not None:
        ecn = f"ECN {'on' if found.ecn else 'off'}"
    value = "; ".join(part for part in (f"{found.interface or device}: {pfc}", ecn, ours, found.counters) if part)
    name = f"{device} flow control"
    lossless = found.pfc is not None and found.priority in found.pfc
    if lossless or found.ecn:
        return Finding(name, value)
    if found.pfc:
        wanted = found.paused_dscp
        step = f"UCCL_EP_NIC_TRAFFIC_CLASS={wanted * 4} (DSCP {wanted}), if that is the class of RoCE in this fabric"
        return Finding(name, f"{value}: they are dropped where others are paused", Status.NOTE, step)
    tool = "niccli or bnxt_setupcc.sh" if found.family.name == _BROADCOM else f"mlnx_qos -i {found.interface}"
    step = f"see what the fabric expects, and set PFC or ECN for priority {found.priority} with {tool}"
    if found.pfc is None:
        step = f"look at it with {tool}"
    if found.family.name == _BROADCOM:
        value += ": throughput of these NICs collapses without flow control on the network (completion status 12)"
    return Finding(name, value, Status.NOTE, step)


def _is_on(text: str) -> bool:
    try:
        return int(text, 0) != 0
    except ValueError:
        return False
