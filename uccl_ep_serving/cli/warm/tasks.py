"""What ``uccl-ep warm`` compiles, in pieces that processes share out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from uccl_ep_serving.check.machine import has_gpu_devices
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.native.cache import cache_directory, read_object
from uccl_ep_serving.native.groups import Group, load
from uccl_ep_serving.protocol.layout import LowLatencyPlan

__all__ = ["GROUPS", "Kernels", "Outcome", "Task", "all_groups", "gpu_task", "group_tasks"]

#: What is compiled for CPUs, in words.
GROUPS = "groups of entry points for the CPU"


class Outcome(NamedTuple):
    """What became of a task.

    Attributes:
        place: the cache that keeps what was compiled.
        nbytes: of it.
        was_there: nothing had to be compiled.
        tasks: what else is to be done.
        remark: what there is to say, in words.
    """

    place: str = ""
    nbytes: int = 0
    was_there: bool = False
    tasks: tuple[Task, ...] = ()
    remark: str = ""


class Task(NamedTuple):
    """One piece of work, done in a process of its own.

    Attributes:
        kind: what pieces of this kind are, in words; "" for what finds out only what there is to compile.
        name: of this piece.
        work: an importable function that returns an :class:`Outcome`.
        arguments: of it.
    """

    kind: str
    name: str
    work: Callable[..., Outcome]
    arguments: tuple[Any, ...]


# -- for the CPU ----------------------------------------------------------------------------------------------------


def all_groups() -> list[Group]:
    """Entry points of everything on the CPU: both modes, proxies, every transport, what ``uccl-ep check`` writes with.
    What takes longest comes first."""
    from uccl_ep_serving.kernels.cpu.normal import NORMAL_NODES
    from uccl_ep_serving.kernels.select import cpu_groups
    from uccl_ep_serving.native.failure import STICKY_ERROR
    from uccl_ep_serving.preflight.turns import WIRE
    from uccl_ep_serving.proxy.service import proxy_groups
    from uccl_ep_serving.proxy.transport.select import NIC_TRANSPORTS

    return [NORMAL_NODES, *reversed(cpu_groups()), *proxy_groups("auto", NIC_TRANSPORTS), WIRE, STICKY_ERROR]


def group_tasks(groups: Callable[[], list[Group]]) -> dict[Task, Outcome | None]:
    """A task for each group of ``groups()``, an importable function; and its outcome where it is in the cache."""
    found: dict[Task, Outcome | None] = {}
    for group in groups():
        task = Task(GROUPS, group.name, _compile_group, (groups, group.name))
        # read, because a damaged one is not there
        kept = group.found
        found[task] = _kept(kept)._replace(was_there=True) if kept and read_object(kept) is not None else None
    return found


def _compile_group(groups: Callable[[], list[Group]], name: str) -> Outcome:
    group = next(one for one in groups() if one.name == name)
    # another process may compile it at this moment: then this one waits for it
    load(group)
    if (kept := group.found) is None:
        raise OSError(errno.EIO, "what was compiled could not be kept", str(cache_directory()))
    return _kept(kept)


def _kept(file: Path) -> Outcome:
    return Outcome(str(file.parent), file.stat().st_size)


# -- for GPUs -------------------------------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """For what kernels are compiled.

    Attributes:
        plan: sizes.
        codings: how dispatches send tokens.
        node_ranks: ranks of a node where normal mode crosses once between nodes, else 0.
    """

    plan: LowLatencyPlan
    codings: tuple[str, ...]
    node_ranks: int


def gpu_task(gpu: str, kernels: Kernels) -> Task:
    """Find out what there is to compile for the GPU named ``gpu``, or for this machine's where that is ""."""
    return Task("", f"kernels for {gpu}" if gpu else "this machine's GPU", _find_kernels, (gpu, kernels))


def _find_kernels(name: str, kernels: Kernels) -> Outcome:
    if not name and (missing := _no_gpu()):
        return Outcome(remark=f"no kernels for a GPU: {missing}")
    try:
        from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for, present_gpu
        from uccl_ep_serving.modes.ahead import launches
    except ImportError as error:
        raise ConfigError(f"kernels for a GPU need Triton: {error}. Next step: pip install 'triton>=3.6'") from error
    name, gpu = (name, GPUS[name]) if name else present_gpu()
    with compiling_for(gpu):
        found = [launch.kernel.__name__ for launch in launches(*kernels)]
    tasks = (
        Task(f"kernels for {name}", f"{kernel} for {name}", _compile_kernel, (gpu, kernels, place))
        for place, kernel in enumerate(found)
    )
    return Outcome(tasks=tuple(tasks))


def _no_gpu() -> str:
    """Why there are no kernels to compile for this machine's GPU, "" where there are. Says so without torch."""
    if not has_gpu_devices():
        return "this machine has none; --gpu names one"
    import torch

    if not torch.cuda.is_available():
        return "torch finds none; uccl-ep doctor says more, --gpu names one"
    return ""


def _compile_kernel(gpu: Any, kernels: Kernels, place: int) -> Outcome:
    from uccl_ep_serving.kernels.triton.ahead import compiling_for, keep
    from uccl_ep_serving.modes.ahead import launches

    with compiling_for(gpu):
        directory, was_there = keep(launches(*kernels)[place])
    nbytes = sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
    return Outcome(str(directory.parent), nbytes, was_there)
