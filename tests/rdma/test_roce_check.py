"""``uccl-ep check`` over real RC verbs: a rail between two ranks, written over and measured."""

from __future__ import annotations

import datetime
import importlib.util
import multiprocessing
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

# Debian's pyverbs, for the interpreter of the same version
sys.path.append("/usr/lib/python3/dist-packages")
pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(400)]


def _check(rank: int, path: str, answers: Any) -> None:
    import torch.distributed as dist

    from uccl_ep_serving.config import Settings
    from uccl_ep_serving.preflight import rank as one_rank
    from uccl_ep_serving.preflight import ways
    from uccl_ep_serving.preflight.job import Job, Place
    from uccl_ep_serving.preflight.meeting import Meeting
    from uccl_ep_serving.preflight.outcome import Outcome

    try:
        # emulation is slow: a second before anything is sent again; layers of both modes have a test of their own
        ways.SETTINGS.update(timeout=60.0, connect_timeout=60.0)
        one_rank.MODES = ()
        settings = Settings(transport="roce", direct=False, nics="rxe", nic_timeout=18)
        store = dist.FileStore(path, 2)
        store.set_timeout(datetime.timedelta(seconds=90))
        meeting = Meeting(store, Place(0, 1, rank, 2, rank, 2))
        job = Job(1, 0, 2, rank, "", 0, 120.0)
        outcome = Outcome([])
        one_rank.examine(outcome, meeting, job, lambda: settings, None, lambda words: None)
        answers.put((rank, outcome.passed, [(one.part, one.said, str(one.fault or "")) for one in outcome.findings]))
    except BaseException:
        answers.put((rank, False, [("", "", traceback.format_exc())]))


def test_a_rail_is_written_over(tmp_path: Path) -> None:
    # imported once and inherited: torch takes most of a minute under emulation
    import uccl_ep_serving.preflight.rank  # noqa: F401

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=_check, args=(rank, str(tmp_path / "store"), answers), daemon=True) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = sorted(answers.get(timeout=240) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    for _, passed, findings in found:
        assert passed, findings
        alone = {part: said for part, said, _ in findings if part.startswith("NIC to itself")}
        wanted = {"NIC to itself"} | ({"NIC to itself, pyverbs"} if importlib.util.find_spec("pyverbs") else set())
        assert alone.keys() == wanted
        print(alone)
        (there, back) = [said for part, said, _ in findings if part == "roce rail 0"]
        print(there, "|", back)
        assert there.startswith("rxe")
        assert "GB/s" in back
