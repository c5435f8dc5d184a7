"""The probe of :mod:`engine_probe` for vLLM: loaded in the server's processes by entry point, under our manager.

One mode is vLLM's alone, :data:`GRAPHS`: layers treat small steps as if the machine captured them in CUDA graphs, and
each rank writes down for how many rows its dispatches make room.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.engines import engine_probe

GRAPHS = "graphs"
#: Tokens of the largest step that is treated so.
LARGEST = 8


def install(directory: Path, mode: str) -> dict[str, str]:
    """Write the plugin's distribution into ``directory``; returns the variables its server needs."""
    information = directory / "uccl_ep_vllm_probe-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: uccl_ep_vllm_probe\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nuccl_ep_vllm_probe = tests.engines.vllm_probe:register\n"
    )
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")])),
        engine_probe.MODE: mode,
        engine_probe.FILE: str(directory / "routing"),
    }


def register() -> None:
    """Entry point: the manager opens the probed Buffer.

    Only once the hooks of a worker are in place: where vLLM has no Triton its worker looks through every loaded module,
    and does not survive what it finds in Numba's, which a Buffer needs.
    """
    from uccl_ep_serving.engines.vllm import layer_hooks

    original = layer_hooks.activate

    def activate() -> None:
        original()
        if os.environ[engine_probe.MODE] == GRAPHS:
            as_on_a_gpu()
            return
        from uccl_ep_serving.engines.vllm import all2all

        if not hasattr(all2all.Buffer, "_kept"):
            all2all.Buffer = engine_probe.subclass(all2all.Buffer)  # type: ignore[misc]

    layer_hooks.activate = activate


def as_on_a_gpu() -> None:
    """Layers find that steps of up to :data:`LARGEST` tokens may be captured."""
    from uccl_ep_serving.engines.vllm.graph_steps import GraphSteps

    most_rows = GraphSteps.most_rows
    if hasattr(most_rows, "__wrapped__"):
        return

    def noted(self: Any, tokens: int) -> int:
        rows = most_rows(self, tokens)
        with open(f"{os.environ[engine_probe.FILE]}.{os.getpid()}", "a") as file:
            file.write(f"{rows}\n")
        return rows

    noted.__wrapped__ = most_rows  # type: ignore[attr-defined]
    GraphSteps.most_rows = noted  # type: ignore[method-assign]
    GraphSteps.largest = LARGEST  # type: ignore[assignment, method-assign]


def rooms(directory: Path) -> list[set[int]]:
    """For each rank, for how many rows its dispatches made room; 0: as many as came."""
    return [set(map(int, path.read_text().split())) for path in directory.glob("routing.*")]
