"""Who takes part in a check: nodes, the ranks of each, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..check.faults import Fault
from ..check.gate import most_seconds
from ..check.machine import has_gpu_devices
from ..errors import ConfigError

__all__ = ["PORT", "Finding", "Job", "Place", "failed", "of_torchrun", "skew"]

#: Where the nodes of a check meet, unless somebody says otherwise.
PORT = 29555


class Job(msgspec.Struct, frozen=True):
    """What one process of a check is told.

    Attributes:
        nodes, node: how many, and which one this is.
        locals, local: ranks of this node, and which of them this process is.
        master, port: where rank 0 listens for the others.
        seconds: that all parts may take together.
        served: somebody else listens there (torchrun's agent), so rank 0 only connects.
        doctor: what the doctor of this node has found that is a problem or worth a note, told by its first rank.
    """

    nodes: int
    node: int
    locals: int
    local: int
    master: str
    port: int
    seconds: float
    served: bool = False
    doctor: tuple[Finding, ...] = ()


class Place(NamedTuple):
    """Where a rank is: its node of how many, its number there of how many, and its rank of how many."""

    node: int
    nodes: int
    local: int
    locals: int
    rank: int
    ranks: int


class Finding(msgspec.Struct, frozen=True):
    """A line of the report.

    Attributes:
        part: what was tried.
        where: between whom, or on which node.
        said: what was found; measured figures.
        note: worth knowing, in words, with its next step; it does not stand in the way.
        fault: why it has failed; None where it has not.
    """

    part: str
    where: str
    said: str = ""
    note: str = ""
    fault: Fault | None = None


def failed(part: str, where: str, *, expected: str, found: str, cause: str, step: str) -> Finding:
    """A finding that stands in the way of a job, in the words of its fault."""
    return Finding(part, where, fault=Fault(where, expected, found, cause, step))


def skew(job: Job) -> float:
    """Seconds that ranks may come later than others: the first of a node without a record checks its GPUs before."""
    return most_seconds() if (job.nodes > 1 or job.served) and has_gpu_devices() else 0.0


def of_torchrun(environment: Mapping[str, str], seconds: float, doctor: Sequence[Finding] = ()) -> Job | None:
    """The job of a process that torchrun has started; None for others. Raises ConfigError where a variable is
    missing, or no number."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environment.keys():
        return None

    def number(name: str, otherwise: Any = None) -> int:
        return int(environment[name] if otherwise is None else environment.get(name, otherwise))

    try:
        locals_ = number("LOCAL_WORLD_SIZE")
        return Job(
            nodes=number("GROUP_WORLD_SIZE", number("WORLD_SIZE") // locals_),
            node=number("GROUP_RANK", number("RANK") // locals_),
            locals=locals_,
            local=number("LOCAL_RANK"),
            master=environment["MASTER_ADDR"],
            port=number("MASTER_PORT"),
            seconds=seconds,
            served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            doctor=tuple(doctor),
        )
    except (KeyError, ValueError, ZeroDivisionError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"torchrun's variables: {said}. Next step: start with torchrun, or unset RANK") from None
