"""The probe of :mod:`engine_probe` for vLLM: loaded in the server's processes by entry point, under our manager."""

from __future__ import annotations

import os
from pathlib import Path

from tests.engines import engine_probe


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
        from uccl_ep_serving.engines.vllm import all2all

        if not hasattr(all2all.Buffer, "_kept"):
            all2all.Buffer = engine_probe.subclass(all2all.Buffer)  # type: ignore[misc]

    layer_hooks.activate = activate
