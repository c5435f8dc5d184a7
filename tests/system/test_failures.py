"""A killed rank, a silent rank, a dead proxy, bad input: named, in bounded time, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from tests.support import bodies
from tests.support.combinations import diagonal, first_of
from tests.support.ranks import Ranks
from tests.support.remains import held, left
from tests.system.test_group import PATHS


def _wait_for(paths: list[str], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(os.path.exists(path) for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize(("path", "mode"), diagonal(["direct", "shm", "tcp"], ["low_latency", "normal"]))
def test_a_killed_rank_is_named_within_a_second(mortal_ranks: Ranks, tmp_path: Path, path: str, mode: str) -> None:
    marker = str(tmp_path / "ready")
    mortal_ranks.start(3, bodies.until_it_fails, PATHS[path], mode, 1, False, marker)
    _wait_for([f"{marker}.{rank}" for rank in range(3)])
    time.sleep(0.2)
    pids = [mortal_ranks.pid(rank) for rank in range(3)]
    working = held(pids)
    assert len(working["sockets"]) >= 3, working  # else finding none afterwards would say nothing
    assert len(working["memory"]) >= 3, working
    killed = time.time()
    mortal_ranks.signal(1)
    results = mortal_ranks.finish([0, 2])
    for succeeded, found in results.values():
        assert succeeded, found
        assert (found["kind"], found["peer"]) == ("PeerLost", 1)
        assert found["when"] - killed < 1.0
        assert found["again"] == "PeerLost"
    assert left(pids) == {}


@pytest.mark.parametrize(
    ("path", "mode"), first_of(*itertools.product(["direct", "shm", "tcp"], ["low_latency", "normal"]))
)
def test_a_silent_rank_is_named_at_the_deadline(mortal_ranks: Ranks, tmp_path: Path, path: str, mode: str) -> None:
    marker = str(tmp_path / "ready")
    mortal_ranks.start(3, bodies.until_it_fails, {**PATHS[path], "timeout": 2.0}, mode, 1, True, marker)
    results = mortal_ranks.finish([0, 1, 2])
    last_sign = os.stat(f"{marker}.1").st_mtime
    for rank in (0, 2):
        succeeded, found = results[rank]
        assert succeeded, found
        # the first to give up closes its Buffer, which the other may see before its own deadline: no matter
        assert (found["kind"], found["peer"], found["again"]) == ("PeerTimeout", 1, "PeerTimeout"), found
        assert "arrived" in found["text"]
        assert 1.9 < found["when"] - last_sign < 3.5


def test_bad_input_is_refused_by_name_and_the_group_goes_on(ranks: Ranks) -> None:
    for path in ("direct", "shm"):
        for messages in ranks.run(2, bodies.refused, PATHS[path]):
            assert all(message.startswith("ConfigError") for message in messages), messages


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_stray_command_is_named_once_and_the_group_goes_on(ranks: Ranks, path: str) -> None:
    zero, one = ranks.run(2, bodies.stray_command, PATHS[path])
    assert one == []
    (text,) = zero
    assert text.startswith("ProtocolError: the proxy refused command")
    assert "rank 1's window" in text
    assert "(host), channel 0" in text


@pytest.mark.parametrize(
    ("who", "path", "mode"), diagonal(["kernel", "proxy"], ["shm", "tcp"], ["low_latency", "normal"])
)
def test_an_offset_outside_the_window_ends_the_operation_on_both_sides(
    ranks: Ranks, who: str, path: str, mode: str
) -> None:
    """Long before the deadline of 20 s, and by name: the one says what was wrong, the other whom it lost."""
    zero, one = ranks.run(2, bodies.operation_hit, PATHS[path], mode, who == "kernel")
    assert (zero["kind"], zero["peer"]) == ("ProtocolError", 1)
    cause = {"kernel": "a kernel of this rank was about to write", "proxy": "a kernel of this rank enqueued"}[who]
    assert cause in zero["text"]
    assert (one["kind"], one["peer"]) == ("PeerLost", 0)
    assert max(zero["seconds"], one["seconds"]) < 1.0


def test_different_shapes_are_refused_on_every_rank(ranks: Ranks) -> None:
    for text in ranks.run(3, bodies.disagree_on_shape, PATHS["shm"]):
        assert text.startswith("ConfigError")
        assert "hidden=256" in text
        assert "hidden=128" in text


def test_different_settings_are_refused_on_every_rank(ranks: Ranks) -> None:
    own = [{}, {"channels": 2}, {}]
    for text in ranks.run(3, bodies.disagree_on_settings, PATHS["shm"], own):
        assert text.startswith("ConfigError")
        assert "UCCL_EP_CHANNELS: rank 0 has 0, rank 1" in text


def test_a_dead_proxy_fails_the_next_operation(mortal_ranks: Ranks) -> None:
    zero, one = mortal_ranks.run(2, bodies.proxy_dies, {**PATHS["shm"], "timeout": 2.0})
    assert zero[0].startswith("ProxyDied")
    # where this rank gets no core for a while the other one has gone on without it by now
    assert zero[1].startswith(("ProxyDied", "Evicted"))
    assert all("UCCL_EP_FAULT_PROXY_AFTER" in text for text in zero), "the cause"
    assert len(zero) == len(one) == 2
    assert one[0].startswith(("PeerTimeout", "PeerLost"))
