"""Limits of this process that decide how large a window, or how many connections, it can have."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from uccl_ep_serving.cli.doctor.container import pins_freely
from uccl_ep_serving.cli.doctor.findings import Finding, Status, settings_or_defaults, size
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.topology import Topology
from uccl_ep_serving.protocol.command import MAX_RANKS
from uccl_ep_serving.proxy.spin import choose_spin, own_cores

__all__ = ["files_of_a_rank", "limits"]

# RDMA registers whole windows, which pins them: less than this cannot hold even a small one
_MEMLOCK_FLOOR = 1 << 30
# the engine's own files: libraries, sockets of its process groups, logs
_ENGINE_FILES = 256
# a group that an engine may well build on one machine or a few
_COMMON_RANKS = 32


def limits() -> Iterator[Finding]:
    yield _memlock(needed=bool(Topology.read().nics))
    yield _nofile()
    yield _spin()


def _memlock(*, needed: bool) -> Finding:
    """Whether a window can be pinned; ``needed``: by a NIC that registers it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "unlimited")
    if soft >= _MEMLOCK_FLOOR:
        return Finding("memlock", size(soft))
    if pins_freely():
        return Finding("memlock", f"{size(soft)}, which IPC_LOCK lifts")
    # the shell counts KiB where the system call counts bytes
    step = (
        f"ulimit -l {_MEMLOCK_FLOOR >> 10}, or raise memlock in /etc/security/limits.conf or for the container; root "
    )
    step += "of a container may have the capability IPC_LOCK instead, which runtimes give to no other user"
    status = Status.PROBLEM if needed else Status.NOTE
    return Finding("memlock", f"{size(soft)}: below {size(_MEMLOCK_FLOOR)}", status, step)


def files_of_a_rank(ranks: int, settings: Settings) -> int:
    """Descriptors that one rank of a group needs at most.

    Per peer: the control connection, its TCP connections for every proxy (or, over shm, a pidfd for every proxy and,
    while windows are shared, two segments). Once: for every proxy an epoll descriptor, a listener, and two more with
    which connections are mended; two listeners, a socket pair, two segments, two of the live counters.
    """
    per_peer = 1 + max(settings.tcp_connections * settings.proxies, settings.proxies + 2)
    return (ranks - 1) * per_peer + 4 * settings.proxies + 9


def _spin() -> Finding:
    """Whether idle proxies keep polling, if each GPU of this machine has a rank and all use the cores of this one."""
    settings, ranks = settings_or_defaults(), max(len(Topology.read().gpus), 1)
    cores = own_cores()
    chosen = choose_spin(
        settings.proxy_spin,
        cores,
        [cores] * (ranks - 1),
        proxies=settings.proxies,
        named_cores=len(set(settings.proxy_cpus)),
    )
    return Finding("proxy spin", f"{chosen.reason} (with {ranks} rank{'s' * (ranks > 1)} here)")


def _nofile() -> Finding:
    """How large a group the limit on open files allows, with the settings in force."""
    settings = settings_or_defaults()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files_of_a_rank(_COMMON_RANKS, settings) + _ENGINE_FILES
    if soft == resource.RLIM_INFINITY:
        return Finding("nofile", "unlimited")
    fitting = (ranks for ranks in range(2, MAX_RANKS + 1) if files_of_a_rank(ranks, settings) + _ENGINE_FILES <= soft)
    most = max(fitting, default=1)
    connections = settings.proxies * settings.tcp_connections
    value = f"{soft}: enough for groups of {most} ranks over tcp ({connections} connections a peer)"
    if soft >= wanted:
        return Finding("nofile", value)
    step = f"ulimit -n {wanted} for {_COMMON_RANKS} ranks"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        step += ", after raising nofile in /etc/security/limits.conf or for the container"
    return Finding("nofile", value, Status.PROBLEM if most < 2 else Status.NOTE, step)
