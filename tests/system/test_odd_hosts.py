"""Hosts that are not as engines expect them: a /dev/shm without room, and a wall clock that jumps."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import bodies
from tests.support.ranks import Ranks
from tests.support.source_tree import ROOT
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

#: Where the wall clock may be read: the age of a file, and of a record; when a Buffer was opened.
_DATED = {"native/cache.py", "check/stamp.py", "data_plane/runtime.py"}


def test_a_dev_shm_without_room_is_not_needed() -> None:
    mount = "mount -t tmpfs -o size=4k none /dev/shm && exec"
    command = ["unshare", "--mount", "sh", "-c", f'{mount} "$0" "$@"', sys.executable, "examples/02_low_latency.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"a mount namespace cannot be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def under_a_jumping_clock(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    """Both modes, while each look at the wall clock finds another day."""
    honest, days = time.time, random.Random(exchange.rank)
    time.time = lambda: honest() + 86400.0 * days.randint(-400, 400)
    try:
        return int(bodies.both_modes(exchange, overrides, 3)["rank"])
    finally:
        time.time = honest


@pytest.mark.parametrize("overrides", [{}, {"transport": "tcp", "direct": False}], ids=["direct", "tcp"])
def test_clocks_that_jump_end_no_wait(ranks: Ranks, overrides: dict[str, Any]) -> None:
    assert ranks.run(2, under_a_jumping_clock, overrides) == [0, 1]


def test_nothing_that_waits_reads_the_wall_clock() -> None:
    root = ROOT / "uccl_ep_serving"
    folders = (
        "buffer.py",
        "modes",
        "gpu",
        "data_plane",
        "control_plane",
        "kernels",
        "proxy",
        "native",
        "check",
        "engines",
    )
    files = [
        file
        for name in folders
        for file in ([root / name] if name.endswith(".py") else sorted((root / name).resolve().rglob("*.py")))
    ]
    assert len(files) > 150
    wall = re.compile(r"\btime\.time\(|datetime\.now\(|CLOCK_REALTIME|gettimeofday")
    reading = {str(Path(*file.parts[-2:])) for file in files if wall.search(file.read_text())}
    assert reading <= _DATED, reading
