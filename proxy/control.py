"""The host's side of a proxy's control words: compiled, because Python's own stores promise no memory order."""

from __future__ import annotations

from ..native.atomics import fetch_add, load64, store64
from ..native.jit import compiled
from .state import NAMED, PEER_ENTRY, PEER_REQUEST, PEERS, REQUESTS, STOP

__all__ = ["acknowledge", "read", "request_forget", "request_stop"]


@compiled
def read(address: int) -> int:
    """int64 at ``address``, acquire."""
    return load64(address)


@compiled
def acknowledge(state: int, refused: int) -> None:
    """The first ``refused`` refused commands have been named."""
    store64(state + NAMED, refused)


@compiled
def request_stop(state: int) -> None:
    """Ask the loop to return. It does so at its next iteration."""
    store64(state + STOP, 1)


@compiled
def request_forget(state: int, peer: int, reason: int) -> None:
    """Ask the loop to part from ``peer``; from now on nothing that happens to this peer is an error."""
    store64(load64(state + PEERS) + peer * PEER_ENTRY + PEER_REQUEST, reason + 1)
    fetch_add(state + REQUESTS, 1)
