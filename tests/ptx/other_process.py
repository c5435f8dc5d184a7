"""What Triton makes of kernels, from a process of its own: here Triton may be the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["printed_by"]


def printed_by(script: Path) -> Any:
    """The JSON that ``script`` prints, where Triton is the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(script)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout)
