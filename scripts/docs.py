#!/usr/bin/env python3
"""Regenerate the tables that stand in the documentation between ``generated`` and ``end`` markers.

Usage: ``scripts/docs.py`` rewrites the files; ``scripts/docs.py --check`` writes nothing and exits 1 when a
file differs from what would be written. Run it with the Python of this checkout's environment: the tables are made of
the package that it imports.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client.core import HistogramMetricFamily

import uccl_ep_serving
from tests.mutants.score import EQUIVALENT, sums
from tests.mutants.trial import KILLED, SURVIVED, TIMEOUT
from tests.ptx.litmus.litmus import table as litmus_table
from tests.ptx.litmus.tests import ALL as LITMUS
from uccl_ep_serving.cli.export import METRICS
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.engines.memory_budget import GIB, MoeShape, memory_budget
from uccl_ep_serving.engines.versions import SGLANG, VLLM, VersionRange
from uccl_ep_serving.engines.vllm import targets as vllm
from uccl_ep_serving.protocol import tables
from uccl_ep_serving.variables import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


def _default(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int) and value and value % (1 << 20) == 0:
        return f"{value >> 20}M"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value not in ("", (), None) else "not set"


def settings_table(group: str) -> str:
    """One row per environment variable of ``group``."""
    rows = ["| variable | default | all ranks | meaning |", "|---|---|---|---|"]
    defaults = Settings()
    for variable in SETTINGS:
        if variable.group != group:
            continue
        default = _default(getattr(defaults, variable.field))
        agreed = "yes" if variable.agreed else ""
        rows.append(f"| `{variable.name}` | {default} | {agreed} | {variable.meaning} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """One row per metric."""
    rows = [
        "| metric | labels | meaning |",
        "|---|---|---|",
        "| `uccl_ep_up` |  | 1 for a Buffer that answers, else 0 |",
    ]
    for metric in METRICS:
        kind = " (histogram)" if metric.family is HistogramMetricFamily else ""
        rows.append(f"| `{metric.scraped}`{kind} | {', '.join(metric.labels)} | {metric.meaning} |")
    return "\n".join(rows)


def versions_table(engine: str, versions: Iterable[VersionRange]) -> str:
    """One row per range of versions."""
    rows = [f"| {engine} | standing | why |", "|---|---|---|"]
    for known in versions:
        first, last = (".".join(map(str, version)) for version in (known.first, known.last))
        span = last if known.first == known.last else f"{first} to {last}"
        rows.append(f"| {span} | {known.standing} | {known.reason} |")
    rows.append("| newer | unproven | as with any version, each hook is verified at start |")
    return "\n".join(rows)


DEEPSEEK_V3 = MoeShape(hidden=7168, experts=256, topk=8, intermediate=2048)


def memory_table() -> str:
    """What DeepSeek-V3 takes of each GPU, a row per size of the window."""
    ranks = (8, 16, 32)
    rows = [f"| tokens | {' | '.join(f'EP {count}' for count in ranks)} |", "|---:|" + "---:|" * len(ranks)]
    for tokens in (128, 256, 512, 1024, 2048, 4096):
        cells = []
        for count in ranks:
            found = memory_budget(DEEPSEEK_V3, count, tokens, normal_plan(count, Settings(), 0))
            cells.append(f"{found.window / GIB:.1f} + {found.activations / GIB:.1f}")
        rows.append(f"| {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(rows)


def vllm_hooks_table() -> str:
    """One row per name of vLLM that the plugin changes."""
    rows = ["| when | name | what for | line in 0.33.0 |", "|---|---|---|---|"]
    groups = {"always": vllm.NAME_TARGETS, "asked for": vllm.CONFIG_TARGETS, "worker": vllm.LAYER_TARGETS}
    for when, group in groups.items():
        rows += [f"| {when} | `{target.name}` | {target.purpose} | {target.line} |" for target in group]
    return "\n".join(rows)


def _first_line(module: str) -> str:
    """First sentence of the docstring of a module (or package) of ``uccl_ep_serving``."""
    place = ROOT / "uccl_ep_serving" / module
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def layers_table() -> str:
    """One row per module, a blank number where it stands beside the one above; from import-linter's contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    rows = ["| layer | module | what it holds |", "|---:|---|---|"]
    for number, layer in enumerate(layers, 1):
        for index, module in enumerate(re.findall(r"\w+", layer)):
            rows.append(f"| {'' if index else number} | `{module}` | {_first_line(module)} |")
    return "\n".join(rows)


#: Cards of benchmarks/cards.toml that the README shows, and columns of their results.
CARDS = ("prefill", "decode")
SUBJECTS = ("direct", "shm", "tcp", "gloo", "mpi", "memcpy", "unpack")


def results_table() -> str:
    """A row per workload: median times that `make bench` has left in benchmarks/results."""
    rows = [f"| dispatch / combine | {' | '.join(SUBJECTS)} |", "|---|" + "---:|" * len(SUBJECTS)]
    runs: dict[str, None] = {}
    for name in CARDS:
        result = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
        card, machine, times = result["card"], result["machine"], result["us"]
        runs[f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}"] = None
        what = f"{card['mode'].replace('-', ' ')}, {card['tokens']} x {card['hidden']} {card['dtype']}"
        what += f", top-{card['topk']} of {card['experts']}"
        cells = [
            " / ".join(f"{times[who][phase]['median'] / 1e3:.3g}" for phase in ("dispatch", "combine"))
            if who in times
            else ""
            for who in SUBJECTS
        ]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    command = f'`make bench ARGS="--only {",".join(CARDS)}"`'
    return "\n".join([*rows, "", f"Medians ({'; '.join(runs)}): {command}."])


