"""Start the ranks of a stand-alone benchmark on this host, and end all of them when one fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from uccl_ep_serving.errors import ConfigError

__all__ = [
    "RankFailed",
    "free_port",
    "launched_by",
    "local_place",
    "mpi_launcher",
    "mpi_missing",
    "prepare_rank",
    "run_ranks",
]

#: What mpirun tells the processes that it starts (rank, size): Open MPI, then MPICH and Intel MPI.
_MPI = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
#: The same of the ranks of a host; plain PMI says neither.
_MPI_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_GRACE_SECONDS = 5.0


class RankFailed(RuntimeError):
    """A rank ended badly or not at all."""


def launched_by(environment: Mapping[str, str]) -> tuple[str, int, int]:
    """(launcher, rank, size): ("torchrun", …), ("mpirun", …), or ("", 0, 0) when nobody has started ranks yet. Raises
    ConfigError where the launcher's variables are no numbers."""
    for rank, size in (("RANK", "WORLD_SIZE"), *_MPI):
        if rank in environment and size in environment:
            try:
                numbers = int(environment[rank]), int(environment[size])
            except ValueError as error:
                raise ConfigError(f"{rank}, {size}: {error}. Next step: unset them, or start with torchrun") from None
            return ("torchrun" if rank == "RANK" else "mpirun"), *numbers
    return "", 0, 0


def mpi_launcher() -> str:
    """Path of mpirun or mpiexec, "" when there is none.

    One beside the interpreter goes first: mpi4py loads the MPI library of its own environment when there is one, and
    the ranks of one library started by another's launcher would each find themselves alone.
    """
    places = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return shutil.which("mpirun", path=places) or shutil.which("mpiexec", path=places) or ""


def mpi_missing() -> str:
    """What this machine lacks for MPI, "" when it has all."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if mpi_launcher() else "no mpirun or mpiexec on PATH"


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_ranks(command: Sequence[str], ranks: int, timeout: float, mpirun: str = "") -> None:
    """Run ``command`` as ranks 0..ranks-1 and wait for all.

    Each finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun. With
    ``mpirun`` (a path) that starts them, and they take their ranks from MPI's variables.

    Raises:
        RankFailed: a rank ended with another status than 0, or ``timeout`` seconds passed; all ranks have ended.
    """
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_WORLD_SIZE": str(ranks),
        # the checkout has directories that must not become top-level modules
        "PYTHONSAFEPATH": "1",
        # one rank a core is what is measured; torch would start a thread for every core in each
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Open MPI would bind each rank to one core, and with it the proxies that are there to run beside it
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        # and refuse more ranks than cores (release 5, then 4)
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    if mpirun and os.geteuid() == 0:
        # whoever runs this as root, as in most containers, has decided so already; mpirun would refuse
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT"):
            environment.setdefault(name, "1")
        environment.setdefault("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    if mpirun:
        starts = [([mpirun, "-n", str(ranks), *command], environment)]
    else:
        starts = [
            (list(command), {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
            for rank in range(ranks)
        ]
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout
    try:
        for arguments, variables in starts:
            processes.append(subprocess.Popen(arguments, env=variables))
        while True:
            statuses = [process.poll() for process in processes]
            bad = [(rank, status) for rank, status in enumerate(statuses) if status not in (None, 0)]
            if bad:
                rank, status = bad[0]
                raise RankFailed(f"rank {rank} of {ranks} ended with status {status}")
            if None not in statuses:
                return
            if time.monotonic() > deadline:
                late = [rank for rank, status in enumerate(statuses) if status is None]
                raise RankFailed(f"ranks {late} have not finished after {timeout:.0f} s: raise --timeout")
            time.sleep(0.05)
    finally:
        _end(processes)


def prepare_rank(rank: int, size: int) -> None:
    """Complete what mpirun leaves out of the environment that torch.distributed reads, and LOCAL_RANK and
    LOCAL_WORLD_SIZE where it says them. Raises ConfigError where the master's address is missing."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(size))
    for local_rank, local_size in _MPI_LOCAL:
        if local_rank in os.environ and local_size in os.environ:
            os.environ.setdefault("LOCAL_RANK", os.environ[local_rank])
            os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ[local_size])
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"{name} is not set: start with torchrun, or set it for mpirun (mpirun -x {name}=…)")


def local_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, ranks) on this host, which say whose GPU is whose. Raises ConfigError where the launcher says neither."""
    try:
        return int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    except KeyError as error:
        raise ConfigError(
            f"{error.args[0]} is not set, so that nobody knows which GPU is this rank's. Next step: start with "
            "torchrun, or with an mpirun of Open MPI or Intel MPI"
        ) from None
