#!/usr/bin/env python3
"""Where the warps of a kernel spend their time, by source line: samples of a report that ncu wrote.

    benchmarks/gpu_samples.py REPORT.ncu-rep [--lines 25]

``scripts/gpu-check profile`` writes such reports of both modes. Needs no GPU, and ``pip install ncu-report``. For each
kernel that was profiled: microseconds, registers, and the lines at which most samples of its warps were taken, with
what those waited for. A sample is taken at the instruction that waits, which is the one after a load, not the load.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Before the name of what a warp waited for.
_STALLED = "smsp__pcsamp_warps_issue_stalled_"


def samples(action: Any) -> Counter[tuple[str, int, str]]:
    """Samples of a profiled kernel by file name, line and what was waited for."""
    found: Counter[tuple[str, int, str]] = Counter()
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        if not name.startswith(_STALLED) or name.endswith("_not_issued") or not metric.num_instances():
            continue
        places = metric.correlation_ids()
        for index in range(metric.num_instances()):
            source = action.source_info(places.as_uint64(index))
            where = (Path(source.file_name()).name, source.line()) if source else ("?", 0)
            found[(*where, name.removeprefix(_STALLED))] += metric.as_uint64(index)
    return found


def table(found: Counter[tuple[str, int, str]], sources: Mapping[str, str], lines: int) -> list[str]:
    """What is waited for in all, then the ``lines`` lines with most samples, with their text where ``sources`` have the
    file."""
    total = found.total() or 1
    reasons, places = Counter[str](), Counter[tuple[str, int]]()
    for (name, line, reason), count in found.items():
        reasons[reason] += count
        places[name, line] += count
    said = [", ".join(f"{reason} {count / total:.0%}" for reason, count in reasons.most_common(8))]
    for (name, line), count in places.most_common(lines):
        here = Counter({one[2]: many for one, many in found.items() if one[:2] == (name, line)})
        why = ", ".join(f"{reason} {many / count:.0%}" for reason, many in here.most_common(3))
        text = sources.get(name, "").splitlines()[line - 1 : line]
        said.append(f"{count / total:6.1%}  {name}:{line}  {why}  {''.join(text).strip()[:90]}".rstrip())
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--lines", type=int, default=25)
    options = parser.parse_args()
    try:
        import ncu_report  # type: ignore[import-not-found]
    except ImportError:
        parser.exit(1, "no ncu_report: pip install ncu-report\n")
    report = ncu_report.load_report(str(options.report))
    for part in range(report.num_ranges()):
        profiled = report.range_by_idx(part)
        for index in range(profiled.num_actions()):
            action = profiled.action_by_idx(index)
            took = action.metric_by_name("gpu__time_duration.sum").as_double() / 1e3
            registers = action.metric_by_name("launch__registers_per_thread").as_uint64()
            print(f"\n{action.name()}: {took:.1f} us, {registers} registers")
            sources = {Path(file).name: text for file, text in action.source_files().items()}
            print("\n".join(table(samples(action), sources, options.lines)))


if __name__ == "__main__":
    main()
