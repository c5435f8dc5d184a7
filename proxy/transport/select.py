"""Which way leads to a peer, and why: the one place where that is decided.

The inputs are facts that the runtime (or ``uccl-ep doctor``) has found out; nothing is probed here, so the same facts
always give the same answer and the same words. From best to worst: the kernels write the peer's mapped window
themselves (no transport at all); a proxy does it over ``shm``; a proxy sends over ``tcp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...config import Settings
from ...errors import ConfigError

__all__ = ["DIRECT", "ROCE", "SHM", "TCP", "Choice", "choose", "preview"]

#: Not a transport: kernels write the peer's window and store its flag.
DIRECT = "direct"
SHM = "shm"
TCP = "tcp"
ROCE = "roce"


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to a peer.

    Attributes:
        transport: DIRECT, or the name of a transport (``Capabilities.name``).
        reason: the way and why it was taken, in words.
    """

    transport: str
    reason: str


def choose(settings: Settings, *, mapped: bool, same_host: bool | None = None, why_not: str = "") -> Choice:
    """The way to a peer, the same at both ends: ``transport`` and ``direct`` are settings that all
    ranks agree on, and the facts are symmetric.

    Args:
        settings: ``transport`` and ``direct`` are used.
        mapped: each of the two ranks has mapped the other's window and mailbox.
        same_host: both run under one kernel; None = not known.
        why_not: why the windows are not mapped, in words; "" = the obvious reason.

    Raises:
        ConfigError: the settings demand a way that does not exist.
    """
    missing = why_not or ("its memory cannot be mapped here" if same_host else "it is on another host")
    if mapped and settings.direct:
        return Choice(DIRECT, "direct (its window is mapped here and UCCL_EP_DIRECT=1)")
    if settings.transport in (TCP, ROCE):
        return Choice(settings.transport, f"{settings.transport} (UCCL_EP_TRANSPORT={settings.transport})")
    if mapped:
        forced = settings.transport == SHM
        why = "UCCL_EP_TRANSPORT=shm" if forced else "UCCL_EP_DIRECT=0 and its window is mapped here"
        return Choice(SHM, f"shm ({why})")
    if settings.transport == SHM:
        raise ConfigError(f"shm cannot reach a peer: {missing}. With UCCL_EP_TRANSPORT=auto it is reached over tcp")
    return Choice(TCP, f"tcp ({missing})")


#: The situations that a peer can be in: words, same host, mapped.
_SITUATIONS = (
    ("a rank on this host", True, True),
    ("a rank on this host that shares no memory with this one", True, False),
    ("a rank on another host", False, False),
)


def preview(settings: Settings) -> Iterator[tuple[str, str]]:
    """(situation, answer) for each situation a peer can be in: what these settings would do, without any peer."""
    for situation, same_host, mapped in _SITUATIONS:
        try:
            answer = choose(settings, mapped=mapped, same_host=same_host).reason
        except ConfigError as error:
            answer = f"impossible: {error}"
        yield situation, answer
