"""What a server on a CPU needs with either engine: a startup directory, its variables, and hooks that fail aloud.

The startup directory holds a distribution that is seen through ``PYTHONPATH`` only: the engine's plugin loader finds
the hooks by its entry point, and without the directory nothing of the CPU code is imported by an engine.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["register_hooks", "variables", "write_distribution"]


def write_distribution(startup: Path, name: str, version: str = "0", entry_points: str = "") -> None:
    """Write the metadata of a distribution into ``startup``, which is created if missing."""
    place = startup / f"{name}-{version}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (place / "entry_points.txt").write_text(entry_points)


def variables(startup: Path, switch: str, threads: int) -> dict[str, str]:
    """The variables of a CPU server of either engine.

    Args:
        startup: the startup directory.
        switch: variable without which :func:`register_hooks` does nothing.
        threads: OpenMP threads of each rank.
    """
    return {
        switch: "1",
        "PYTHONPATH": os.pathsep.join([str(startup), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": "",  # a machine with GPUs runs the demo on its CPU all the same
        "HIP_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile with a C++ compiler, which may not be there
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }


def register_hooks(switch: str, engine: str, require_cpu: Callable[[], None], hooks: str) -> None:
    """Call ``register`` of the module ``hooks`` where ``switch`` is set; ends the process when that fails.

    Engines log a plugin's failure and go on: a server with half of the hooks would end later, for an obscure reason.
    """
    if os.environ.get(switch) != "1":
        return
    try:
        require_cpu()
        importlib.import_module(hooks).register()
    except Exception as error:
        sys.exit(f"uccl_ep_serving: the CPU shims of {engine} could not be set up: {error}")
