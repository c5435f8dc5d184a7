"""``uccl-ep doctor``: what this machine can do for expert parallelism, and what to do about what it cannot.

Every check yields findings; a finding that is a problem carries a next step. Nothing is changed on the
machine and no engine is imported: versions come from metadata, devices from sysfs. NICs that ranks would use are opened
for a moment, to ask what they can do.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata

import psutil
from rich.console import Console
from rich.table import Table

from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.cli.doctor.gpus import examine_gpus
from uccl_ep_serving.cli.doctor.nics import examine_nics, examine_transports
from uccl_ep_serving.cli.doctor.packages import package, requirement
from uccl_ep_serving.cli.doctor.verbs import examine_with_bindings
from uccl_ep_serving.config import SETTINGS, Settings, cache_wanted, unknown_variables
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.data_plane.rails import HcaFilter
from uccl_ep_serving.data_plane.topology import Topology
from uccl_ep_serving.engines.versions import SGLANG, VLLM, Engine, Standing
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.native.jit import cache_directory
from uccl_ep_serving.protocol.command import MAX_RANKS
from uccl_ep_serving.proxy.transport.select import NIC_TRANSPORTS, Offers, preview

# RDMA registers whole windows, which pins them: less than this cannot hold even a small one
MEMLOCK_FLOOR = 1 << 30
# the engine's own files: libraries, sockets of its process groups, logs
ENGINE_FILES = 256
# a group that an engine may well build on one machine or a few
COMMON_RANKS = 32


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def environment() -> Iterator[Finding]:
    """Interpreter, libraries and machine."""
    yield Finding("uccl_ep_serving", metadata.version("uccl_ep_serving"))
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    for name in ("torch", "numba", "numpy"):
        yield package(name, required=True)
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "linux":
        yield Finding("platform", machine)
    else:
        step = "run on Linux: the proxies use memfd and Linux sockets"
        yield Finding("platform", machine, Status.PROBLEM, step)
    cores = psutil.cpu_count() or 1
    usable = len(os.sched_getaffinity(0))
    yield Finding("cores", f"{usable} usable of {cores}")
    yield Finding("memory", f"{_size(psutil.virtual_memory().available)} available")
    yield _compiled_code()


def _compiled_code() -> Finding:
    """Where compiled code is kept, and whether that is where the user wants it."""
    directory, wanted = cache_directory(), cache_wanted()
    if not wanted or directory.is_relative_to(wanted):
        return Finding("compiled code", str(directory))
    value = f"{directory}: UCCL_EP_CACHE_DIR={wanted} cannot be written"
    return Finding("compiled code", value, Status.NOTE, "make the directory writable for this user, or unset it")


def _engine(name: str, engine: Engine) -> Finding:
    """An engine and how well its version is known."""
    version = engine.installed()
    if version is None:
        return package(name, required=False)
    standing, reason = engine.look_up(version)
    value = f"{version}: {standing.value}, {reason}"
    if standing is Standing.SUPPORTED:
        return Finding(name, value)
    return Finding(name, value, Status.NOTE, f"pip install {requirement(name)}".partition(";")[0])


def _plugin(name: str, engine: Engine, group: str) -> Finding:
    """Whether the engine will find the plugin."""
    points = metadata.entry_points(group=group, name="uccl_ep")
    if points:
        return Finding(f"{name} plugin", ", ".join(f"entry point {point.value}" for point in points))
    step = "install the package with pip, so that its entry points are registered"
    return Finding(f"{name} plugin", f"no entry point: {engine.title} will not know uccl_ep", Status.PROBLEM, step)


def engines() -> Iterator[Finding]:
    """Serving engines, how well their versions are known, and whether they will find the plugin."""
    for name, engine, group in (("sglang", SGLANG, "sglang.srt.plugins"), ("vllm", VLLM, "vllm.general_plugins")):
        yield _engine(name, engine)
        yield _plugin(name, engine, group)


def gpus() -> Iterator[Finding]:
    """GPUs that torch can use, and what their kernels need."""
    try:
        device = Settings.from_environment().device
    except ConfigError:
        device = Settings().device  # reported under settings
    yield from examine_gpus(device)


def _wanted() -> HcaFilter:
    """The devices that the environment asks for; all of them where a setting is wrong (reported under settings)."""
    try:
        return HcaFilter.of(Settings.from_environment())
    except ConfigError:
        return HcaFilter()


def nics() -> Iterator[Finding]:
    """RDMA devices: what they are, which GPU uses them, and why the others are not used."""
    yield from examine_nics(Topology.read(), _wanted())
    yield from examine_with_bindings()


def _shm() -> Finding:
    try:
        descriptor = os.memfd_create("uccl_ep_doctor", os.MFD_CLOEXEC)
    except OSError as error:
        step = "allow memfd_create in the container's seccomp profile"
        return Finding("shm", f"unusable: memfd_create: {error.strerror}", Status.PROBLEM, step)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[0] = 1
    except OSError as error:
        step = "raise the memory limit of the container"
        return Finding("shm", f"unusable: mapping shared memory: {error.strerror}", Status.PROBLEM, step)
    finally:
        os.close(descriptor)
    return Finding("shm", "usable between ranks of this host")


def _tcp() -> Finding:
    """Addresses that peers could connect to: of both families, as ranks listen (``bootstrap.local_host``)."""
    up = psutil.net_if_stats()
    addresses = [
        f"{name} {address.address}"
        for name, found in sorted(psutil.net_if_addrs().items())
        for address in found
        if address.family in (socket.AF_INET, socket.AF_INET6) and name in up and up[name].isup
        # with a zone: link-local, which ranks do not take
        if "%" not in address.address
    ]
    if not addresses:
        step = "bring an interface up: ip link set lo up"
        return Finding("tcp", "unusable: no interface is up with an IP address", Status.NOTE, step)
    if all(address.startswith("lo ") for address in addresses):
        return Finding("tcp", f"usable on this host only ({', '.join(addresses)})")
    return Finding("tcp", f"usable over {', '.join(addresses)}")


def transports() -> Iterator[Finding]:
    """Each transport with the reason it is or is not usable, then the way to each kind of peer."""
    yield _shm()
    yield _tcp()
    try:
        in_force = Settings.from_environment()
    except ConfigError:
        return  # reported under settings
    offers: Offers = {}
    try:
        nics = HostNics(in_force)
    except ConfigError as error:
        if in_force.transport in ("auto", *NIC_TRANSPORTS):  # a Buffer would raise the same
            yield Finding("nics", str(error), Status.PROBLEM, "correct or unset the variable")
            return
        yield Finding("nics", f"not looked at: {error}", Status.NOTE, "correct or unset the variable")
    else:
        offers = nics.offers
        yield from examine_transports(nics, in_force)
    for situation, answer in preview(in_force, offers):
        yield Finding("peer", f"{situation}: {answer}")


def _memlock(*, needed: bool) -> Finding:
    """Whether a window can be pinned; ``needed``: by a NIC that registers it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "unlimited")
    if soft >= MEMLOCK_FLOOR:
        return Finding("memlock", _size(soft))
    # the shell counts KiB where the system call counts bytes
    step = f"ulimit -l {MEMLOCK_FLOOR >> 10}, or raise memlock in /etc/security/limits.conf or for the container"
    status = Status.PROBLEM if needed else Status.NOTE
    return Finding("memlock", f"{_size(soft)}: below {_size(MEMLOCK_FLOOR)}", status, step)


