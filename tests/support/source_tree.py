"""The source tree as the project-level tests see it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

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
