"""What normal mode's kernels are for a GPU, and what they execute on the model machine.

    python benchmarks/normal_counts.py [--json FILE] [--before COMMIT] [--ranks 8 --ranks 16] [--tokens 512]

Compiled for sm_90, cold, one after another: what an engine needs for dispatches in FP8, from a handle in BF16, and
combines in BF16, of DeepSeek-V3, in a node and between nodes. Executed: one dispatch with a promise and its combine in
BF16, of ranks that map each other's windows, by Triton's kernels and by bulk copies; the combined tokens are checked.
A group has so many tokens, whatever its ranks, by Triton's kernels also twice as many: what a token more takes.
Programs run one after another and look again until all has come, so that instructions are those of work and of turns.
``--before``: an earlier commit beside this one, by Triton's kernels, on this one's machine. All of it takes an hour of
a core; with ``--json`` a run that was interrupted goes on where it was (:mod:`benchmarks.parts`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.support.source_tree import ROOT
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.report import markdown_table

if TYPE_CHECKING:
    from benchmarks.parts import Parts

__all__ = ["compile_sums", "lay_over", "markdown", "measure", "process"]

#: DeepSeek-V3 has 256 experts; the model machine's windows have room for 16 of a rank.
HIDDEN, TOPK, LOCAL_EXPERTS = 7168, 8, 16
#: Channels of an operation that is executed: with more of them each has less to do.
PROGRAMS = 4
SECONDS = 7200.0
NOW, BEFORE = "now", "before"
COPIES = ("triton", "tma")
#: Of an earlier commit's tree, replaced by this one's where it is executed: the machine, and what checks results. What
#: takes the product's launches to the machine (tests/ptx/product) is each commit's own.
MACHINE = (
    *("tests/ptx/machine", "tests/ptx/memory", "tests/ptx/translation"),
    *("tests/support/bits.py", "tests/support/normal_cases.py"),
)
#: What torch launches itself; its instructions are not counted.
BY_TORCH = "fill_, copy_"
FILLING = ("zeros", "zeros_like", "full", "zero_", "fill_", "copy_")
COUNTED = ("launches", "longest", "executed")
#: What moves bytes, in words.
MOVED = {"load": "loaded", "store": "stored"}
#: Of both designs.
SOURCES = ("normal*.py", "routing.py")
#: Of a compiled kernel, in words.
COMPILED = {
    "seconds": "seconds of a core",
    "text": "instructions of PTX",
    "bytes": "bytes of PTX",
    "registers": "registers",
    "spilled": "bytes spilled",
    "in_flight": "KiB of rows in flight",
}


def compile_here(*names: str) -> list[dict[str, Any]]:
    """By kernel of ``names``, of normal mode without any, and specialization. Of the product and its tests it uses what
    earlier commits have as well."""
    from tests.kernels.compiled_kernels import launches, normal_launches
    from tests.kernels.compiled_traps import cubin_resources, loads_at_once
    from tests.ptx.translation.program import Label, parse
    from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for

    found = []
    with compiling_for(GPUS["sm_90"]):
        wanted = launches(frozenset(names)) if names else normal_launches()
        for one in {(launch.variant, launch.arguments): launch for launch in wanted}.values():
            start = time.process_time()
            built = one.build()
            spent = time.process_time() - start
            ptx = built.asm["ptx"]
            found.append(
                {
                    "kernel": one.kernel.fn.__name__,
                    "nodes": _crosses(one.constants),
                    "seconds": spent,
                    "text": sum(not isinstance(line, Label) for line in parse(ptx).code),
                    "bytes": len(ptx),
                    "in_flight": 16 * 32 * one.variant.warps * loads_at_once(ptx) / 1024,
                    **cubin_resources(built.asm["cubin"]),
                }
            )
    return found


def _crosses(constants: Mapping[str, Any]) -> bool:
    """Whether a kernel with these is one between nodes; they stood one by one before they became a shape."""
    return bool(constants.get("SHAPE", constants).get("NODES"))


def copies_here() -> list[dict[str, Any]]:
    """The same of bulk copies, by NVRTC."""
    from tests.kernels.compiled_traps import cubin_resources
    from tests.kernels.test_copies_compiled import code_of
    from tests.ptx.translation.program import Label, parse
    from uccl_ep_serving.kernels.cuda import nvrtc

    found = []
    for form in ("fp8", "cached", "combine"):
        code = code_of(form, 8)
        start = time.process_time()
        binary = code.compiled(nvrtc.GPUS[0])
        spent = time.process_time() - start
        text = sum(not isinstance(line, Label) for line in parse(binary.ptx).code)
        found.append(
            {
                "kernel": code.name,
                "nodes": False,
                "seconds": spent,
                "text": text,
                "bytes": len(binary.ptx),
                "in_flight": code.shared / 1024,
                **cubin_resources(binary.cubin),
            }
        )
    return found


def execute_here(ranks: int, tokens: int, copy: str, accesses: bool = False) -> dict[str, dict[str, float]]:
    """Of a group with ``tokens`` tokens, by kernel: launches of a rank, instructions of a warp of its longest program,
    and of all warps of a rank. Of the product and of tests/ptx/product it uses what earlier commits have as well.

    Args:
        accesses: instead how many bytes threads load and store sixteen at a time, as rows are moved, in units of the
            rows that a rank receives. For this the machine stops at each access.
    """
    import numpy as np
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from tests.ptx.machine.block import Block, Warp
    from tests.ptx.machine.machine import Machine
    from tests.ptx.memory.sequential import Sequential
    from tests.ptx.product import ranks as model
    from tests.ptx.product import trials
    from tests.ptx.product.compiled import Compiled
    from tests.ptx.translation.event import COUNT
    from tests.support import normal_cases
    from uccl_ep_serving.config import Settings
    from uccl_ep_serving.kernels.triton import normal
    from uccl_ep_serving.kernels.triton.kernel import PREFIX
    from uccl_ep_serving.modes.normal_gpu import NormalGpu
    from uccl_ep_serving.protocol.layout import PAGE

    def name_of(block: Block) -> str:
        return block.launch.kernel.program.name.removeprefix(PREFIX)

    each = max(tokens // ranks, 1)
    case = normal_cases.Case((each,) * ranks, HIDDEN, LOCAL_EXPERTS * ranks, TOPK, torch.bfloat16, 0.0)
    inputs = case.inputs()
    #: bytes, of all ranks
    received = sum(len(one.source) for one in inputs.delivered) * HIDDEN * 2
    found: dict[str, dict[str, float]] = {}
    counting = False

    class Counted(Machine):
        """Counts what each program has executed."""

        def record(self, warp: Warp, number: int, lanes: Sequence[int]) -> None:
            super().record(warp, number, lanes)
            decoded = warp.block.decoded(number)
            if accesses and counting and decoded.kind in MOVED and decoded.nbytes == 16 and not decoded.shared:
                one = found.setdefault(name_of(warp.block), dict.fromkeys(MOVED.values(), 0.0))
                one[MOVED[decoded.kind]] += decoded.nbytes * len(lanes) / received

        def _block_exited(self, block: Block) -> None:
            super()._block_exited(block)
            if counting and not accesses:
                name = name_of(block)
                one = found.setdefault(name, {"launches": 0, "longest": 0, "executed": 0})
                warps = block.state[:, COUNT].astype(np.int64).reshape(-1, 32).max(axis=1)
                one["launches"] += int(block.place == (0, 0)) / ranks
                one["longest"] = max(one["longest"], int(warps.max()))
                one["executed"] += int(warps.sum()) / ranks

    class ByTorch(TorchDispatchMode):
        """Counts what torch launches to fill tensors of a device, or to copy them."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if counting and not accesses and func._schema.name.removeprefix("aten::") in FILLING:
                found.setdefault(BY_TORCH, {"launches": 0})["launches"] += 1 / ranks
            return func(*args, **(kwargs or {}))

    # turns store the same words again, which the machine takes for waiting: its clock goes on as it is
    machine = Counted(
        1, Sequential(), resident=PROGRAMS, burst=0.9, parting=0.0, patience=1 << 60, host_limit_s=SECONDS
    )
    # rings hold all rows of a peer, and each channel of it a token more; so does the heap, where earlier kernels store
    landing = -(-ranks * (each + PROGRAMS) * (2 * HIDDEN + 256) // PAGE) * PAGE
    # earlier groups are not told them, nor how to copy
    sizes = mock.patch.dict(model._SMALL, heap=landing, rounds=4 * landing, chunk=1 << 20)
    # as the product does, where tests count the ids of few tokens by several programs
    marked = mock.patch.object(model, "MARKED", normal._MARKED, create=True)
    chosen = {"copy": copy} if hasattr(Settings, "copy") else {}
    settings = Settings(timeout=model.TIMEOUT, window="host", programs=PROGRAMS, **chosen)
    kept = []  # what they tell the host with is mapped memory
    with sizes, marked, trials.group_of(machine, Compiled(weak=accesses), ranks, "mapped", settings) as group:

        def body(runtime: Any) -> normal_cases.Outcome:
            nonlocal counting
            given = case.inputs()  # of the device
            mode: Any = NormalGpu(runtime, group.gpu(runtime))
            kept.append(mode)
            for turn in range(2):
                # the first compiles
                group.synchronise()
                runtime.group.barrier.wait(SECONDS)
                counting = turn == 1
                with ByTorch():
                    outcome = normal_cases.round_trip(mode, given, runtime.rank, num_worst_tokens=ranks * each)
            return outcome

        # compared out here, where a tensor is no memory of the device
        normal_cases.check(inputs, group.run(body, limit_steps=1 << 60), worst=ranks * each)
    return found


def measure(groups: Sequence[int], tokens: int, before: str = "", parts: Parts | None = None) -> dict[str, Any]:
    """What is compiled by commit; what is executed by ranks and way of copying, of the earlier commit under keys that
    end in ``_before``. What is among ``parts`` is taken from there."""
    # not there in commits to compare with, which count by this file
    from benchmarks.host_time import check_out

    def part(place: Path, *body: object) -> Any:
        name = " ".join(map(str, (NOW if place is ROOT else before, *body)))
        return process(place, *body) if parts is None else parts.measured(name, lambda: process(place, *body))

    result: dict[str, Any] = {"machine": describe(), "tokens": tokens, "before": before}
    result |= {"lines": {}, "all_lines": {}, "compiled": {}, "compile": {}}
    with tempfile.TemporaryDirectory() as folder:
        places = {NOW: ROOT}
        if before:
            check_out(before, Path(folder))
            places[BEFORE] = Path(folder)
        for way, place in places.items():
            sources = [one for name in SOURCES for one in (place / "kernels" / "triton").glob(name)]
            result["lines"][way] = _lines(sources)
            result["all_lines"][way] = _lines((place / "kernels" / "triton").glob("*.py"))
            result["compiled"][way] = part(place, "compile")
            result["compile"][way] = compile_sums(result["compiled"][way])
        result["compiled"][NOW] = [*result["compiled"][NOW], *part(ROOT, "copies")]
        for way, place in places.items():
            if way == BEFORE:
                lay_over(place)
            kinds = COPIES if way == NOW else ("triton",)
            result |= {
                _of("moved", way): part(place, "execute", groups[0], 8 * groups[0], "triton", 1),
                _of("executed", way): {
                    f"{ranks} {copy}": part(place, "execute", ranks, tokens, copy) for ranks in groups for copy in kinds
                },
                _of("doubled", way): {
                    f"{ranks} triton": part(place, "execute", ranks, 2 * tokens, "triton") for ranks in groups
                },
            }
    return result


def _of(key: str, way: str) -> str:
    """The key in a result for what was executed of a commit."""
    return key if way == NOW else f"{key}_{way}"


def lay_over(place: Path) -> None:
    """This commit's machine over that of the tree at ``place``."""
    for name in MACHINE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, place / name)