def suites_table() -> str:
    """A row per suite of tests, from what `make suites` has measured; the sums beside their budgets."""
    found = json.loads((ROOT / "benchmarks/results/suites.json").read_text())
    rows = ["| suite | holds | runs with | tests | seconds | commit |", "|---|---|---|---:|---:|---|"]
    for suite in found["suites"]:
        measured = suite["measured"]
        cells = [suite["name"], suite["holds"], f"`{suite['target']}`"]
        cells += [f"{measured[name]:.0f}" if name in measured else "" for name in ("tests", "seconds")]
        if measured.get("left"):
            cells[-2] += f", {measured['left']} not yet"
        rows.append(f"| {' | '.join(cells)} | {measured.get('commit', 'not yet')} |")
    sums = []
    for whole, budget in found["budgets"].items():
        parts = [suite["measured"].get("seconds") for suite in found["suites"] if whole in suite["within"]]
        known = [seconds for seconds in parts if seconds is not None]
        without = f", {len(parts) - len(known)} suites of it not yet measured" if len(known) < len(parts) else ""
        sums.append(f"`{whole}` takes {sum(known):.0f} of its {budget} seconds{without}")
    return "\n".join([*rows, "", f"{'; '.join(sums)}, on two cores with nothing else to do."])


def mutants_table() -> str:
    """A row per area, from what `make mutants` has tried."""
    tried = json.loads((ROOT / "benchmarks/results/mutants.json").read_text())["mutants"]
    rows = ["| area | mutants | equivalent | killed at first | killed now | by a time-out | by slow tests | survive |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for area, found in sums(tried).items():
        killed = found[KILLED] + found[TIMEOUT]
        count = killed + found[SURVIVED]
        first = f"{found['first']}, {found['first'] / count:.0%}" if count else "0"
        cells = [area, count + found[EQUIVALENT], found[EQUIVALENT], first, killed, found[TIMEOUT], found["slow"]]
        cells.append(found[SURVIVED])
        rows.append(f"| {' | '.join(map(str, cells))} |")
    seeds, commits = (", ".join(dict.fromkeys(str(one[name]) for one in tried)) for name in ("seed", "commit"))
    return "\n".join([*rows, "", f"Seed {seeds}; commits {commits}."])


def clusters_table() -> str:
    """The first table of what `python -m tests.support.clusters` has written."""
    text = (ROOT / "tests/data_plane/clusters.md").read_text()
    rows = text[text.index("\n| cluster |") :].strip()
    return rows.partition("\n\n")[0]


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "results"): results_table,
    ("CONTRIBUTING.md", "suites"): suites_table,
    ("CONTRIBUTING.md", "mutants"): mutants_table,
    ("docs/first-cluster.md", "clusters"): clusters_table,
    ("docs/settings.md", "everyday settings"): lambda: settings_table("everyday"),
    ("docs/settings.md", "NIC settings"): lambda: settings_table("nic"),
    ("docs/settings.md", "debug settings"): lambda: settings_table("debug"),
    ("docs/operating.md", "metrics"): metrics_table,
    ("docs/sglang.md", "sglang memory"): memory_table,
    ("docs/sglang.md", "sglang versions"): lambda: versions_table("SGLang", SGLANG.versions),
    ("docs/vllm.md", "vllm versions"): lambda: versions_table("vLLM", VLLM.versions),
    ("docs/vllm.md", "vllm hooks"): vllm_hooks_table,
    ("docs/architecture/overview.md", "layers"): layers_table,
    ("docs/architecture/model-machine.md", "litmus"): lambda: litmus_table(LITMUS),
    **{("docs/architecture/formats.md", name): make for name, make in tables.TABLES.items()},
}


def render(name: str, text: str) -> str:
    """``text`` of the file ``name`` with its generated tables replaced.

    Raises:
        ValueError: a table of :data:`TABLES` has no markers in the text.
    """
    for (file, table), make in TABLES.items():
        if file != name:
            continue
        marker = f"<!-- generated by `make docs`: {table} -->\n"
        before, found, rest = text.partition(marker)
        _, end, after = rest.partition(END)
        if not (found and end):
            raise ValueError(f"{name} has no markers for the table {table!r}")
        text = f"{before}{marker}{make()}\n{end}{after}"
    return text


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Rewrite the pages below ``root`` that are out of date, or only name them with ``--check``; the exit status."""
    package = Path(uccl_ep_serving.__file__).resolve()
    if not package.is_relative_to(ROOT):
        print(f"uccl_ep_serving comes from {package.parent}, not from {ROOT}: run make docs", file=sys.stderr)
        return 1
    check, stale = "--check" in arguments, False
    for name in dict.fromkeys(name for name, _ in TABLES):
        page = root / name
        before = page.read_text()
        after = render(name, before)
        if after != before:
            stale = True
            if not check:
                page.write_text(after)
            print(f"{name}: {'out of date, run make docs' if check else 'rewritten'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
