"""What more ranks cost: time of a layer's dispatch and combine, and memory of a rank, with 2 to 16 ranks on a machine.

    python benchmarks/ep_sizes.py [--json FILE] [--ranks 2 4 8 16]

Every rank has the same tokens at each size, 64 x 7168 BF16, top-8 of 64 experts, on the direct path. Where there are
more ranks than cores they take turns, and so does the bound beside them: ``memcpy`` of the bytes that a rank sends, all
ranks at the same time. A time divided by it says what the exchange costs beyond moving bytes.

Memory of a rank is the mean growth of the ranks' proportional set size (Pss, proc(5): a page that several processes map
counts once) from before the Buffer until after three layers. Beside it stands the window, most of which is touched
only by the worst case of its shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.launch import run_ranks
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.cli.bench import run_standalone

__all__ = ["markdown", "measure", "run_rank"]

RANKS, MODES = (2, 4, 8, 16), ("low-latency", "normal")
#: Of a rank. What each of 16 ranks holds to verify its answers, 0.8 GiB, fits 16 GiB.
TOKENS = 64
_RANK_PROGRAM = "import sys; from benchmarks import ep_sizes; ep_sizes.run_rank(sys.argv[1], sys.argv[2])"
#: Seconds that the ranks of one size may take.
_SECONDS = 300.0
_LAYERS = 3


def _card(mode: str, ranks: int) -> Card:
    return Card(name="ep-sizes", mode=mode, against=(), tokens=TOKENS, ranks=ranks, iterations=12, warmup=2)


def _pss() -> int:
    """Proportional set size of this process, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def run_rank(mode: str, directory: str) -> None:
    """Body of a rank: what a Buffer and its first layers add to memory goes into ``directory``.

    Raises WrongData when what came is not what the oracle says.
    """
    import torch
    import torch.distributed as dist

    from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem, Routing
    from uccl_ep_serving.bench.subjects import LowLatencySubject, NormalSubject
    from uccl_ep_serving.buffer import Buffer
    from uccl_ep_serving.config import Settings

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    card, rank, cpu = _card(mode, group.size()), group.rank(), torch.device("cpu")
    low_latency, routing = mode == "low-latency", Routing.draw(card)
    problem: Any = LowLatencyProblem(card, routing, rank) if low_latency else FlatProblem(card, routing, rank)
    dist.barrier()
    before = _pss()
    dist.barrier()
    buffer = Buffer(group, low_latency_mode=low_latency, settings=Settings.from_environment(device="cpu"))
    if low_latency:
        subject: Any = LowLatencySubject(mode, buffer, problem, cpu, weights_at_dispatch=True)
    else:
        subject = NormalSubject(mode, buffer, problem, cpu)
    for variant in range(_LAYERS):
        for phase in subject.phases.values():
            phase(variant)
        subject.check(variant)
    dist.barrier()
    after = _pss()
    dist.barrier()
    found = {"grown": after - before, "window": buffer.runtime.window_bytes.nbytes}
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    subject.close()
    dist.destroy_process_group()


def _memory(mode: str, ranks: int) -> dict[str, float]:
    """Bytes of a rank: ``grown`` (mean) and ``window``."""
    with tempfile.TemporaryDirectory() as directory:
        run_ranks([sys.executable, "-c", _RANK_PROGRAM, mode, directory], ranks, _SECONDS)
        found = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: mean(one[name] for one in found) for name in ("grown", "window")}


def _times(mode: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Summaries of microseconds by subject and phase; every sample is verified."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "card.json")
        run_standalone(_card(mode, ranks), str(target), timeout=_SECONDS)
        found = json.loads(target.read_text())["us"]
    return {name: found[name] for name in ("direct", "memcpy")}


def measure(ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    """By mode and number of ranks, ``us`` and ``bytes``."""
    machine = describe()
    sizes = {
        mode: {str(one): {"us": _times(mode, one), "bytes": _memory(mode, one)} for one in ranks} for mode in MODES
    }
    machine["load_after"] = describe()["load"]
    return {"machine": machine, "sizes": sizes}


def markdown(result: Mapping[str, Any]) -> str:
    """A row per mode and number of ranks."""
    lines = [
        "Medians of the slowest rank, p10 - p90 of the layer; a layer is layout, dispatch and combine.",
        "",
        "| mode | ranks | dispatch us | combine us | layer us | p10 - p90 | `memcpy` us | layer, times `memcpy` "
        "| MiB a rank | of a window of |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, sizes in result["sizes"].items():
        for ranks, one in sizes.items():
            ours, bound = one["us"]["direct"], one["us"]["memcpy"]["layer"]["median"]
            layer = ours["layer"]
            cells = [mode, ranks, *(f"{ours[phase]['median']:,.0f}" for phase in ("dispatch", "combine", "layer"))]
            cells += [f"{layer['p10']:,.0f} - {layer['p90']:,.0f}", f"{bound:,.0f}", f"{layer['median'] / bound:.2f}"]
            cells += [f"{one['bytes'][name] / 2**20:,.0f}" for name in ("grown", "window")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    result = measure(options.ranks)
    print(markdown(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