def _lines(sources: Iterable[Path]) -> int:
    return sum(len(one.read_text().splitlines()) for one in sources)


def compile_sums(kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of what :func:`compile_here` found: how many kernels, seconds of a core for all and for the slowest."""
    seconds = [one["seconds"] for one in kernels]
    return {"kernels": len(seconds), "seconds": sum(seconds), "slowest": max(seconds)}


def process(place: Path, *body: object) -> Any:
    """What one of the functions above finds in a process of its own, of the product at ``place``, with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        done = subprocess.run(
            [sys.executable, "-P", __file__, "--body", *map(str, body)],
            env={
                "PYTHONPATH": str(place),
                "PATH": "/usr/bin:/bin",
                "HOME": caches,
                "TRITON_CACHE_DIR": f"{caches}/triton",
            },
            stdout=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def markdown(found: Mapping[str, Any]) -> str:
    """A row per commit and kernel, the sums of both commits; of what was executed likewise, with a row for all."""
    kernels, sums = [], []
    for way, compiled in found["compiled"].items():
        for one in compiled:
            where = "between nodes" if one["nodes"] else "in a node"
            kernels.append([way, f"`{one['kernel']}`", where, *(f"{one[key]:,.4g}" for key in COMPILED)])
        triton = [one for one in compiled if not one["kernel"].startswith("copy_")]
        count, seconds, slowest = compile_sums(triton).values()
        written = [f"{sum(one[key] for one in triton):,}" for key in ("text", "bytes")]
        sums.append([way, str(count), f"{seconds:.0f}", *written, f"{slowest:.1f}", f"{found['lines'][way]:,}"])
    # nothing before in some records
    ways = [way for way in (NOW, BEFORE) if _of("executed", way) in found]
    executed = []
    for key, way in ((key, way) for key in found["executed"] for way in ways):
        of_way = (found.get(_of(what, way), {}).get(key, {}) for what in ("executed", "doubled"))
        parts, doubled = (_with_all(one, "launches", "executed") for one in of_way)
        for name, one in parts.items():
            twice = doubled.get(name, {})
            more = f"{_of_a_token(found, key, one, twice):,.0f}" if "executed" in twice else "-"
            counts = (f"{one[what]:,.0f}" if what in one else "-" for what in COUNTED)
            executed.append([f"EP{key.replace(' ', ', ')}", way, name, *counts, more])
    of_sums = ("commit", "Triton's kernels", *list(COMPILED.values())[:3], "the slowest", "lines of Python")
    about = (
        f"Compiled for sm_90, 8 ranks, between nodes of 4, on one core. Before is {found['before'] or 'not measured'}. "
        f"Executed: {found['tokens']} tokens of {HIDDEN} BF16 values in all, {LOCAL_EXPERTS} experts of a rank, "
        f"top-{TOPK}, over mapped windows, {PROGRAMS} programs; instructions of PTX of warps, 8 of a program and 4 of "
        "`mark_tokens`. A token more: what all warps of a rank execute for each token that it has above these, by a "
        f"count with twice as many. `{BY_TORCH}`: what torch fills and copies, whose launches only are counted."
    )
    tables = [
        markdown_table(of_sums, sums),
        markdown_table(("commit", "kernel", "where", *COMPILED.values()), kernels),
        markdown_table(
            ("ranks, copies", "commit", "kernel", "launches", "longest program", "all programs", "a token more"),
            executed,
        ),
    ]
    if "moved" in found:
        rows = []
        for way in ways:
            for name, one in _with_all(found.get(_of("moved", way), {}), *MOVED.values()).items():
                rows.append([way, name, *(f"{one[what]:.2f}" for what in MOVED.values())])
        of_moved = ("commit", "kernel", *(f"{what}, times the bytes of rows" for what in MOVED.values()))
        tables.append(markdown_table(of_moved, rows))
    return "\n\n".join((*tables, about))


def _with_all(parts: Mapping[str, Mapping[str, float]], *summed: str) -> dict[str, Mapping[str, float]]:
    """Kernels by their names in a table, and where there are any, what is ``summed`` of all of them."""
    whole = {what: sum(one.get(what, 0) for one in parts.values()) for what in summed}
    return {**{f"`{name}`": one for name, one in parts.items()}, **({"all": whole} if parts else {})}


def _of_a_token(found: Mapping[str, Any], key: str, one: Mapping[str, float], doubled: Mapping[str, float]) -> float:
    """Instructions of all warps of a rank for a token more; ``key``: ranks and way of copying of both counts."""
    return (doubled["executed"] - one["executed"]) * int(key.split()[0]) / found["tokens"]


def main() -> None:
    """Count, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", default="", help="an earlier commit")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--body", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.body:
        what, *sizes = options.body
        if what == "execute":
            ranks, tokens, copy, *accesses = sizes
            print(json.dumps(execute_here(int(ranks), int(tokens), copy, bool(accesses))))
        else:
            print(json.dumps(compile_here(*sizes) if what == "compile" else copies_here()))
        return
    from benchmarks.parts import Parts  # not there in commits to compare with

    parts = Parts("normal_counts") if options.json else None
    before = (
        options.before
        and subprocess.check_output(["git", "rev-parse", "--short=12", options.before], cwd=ROOT, text=True).strip()
    )
    found = measure(options.ranks or [8, 16, 32], options.tokens, before, parts)
    if parts is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        parts.end()
    print(markdown(found))


if __name__ == "__main__":
    main()
