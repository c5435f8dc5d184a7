"""What a long run has found so far, in a file that is whole at any time: a run goes on where one of the same commit was
interrupted, or of the same sources of what a row is about."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.machine import describe

__all__ = ["Kept", "same_commit", "write"]

Row = dict[str, Any]


def same_commit(kept: str, now: str) -> bool:
    """Whether what was found at commit ``kept`` is true ``now``: "+" stands for sources that differ from the commit."""
    return kept == now and bool(now) and not now.endswith("+")


def write(file: Path, machine: Mapping[str, Any], name: str, rows: Sequence[Row] | Mapping[str, Row]) -> None:
    """Write ``rows`` under ``name``, a line for each, with the load of now; the file is the old one or the new one."""
    begin, end = "{}" if isinstance(rows, Mapping) else "[]"
    lines = (
        [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
        if isinstance(rows, Mapping)
        else [json.dumps(row) for row in rows]
    )
    told = json.dumps({**machine, "load_after": describe()["load"]})
    partial = file.with_suffix(".partial")
    partial.write_text(f'{{"machine": {told},\n"{name}": {begin}\n' + ",\n".join(lines) + f"\n{end}}}\n")
    partial.replace(file)


class Kept:
    """The rows of one commit, or of what has not changed since another.

    Args:
        file: of an earlier run; its rows are kept where they are of the commit of ``machine``, and that is known, and
            where they are ``still`` true.
        name: of the rows in the file.
        key: what a row is of; rows are sorted by it.
        machine: what runs now.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        key: Callable[[Row], Hashable],
        machine: Mapping[str, Any],
        still: Callable[[Row], bool] = lambda row: False,
    ) -> None:
        self._file, self._name, self._key, self._machine = file, name, key, machine
        known = json.loads(file.read_text()) if file.exists() else {"machine": {"commit": ""}}
        same = same_commit(known["machine"]["commit"], machine["commit"])
        self.rows: dict[Any, Row] = {key(row): row for row in known.get(name, ()) if same or still(row)}

    def keep(self, row: Row) -> None:
        """Add a row, and write the file."""
        self.rows[self._key(row)] = row
        write(self._file, self._machine, self._name, [self.rows[key] for key in sorted(self.rows)])
