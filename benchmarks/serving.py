"""What serving costs with each all-to-all of an engine on CPU ranks: ``uccl-ep compare-serving`` with the demo model.

    .venv/bin/python benchmarks/serving.py sglang [OUTPUT]
    .venv-vllm/bin/python benchmarks/serving.py vllm [OUTPUT]

The engine's own way is the first of each comparison. Its server is started as often as ours, one after another, and the
engine's own client loads it. ``allgather_reducescatter`` is vLLM's default; its CPU communicator lacks two collectives,
which ``uccl_ep_serving/demo/vllm_cpu/hooks.py`` supplies over gloo, for tests only. Experts are the same torch code
everywhere. So the figures say what an all-to-all costs CPU ranks, not what an engine does on GPUs.

Eight minutes for SGLang, fifteen for vLLM, on two cores. It writes ``results/serving-ENGINE.json`` and its part of
``RESULTS.md``. With OUTPUT, a directory, an interrupted run goes on there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.report import markdown_table
from uccl_ep_serving.cli.compare_serving import DEMO_LOAD, run_starts
from uccl_ep_serving.compare.directory import read_starts
from uccl_ep_serving.compare.serving.plan import ServingPlan
from uccl_ep_serving.compare.serving.report import page_of
from uccl_ep_serving.compare.serving.results import assemble

HERE = Path(__file__).resolve().parent
#: The second server of a name goes through proxies; the first lets the ranks of a host copy directly.
PROXIES = "UCCL_EP_DIRECT=0 UCCL_EP_TRANSPORT=shm"
BACKENDS = {
    "sglang": ("none", "uccl_ep", "uccl_ep"),
    "vllm": (
        "allgather_reducescatter",
        "uccl_ep_high_throughput",
        "uccl_ep_high_throughput",
        "uccl_ep_low_latency",
        "uccl_ep_low_latency",
    ),
}
SECONDS = 600.0


def plan_of(engine: str) -> ServingPlan:
    """What is compared."""
    names = BACKENDS[engine]
    extras = {f"{name}#2": PROXIES for name in names if names.count(name) == 2}
    return ServingPlan(engine, (), names, extras, load=DEMO_LOAD)


def markdown(result: Mapping[str, Any]) -> str:
    """Tables of a result, and how it was measured."""
    page = page_of(result)
    # the last says how each server was started, which this file does
    tables = [f"{title}:\n\n{markdown_table(headings, rows)}\n" for title, headings, rows, _ in page.tables[:-1]]
    return "\n".join([*tables, f"{page.method}. {page.workload}.\n", *page.told, ""])


def main() -> None:
    """Measure, print, write the results."""
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in BACKENDS:
        sys.exit(f"usage: serving.py {'|'.join(BACKENDS)} [OUTPUT]")
    plan = plan_of(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="uccl-serving-") as scratch:
        directory = Path(sys.argv[2] if len(sys.argv) == 3 else scratch)
        run_starts(plan, directory, SECONDS)
        result = assemble(plan, read_starts(directory, plan))
    # what this machine's files are called, and what was answered, says nothing elsewhere
    starts = [{name: value for name, value in start.items() if name != "answers"} for start in result["starts"]]
    for start in starts:
        start["servers"] = {name: {**server, "command": []} for name, server in start["servers"].items()}
    rates = [one for one in result["verdicts"] if one["figure"] == "tokens_per_second"]
    found = {
        **result,
        "starts": starts,
        "machine": starts[0]["machine"],
        "times_baseline": {one["b"]: 1 / one["ratio"] for one in rates},
        "times_baseline_interval": {one["b"]: {"low": 1 / one["high"], "high": 1 / one["low"]} for one in rates},
    }
    target = HERE / "results" / f"serving-{plan.engine}.json"
    target.write_text(json.dumps(found, indent=1) + "\n")
    subprocess.run([sys.executable, str(HERE / "run.py"), "--render"], check=True)


if __name__ == "__main__":
    main()
