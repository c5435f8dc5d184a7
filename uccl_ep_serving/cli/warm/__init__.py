"""``uccl-ep warm``: compile everything before the first Buffer does, for images and cold pods."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: That kernels can be compiled for without one, as in kernels/triton/ahead.py.
GPUS = ("sm_90", "sm_100", "gfx942", "gfx950")
CODINGS = ("bf16", "fp8", "ue8m0")


@app.command()
def warm(
    gpu: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(GPUS)}: compile for it, whatever is here; none: no GPU. Can be repeated."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile; 0: for all cores, if memory allows.")] = 0,
    ranks: Annotated[int, typer.Option(help="EP ranks.")] = 8,
    node_ranks: Annotated[int, typer.Option(min=0, help="Ranks of a host; 0: all.")] = 0,
    experts: Annotated[int, typer.Option(help="Experts, redundant ones included.")] = 256,
    hidden: Annotated[int, typer.Option(help="Values per token.")] = 7168,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    tokens: Annotated[int, typer.Option(help="Most tokens of a low-latency dispatch.")] = 128,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(CODINGS)}: how dispatches send tokens. Can be repeated; else all that fit."),
    ] = None,
) -> None:
    """Compile everything for this machine into the cache, so that the first Buffer finds it there.

    For CPUs: kernels, proxies and transports, into UCCL_EP_CACHE_DIR (else ~/.cache). The code is for this processor:
    where an image is built on another kind of machine, set NUMBA_CPU_NAME and NUMBA_CPU_FEATURES in the image to those
    of the machines that serve.

    For GPUs: the kernels of the GPU that is here, or of those named, into Triton's own cache (TRITON_CACHE_DIR, else
    ~/.triton/cache), where launches find them if Triton is of the same version and the cache lies under the same path.
    They are for the sizes of one model: those of DeepSeek-V3 on 8 ranks, or those given. What Triton builds besides
    when it loads a kernel, with the C compiler, needs the GPU and is left to the first Buffer.

    Exit status 0 when everything is there, 1 when something does not compile or cannot be kept.
    """
    from uccl_ep_serving.cli.warm import progress
    from uccl_ep_serving.cli.warm.tasks import Kernels
    from uccl_ep_serving.protocol.layout import LowLatencyPlan
    from uccl_ep_serving.protocol.message import SCALE_BLOCK

    blocks = dict(zip(CODINGS, (1, SCALE_BLOCK, 4 * SCALE_BLOCK), strict=True))
    codings = tuple(dtype or (name for name, block in blocks.items() if hidden % block == 0))
    gpus = [""] if not gpu else [one for one in gpu if one != "none"]
    try:
        for name, given, known in (("gpu", gpus, ("", *GPUS)), ("dtype", codings, CODINGS)):
            if wrong := [one for one in given if one not in known]:
                raise ValueError(f"--{name} {wrong[0]} is none of {', '.join(filter(None, known))}")
        if gpus and "none" in (gpu or ()):
            raise ValueError(f"--gpu none, and --gpu {gpus[0]}: leave one of them out")
        plan = LowLatencyPlan(ranks, tokens, hidden, experts, topk, 2)
        if node_ranks and ranks % node_ranks:
            raise ValueError(f"{ranks} ranks do not fill hosts of {node_ranks}")
    except ValueError as error:
        typer.echo(f"warm: {error}", err=True)
        raise typer.Exit(2) from None
    crossed = node_ranks if 1 < node_ranks < ranks else 0
    raise typer.Exit(progress.run(gpus, Kernels(plan, codings, crossed), jobs))
