"""Under which addresses the engines' own groups would listen: torch's gloo, and what SGLang and vLLM announce.

Neither asks for the address that our ranks choose. A host whose name is on loopback (Debian's /etc/hosts), or that has
no default route, serves alone and hangs beside others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

import msgspec

from ..control_plane.addresses import is_loopback
from .job import Finding, failed

__all__ = ["Names", "gather_names", "unreachable"]

#: What says which address an engine announces; vLLM reads the last, SGLang the others.
_HOST_IP = ("SGLANG_HOST_IP", "HOST_IP", "VLLM_HOST_IP")
#: Where both engines look for the route to: nothing is sent.
_FAR = ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888"))


class Names(msgspec.Struct, frozen=True):
    """Of a host.

    Attributes:
        gloo: the address of the host's name that torch's gloo takes; "" where GLOO_SOCKET_IFNAME says which.
        announced: the address that the engines announce; "" where they find none.
    """

    gloo: str
    announced: str


def gather_names(gloo_interface: str, environment: Mapping[str, str] = os.environ) -> Names:
    """Those of this host. ``gloo_interface``: GLOO_SOCKET_IFNAME, "" where it is not set."""
    given = next((environment[name] for name in _HOST_IP if environment.get(name)), "")
    return Names("" if gloo_interface else _resolved(), given or _routed())


def _resolved() -> str:
    """The first address of the host's name that can be listened on; gloo takes loopback where there is none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
        except OSError:
            continue
    return "127.0.0.1"


def _routed() -> str:
    for family, far in _FAR:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 80))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def unreachable(names: Names, where: str, host: str, address: str, interface: str) -> Iterator[Finding]:
    """What keeps an engine's groups on this node from the other nodes.

    Args:
        where: the node, in words. host: its name.
        address, interface: of our own choice, which the others reach.
    """
    if is_loopback(names.gloo):
        yield failed(
            "host name",
            where,
            expected="torch's gloo, which the engines use, listens where other nodes reach it",
            found=f"the name {host} is at {names.gloo}",
            cause="/etc/hosts gives the host's name an address on loopback, or nobody knows the name",
            step=f"export GLOO_SOCKET_IFNAME={interface} there, or the address {address} for {host} in /etc/hosts",
        )
    if not names.announced or is_loopback(names.announced):
        yield failed(
            "host name",
            where,
            expected="SGLang and vLLM find the address of this host",
            found=names.announced or "no route leaves this host's own networks, which is where both look",
            cause="there is no default route" if not names.announced else f"one of {', '.join(_HOST_IP)} says so",
            step=f"export SGLANG_HOST_IP={address} VLLM_HOST_IP={address} there",
        )
