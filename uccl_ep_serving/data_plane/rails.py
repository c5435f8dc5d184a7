"""Which NICs a rank uses: the nearest ones to its GPU, dealt out evenly among the GPUs that share them.

A rank's NICs are its *rails*, in PCI order: rail i of one rank talks to rail i of another, so that in a rail-optimised
fabric traffic between equal GPUs of two hosts stays below one switch. Which stream takes which rail is decided by
:func:`uccl_ep_serving.proxy.transport.nic.words.rail_of`.

The choice, which :func:`choose_rails` explains NIC by NIC (and ``uccl-ep doctor`` prints):

1. NICs that ``UCCL_EP_NICS`` (else, of those that NCCL drives itself, ``NCCL_IB_HCA``) leaves out, that have no active
   port, that another transport drives or that could not be opened are not used. Software devices (soft-RoCE), and
   beside EFA other devices, only when such a variable names them.
2. Of the rest, those of one kind of network, InfiniBand or Ethernet: that whose NICs are faster together, unless a
   variable names others. A rail of the one cannot reach a rail of the other.
3. Of these, those at the smallest distance to the GPU, and of these, those at least half as fast as the fastest: a
   slow port for management or storage is no rail.
4. GPUs with the same nearest NICs share them: k GPUs and m >= k NICs get m/k each, in PCI order; fewer NICs than GPUs
   are used by m/k GPUs each.

Channels follow rails (:func:`choose_channels`): a stream keeps to one rail, and where rows cross once to a node a rank
has one peer on each other node, so one channel would leave all rails but one idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..config import Settings
from ..errors import ConfigError
from ..protocol.streams import MAX_CHANNELS
from .topology import Distance, Gpu, Nic, Topology

__all__ = ["Channels", "HcaFilter", "Rails", "Verdict", "choose_channels", "choose_rails", "deal"]

#: A NIC slower than this part of the fastest one at the same distance is not used.
_SLOWEST_PART = 0.5
#: The variable of our own list of devices.
_OURS = "UCCL_EP_NICS"
#: Of a NIC without a link.
_ANY_PORT = 0

#: A NIC, or its name.
_Rail = TypeVar("_Rail")


@dataclass(frozen=True, slots=True)
class HcaFilter:
    """A list of devices in the syntax of ``NCCL_IB_HCA``.

    ``mlx5_0,mlx5_3`` names prefixes, a leading ``=`` asks for exact names, a leading ``^`` excludes (``^=`` excludes
    exact names), ``:1`` after a name stands for that port only.

    Our own list speaks of every device, and what it asks for by name must be there. NCCL's speaks of those that NCCL
    drives itself, which EFA devices are not; and it may be the list of a whole cluster, so what is not there is passed
    over.

    Attributes:
        text: as written; "" accepts everything.
        variable: where it was written.
    """

    text: str = ""
    variable: str = _OURS

    def __post_init__(self) -> None:
        if not self.binding:
            return
        if self.text and not self._names():
            raise ConfigError(f"{self.variable}={self.text!r} names no device. Example: mlx5_0,mlx5_3 or ^mlx5_bond")
        for _, port in self._names():
            if port and not port.isdigit():
                raise ConfigError(f"{self.variable}={self.text!r}: {port!r} is not a port number")

    @classmethod
    def of(cls, settings: Settings) -> HcaFilter:
        """``UCCL_EP_NICS``, or ``NCCL_IB_HCA`` where that is empty. Raises ConfigError when the first is malformed."""
        if settings.nics:
            return cls(settings.nics)
        return cls(settings.nccl_ib_hca, "NCCL_IB_HCA") if settings.nccl_ib_hca else cls()

    @property
    def binding(self) -> bool:
        """Whether what the list asks for is refused where it cannot be had."""
        return self.variable == _OURS

    @property
    def _excludes(self) -> bool:
        return self.text.startswith("^")

    @property
    def _exact(self) -> bool:
        return self.text.lstrip("^").startswith("=")

    def _names(self) -> list[tuple[str, str]]:
        names = self.text.lstrip("^").lstrip("=").split(",")
        return [(name, port) for name, _, port in (entry.strip().partition(":") for entry in names) if name]

    def accepts(self, nic: Nic) -> bool:
        """Whether the list leaves a port of ``nic`` in."""
        return any(self._leaves_in(nic, port) for port in nic.ports or (_ANY_PORT,))

    def names(self, nic: Nic) -> bool:
        """Whether the list asks for ``nic``, rather than not excluding it."""
        return self._speaks_of(nic) and bool(self._names()) and not self._excludes and self.accepts(nic)

    def meant(self, nic: Nic) -> bool:
        """Whether somebody may expect ``nic`` to be used: our own list does not leave it out, nor does one of NCCL's
        that excludes it."""
        excluding = self.binding or (self._excludes and bool(self._names()))
        return self.accepts(nic) or not excluding

    def missing(self, nics: Sequence[Nic]) -> list[str]:
        """What of the list is not among ``nics`` with an active port, in words.

        A prefix need not fit: it is missing where it is the whole name of a device that has no link, and in our own
        list where no other one fits either.
        """
        nics = [nic for nic in nics if self._speaks_of(nic)]
        if self._excludes:
            return []
        dead: list[str] = []
        absent: list[str] = []
        for name, port in self._names():
            entry = f"{name}:{port}" if port else name
            fitting = [nic for nic in nics if self._fits(nic, name, port)]
            if any(nic.name == name for nic in nics):
                if not any(nic.name == name and nic.active for nic in fitting):
                    dead.append(f"{entry} (no active port; check its cable, bring its interface up)")
            elif not fitting:
                absent.append(f"{entry} (no such device or port)")
        some_fit = len(dead) + len(absent) < len(self._names())
        return dead if self.binding and not self._exact and some_fit else dead + absent

    def demands(self, nic: Nic) -> bool:
        """Whether our own list asks for ``nic`` by its whole name: who wrote that wants this one and no other."""
        return self.binding and self.names(nic) and nic.name in (name for name, _ in self._names())

    def port(self, nic: Nic) -> int:
        """The first active port that the list leaves in; 1 where none is known."""
        return next((port for port in nic.ports if self._leaves_in(nic, port)), 1)

    def _speaks_of(self, nic: Nic) -> bool:
        return self.binding or not nic.is_efa

    def _leaves_in(self, nic: Nic, port: int) -> bool:
        """As NCCL's own: a list without any name fits everything, so ``^`` alone leaves nothing in."""
        if not self.text or not self._speaks_of(nic):
            return True
        listed = [entry for entry in self._names() if self._fits_port(nic, port, *entry)]
        return (bool(listed) or not self._names()) != self._excludes

    def _fits(self, nic: Nic, name: str, port: str) -> bool:
        return any(self._fits_port(nic, each, name, port) for each in nic.ports or (_ANY_PORT,))

    def _fits_port(self, nic: Nic, port: int, name: str, wanted: str) -> bool:
        equal = nic.name == name if self._exact else nic.name.startswith(name)
        return equal and (not wanted or port == _ANY_PORT or (wanted.isdigit() and int(wanted) == port))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one NIC: ``used`` or not, at which distance from the GPU, and why, in words."""

    nic: Nic
    used: bool
    distance: Distance
    reason: str


@dataclass(frozen=True, slots=True)
class Rails:
    """The NICs of a rank for one transport, in rail order, and a verdict on every NIC of the machine."""

    transport: str
    nics: tuple[Nic, ...]
    verdicts: tuple[Verdict, ...]

    def of_proxy(self, proxy: int, proxies: int) -> tuple[Nic, ...]:
        """The NICs that ``proxy`` drives."""
        return deal(self.nics, proxy, proxies)


def deal(nics: tuple[_Rail, ...], proxy: int, proxies: int) -> tuple[_Rail, ...]:
    """Those of ``nics`` that ``proxy`` drives: rails are dealt in turn; with more proxies than rails they share."""
    if proxies >= len(nics):
        return nics[proxy % len(nics) :][:1] if nics else ()
    return nics[proxy::proxies]


@dataclass(frozen=True, slots=True)
class Channels:
    """How many channels messages are striped over and why, in words; ``warning``: what is wrong with that, or ""."""

    count: int
    reason: str
    warning: str = ""


def choose_channels(settings: Settings, rails: int) -> Channels:
    """The channels of a group in which two ranks have up to ``rails`` NICs in common, 0 = none is used.

    Channel c belongs to proxy c % proxies, which drives every so many-th rail and deals its streams to them in turn: as
    many channels as rails use each of them once.
    """
    if settings.channels:
        count, reason = settings.least_channels, "UCCL_EP_CHANNELS"
        idle = rails - count
        if idle <= 0:
            return Channels(count, reason)
        warning = (
            f"UCCL_EP_CHANNELS={settings.channels} leaves {idle} of the {rails} NICs of a rank idle whenever it has "
            f"one peer to send to (normal mode between nodes). Next step: unset it for {min(rails, MAX_CHANNELS)}"
        )
        return Channels(count, reason, warning)
    if rails > settings.least_channels:
        return Channels(min(rails, MAX_CHANNELS), f"for the {rails} NICs of a rank")
    return Channels(settings.least_channels, "one for each proxy")


def choose_rails(
    topology: Topology,
    transport: str,
    *,
    gpu: str = "",
    local_rank: int = 0,
    local_ranks: int = 1,
    wanted: HcaFilter | None = None,
    broken: Mapping[str, str] | None = None,
) -> Rails:
    """The NICs that a rank uses with ``transport``.

    Args:
        topology: of this machine.
        transport: "efa" or "roce".
        gpu: PCI address of the rank's GPU; "" for a rank without one, or whose GPU is not in the topology.
        local_rank, local_ranks: index among the ranks of this host; deals NICs to ranks without a GPU.
        wanted: devices the user asked for; None = all.
        broken: devices that cannot be used, and why.
    """
    wanted = wanted or HcaFilter()
    here = topology.gpu(gpu) if gpu else None
    on_efa = any(nic.is_efa for nic in topology.nics)
    refused = {nic.name: why for nic in topology.nics if (why := _refusal(nic, transport, wanted, on_efa))}
    refused.update(broken or {})
    refused.update(_of_another_network([nic for nic in topology.nics if nic.name not in refused], wanted))
    open_to_use = [nic for nic in topology.nics if nic.name not in refused]
    nearest = _nearest(here, open_to_use)
    for nic in open_to_use:
        if nic not in nearest:
            refused[nic.name] = _farther(here, nic, nearest)
    mine, share = _share(topology, here, nearest, open_to_use, local_rank, local_ranks)
    verdicts = []
    for nic in topology.nics:
        distance = topology.distance(here, nic) if here else Distance.UNKNOWN
        part = f"rail {mine.index(nic)}{share}" if nic in mine else f"left to others{share}"
        reason = refused.get(nic.name, part)
        verdicts.append(Verdict(nic, nic in mine, distance, reason))
    return Rails(transport, tuple(mine), tuple(verdicts))


def _refusal(nic: Nic, transport: str, wanted: HcaFilter, on_efa: bool) -> str:
    """Why ``nic`` is out of the question, "" when it is not; ``on_efa``: the machine has EFA devices."""
    if nic.transport != transport:
        return f"driven by {nic.transport}, not {transport}"
    if not wanted.accepts(nic):
        return f"{wanted.variable}={wanted.text} leaves it out"
    if not nic.active:
        return "no active port"
    if nic.is_software and not wanted.names(nic):
        return "a software device: used only when UCCL_EP_NICS or NCCL_IB_HCA names it"
    if on_efa and not nic.is_efa and not wanted.names(nic):
        # such as the management ports of NVLink switches, which InfiniBand drives and which lead to no other host
        return "the network of this machine is EFA: used only when UCCL_EP_NICS or NCCL_IB_HCA names it"
    return ""


def _of_another_network(nics: Sequence[Nic], wanted: HcaFilter) -> dict[str, str]:
    """Those of ``nics`` that are not of the network whose NICs are faster together; and why."""
    rates: dict[str, float] = {}
    for nic in nics:
        rates[nic.link] = rates.get(nic.link, 0.0) + nic.gbps
    best = max(rates, key=rates.__getitem__, default="")
    words = f"the network of the rails is {best}, with {rates.get(best, 0.0):g} Gb/s in all"
    return {nic.name: f"{nic.link}: {words}" for nic in nics if nic.link != best and not wanted.names(nic)}


def _nearest(gpu: Gpu | None, nics: Sequence[Nic]) -> list[Nic]:
    """Those of ``nics`` at the smallest distance, without the slow ones."""
    if not nics:
        return []
    distances = [Topology.distance(gpu, nic) if gpu else Distance.UNKNOWN for nic in nics]
    near = [nic for nic, distance in zip(nics, distances, strict=True) if distance == min(distances)]
    fastest = max(nic.gbps for nic in near)
    return [nic for nic in near if nic.gbps >= fastest * _SLOWEST_PART]


def _farther(gpu: Gpu | None, nic: Nic, nearest: Sequence[Nic]) -> str:
    best = nearest[0]
    if gpu is not None and Topology.distance(gpu, nic) > Topology.distance(gpu, best):
        return f"farther from the GPU ({_words(gpu, nic)}) than {best.name} ({_words(gpu, best)})"
    return f"{nic.gbps:g} Gb/s: less than half of {best.name}"


def _words(gpu: Gpu, nic: Nic) -> str:
    return Topology.distance(gpu, nic).name.lower()


def _share(
    topology: Topology, gpu: Gpu | None, nearest: list[Nic], nics: Sequence[Nic], local_rank: int, local_ranks: int
) -> tuple[list[Nic], str]:
    """This rank's part of ``nearest``, and words about who has the rest."""
    if gpu is None:
        return _deal(nearest, local_rank % local_ranks, local_ranks, "ranks of this host")
    sharing = [other for other in topology.gpus if _nearest(other, nics) == nearest]
    return _deal(nearest, sharing.index(gpu), len(sharing), "GPUs")


def _deal(nics: list[Nic], index: int, parties: int, whom: str) -> tuple[list[Nic], str]:
    """Part ``index`` of ``parties`` of ``nics``, in order; parties share a NIC where there are fewer NICs."""
    count = len(nics)
    if parties <= 1 or count == 0:
        return nics, ""
    words = f" ({count} for {parties} {whom})"
    if count < parties:
        return [nics[index * count // parties]], words
    return nics[index * count // parties : (index + 1) * count // parties], words
