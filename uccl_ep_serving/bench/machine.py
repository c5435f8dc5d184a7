"""What a figure was measured on: a figure without it cannot be compared with another."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

__all__ = ["describe", "host_identity"]

#: The files whose difference is marked: all, but for what benchmarks themselves write while they run.
_SOURCES = (
    ":(top)",
    *(f":(top,exclude){path}" for path in ("benchmarks/results", "benchmarks/RESULTS.md", "CONTRIBUTING.md")),
)
_PACKAGES = ("uccl_ep_serving", "torch", "numba", "numpy", "mpi4py", "deep_ep", "uccl", "mori")
#: Distributions of what has several, one for each CUDA.
_ONE_OF = {
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "nixl": ("nixl-cu13", "nixl-cu12", "nixl"),
}


def _git(*arguments: str) -> str:
    """Output of git in the directory of this package's source, "" where there is none."""
    found = importlib.util.find_spec("uccl_ep_serving")
    if found is None or found.origin is None:
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(found.origin).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str:
    """Commit of the checkout, "+" appended when sources differ from it; "" when installed from a wheel."""
    root, commit = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "--short=12", "HEAD")
    # a wheel inside some project's virtual environment is not that project's code
    if not commit or not (Path(root) / "uccl_ep_serving" / "protocol").is_dir():
        return ""
    return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", *_SOURCES) else "")


def sources_digest() -> str:
    """Of the package's own sources: no commit tells two states apart that differ from it, nor two wheels."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for part in sorted(package.iterdir()):
        # kernels and proxy of a checkout are links
        for file in sorted(part.resolve().rglob("*.py")) if part.is_dir() else [part] * (part.suffix == ".py"):
            digest.update(f"{part.name}/{file.name}".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, distributions in (*((name, (name,)) for name in _PACKAGES), *_ONE_OF.items()):
        for distribution in distributions:
            try:
                found.setdefault(name, metadata.version(distribution))
            except metadata.PackageNotFoundError:
                continue
    return found


def host_identity() -> str:
    """Equal for two processes exactly when they run on one kernel, and so share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def describe() -> dict[str, Any]:
    """Commit, digest of the sources, CPU, cores, memory, load average (1, 5, 15 minutes), kernel, versions, UTC."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "sources": sources_digest(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": [round(value, 2) for value in os.getloadavg()],
        # what follows names the build of one distribution or provider
        "kernel": ".".join(platform.release().split(".")[:2]),
        "versions": _versions(),
    }
