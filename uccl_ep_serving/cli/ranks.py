"""The ranks that ``uccl-ep bench`` and ``compare`` start on this host: each runs the command's ``rank_main``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from uccl_ep_serving.bench.launch import (
    launched_by,
    mpi_launcher,
    mpi_missing,
    prepare_rank,
    run_ranks,
)
from uccl_ep_serving.errors import UcclEpError
from uccl_ep_serving.native.background import die_with_parent

__all__ = ["run_as_rank", "start_ranks"]


def start_ranks(command: str, job: Mapping[str, Any], ranks: int, timeout: float, *, mpi: bool) -> None:
    """Call ``rank_main`` of ``uccl_ep_serving.cli.<command>`` in each of ``ranks`` processes, and wait for them.

    Args:
        job: what each is told, as JSON in an argument rather than in a file.
        timeout: seconds.
        mpi: the ranks need MPI: mpirun starts them, where there is one.

    Raises RankFailed.
    """
    program = f"from uccl_ep_serving.cli.{command} import rank_main; import sys; sys.exit(rank_main(sys.argv[1]))"
    mpirun = mpi_launcher() if mpi and not mpi_missing() else ""
    told = json.dumps({**job, "parent": os.getpid()})
    run_ranks([sys.executable, "-c", program, told], ranks, timeout, mpirun)


def run_as_rank(command: str, told: str, run: Callable[[dict[str, Any]], None]) -> int:
    """Body of a ``rank_main``: ``run`` what :func:`start_ranks` has ``told``. Returns the exit status."""
    job = json.loads(told)
    launcher, rank, size = launched_by(os.environ)
    if launcher == "torchrun":
        # under mpirun the parent is mpirun's own daemon, which ends its processes
        die_with_parent(job["parent"])
    try:
        prepare_rank(rank, size)
        run(job)
    except (UcclEpError, AssertionError) as error:
        print(f"{command}: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
