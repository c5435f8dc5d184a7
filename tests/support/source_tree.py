"""The source tree as the project-level tests see it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "uccl_ep_serving"


def source_files() -> list[Path]:
    """Every file of the source tree, tracked or about to be, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def python_sources() -> list[Path]:
    """Python files of the package, without the tests."""
    places = [PACKAGE, ROOT / "kernels", ROOT / "proxy"]
    return sorted(path for place in places for path in place.rglob("*.py") if not through_symlink(path))


def installed_files() -> dict[str, Path]:
    """What an installation holds, by its path there: the Python files of the package and pyproject.toml's data."""
    files = python_sources()
    for package, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items():
        # not by the two symlinks of the package
        place = ROOT.joinpath(*package.split(".")).resolve()
        files += [path for pattern in patterns for path in place.glob(pattern)]
    names = [path.relative_to(ROOT).as_posix() for path in files]
    return {
        name if name.startswith(f"{PACKAGE.name}/") else f"{PACKAGE.name}/{name}": path
        for name, path in zip(names, files, strict=True)
    }


def copy_source(to: Path) -> None:
    """Copy :func:`source_files` and the two symlinks of the package into the directory ``to``, which is made."""
    for path in source_files():
        copy = to / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    for name in ("kernels", "proxy"):
        (to / PACKAGE.name / name).symlink_to(f"../{name}")


def load_script(name: str) -> ModuleType:
    """``scripts/NAME.py`` as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def through_symlink(path: Path) -> bool:
    """Whether ``path`` is reached through a symlink, and so stands in the tree a second time."""
    return any(parent.is_symlink() for parent in path.parents)


def run_python(code: str, *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter whose ``sys.path`` starts with ``cwd``."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
