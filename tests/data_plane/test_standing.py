"""How a rank stands, as it is told outside: its state and why, and for whom it waits."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from uccl_ep_serving.control_plane.reports import Wait
from uccl_ep_serving.data_plane import standing
from uccl_ep_serving.data_plane.standing import STATES, WaitLog, state_of
from uccl_ep_serving.errors import PeerTimeout


def watch(**changes: Any) -> Any:
    """Of a rank that goes on, but for ``changes``."""
    liveness = SimpleNamespace(stopped="", lost_unmasked=[], how_gone=lambda peer: f"how {peer} went")
    space = SimpleNamespace(
        failed=False, phase="dispatch", failure=lambda phase: PeerTimeout(f"{phase}: silent", peer=1)
    )
    plane = SimpleNamespace(space=space, service=SimpleNamespace(death=""))
    found = SimpleNamespace(closed=False, broken="", short="", stale="", liveness=liveness, plane=plane)
    for path, value in changes.items():
        *path_to, name = path.split("__")
        target: Any = found
        for part in path_to:
            target = getattr(target, part)
        setattr(target, name, value)
    return found


@pytest.mark.parametrize(
    ("changes", "state", "why"),
    [
        ({}, "ok", ""),
        ({"closed": True, "broken": "torn"}, "closed", ""),
        (
            {"liveness__stopped": "ranks [1] have gone on without it", "broken": "torn"},
            "evicted",
            "ranks [1] have gone on",
        ),
        ({"broken": "torn"}, "broken", "torn"),
        ({"short": "no room"}, "broken", "no room"),
        ({"liveness__lost_unmasked": [2, 3]}, "lost", "rank 2: how 2 went; rank 3: how 3 went"),
        ({"plane": None, "stale": "rank 2 was masked"}, "rebuilding", "rank 2 was masked"),
        ({"plane__service__death": "proxy 0 ended"}, "failed", "proxy 0 ended"),
        ({"plane__service": None, "stale": "rank 2 was masked"}, "stale", "rank 2 was masked"),
        ({"plane__space__failed": True}, "failed", "dispatch: silent"),
    ],
)
def test_a_state_is_told_with_its_reason(changes: dict[str, Any], state: str, why: str) -> None:
    found = state_of(watch(**changes))
    assert found[0] == state
    assert found[0] in STATES
    assert found[1].startswith(why)


def test_waits_are_counted_by_peer_and_a_long_one_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(standing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log, wait = WaitLog(3), Wait(2, "low-latency combine recv", 0, 5, 8)
    for second in range(1, 30):
        now[0] = float(second)
        log.sample(wait if second % 10 else None, (1, second // 10), timeout=40.0)
    assert log.as_dict() == {"samples": 29, "by_peer": {"2": 27}, "seconds": 8.0}
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 3  # one for each operation, after a tenth of the deadline
    assert told[0].startswith("rank 3 has waited 5 s for rank 2 (low-latency combine recv, 5 of 8 messages have come)")


def test_a_wait_that_ends_and_others_that_follow_are_no_long_one(caplog: pytest.LogCaptureFixture) -> None:
    log = WaitLog(0)
    for operation in range(100):
        log.sample(Wait(1, "dispatch"), (0, operation), timeout=0.0)
        time.sleep(0.02)
    assert not caplog.records
