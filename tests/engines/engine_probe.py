"""A plugin of SGLang for tests: sits between the engine and our Buffer, to count what was routed or to lose rows.

Loaded in the server's processes through a directory on ``PYTHONPATH`` (:func:`install`). ``PROBE_MODE`` chooses:

``record``
    every rank appends, for each low-latency dispatch and each layout of a normal one, a JSON line with what its routing
    table implies;
``drop``
    slots of experts on other ranks are dispatched as -1, so whatever remote experts would add is lost.

``drop when told``
    the same, while the file that :func:`told` names exists: one server answers without the fault and with it.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

FILE = "PROBE_FILE"
MODE = "PROBE_MODE"


def install(directory: Path, mode: str) -> dict[str, str]:
    """Write the plugin's distribution into ``directory``; returns the variables its server needs."""
    information = directory / "uccl_ep_engine_probe-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: uccl_ep_engine_probe\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nuccl_ep_probe = tests.engines.engine_probe:register\n"
    )
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")])),
        MODE: mode,
        FILE: str(directory / "routing"),
    }


def told(directory: Path) -> Path:
    """The file whose presence makes ``drop when told`` drop; change it only while nothing is asked of the server."""
    return directory / "routing.lose"


def recorded(directory: Path) -> dict[int, dict[str, int]]:
    """Sums of the lines that each rank wrote."""
    ranks: dict[int, dict[str, int]] = {}
    for path in directory.glob("routing.*"):
        sums = ranks.setdefault(int(path.suffix[1:]), {})
        for line in path.read_text().splitlines():
            for name, value in json.loads(line).items():
                sums[name] = sums.get(name, 0) + value
    return ranks


def register() -> None:
    """Entry point: put the probe between SGLang and the class that the plugin installs."""
    from uccl_ep_serving.engines.sglang import activation

    original = activation.buffer_class

    @functools.cache
    def probed() -> type[Any]:
        return subclass(original())

    activation.buffer_class = probed  # type: ignore[assignment]


def subclass(base: type[Any]) -> type[Any]:
    """A Buffer class that records, or drops, as ``PROBE_MODE`` says."""
    mode = os.environ[MODE]
    order = told(Path(os.environ[FILE]).parent)

    class Probed(base):
        def _owner(self, topk_idx: Any, experts: int) -> Any:
            """Rank that owns each slot, -1 for empty slots; integer ``[tokens, topk]``."""
            owner = topk_idx // (experts // self.group_size)
            return owner.masked_fill(topk_idx < 0, -1)

        def _kept(self, topk_idx: Any, experts: int) -> Any:
            if not (mode == "drop" or (mode == "drop when told" and order.exists())):
                return topk_idx
            return topk_idx.masked_fill(self._owner(topk_idx, experts) != self.rank, -1)

        def _note(self, prefix: str, topk_idx: Any, experts: int) -> None:
            """Write down what this rank's routing table implies, names beginning with ``prefix``."""
            owner = self._owner(topk_idx, experts)
            remote = [int((owner == rank).any(dim=1).sum()) for rank in range(self.group_size) if rank != self.rank]
            line = {
                "calls": 1,
                "tokens": topk_idx.shape[0],
                "rows": sum(remote),
                "expert_rows": int(((owner >= 0) & (owner != self.rank)).sum()),
            }
            with open(f"{os.environ[FILE]}.{self.rank}", "a") as file:
                file.write(json.dumps({prefix + name: value for name, value in line.items()}) + "\n")

        def low_latency_dispatch(self, x: Any, topk_idx: Any, tokens: int, experts: int, **kwargs: Any) -> Any:
            self._experts = experts
            self._note("", topk_idx, experts)
            return super().low_latency_dispatch(x, self._kept(topk_idx, experts), tokens, experts, **kwargs)

        def low_latency_combine(self, x: Any, topk_idx: Any, *args: Any, **kwargs: Any) -> Any:
            return super().low_latency_combine(x, self._kept(topk_idx, self._experts), *args, **kwargs)

        def get_dispatch_layout(self, topk_idx: Any, experts: int, **kwargs: Any) -> Any:
            self._experts = experts
            self._note("normal_", topk_idx, experts)
            return super().get_dispatch_layout(self._kept(topk_idx, experts), experts, **kwargs)

        def dispatch(self, x: Any, *, topk_idx: Any, **kwargs: Any) -> Any:
            return super().dispatch(x, topk_idx=self._kept(topk_idx, self._experts), **kwargs)

    return Probed
