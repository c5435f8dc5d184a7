"""``uccl-ep check``: try what serving needs, before a server starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from uccl_ep_serving.preflight.job import Finding

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_GROUPS = ("probe", "first")
#: Where the nodes meet, unless --port says otherwise.
_PORT = 29555


@app.command()
def check(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Only the GPUs that this process sees, and keep a record.")
    ] = False,
    only: Annotated[
        str,
        typer.Option(help="With --gpu. probe: the driver's calls; first: one operation of each mode. Keeps no record."),
    ] = "",
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes that take part; start the check on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of them this is, from 0.")] = 0,
    master: Annotated[str, typer.Option(help="An address of node 0 that the others reach.")] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port of node 0 where they meet.")] = _PORT,
    ranks_per_node: Annotated[
        int,
        typer.Option(
            min=0, max=128, help="Ranks of this node; 0: one for each GPU; without any 2, of several nodes 1."
        ),
    ] = 0,
    seconds: Annotated[
        float, typer.Option(min=10, max=86400, help="That all parts may take together, once ranks have started.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Try everything that serving needs, on one node or several, and say what stands in the way.

    On each node: what the doctor finds, and a check of its GPUs unless one is on record. Then ranks connect as those of
    a job do, write into each other's memory over each NIC and each other way, in host and GPU memory, verify every
    byte, measure, and run a layer of both modes. A table, and a verdict whose every failure has its next step.

    On several nodes start it on all: uccl-ep check --nnodes 2 --node-rank 0 --master HOST, and --node-rank 1; or
    torchrun ... --no-python uccl-ep check.

    --gpu tries the GPUs of this machine alone, in two minutes at most, and keeps a record: engines start on a GPU
    whose check is on record, for this driver, Triton and version; they run it themselves where it is missing.

    Exit status 0 when everything has passed, 1 when not, 2 when there was nothing to check or the arguments are wrong.
    """
    if only and (only not in _GROUPS or not gpu):
        typer.echo(f"check: --only goes with --gpu, and is one of {', '.join(_GROUPS)}", err=True)
        raise typer.Exit(2)
    if node_rank >= nnodes or (nnodes > 1 and not master):
        step = "--nnodes N --node-rank R --master HOST, with R from 0 to N - 1 and HOST an address of node 0"
        typer.echo(f"check: several nodes need {step}", err=True)
        raise typer.Exit(2)
    if gpu:
        raise typer.Exit(_gpu_alone(only, seconds, as_json))
    from uccl_ep_serving.errors import ConfigError
    from uccl_ep_serving.preflight import report
    from uccl_ep_serving.preflight.job import Job

    ranks = ranks_per_node or _gpus() or (2 if nnodes == 1 else 1)
    job = Job(nnodes, node_rank, ranks, 0, master or "127.0.0.1", port, seconds)
    try:
        status = report.run(job, os.environ, lambda node: list(_alone(node)), as_json)
    except ConfigError as error:
        typer.echo(f"check: {error}", err=True)
        status = 2
    raise typer.Exit(status)


def _gpu_alone(only: str, seconds: float, as_json: bool) -> int:
    try:
        from uccl_ep_serving.check import report
    except ImportError as error:
        typer.echo(f"check: {error}. Next step: uccl-ep doctor says what GPU tensors need", err=True)
        return 1
    return report.run((only,) if only else _GROUPS, seconds, as_json)


def _gpus() -> int:
    from uccl_ep_serving.cli.doctor.gpus import for_cpus_only
    from uccl_ep_serving.config import Settings
    from uccl_ep_serving.errors import ConfigError

    try:
        on_cpu = Settings.from_environment().device == "cpu"
    except ConfigError:
        on_cpu = False  # said by the ranks
    if on_cpu or for_cpus_only():
        return 0
    import torch

    return torch.cuda.device_count()


def _alone(node: int) -> Iterator[Finding]:
    """What stands in the way on this node by itself: problems of the doctor's, and the check of its GPUs."""
    from uccl_ep_serving.cli.doctor.findings import Status
    from uccl_ep_serving.cli.doctor.report import examine
    from uccl_ep_serving.preflight.job import Finding, failed

    where = f"node {node}"
    problems = [one for found in examine().values() for one in found if one.status is Status.PROBLEM]
    for one in problems:
        cause, step = "this node is not set up for it", one.next_step or "uccl-ep doctor"
        yield failed(f"doctor: {one.name}", where, expected="a usable node", found=one.value, cause=cause, step=step)
    if not problems:
        yield Finding("doctor", where, "nothing stands in the way")
    if _gpus():
        from uccl_ep_serving.check.gate import checked
        from uccl_ep_serving.check.machine import present
        from uccl_ep_serving.check.stamp import COMMAND, State

        try:
            machine = present()
        except RuntimeError as error:
            step = "uccl-ep doctor, and what the driver's own tool says (nvidia-smi, rocm-smi)"
            yield failed(
                "GPU check", where, expected="a driver that answers", found=str(error), cause="the driver", step=step
            )
            return
        record = checked(machine)
        if record.state is State.PASSED:
            yield Finding("GPU check", where, record.why)
        else:
            cause, step = "see what it prints", f"{COMMAND} on this node"
            yield failed(
                "GPU check", where, expected="a check that has passed", found=record.why, cause=cause, step=step
            )
