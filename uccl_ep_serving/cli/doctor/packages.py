"""Installed packages for ``uccl-ep doctor``, held against the ranges in this package's own metadata."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from uccl_ep_serving.cli.doctor.findings import Finding, Status

__all__ = ["installed", "package", "requirement"]


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
