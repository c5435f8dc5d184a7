#!/usr/bin/env python3
"""Normal mode on one GPU: checked, then timed, beside a plain copy of the same bytes. Ranks are processes on it.

    benchmarks/gpu_normal.py [--only normal_alone,normal_exchange,normal_first,normal_deepep]
                             [--programs 4,8,16,24] [--copies triton,tma] [--json FILE]

Each part prints one JSON object. ``scripts/gpu-check`` runs all of it beside the tests. With ``--interpreter`` and a
small shape it runs everywhere, and its times mean nothing.

- ``normal_alone``: one rank, whose rows only go to its own outputs: what the kernels copy with so many programs.
- ``normal_exchange``: two ranks that write each other's windows in GPU memory (CUDA IPC), BF16 and FP8 with scales: a
  dispatch whose size the host reads back, one from a handle, a combine; GB/s of received rows, and the share of what a
  copy of the same bytes reaches in the same round. Target: 70% with 24 programs or fewer. Two processes on one device
  take turns unless MPS runs (``machine.mps``), the copies beside them too.
- ``normal_first``: where the time of a dispatch goes whose size the host reads back, of one rank and of two, BF16 and
  most programs: microseconds of each step of the host, and of each kernel by the profiler.
- ``normal_deepep``: the same two ranks by DeepEP's kernels inside a node, where its package loads; else which call
  failed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import gpu_first_dispatch
from benchmarks.gpu_frame import (
    beside_deepep,
    deepep_group,
    has_mps,
    import_deepep,
    interpreted,
    reached,
    run_parts,
    seconds_of,
    share_the_cores,
)

#: Of the speed of a copy.
TARGET = 0.7
FORMATS = ("bf16", "fp8")
EXPERTS, TOPK = 64, 8
#: DeepEP's figures are published for 24; half of its programs send.
DEEPEP_PROGRAMS = (16, 24)


class Shape(NamedTuple):
    """What is measured: tokens of each rank, values of a token, samples, calls in a sample, numbers of programs."""

    tokens: int
    hidden: int
    rounds: int
    calls: int
    programs: tuple[int, ...]


def opened(exchange: Any, shape: Shape, copy: str) -> Any:
    """A Buffer whose windows lie in device memory, with room for all rows, which ``copy`` moves."""
    room = 2 * exchange.size * shape.tokens * (2 * shape.hidden + 256) + (1 << 20)
    overrides = {"window": "device", "heap_bytes": room, "round_bytes": 64 << 20, "chunk_bytes": 1 << 20, "copy": copy}
    if interpreted():
        from tests.kernels import triton_normal_bodies

        return triton_normal_bodies.opened(exchange, overrides)
    from tests.support import gpu_bodies

    return gpu_bodies.opened(exchange, overrides)


def device() -> Any:
    """Where kernels work."""
    import torch

    return torch.device("cpu" if interpreted() else "cuda")


def together(exchange: Any, steps: dict[str, Callable[[], Any]], shape: Shape) -> dict[str, list[float]]:
    """Seconds of a call of each step, by round: all ranks begin a sample together, and steps take turns."""
    samples: dict[str, list[float]] = {name: [] for name in steps}

    def often(step: Callable[[], Any]) -> None:
        for _ in range(shape.calls):
            step()

    for _ in range(1 + shape.rounds):
        for name, step in steps.items():
            exchange.all_gather(b"")
            samples[name].append(seconds_of(lambda step=step: often(step)) / shape.calls)
    # the first round warmed up
    return {name: times[1:] for name, times in samples.items()}


def figures(samples: dict[str, list[float]], nbytes: dict[str, int]) -> dict[str, Any]:
    """Of each step: microseconds, GB/s of ``nbytes``, and the share of the speed of a copy of as many bytes."""
    from uccl_ep_serving.bench.statistics import ratios, summary

    found = {}
    for name, size in nbytes.items():
        copied = samples["copy_" + name]
        found[name] = {
            "microseconds": summary([1e6 * one for one in samples[name]]),
            "gb_per_s": summary([size / one / 1e9 for one in samples[name]]),
            "copy_gb_per_s": summary([size / one / 1e9 for one in copied]),
            "share_of_copy": ratios(samples[name], copied),
        }
    return found


def first_dispatch(buffer: Any, given: Any, rank: int, config: Any) -> Callable[[], Any]:
    """A dispatch of what ``rank`` is given, of a size that the host reads back; the layout is counted here."""
    ids, weights = given.topk_idx[rank], given.topk_weights[rank]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    return lambda: buffer.dispatch(given.rows(rank), topk_idx=ids, topk_weights=weights, config=config, **layout)


def measured(exchange: Any, shape: Shape, form: str, copy: str) -> list[dict[str, Any]]:
    """Figures of one rank for each number of programs, after its data was verified against the oracle."""
    import torch

    from tests.support import gpu_bodies, normal_cases
    from uccl_ep_serving.buffer import Config

    share_the_cores(exchange.size)
    quantised = form == "fp8"
    case = normal_cases.Case(
        tokens=(shape.tokens,) * exchange.size,
        hidden=shape.hidden,
        experts=EXPERTS,
        topk=TOPK,
        lost=0.0,
        dtype=torch.float8_e4m3fn if quantised else torch.bfloat16,
    )
    buffer, rank, inputs = opened(exchange, shape, copy), exchange.rank, case.inputs()
    found = []
    for programs in shape.programs:
        config = Config(num_sms=programs)
        given, outcome = gpu_bodies.checked_round_trip(buffer, device(), rank, inputs, config=config)
        first = first_dispatch(buffer, given, rank, config)
        rows, received, handle, values = given.rows(rank), outcome.received, outcome.handle, outcome.rows
        outputs = normal_cases.expert_outputs(values, rank)
        nbytes = values.nbytes + (received[1].nbytes if quantised else 0)
        flat = torch.empty(max(nbytes, outputs.nbytes), dtype=torch.uint8, device=values.device)
        source = torch.empty_like(flat)
        steps = {
            "copy_dispatch": lambda n=nbytes, flat=flat, source=source: flat[:n].copy_(source[:n]),
            "dispatch": lambda x=rows, handle=handle, config=config: buffer.dispatch(x, handle=handle, config=config),
            "first_dispatch": first,
            "copy_combine": lambda n=outputs.nbytes, flat=flat, source=source: flat[:n].copy_(source[:n]),
            "combine": lambda y=outputs, handle=handle, config=config: buffer.combine(y, handle, config=config),
        }
        samples = together(exchange, steps, shape)
        samples["copy_first_dispatch"] = samples["copy_dispatch"]
        figure = figures(samples, {"dispatch": nbytes, "first_dispatch": nbytes, "combine": outputs.nbytes})
        found.append(
            {
                "rank": rank,
                "ranks": exchange.size,
                "format": form,
                "copy": copy,
                "tokens": shape.tokens,
                "hidden": shape.hidden,
                "programs_allowed": programs,
                "received_rows": len(values),
                **figure,
                "target_met": min(figure[name]["share_of_copy"]["median"] for name in ("dispatch", "combine"))
                >= TARGET,
            }
        )
    buffer.destroy()
    return found


def first_steps(exchange: Any, shape: Shape) -> dict[str, Any]:
    """Where the time of a first dispatch goes, BF16, with the most programs, after its data was verified."""
    from tests.support import gpu_bodies, normal_cases
    from uccl_ep_serving.buffer import Config

    share_the_cores(exchange.size)

    case = normal_cases.Case((shape.tokens,) * exchange.size, hidden=shape.hidden, experts=EXPERTS, topk=TOPK, lost=0.0)
    buffer = opened(exchange, shape, "triton")
    config = Config(num_sms=max(shape.programs))
    given, _ = gpu_bodies.checked_round_trip(buffer, device(), exchange.rank, case.inputs(), config=config)
    dispatch = first_dispatch(buffer, given, exchange.rank, config)
    found = gpu_first_dispatch.measured(exchange, dispatch, shape.rounds * shape.calls)
    buffer.destroy()
    return {"rank": exchange.rank, "ranks": exchange.size, "programs_allowed": max(shape.programs), **found}


def deepep(exchange: Any, shape: Shape, programs: int, directory: str) -> dict[str, Any]:
    """The steps of :func:`measured` by DeepEP inside a node, BF16, or the call that failed."""
    import torch
    import torch.distributed as dist

    from uccl_ep_serving.oracle import calc_diff

    rank = exchange.rank
    found = {"rank": rank, "ranks": exchange.size, "tokens": shape.tokens, "programs": programs}
    stage = reached(directory, rank, "import deep_ep")
    try:
        deep_ep = import_deepep()

        stage = reached(directory, rank, "init_process_group")
        group = deepep_group(exchange)
        stage = reached(directory, rank, "Buffer")
        deep_ep.Buffer.set_num_sms(programs)
        buffer = deep_ep.Buffer(group, 1 << 30, 0, explicitly_destroy=True)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(shape.tokens, shape.hidden, generator=generator).bfloat16().cuda()
        ids = torch.rand(shape.tokens, EXPERTS, generator=generator).topk(TOPK, dim=1).indices.cuda()
        weights = torch.ones(ids.shape, device="cuda")
        stage = reached(directory, rank, "get_dispatch_layout")
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        given = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        stage = reached(directory, rank, "dispatch")
        rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **given)
        stage = reached(directory, rank, "combine")
        combined = buffer.combine(rows, handle)[0]
        copies = in_rank.sum(dim=1, keepdim=True)
        difference = float(calc_diff(combined.cpu(), (x.float() * copies).cpu()))
        assert difference < 5e-6, difference
        target = torch.empty_like(rows)
        steps = {
            "copy_dispatch": lambda: target.copy_(rows),
            "dispatch": lambda: buffer.dispatch(x, handle=handle),
            "first_dispatch": lambda: buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **given),
            "copy_combine": lambda: target.copy_(rows),
            "combine": lambda: buffer.combine(rows, handle),
        }
        stage = reached(directory, rank, "timing")
        if not has_mps():
            # its kernels wait for each other in the middle of a copy
            shape = shape._replace(rounds=min(shape.rounds, 5), calls=min(shape.calls, 3))
        samples = together(exchange, steps, shape)
        samples["copy_first_dispatch"] = samples["copy_dispatch"]
        found |= figures(samples, dict.fromkeys(("dispatch", "first_dispatch", "combine"), rows.nbytes))
        buffer.destroy()
        return found
    except Exception as error:
        return {**found, "failed": stage, "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parts(pool: Any, options: argparse.Namespace) -> dict[str, Callable[[], list[Any]]]:
    """What can be measured, by name."""
    programs = tuple(map(int, options.programs.split(",")))
    shape = Shape(options.tokens, options.hidden, options.rounds, options.calls, programs)

    # the interpreter takes its time
    limit = 580.0 if options.interpreter else 150.0

    def each(ranks: int) -> list[Any]:
        kinds = itertools.product(options.formats.split(","), options.copies.split(","))
        return [
            one for kind in kinds for rank in pool.run(ranks, measured, shape, *kind, timeout=limit) for one in rank
        ]

    return {
        "normal_alone": lambda: each(1),
        "normal_exchange": lambda: each(2),
        "normal_first": lambda: [one for ranks in (1, 2) for one in pool.run(ranks, first_steps, shape, timeout=limit)],
        "normal_deepep": lambda: [
            one for programs in DEEPEP_PROGRAMS for one in beside_deepep(pool, 2, deepep, shape, programs)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168, help="values of a token, a multiple of 128")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each step")
    parser.add_argument("--calls", type=int, default=10, help="calls that make a sample")
    parser.add_argument("--programs", default="4,8,16,24", help="most programs, comma-separated")
    parser.add_argument("--copies", default="triton", help="what moves rows, comma-separated: triton, tma")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of rows, comma-separated")
    parser.add_argument("--interpreter", action="store_true", help="in Triton's interpreter, on CPU tensors")
    run_parts(parser, ("normal_alone", "normal_exchange", "normal_first", "normal_deepep"), parts)


if __name__ == "__main__":
    main()
