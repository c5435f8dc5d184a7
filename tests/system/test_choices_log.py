"""What was chosen is in the log whenever a data plane is installed: with the window that serves from then on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support import bodies
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.control_plane.bootstrap import StoreExchange


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self.lines.append(record.getMessage())


def logged(exchange: StoreExchange, overrides: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(line, MiB of the window and of its low latency) after opening, a first and a larger low-latency shape, and after
    masking the last rank."""
    kept, log = _Kept(), logging.getLogger("uccl_ep_serving")
    level = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    found = []

    def note() -> None:
        layout = buffer.runtime.layout
        (line,) = [line for line in kept.lines if line.startswith("uccl_ep rank")]
        kept.lines.clear()
        found.append((line, layout.nbytes / 2**20, layout.low_latency.nbytes / 2**20 if layout.low_latency else 0.0))

    try:
        buffer = bodies.opened(exchange, overrides)
        note()
        for tokens in (8, 16):
            for seed in range(2):
                bodies.round_trip(buffer, seed, tokens=tokens)
            note()
        exchange.all_gather(b"")  # a rank that is still in its combine would hear of the mask there
        last = exchange.size - 1
        if exchange.rank == last:
            buffer.runtime.close(0.1)
            return found
        buffer.low_latency_update_mask_buffer(last, True)
        bodies.normal_trip(buffer, lost=frozenset({last}))
        note()
        buffer.destroy()
    finally:
        log.removeHandler(kept)
        log.setLevel(level)
    return found


@pytest.mark.parametrize("path", ["direct", "tcp"])
def test_every_window_is_logged_with_the_size_that_serves(ranks: Ranks, path: str) -> None:
    results = ranks.run(3, logged, PATHS[path])
    assert [len(found) for found in results] == [4, 4, 3]
    for rank, found in enumerate(results):
        for number, (line, size, low_latency) in enumerate(found):
            assert line.startswith(f"uccl_ep rank {rank} of 3: ")
            assert f"window {size:.1f} MiB" in line
            assert (f"low latency {low_latency:.1f} MiB" if number else "no low latency yet") in line
            assert line.endswith("without ranks 2") == (number == 3)
        sizes = [low_latency for _, _, low_latency in found]
        # what has room once has room for good
        assert sizes[0] < sizes[1] < sizes[2] == sizes[-1]