def files_of_a_rank(ranks: int, settings: Settings) -> int:
    """Descriptors that one rank of a group needs at most.

    Per peer: the control connection, its TCP connections for every proxy (or, over shm, a pidfd for every proxy and,
    while windows are shared, two segments). Once: an epoll descriptor and a listener for every proxy, two listeners, a
    socket pair, two segments, the live counters.
    """
    per_peer = 1 + max(settings.tcp_connections * settings.proxies, settings.proxies + 2)
    return (ranks - 1) * per_peer + 2 * settings.proxies + 8


def _nofile() -> Finding:
    """How large a group the limit on open files allows, with the settings in force."""
    try:
        settings = Settings.from_environment()
    except ConfigError:
        settings = Settings()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files_of_a_rank(COMMON_RANKS, settings) + ENGINE_FILES
    if soft == resource.RLIM_INFINITY:
        return Finding("nofile", "unlimited")
    fitting = (ranks for ranks in range(2, MAX_RANKS + 1) if files_of_a_rank(ranks, settings) + ENGINE_FILES <= soft)
    most = max(fitting, default=1)
    connections = settings.proxies * settings.tcp_connections
    value = f"{soft}: enough for groups of {most} ranks over tcp ({connections} connections a peer)"
    if soft >= wanted:
        return Finding("nofile", value)
    step = f"ulimit -n {wanted} for {COMMON_RANKS} ranks"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        step += ", after raising nofile in /etc/security/limits.conf or for the container"
    return Finding("nofile", value, Status.PROBLEM if most < 2 else Status.NOTE, step)


