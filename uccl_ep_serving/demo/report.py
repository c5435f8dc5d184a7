"""What the demo prints about the traffic: a table of every rank's counters, and what they must add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

__all__ = ["reduced_rows", "traffic_tables"]

Counters = Mapping[str, Any]
"""One rank's ``Buffer.stats()``."""

_OPERATIONS = {
    "ll_dispatch": "low-latency dispatch",
    "ll_combine": "low-latency combine",
    "normal_dispatch": "normal dispatch",
    "normal_combine": "normal combine",
}


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _transports(counters: Counters) -> str:
    names = sorted(set(counters["transport_by_peer"].values()))
    return ", ".join(map(str, names)) or "-"


def traffic_tables(ranks: Sequence[Counters]) -> Group:
    """Two tables: what each rank's proxies moved, and how long its operations took."""
    # narrow enough together for a terminal of 80 columns
    wire = Table(title="What moved between the ranks", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("rank", "transport", "proxies", "commands", "writes"):
        wire.add_column(heading, justify="left" if heading == "transport" else "right", no_wrap=True)
    for heading in ("messages\nout", "bytes\nout", "messages\nin", "bytes\nin"):
        wire.add_column(heading, justify="right", no_wrap=True)
    times = Table(title="Operations", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("rank", "operation", "calls", "tokens", "rows to\npeers", "p50 us", "p99 us"):
        times.add_column(heading, justify="left" if heading == "operation" else "right", no_wrap=True)
    for counters in ranks:
        wire.add_row(
            str(counters["rank"]),
            _transports(counters),
            str(counters["proxies"]),
            f"{counters['commands']:,}",
            f"{counters['writes']:,}",
            f"{counters['messages_sent']:,}",
            _bytes(counters["bytes_sent"]),
            f"{counters['messages_received']:,}",
            _bytes(counters["bytes_received"]),
        )
        for key, name in _OPERATIONS.items():
            operation = counters["ops"].get(key)
            if operation and operation["count"]:
                times.add_row(
                    str(counters["rank"]),
                    name,
                    f"{operation['count']:,}",
                    f"{operation['tokens']:,}",
                    f"{operation['rows']:,}",
                    f"{operation['p50_us']:,.0f}",
                    f"{operation['p99_us']:,.0f}",
                )
    return Group(wire, Text(), times)


def reduced_rows(ranks: Sequence[Counters]) -> tuple[int, int]:
    """Rows of the low-latency mode, summed over the ranks.

    Returns:
        Rows dispatched to other ranks, one for each (token, remote rank) pair, and rows that came back. They are
        equal exactly when the expert side reduced: without the router weights one row for each (token, remote expert)
        returns.
    """
    sent = sum(int(counters["ops"].get("ll_dispatch", {}).get("rows", 0)) for counters in ranks)
    returned = sum(int(counters["ops"].get("ll_combine", {}).get("rows", 0)) for counters in ranks)
    return sent, returned
