"""An install nobody may write to, in a process without a home: code is compiled and cached all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

#: Imports the package, compiles one function of it and says where its code was cached.
COMPILES = """
import uccl_ep_serving
from uccl_ep_serving.native.cache import cache_directory
from uccl_ep_serving.native.failure import failure_code
failure_code.address
print(uccl_ep_serving.__file__)
print(cache_directory())
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the package in a directory of which nothing may be written."""
    package = tmp_path / "site" / "uccl_ep_serving"
    shutil.copytree(ROOT / "uccl_ep_serving", package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (package, *package.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return package


def test_it_compiles_and_caches_where_neither_home_nor_the_package_can_be_written(
    installed: Path, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = sorted(installed.rglob("*"))
    nowhere = "/dev/null/nobody"  # below a file: not even root can make it
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("UCCL_EP_", "NUMBA_"))},
        "HOME": nowhere,
        "XDG_CACHE_HOME": f"{nowhere}/.cache",
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(installed.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for attempt in ("compiled", "loaded"):
        done = subprocess.run(
            [sys.executable, "-c", COMPILES],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        package, cache = map(Path, done.stdout.split())
        assert package.parent == installed
        assert cache.is_relative_to(temporary), attempt
        assert cache.stat().st_mode & 0o777 == 0o755
        assert len(list(cache.rglob("*.o"))) == 1
    # root may write where the modes forbid it, so look
    assert sorted(installed.rglob("*")) == before
