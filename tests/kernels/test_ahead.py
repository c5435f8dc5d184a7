"""What is compiled for a GPU that is not there is found by a launch on it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.other_tritons import other_tritons
from tests.kernels.test_launch_keys import compiling
from uccl_ep_serving.cli.warm import GPUS

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

SCRIPT = Path(__file__).parent / "launched_later.py"
TRITONS = [pytest.param("", id="installed"), *other_tritons()]


def hits(gpu: str, action: str, cache: Path, triton: str) -> Any:
    """For each kernel, whether its code was in Triton's cache; see :mod:`.launched_later`."""
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), gpu, action],
        env={**compiling(triton), "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
def test_a_launch_finds_what_was_compiled_ahead(gpu: str, triton: str, tmp_path: Path) -> None:
    assert hits(gpu, "ahead", tmp_path, triton) == [False, False]
    assert hits(gpu, "ahead", tmp_path, triton) == [True, True]
    assert hits(gpu, "launch", tmp_path, triton) == [True, True]


def test_a_launch_on_another_gpu_does_not(tmp_path: Path) -> None:
    hits("sm_90", "ahead", tmp_path, "")
    assert hits("sm_100", "launch", tmp_path, "") == [False, False]


SAME = """
import triton
from uccl_ep_serving.cli.warm import CODINGS, GPUS
from uccl_ep_serving.kernels.triton import ahead
from uccl_ep_serving.modes import ahead as modes
print(GPUS == tuple(ahead.GPUS), CODINGS == tuple(modes.CODINGS))
for name, gpu in ahead.GPUS.items():
    with ahead.compiling_for(gpu):
        print(ahead.present_gpu() == (name, gpu))
"""


def test_the_command_names_what_there_is() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SAME], env=compiling(""), capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * (2 + len(GPUS)), done.stderr
