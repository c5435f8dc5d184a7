"""What low latency's kernels execute for a GPU, counted on the model machine: launches, instructions, lines of PTX.

    python benchmarks/kernel_counts.py [--json FILE] [--before COMMIT] [--ranks 8 --ranks 16] [--tokens 128]

One dispatch and one combine of every rank, FP8 out and BF16 back, between ranks that map each other's windows. Each
phase begins when all ranks have ended the one before, and programs run one after another: nobody waits, so that what is
counted is work. The combined tokens are checked. The longest path of a kernel is that of its longest program; that of a
dispatch is the sum over its kernels, which run one after the other. Compiled are, cold and one after another, all
specializations that an engine can ask for. ``--before``: an earlier commit beside this one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.source_tree import ROOT
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.report import markdown_table

__all__ = ["markdown", "measure"]

#: DeepSeek-V3.
HIDDEN, EXPERTS, TOPK = 7168, 256, 8
#: Of one group of ranks; the machine steps each thread.
SECONDS = 7200.0
NOW, BEFORE = "now", "before"
#: Of a kernel: its counts, in words.
COLUMNS = {
    "launches": "launches",
    "longest": "longest program",
    "executed": "all programs",
    "text": "instructions of PTX",
    "bytes": "bytes of PTX",
}
SUMMED = ("launches", "instructions of PTX", "bytes of PTX")
#: Kernels of both designs.
PHASES = {
    "dispatch": {
        *("dispatch_send", "dispatch_recv"),
        *("route", "pack_dispatch", "dispatch_arrival", "count_rows", "unpack_rows"),
    },
    "combine": {
        *("combine_send", "combine_recv"),
        *("prepare_combine", "pack_combine", "combine_arrival", "sum_rows"),
    },
}
#: Files of low latency alone.
SOURCES = ("ll_*.py", "low_latency.py", "programs.py")


def run_here(ranks: int, tokens: int, hidden: int, accesses: bool) -> dict[str, dict[str, float]]:
    """By kernel: launches, instructions of its longest program and of all, by rank, and of the text. Of the product and
    the machine it uses what earlier commits have as well.

    Args:
        accesses: also the loads of the longest program, for which the machine stops at each; and as rounds those that
            do not follow another load without a store, an atomic or an exchange of lanes in between.
    """
    import numpy as np
    import torch

    from tests.ptx.machine.block import Block, Warp
    from tests.ptx.machine.machine import Machine
    from tests.ptx.memory.sequential import Sequential
    from tests.ptx.product import device, trials
    from tests.ptx.product.compiled import Compiled
    from tests.ptx.translation.event import COUNT
    from tests.ptx.translation.program import Label
    from tests.support import ll_cases
    from uccl_ep_serving.kernels.triton.kernel import PREFIX
    from uccl_ep_serving.oracle import LowLatencyInput, calc_diff

    found: dict[str, dict[str, float]] = {}
    case = ll_cases.Case(
        ranks=ranks, tokens=tokens, hidden=hidden, experts=EXPERTS, topk=TOPK, counts=(tokens,), reduced=False, fp8=True
    )
    inputs = case.inputs()
    # new tensors are not filled: 32 ranks ask for 30 GB, and touch few rows of that
    device._EMPTY.clear()
    counting = False

    loads: dict[Block, list[int]] = defaultdict(lambda: [0, 0, 0])

    class Bare(Sequential):
        """Without the copies of all memory that earlier commits have, and with one agent of a program."""

        def register(self, name: str, address: int, nbytes: int, watched: bool = True, fresh: bool = False) -> None:
            self.regions.add(SimpleNamespace(name=name, start=address, end=address + nbytes, watched=False))

        def new_block(self, launch: Any, block: str, count: int) -> list[Any]:
            return super().new_block(launch, block, 1) * count

        def end(self, launch: Any, agents: Sequence[Any]) -> None: ...

    class Counted(Machine):
        """Counts what each program has executed."""

        def record(self, warp: Warp, number: int, lanes: Sequence[int]) -> None:
            super().record(warp, number, lanes)
            decoded = warp.block.decoded(number)
            if accesses and decoded.kind != "clock" and lanes[0] == 0:
                counted = loads[warp.block]
                loading = decoded.kind == "load" and not decoded.shared
                counted[0] += loading
                counted[1] += loading and not counted[2]
                counted[2] = loading

        def _block_exited(self, block: Block) -> None:
            super()._block_exited(block)
            if counting:
                program = block.launch.kernel.program
                executed = block.state[:, COUNT].astype(np.int64)
                warps = executed.reshape(-1, min(32, len(executed))).max(axis=1)
                written = sum(not isinstance(line, Label) for line in program.code)
                one = found.setdefault(
                    program.name.removeprefix(PREFIX),
                    {"launches": 0, "longest": 0, "executed": 0, "text": written},
                )
                one["launches"] += int(block.place == (0, 0)) / ranks
                if accesses and warps.max() > one["longest"]:
                    one["loads"], one["rounds"], _ = loads[block]
                loads.pop(block, None)
                one["longest"] = max(one["longest"], int(warps.max()))
                one["executed"] += int(warps.sum()) / ranks
            # machines of earlier commits keep it: a megabyte
            block.warps.clear()
            vars(block).pop("barriers", None)

    compiled = Compiled(weak=accesses)
    machine = Counted(1, Bare(), resident=1, burst=0.9, parting=0.0, host_limit_s=SECONDS)

    def body(runtime: Any) -> None:
        nonlocal counting
        # its own, which kernels may touch
        given = LowLatencyInput(*(one.clone() for one in vars(inputs[runtime.rank]).values()))
        low_latency: Any = group.low_latency(runtime)
        ll_cases.reserve(low_latency, case)

        def together() -> None:
            group.synchronise()
            runtime.group.barrier.wait(SECONDS)

        # the first, of a few tokens, has no word yet of what was read
        for turn, few in enumerate((16, tokens)):
            together()
            counting = turn == 1
            together()
            x, ids, weights = given.x[:few], given.topk_idx[:few], given.topk_weights[:few]
            rows, count, handle, _, hook = low_latency.dispatch(
                x, ids, tokens, EXPERTS, return_recv_hook=True, **case.options
            )
            together()
            hook()
            together()
            y = torch.empty(rows[0].shape, dtype=case.dtype)
            elsewhere.submit(experts, rows, count, y, runtime.rank).result()
            combined, _, hook = low_latency.combine(y, ids, weights, handle, return_recv_hook=True)
            together()
            hook()
            together()
        elsewhere.submit(check, given, combined).result()

    def experts(rows: Any, count: Any, y: Any, rank: int) -> None:
        most = int(count.max())
        received = ll_cases.received_values(case, tuple(one[:, :most] for one in rows), count)
        y[:, :most] = ll_cases.expert_output(received, rank)

    def check(given: Any, combined: Any) -> None:
        # the oracle bit by bit would be the work of all ranks for each of them
        assert calc_diff(combined, ll_cases.exact_combined(case, given)) < 9e-4

    # the machine keeps every tensor that a thread of a rank makes
    with ThreadPoolExecutor(1) as elsewhere, trials.group_of(machine, compiled, ranks, "mapped") as group:
        group.run(body, limit_steps=1 << 60)
    for text, kernel in compiled._kernels.items():
        found[kernel.program.name.removeprefix(PREFIX)]["bytes"] = len(text)
    return found


def measure(groups: list[int], tokens: int, hidden: int = HIDDEN, before: str = "") -> dict[str, Any]:
    """Counts by commit, ranks and kernel."""
    # not there in commits to compare with, which count by this file
    from benchmarks import normal_counts
    from benchmarks.host_time import check_out

    result: dict[str, Any] = {
        "machine": describe(),
        "tokens": tokens,
        "hidden": hidden,
        "before": before,
        "lines": {},
        "counts": {},
        "sums": {},
        "compile": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        places = {NOW: ROOT}
        if before:
            check_out(before, Path(folder))
            places[BEFORE] = Path(folder)
        for way, place in places.items():
            sources = [one for name in SOURCES for one in (place / "kernels" / "triton").glob(name)]
            result["lines"][way] = sum(len(one.read_text().splitlines()) for one in sources)
            compiled = normal_counts.process(place, "compile", *set().union(*PHASES.values()))
            result["compile"][way] = normal_counts.compile_sums(compiled)
        # counts are the same whatever runs beside
        with ThreadPoolExecutor(2) as pool:
            counted = {
                way: {str(ranks): pool.submit(_process, place, ranks, tokens, hidden, 0) for ranks in groups}
                for way, place in places.items()
            }
            accesses = pool.submit(_process, ROOT, groups[0], tokens, hidden, 1)
            for way, parts in counted.items():
                result["counts"][way] = {ranks: part.result() for ranks, part in parts.items()}
                result["sums"][way] = {ranks: _sums(kernels) for ranks, kernels in result["counts"][way].items()}
            result["accesses"] = accesses.result()
    return result


def _process(place: Path, *body: int) -> dict[str, dict[str, float]]:
    """:func:`run_here` in a process of its own, of the product at ``place``."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--body", *map(str, body)],
        env={"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _sums(kernels: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of all kernels of a layer: the paths of its phases, and what is summed."""
    paths = {phase: sum(one["longest"] for name, one in kernels.items() if name in PHASES[phase]) for phase in PHASES}
    return {**paths, **{key: sum(one[key] for one in kernels.values()) for key in ("launches", "text", "bytes")}}


def markdown(found: Mapping[str, Any]) -> str:
    """A row per commit, ranks and kernel, and the sums of both commits."""
    rows = []
    for way, groups in found["counts"].items():
        for ranks, kernels in groups.items():
            for name, one in kernels.items():
                rows.append([f"EP{ranks}", way, f"`{name}`", *(f"{one[key]:,.0f}" for key in COLUMNS)])
    sums = []
    for way, groups in found["counts"].items():
        for ranks, kernels in groups.items():
            whole = [f"{one:,.0f}" for one in _sums(kernels).values()]
            sums.append([f"EP{ranks}", way, *whole, f"{found['lines'][way]:,}"])
    headings = ("ranks", "commit", "kernel", *COLUMNS.values())
    of_sums = ("ranks", "commit", "path of a dispatch", "path of a combine", *SUMMED, "lines of Python")
    about = (
        f"{found['tokens']} tokens of {found['hidden']} values a rank, {EXPERTS} experts, top-{TOPK}, FP8 out and BF16 "
        f"back, expanded; warps' instructions of PTX for sm_90. Before is {found['before']}. A path is the sum of the "
        f"longest programs of its kernels. Loads in a round follow each other with nothing but arithmetic in between "
        f"(EP{next(iter(found['counts'][NOW]))}, now)."
    )
    tables = [markdown_table(of_sums, sums), markdown_table(headings, rows)]
    loads = [
        [f"`{name}`", *(f"{one[key]:,.0f}" for key in ("longest", "loads", "rounds"))]
        for name, one in found["accesses"].items()
    ]
    tables.append(markdown_table(("kernel", "longest program", "its loads", "in rounds"), loads))
    # not measured in the record of an earlier commit
    if compiled := found.get("compile"):
        rows = [[way, *(f"{value:,.4g}" for value in one.values())] for way, one in compiled.items()]
        of_compiled = ("commit", "kernels compiled, cold", "seconds of a core", "the slowest")
        tables.append(markdown_table(of_compiled, rows))
    return "\n\n".join((*tables, about))


def main() -> None:
    """Count, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", default="", help="an earlier commit")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--body", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.body:
        *sizes, accesses = options.body
        print(json.dumps(run_here(*sizes, accesses=bool(accesses))))
        return
    found = measure(options.ranks or [8, 16, 32], options.tokens, options.hidden, options.before)
    print(markdown(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
