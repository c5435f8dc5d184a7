"""Servers inside a network namespace: the calling thread enters it, and what the thread starts is born there."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000  # linux/sched.h

#: Runs a command with a /dev/shm of its own: SGLang takes processes that share one for processes of one node.
OWN_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Sockets and processes that this thread makes meanwhile belong to the namespace ``name``."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(other)
        finally:
            os.close(other)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)
