"""Where warps wait, from what a report of ncu says of a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks import gpu_samples

SOURCE = "first\n    second\n"


def metric(*counts: int) -> Any:
    """A metric with ``counts`` at the instructions 0, 1 and so on."""
    return SimpleNamespace(
        num_instances=lambda: len(counts),
        correlation_ids=lambda: SimpleNamespace(as_uint64=lambda index: index),
        as_uint64=counts.__getitem__,
    )


METRICS = {
    "smsp__pcsamp_warps_issue_stalled_barrier": metric(0, 6, 1),
    "smsp__pcsamp_warps_issue_stalled_wait": metric(1, 2, 0),
    "smsp__pcsamp_warps_issue_stalled_wait_not_issued": metric(90, 90, 90),
    "smsp__pcsamp_sample_count": metric(),
}
#: Two instructions of one line, and one of no line.
PLACES = {
    0: SimpleNamespace(file_name=lambda: "/there/kernel.py", line=lambda: 2),
    1: SimpleNamespace(file_name=lambda: "/there/kernel.py", line=lambda: 2),
}
ACTION = SimpleNamespace(metric_names=lambda: list(METRICS), metric_by_name=METRICS.get, source_info=PLACES.get)


def test_samples_are_counted_by_line_and_reason() -> None:
    found = gpu_samples.samples(ACTION)
    assert +found == {("kernel.py", 2, "barrier"): 6, ("kernel.py", 2, "wait"): 3, ("?", 0, "barrier"): 1}


def test_the_lines_with_most_samples_come_first() -> None:
    assert gpu_samples.table(gpu_samples.samples(ACTION), {"kernel.py": SOURCE}, 2) == [
        "barrier 70%, wait 30%",
        " 90.0%  kernel.py:2  barrier 67%, wait 33%  second",
        " 10.0%  ?:0  barrier 100%, wait 0%",
    ]
