"""What Triton makes of the low-latency kernels for GPUs that need not be there: it compiles, and holds no trap."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TARGETS = ("sm_90", "sm_100", "gfx942", "gfx950")
#: Those of the torch versions that the engines pin, besides the installed one.
VERSIONS = ("3.6.0", "3.8.0")
EVERYTHING = {
    "route",
    "pack_dispatch",
    "dispatch_arrival",
    "count_rows",
    "unpack_rows",
    "prepare_combine",
    "pack_combine",
    "combine_arrival",
    "sum_rows",
}


def check(target: str, kernels: set[str], path: str = "") -> None:
    """Compile ``kernels`` for ``target``, with the Triton below ``path`` or the installed one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path, str(ROOT), environment.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "compiled_kernels.py"), target, *sorted(kernels)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {one["kernel"] for one in found} == kernels
    for one in found:
        print(one)
    assert [one for one in found if one["faults"]] == []


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_publishing_waiting_and_copying(target: str) -> None:
    """One kernel of each kind."""
    check(target, {"pack_combine", "combine_arrival", "unpack_rows"})


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel(target: str) -> None:
    check(target, EVERYTHING)


@pytest.fixture(scope="module")
def other_versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directory of each other version of Triton."""
    places = {}
    for version in VERSIONS:
        place = tmp_path_factory.mktemp(f"triton-{version}")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), f"triton=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            places[version] = str(place)
    return places


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_with_the_engines_versions(version: str, target: str, other_versions: dict[str, str]) -> None:
    if version not in other_versions:
        pytest.skip(f"pip cannot install triton {version} here")
    check(target, EVERYTHING, other_versions[version])