def limits() -> Iterator[Finding]:
    """Limits of this process that decide how large a window or how many connections it can have."""
    has_nic = bool(Topology.read().nics)
    yield _memlock(needed=has_nic)
    yield _nofile()
    try:
        shm = psutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", f"missing: {error.strerror}", Status.NOTE, "mount a tmpfs on /dev/shm")
    else:
        yield Finding("/dev/shm", f"{_size(shm.free)} free of {_size(shm.total)}")


def settings() -> Iterator[Finding]:
    """Every setting in force and where its value comes from, and what is wrong with the environment."""
    try:
        in_force = Settings.from_environment()
    except ConfigError as error:
        yield Finding("environment", str(error), Status.PROBLEM, "correct or unset the variable")
    else:
        for variable in SETTINGS:
            source = variable.source(os.environ) or "default"
            source = "environment" if source == variable.name else source
            yield Finding(variable.name, f"{getattr(in_force, variable.field)!r} ({source})")
    for name, closest in unknown_variables().items():
        step = f"did you mean {closest}?" if closest else "unset it"
        yield Finding(name, "no such setting: it has no effect", Status.NOTE, step)


SECTIONS: dict[str, Callable[[], Iterator[Finding]]] = {
    "environment": environment,
    "engines": engines,
    "gpus": gpus,
    "nics": nics,
    "transports": transports,
    "limits": limits,
    "settings": settings,
}


def examine() -> dict[str, list[Finding]]:
    """Run every check; the keys are those of :data:`SECTIONS`, in order."""
    return {title: list(check()) for title, check in SECTIONS.items()}


def _print(report: dict[str, list[Finding]], console: Console) -> None:
    colours = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, findings in report.items():
        table.add_row(f"[bold]{title}[/bold]")
        for finding in findings:
            mark = f"[{colours[finding.status]}]{finding.status.value:7}[/]"
            table.add_row(mark, finding.name, finding.value)
            if finding.next_step and finding.status is not Status.OK:
                table.add_row("", "", f"next: {finding.next_step}")
    console.print(table)


def run(*, as_json: bool) -> int:
    """Examine the machine and print the report to standard output.

    Args:
        as_json: print ``{"usable": bool, "sections": {title: [finding, …]}}`` instead of a table.

    Returns:
        0 when nothing stands in the way, else 1.
    """
    report = examine()
    problems = [found for findings in report.values() for found in findings if found.status is Status.PROBLEM]
    if as_json:
        sections = {title: [asdict(found) for found in findings] for title, findings in report.items()}
        print(json.dumps({"usable": not problems, "sections": sections}, indent=2))
        return 1 if problems else 0
    console = Console(markup=True, highlight=False)
    _print(report, console)
    if problems:
        names = ", ".join(found.name for found in problems)
        console.print(f"\n[red]not usable[/red]: {len(problems)} problem(s): {names}")
    else:
        console.print("\n[green]usable[/green]")
    return 1 if problems else 0
