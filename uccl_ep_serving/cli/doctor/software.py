"""Interpreter, packages and engines: what is installed, compared with the ranges in this package's own metadata."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from uccl_ep_serving.cli.doctor.findings import Finding, Status, size
from uccl_ep_serving.cli.warm.tasks import all_groups
from uccl_ep_serving.config import cache_wanted
from uccl_ep_serving.engines.versions import SGLANG, VLLM, Engine, Standing
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.native.cache import cache_directory, lies_elsewhere, ours, read_directories
from uccl_ep_serving.native.machine import check_executable
from uccl_ep_serving.proxy import cgroup

__all__ = ["engines", "environment", "package"]

#: Threads that a worker of an engine may begin: torch and NumPy one each for every core, NCCL, the engine its own.
_WORKER_TASKS = 512


def installed(distribution: str) -> str | None:
    """Version of ``distribution``, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirement(distribution: str) -> Requirement | None:
    """What this package's own metadata asks of ``distribution``, in its dependencies or an extra."""
    for text in metadata.requires("uccl_ep_serving") or []:
        found = Requirement(text)
        if found.name == distribution:
            return found
    return None


def package(name: str, *, required: bool, also: Sequence[str] = (), pick: str = "", instead: str = "") -> Finding:
    """Installed version of ``name`` against the range in this package's metadata.

    Args:
        required: nothing works without it.
        also: other names under which the same package is distributed.
        pick: versions of that range that suit this machine, where not all do.
        instead: what else could be done where it is missing.
    """
    asked = requirement(name)
    wanted = str(asked.specifier) if asked is not None else ""
    supported = f" (supported: {wanted})" if wanted else ""
    version = next((found for one in (name, *also) if (found := installed(one))), None)
    status = Status.PROBLEM if required else Status.NOTE
    step = f'pip install "{name}{pick or wanted}"{instead}'
    if version is None:
        return Finding(name, f"not installed{supported}", status, step)
    # builds such as 2.13.0+cpu and pre-releases count as what they are built from
    fits = asked is None or asked.specifier.contains(Version(version).public, prereleases=True)
    if fits:
        return Finding(name, f"{version}{supported}")
    return Finding(name, f"{version}: outside the supported range {wanted}", status, step)


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
    yield from _shares()
    yield _compiled_code()


def _shares() -> Iterator[Finding]:
    """What of the machine this process may use."""
    usable, shares = len(os.sched_getaffinity(0)), cgroup.quotas().values()
    quota = f", for {min(shares):g} cores' worth of time by its cgroup" if shares else ""
    yield Finding("cores", f"{usable} usable of {psutil.cpu_count() or 1}{quota}")
    free, left = psutil.virtual_memory().available, cgroup.memory_left()
    words = size(free) + " available" if left is None or left > free else size(left) + " available by its cgroup"
    yield Finding("memory", words)
    tasks = cgroup.tasks_left()
    if tasks is None:
        return
    step = "raise the container's limit of processes (--pids-limit, podPidsLimit)" if tasks < _WORKER_TASKS else ""
    yield Finding("threads", f"{tasks} may still begin by its cgroup", Status.NOTE if step else Status.OK, step)


def _compiled_code() -> Finding:
    """Where compiled code is kept, whether that is where the user wants it, and whether it is all there."""
    directory, wanted = cache_directory(), cache_wanted()
    try:
        check_executable()
    except ConfigError as error:
        return Finding("compiled code", str(error), Status.PROBLEM, "uccl-ep doctor again once that is allowed")
    try:
        groups = all_groups()
        missing = [group.name for group in groups if not group.cached]
    except ImportError as error:  # a package is missing, which has a finding of its own
        return Finding("compiled code", f"{directory}: cannot be looked at: {error}")
    if not missing:
        where = ", ".join(map(str, read_directories()))
        return Finding("compiled code", f"{where}: warm, all of {len(groups)} groups")
    if directory.is_relative_to(os.devnull):
        value = "no directory that this user can write and nobody else: each process compiles for itself"
        return Finding("compiled code", value, Status.NOTE, "UCCL_EP_CACHE_DIR with such a directory, or HOME")
    if lies_elsewhere(directory, wanted):
        value = f"{directory}: UCCL_EP_CACHE_DIR={wanted} {_refused(Path(wanted))}"
        step = "a directory that this user can write and nobody else, of a pod's volume one below its root that is "
        return Finding("compiled code", value, Status.NOTE, f"{step}mounted with subPath; or unset it")
    value = f"{directory}: {len(missing)} of {len(groups)} groups missing: {', '.join(missing)}"
    return Finding("compiled code", value, Status.NOTE, "uccl-ep warm, else the first Buffer that needs them compiles")


def _refused(wanted: Path) -> str:
    """Why compiled code is not kept in ``wanted``, in words."""
    for place in (wanted, *wanted.absolute().parents):
        if os.path.isdir(place) and not ours(place, sticky=place != wanted):
            return f"is not used: others own {place} or can write there"
    return "cannot be written"


def _engine(name: str, engine: Engine, other: Engine) -> Finding:
    """An engine and how well its version is known."""
    version = engine.installed()
    if version is None:
        missing = package(name, required=False)
        if other.installed():
            # their packages exclude each other
            return replace(missing, next_step=f"{missing.next_step}, in an environment without {other.title}")
        return missing
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
    for name, engine, other, group in (
        ("sglang", SGLANG, VLLM, "sglang.srt.plugins"),
        ("vllm", VLLM, SGLANG, "vllm.general_plugins"),
    ):
        yield _engine(name, engine, other)
        yield _plugin(name, engine, group)
