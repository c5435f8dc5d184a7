#!/usr/bin/env python3
"""Regenerate the tables that stand in the documentation between ``generated`` and ``end`` markers.

Usage: ``scripts/docs.py`` rewrites the files; ``scripts/docs.py --check`` writes nothing and exits 1 when a
file differs from what would be written.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from uccl_ep_serving.config import SETTINGS, Settings
from uccl_ep_serving.engines.versions import VLLM
from uccl_ep_serving.engines.vllm import targets as vllm
from uccl_ep_serving.protocol import tables

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


def _default(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int) and value and value % (1 << 20) == 0:
        return f"{value >> 20}M"
    return str(value) if value not in ("", ()) else "empty"


def settings_table() -> str:
    """One row per environment variable."""
    rows = ["| variable | default | all ranks | meaning |", "|---|---|---|---|"]
    defaults = Settings()
    for variable in SETTINGS:
        default = _default(getattr(defaults, variable.field))
        agreed = "yes" if variable.agreed else ""
        rows.append(f"| `{variable.name}` | {default} | {agreed} | {variable.meaning} |")
    return "\n".join(rows)


def vllm_versions_table() -> str:
    """One row per range of versions."""
    rows = ["| vLLM | standing | why |", "|---|---|---|"]
    for known in VLLM.versions:
        first, last = (".".join(map(str, version)) for version in (known.first, known.last))
        rows.append(f"| {last if len(known.first) > 1 else f'{first} to {last}'} | {known.standing} | {known.reason} |")
    rows.append("| newer | unproven | as with any version, each hook is verified at start |")
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
CARDS = ("prefill", "small-steady", "decode")
SUBJECTS = ("direct", "shm", "tcp", "gloo", "mpi", "memcpy", "unpack")


def results_table() -> str:
    """A row per workload and phase: median times that `make bench` has left in benchmarks/results."""
    rows = [f"| milliseconds | {' | '.join(SUBJECTS)} | command |", "|---|" + "---:|" * len(SUBJECTS) + "---|"]
    runs: dict[str, None] = {}
    for name in CARDS:
        result = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
        card, machine, times = result["card"], result["machine"], result["us"]
        runs[f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}"] = None
        what = f"{card['mode'].replace('-', ' ')}, {card['tokens']} x {card['hidden']} {card['dtype']}"
        what += f", {card['ranks']} ranks, top-{card['topk']} of {card['experts']}"
        for phase in ("dispatch", "combine"):
            cells = [f"{times[who][phase]['median'] / 1e3:.3g}" if who in times else "" for who in SUBJECTS]
            command = f'`make bench ARGS="--only {name}"`' if phase == "dispatch" else ""
            rows.append(f"| {what}: {phase} | {' | '.join(cells)} | {command} |")
    return "\n".join([*rows, "", f"Medians ({'; '.join(runs)})."])


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "results"): results_table,
    ("README.md", "settings"): settings_table,
    ("examples/06_vllm/README.md", "vllm versions"): vllm_versions_table,
    ("examples/06_vllm/README.md", "vllm hooks"): vllm_hooks_table,
    ("docs/architecture/overview.md", "layers"): layers_table,
    **{("docs/architecture/overview.md", name): make for name, make in tables.TABLES.items()},
}


def render(name: str) -> str:
    """Text of the file ``name`` with its generated tables replaced.

    Raises:
        ValueError: a table of :data:`TABLES` has no markers in the file.
    """
    text = (ROOT / name).read_text()
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


def stale() -> list[str]:
    """Names of the files whose generated tables are out of date."""
    names = sorted({name for name, _ in TABLES})
    return [name for name in names if render(name) != (ROOT / name).read_text()]


def main() -> int:
    """Rewrite what is stale, or only name it with ``--check``."""
    names = stale()
    check = "--check" in sys.argv[1:]
    for name in names:
        if not check:
            (ROOT / name).write_text(render(name))
        print(f"{name}: {'out of date, run make docs' if check else 'rewritten'}")
    return 1 if check and names else 0


if __name__ == "__main__":
    sys.exit(main())
