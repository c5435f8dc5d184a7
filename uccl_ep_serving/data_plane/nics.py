"""The NICs of this host as one rank uses them: which ones, what they offer, and the endpoints on them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ..config import Settings
from ..errors import ConfigError, TransportError
from ..proxy.transport.select import EFA, NIC_TRANSPORTS, ROCE, Offer, Offers
from .rails import HcaFilter, Rails, choose_rails, deal
from .topology import Nic, Topology

# The transports are imported when a NIC is opened: most hosts that ask have none.
if TYPE_CHECKING:
    from ..proxy.transport.base import Endpoint
    from ..proxy.transport.nic.window import Export
    from ..proxy.transport.verbs.library import VerbsLibrary

__all__ = ["HostNics", "gpu_address", "makes_verbs_objects", "nic_transports", "root_logger_kept"]

_log = logging.getLogger("uccl_ep_serving")

#: By transport, what gives its C functions; a transport that is missing loads those of this machine.
Libraries = Mapping[str, "Callable[[], VerbsLibrary]"]
_LIBRARIES: Libraries = {}


def gpu_address() -> str:
    """PCI address of the GPU that this process uses, "" when it uses none (or torch cannot tell)."""
    import torch

    if not torch.cuda.is_initialized():
        return ""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    parts = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return ""
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def makes_verbs_objects(settings: Settings) -> str:
    """pyverbs or ctypes, and why, in words. Raises ConfigError where UCCL_EP_VERBS asks for what is not there."""
    from ..proxy.transport.verbs.bindings import standing

    return standing(settings.verbs)


def root_logger_kept() -> contextlib.AbstractContextManager[None]:
    """Goes around an import of pyverbs, which sets up logging: that is undone."""
    from ..proxy.transport.verbs import bindings

    return bindings.root_logger_kept()


def nic_transports(settings: Settings) -> tuple[str, ...]:
    """Transports for which this host has NICs that a rank may use. Opens none of them.

    Raises ConfigError when the list of wanted devices is malformed, unless ``transport`` rules NICs out.
    """
    if settings.transport not in ("auto", *NIC_TRANSPORTS):
        return ()
    rails = HostNics(settings).rails
    return tuple(transport for transport in NIC_TRANSPORTS if rails[transport].nics)


class HostNics:
    """The NICs of this host as one rank uses them.

    Args:
        settings: of this rank.
        place, local_ranks: index of this rank among those of its host, and how many they are.
        gpu: PCI address of its GPU, "" without one.
        topology: of this machine; None = read now.
        libraries: where the C functions come from, by transport; None = this machine's.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        place: int = 0,
        local_ranks: int = 1,
        gpu: str = "",
        topology: Topology | None = None,
        libraries: Libraries | None = None,
    ) -> None:
        self._settings, self._place, self._local_ranks, self._gpu = settings, place, local_ranks, gpu
        self._libraries = libraries or _LIBRARIES
        self._wanted = HcaFilter.of(settings)
        self._topology = topology or Topology.read()
        #: NICs that could not be opened, and why.
        self._broken: dict[str, str] = {}

    @functools.cached_property
    def rails(self) -> dict[str, Rails]:
        """This rank's NICs by transport; once :attr:`offers` has been asked for, without those that do not work."""
        return {transport: self._choose(transport) for transport in NIC_TRANSPORTS}

    def _choose(self, transport: str) -> Rails:
        return choose_rails(
            self._topology,
            transport,
            gpu=self._gpu,
            local_rank=self._place,
            local_ranks=self._local_ranks,
            wanted=self._wanted,
            broken=self._broken,
        )

    @functools.cached_property
    def offers(self) -> Offers:
        """What this rank offers over NICs. Opens each of its NICs for a moment; never raises.

        A NIC that cannot be used is left out, and the rails are chosen again without it, as if its port were down. Only
        where the user named that very NIC, or none is left, the transport is not offered.
        """
        return {transport: self._offer(transport) for transport in NIC_TRANSPORTS}

    def _offer(self, transport: str) -> Offer:
        wanted, here = self._wanted, self._topology.nics
        passed_over = []
        if missing := wanted.missing(here):
            there = ", ".join(nic.name for nic in here) or "none"
            words = f"{wanted.variable}={wanted.text} names {', '.join(missing)}; RDMA devices of this machine: {there}"
            if wanted.binding:
                return Offer(reason=words, present=True, asked=wanted.variable)
            # the list is NCCL's, who drives what roce does
            passed_over = [words] if transport == ROCE else []
        devices = [nic for nic in here if nic.transport == transport]
        if not devices:
            if not passed_over or any(nic.is_efa for nic in here):
                return Offer()
            return Offer(reason=passed_over[0], present=True, unused=True)
        found: dict[str, str] = {}
        failures: dict[str, str] = {}
        while untried := [nic for nic in self.rails[transport].nics if nic.name not in found]:
            for nic in untried:
                try:
                    found[nic.name] = self._probe(transport, nic)
                except (ConfigError, TransportError) as error:
                    failures[nic.name] = str(error)
            if demanded := [nic.name for nic in untried if nic.name in failures and wanted.demands(nic)]:
                reasons = [f"{failures[name]} ({wanted.variable} names {name})" for name in demanded]
                return Offer(reason="; ".join(reasons), present=True, asked=wanted.variable)
            self._broken.update(failures)
            self.rails[transport] = self._choose(transport)
        rails = self.rails[transport]
        broken = tuple(dict.fromkeys([*passed_over, *failures.values()]))
        if not rails.nics:
            why = broken or tuple(f"{one.nic.name}: {one.reason}" for one in rails.verdicts if one.nic in devices)
            # of a list that excludes, and of a software device that nobody named, there is nothing to warn
            unused = bool(broken) or any(not nic.is_software and wanted.meant(nic) for nic in devices)
            return Offer(reason="; ".join(why), present=True, unused=unused)
        names = tuple(nic.name for nic in rails.nics)
        texts = [found[name] for name in names]
        words = texts[0] if len(set(texts)) == 1 else "; ".join(map(": ".join, zip(names, texts, strict=True)))
        # what a list names and no rank can have is said once on a host
        if left_out := [one for one in broken if self._place == 0 or one not in passed_over]:
            words_of = ", ".join(names), "; ".join(left_out)
            _log.warning("%s goes on over %s without NICs that fail: %s", transport, *words_of)
        fabric = "EFA" if transport == EFA else rails.nics[0].link
        return Offer(names, fabric, words, present=True, broken=broken)

    def _probe(self, transport: str, nic: Nic) -> str:
        """What ``nic`` is, in words. Raises ConfigError or TransportError when it cannot be used."""
        from ..proxy.transport.nic import efa, roce

        library = self._library(transport)
        if transport == EFA:
            return efa.usable(nic.name, library)
        return roce.examine(nic.name, self._wanted.port(nic), self._settings, library).words

    def port_facts(self, transport: str, nic: Nic) -> tuple[int, str, str]:
        """Path MTU in bytes (0: it says nothing), address ("" without one of IP) and description of ``nic``, which is
        opened for a moment. Raises ConfigError or TransportError where it cannot be used."""
        from ..proxy.transport.nic import roce

        if transport == EFA:
            return 0, "", self._probe(transport, nic)
        found = roce.examine(nic.name, self._wanted.port(nic), self._settings, self._library(transport))
        return found.mtu, found.address, found.words

    def alone(self, nic: Nic) -> str:
        """The value of UCCL_EP_NICS that asks for ``nic``, at the port that this rank uses, and for nothing else."""
        return f"={nic.name}:{self._wanted.port(nic)}" if nic.ports else f"={nic.name}"

    def place_of(self, transport: str) -> tuple[int, int]:
        """Port of this rank's first NIC for ``transport``, and index of the GID that ranks are reached at."""
        from ..proxy.transport.nic import roce

        nic = self.rails[transport].nics[0]
        port = self._wanted.port(nic)
        return port, roce.examine(nic.name, port, self._settings, self._library(transport)).gid

    def reach_gpu(self, transport: str, nic: Nic, start: int, nbytes: int, export: Export) -> str:
        """How ``nic`` reaches memory of a GPU, [start, start + nbytes), in words. Opens it for a moment; raises
        ConfigError or TransportError when it does not."""
        from ..proxy.transport.nic import window

        return window.reach(self._library(transport), nic.name, start, nbytes, export)

    def numa(self, transports: Collection[str]) -> int:
        """NUMA node of this rank's NICs of ``transports``; -1 where it is not known, or not one of several."""
        nodes = {nic.numa for one in set(transports) & set(NIC_TRANSPORTS) for nic in self.rails[one].nics}
        return nodes.pop() if len(nodes) == 1 and len(self._topology.cpus) > 1 else -1

    def _library(self, transport: str) -> VerbsLibrary | None:
        return self._libraries[transport]() if transport in self._libraries else None

    def of_proxy(self, transport: str, proxy: int) -> Sequence[Nic]:
        """The NICs that ``proxy`` drives."""
        return self.rails[transport].of_proxy(proxy, self._settings.proxies)

    def near_cpus(self, transports: Collection[str], proxy: int) -> frozenset[int]:
        """Cores near the NICs that ``proxy`` drives for ``transports``; empty without any, or where that is unknown."""
        kinds = [transport for transport in transports if transport in NIC_TRANSPORTS]
        nics = [nic for transport in kinds for nic in self.of_proxy(transport, proxy)]
        return frozenset(cpu for nic in nics for cpu in self._topology.near_cpus(nic))

    def proxy_cpus(self, transports: Collection[str]) -> frozenset[int]:
        """Cores that the proxies of this rank run on unless ``UCCL_EP_PROXY_CPUS`` names some."""
        here = frozenset(os.sched_getaffinity(0))
        return frozenset[int]().union(
            *(self.near_cpus(transports, one) or here for one in range(self._settings.proxies))
        )

    def endpoint(
        self,
        transport: str,
        rank: int,
        ranks: int,
        proxy: int,
        *,
        window: int,
        window_bytes: int,
        peers: Collection[int],
        local_offers: Sequence[Offer],
        watch: Callable[[], None] = lambda: None,
    ) -> Endpoint:
        """An endpoint of ``transport`` for ``proxy``, not connected.

        Args:
            rank, ranks, proxy, window, window_bytes, peers, watch: see the endpoints.
            local_offers: of all ranks of this host, this one included: NICs that several use are shared evenly.

        Raises:
            ConfigError, TransportError: a NIC refused something; nothing is left open.
            Whatever ``watch`` raises; nothing is left open.
        """
        from ..proxy.transport.nic import efa, roce

        nics, settings = self.of_proxy(transport, proxy), self._settings
        library = self._library(transport)
        if transport == EFA:
            return efa.EfaEndpoint(
                rank,
                ranks,
                proxy,
                window=window,
                window_bytes=window_bytes,
                devices=[nic.name for nic in nics],
                settings=settings,
                library=library,
                watch=watch,
            )
        users = Counter(
            name
            for offer in local_offers
            for each in range(settings.proxies)
            for name in deal(offer.nics, each, settings.proxies)
        )
        return roce.RoceEndpoint(
            rank,
            ranks,
            proxy,
            window=window,
            window_bytes=window_bytes,
            peers=peers,
            settings=settings,
            nics=[roce.NicPort(nic.name, self._wanted.port(nic), max(users[nic.name], 1)) for nic in nics],
            library=library,
            watch=watch,
        )
