"""``uccl-ep demo-vllm`` where vLLM is not installed: what the user is told, and the exit status."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_missing_vllm_is_said_with_the_command_that_installs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uccl_ep_serving.cli.demo_vllm"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "vLLM is not installed; `make demo-vllm` installs it for CPU" in done.stdout
    assert "Traceback" not in done.stderr
