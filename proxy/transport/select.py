"""Which way leads to a peer, and why: the one place where that is decided.

The inputs are facts that the runtime (or ``uccl-ep doctor``) has found out; nothing is probed here, so the same facts
always give the same answer and the same words. From best to worst: the kernels write the peer's mapped window
themselves (no transport at all); a proxy does it over ``shm``; a proxy has NICs do it over ``efa`` or ``roce``, where
both ranks offer it; a proxy sends over ``tcp``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...config import Settings
from ...errors import ConfigError

#: Not a transport: kernels write the peer's window and store its flag.
DIRECT = "direct"
SHM = "shm"
TCP = "tcp"
EFA = "efa"
ROCE = "roce"

#: Transports over NICs, best first.
NIC_TRANSPORTS = (EFA, ROCE)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank offers of a transport over NICs.

    Attributes:
        nics: names of its NICs, in rail order; () = it cannot be reached this way.
        fabric: what its NICs are plugged into; only equal fabrics reach each other.
        reason: why there is no NIC, or what the NICs are, in words.
        present: the machine has devices for it, usable or not: only then is the reason worth telling.
        broken: what is wrong with NICs that would be among them.
        unused: there are NICs that ought to be among them, and none of them can be used: worth a warning.
        asked: the variable that asks for NICs by name which cannot be used; "" where none does.
        gpu: how its NICs reach its GPU's memory, in words; "" = they were not asked, or do not.
        no_gpu: why they do not.
    """

    nics: tuple[str, ...] = ()
    fabric: str = ""
    reason: str = "no device"
    present: bool = False
    broken: tuple[str, ...] = ()
    unused: bool = False
    asked: str = ""
    gpu: str = ""
    no_gpu: str = ""


#: By transport; a transport that is missing is not offered.
Offers = Mapping[str, Offer]


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to a peer.

    Attributes:
        transport: DIRECT, or the name of a transport (``Capabilities.name``).
        reason: the way and why it was taken, in words.
        warning: what is wrong with that, and the next step; "" when nothing is.
    """

    transport: str
    reason: str
    warning: str = ""


def choose(
    settings: Settings,
    *,
    mapped: bool,
    same_node: bool = True,
    same_host: bool | None = None,
    mine: Offers | None = None,
    theirs: Offers | None = None,
) -> Choice:
    """The way to a peer, the same at both ends: ``transport`` and ``direct`` are settings that all
    ranks agree on, and the facts are symmetric.

    Args:
        settings: ``transport`` and ``direct`` are used.
        mapped: each of the two ranks has mapped the other's window and mailbox.
        same_node: ``UCCL_EP_NODE_RANKS`` does not part them.
        same_host: both run under one kernel; None = not known.
        mine, theirs: what the two ranks offer over NICs; None = nothing.

    Raises:
        ConfigError: the settings demand a way that does not exist.
    """
    missing = "its memory cannot be mapped here" if same_host else "it is on another host"
    mine, theirs = mine or {}, theirs or {}
    if mapped and settings.direct and same_node:
        return Choice(DIRECT, "direct (its window is mapped here and UCCL_EP_DIRECT=1)")
    if settings.transport == TCP:
        return Choice(TCP, "tcp (UCCL_EP_TRANSPORT=tcp)")
    if settings.transport in NIC_TRANSPORTS:
        kind = settings.transport
        if obstacle := _obstacle(mine.get(kind, Offer()), theirs.get(kind, Offer())):
            raise ConfigError(
                f"{kind} cannot reach a peer: {obstacle}. With UCCL_EP_TRANSPORT=auto it is reached in another way; "
                "uccl-ep doctor says more of each NIC"
            )
        return Choice(kind, f"{kind} (UCCL_EP_TRANSPORT={kind})")
    if mapped:
        forced = settings.transport == SHM
        setting = "UCCL_EP_DIRECT=0" if same_node else f"UCCL_EP_NODE_RANKS={settings.node_ranks}"
        why = "UCCL_EP_TRANSPORT=shm" if forced else f"{setting} and its window is mapped here"
        return Choice(SHM, f"shm ({why})")
    if settings.transport == SHM:
        raise ConfigError(f"shm cannot reach a peer: {missing}. With UCCL_EP_TRANSPORT=auto it is reached over tcp")
    reasons, idle = [missing], False
    for kind in NIC_TRANSPORTS:
        ours, other = mine.get(kind, Offer()), theirs.get(kind, Offer())
        obstacle = _obstacle(ours, other)
        if not obstacle:
            return Choice(kind, f"{kind} ({missing}, and both ranks have {ours.fabric} NICs)")
        if asked := ours.asked or other.asked:
            raise ConfigError(
                f"{asked} asks for NICs that cannot be used: {obstacle}. Next step: correct that, or unset {asked}; "
                "uccl-ep doctor says more of each NIC"
            )
        if ours.present or other.present:
            reasons.append(f"not {kind}: {obstacle}")
        idle = idle or any(offer.nics or offer.unused for offer in (ours, other))
    words = f"tcp ({'; '.join(reasons)})"
    if not idle:
        return Choice(TCP, words)
    return Choice(
        TCP,
        words,
        f"NICs are there and are not used, tcp is many times slower: {'; '.join(reasons[1:])}. Next step: correct that "
        "(uccl-ep doctor says more of each NIC), or set UCCL_EP_TRANSPORT=tcp where it is meant",
    )


def _obstacle(mine: Offer, theirs: Offer) -> str:
    """Why two ranks cannot reach each other over their NICs, "" when they can."""
    if not mine.nics:
        return f"this rank: {mine.reason}"
    if not theirs.nics:
        return f"the peer: {theirs.reason}"
    if mine.fabric != theirs.fabric:
        return f"this rank's NICs are on {mine.fabric}, the peer's on {theirs.fabric}"
    return ""


#: The situations that a peer can be in: words, same host, mapped.
_SITUATIONS = (
    ("a rank on this host", True, True),
    ("a rank on this host that shares no memory with this one", True, False),
    ("a rank on another host", False, False),
)


def preview(settings: Settings, offers: Offers | None = None) -> Iterator[tuple[str, str]]:
    """(situation, answer) for each situation a peer can be in: what these settings would do, without any peer.

    Args:
        settings: ``transport`` and ``direct`` are used.
        offers: what this machine offers over NICs; peers are taken to offer the same.
    """
    for situation, same_host, mapped in _SITUATIONS:
        try:
            answer = choose(settings, mapped=mapped, same_host=same_host, mine=offers, theirs=offers).reason
        except ConfigError as error:
            answer = f"impossible: {error}"
        yield situation, answer
