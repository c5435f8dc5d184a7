"""What rank processes run to learn with which arguments kernels are launched, in Triton's interpreter.

Each returns launches as plain values: (prepared ahead, module, kernel, arguments, constants, warps, fused).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels import triton_bodies, triton_normal_bodies
from tests.support import ll_cases, normal_cases
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

Seen = tuple[bool, str, str, tuple[int, ...], dict[str, Any], int, bool]
#: Tokens of a step: among them the values that Triton would compile apart, 1 and multiples of 16.
STEPS = (17, 16, 1, 0)
MOST = max(STEPS)
#: Their BLOCK follows the number of tokens in the interpreter only; on a GPU it is one number.
_SIZED_FOR_THE_INTERPRETER = {"mark_tokens", "open_rows"}


@contextmanager
def recorded() -> Iterator[list[Seen]]:
    """Launches made, and compiled ahead, inside the block."""
    from uccl_ep_serving.kernels.triton.launch import Launch

    found: dict[str, Seen] = {}
    run = Launch.run

    def note(launch: Launch, ahead: bool) -> None:
        name, module = launch.kernel.__name__, launch.kernel.fn.__module__
        constants = dict(launch.constants)
        if "SHAPE" in constants:
            constants["SHAPE"] = dict(constants["SHAPE"])
        if name in _SIZED_FOR_THE_INTERPRETER:
            constants["SHAPE"]["BLOCK"] = 1024
        seen = (ahead, module, name, launch.arguments, constants, launch.variant.warps, launch.variant.fused)
        found[repr(seen)] = seen

    def running(launch: Launch) -> None:
        note(launch, False)
        run(launch)

    everything: list[Seen] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", running)
        patch.setattr(Launch, "compile", lambda launch: note(launch, True))
        yield everything
    everything += found.values()


def _apart(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that starts ``elements`` after the start of its memory, as a slice of a larger batch does."""
    memory = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)
    return memory[elements:].view(tensor.shape).copy_(tensor)


def low_latency(exchange: StoreExchange, overrides: dict[str, Any]) -> list[Seen]:
    """Steps of other lengths, with arguments at other addresses, with optional ones and without."""
    buffer = triton_bodies.opened(exchange, overrides)
    with recorded() as found:
        for fp8, reduced in ((False, True), (True, False)):
            for step, tokens in enumerate(STEPS):
                _low_latency_step(buffer, step, tokens, fp8, reduced)
    buffer.destroy()
    return found


def _low_latency_step(buffer: Buffer, step: int, tokens: int, fp8: bool, reduced: bool) -> None:
    ranks, odd = buffer.group_size, step % 2
    case = ll_cases.Case(
        ranks=ranks, tokens=MOST, counts=(tokens,), topk=3, experts=4 * ranks, fp8=fp8, reduced=reduced, seed=step
    )
    given = case.inputs()[buffer.rank]
    ids, weights = _apart(given.topk_idx, odd), _apart(given.topk_weights, odd)
    stats = torch.zeros(5, dtype=torch.int32)[1:] if odd else None
    waited = torch.zeros(ranks + 1, dtype=torch.int64)[1:] if odd else None
    rows, _, handle, _, hook = buffer.low_latency_dispatch(
        given.x,
        ids,
        MOST,
        case.experts,
        use_fp8=fp8,
        topk_weights=weights if reduced else None,
        cumulative_local_expert_recv_stats=stats,
        dispatch_wait_recv_cost_stats=waited,
        return_recv_hook=bool(odd),
    )
    if hook is not None:
        hook()
    values = rows[0].bfloat16() if isinstance(rows, tuple) else rows
    out = torch.empty_like(given.x) if odd else None
    buffer.low_latency_combine(values, ids, weights, handle, out=out, combine_wait_recv_cost_stats=waited)


def normal(exchange: StoreExchange, overrides: dict[str, Any]) -> list[Seen]:
    """The same of normal mode: with a look of the host, without one, from a handle; weights and biases."""
    buffer, rank, ranks = triton_normal_bodies.opened(exchange, overrides), exchange.rank, exchange.size
    with recorded() as found:
        for step, tokens in enumerate(STEPS):
            uneven = tuple(max(tokens - 3 * one, 0) for one in range(ranks))
            dtype = torch.float8_e4m3fn if step % 3 == 0 else torch.bfloat16
            case = normal_cases.Case(tokens=uneven, hidden=128, experts=4 * ranks, topk=3, dtype=dtype, seed=step)
            inputs = _moved(case.inputs(), step % 2)
            worst = sum(uneven) + 1 if step > 1 else 0
            outcome = normal_cases.round_trip(buffer, inputs, rank, num_worst_tokens=worst)
            again, *_ = buffer.dispatch(inputs.rows(rank), handle=outcome.handle)
            again = again[0] if isinstance(again, tuple) else again
            bias = torch.zeros(uneven[rank], case.hidden, dtype=torch.bfloat16)
            buffer.combine(again.bfloat16(), outcome.handle, bias=(bias, bias) if step % 2 else bias)
    buffer.destroy()
    return found


def _moved(inputs: normal_cases.Inputs, elements: int) -> normal_cases.Inputs:
    move: Callable[[torch.Tensor], torch.Tensor] = lambda one: _apart(one, elements)  # noqa: E731
    names = ("topk_idx", "topk_weights", "scales")
    return replace(inputs, **{name: [move(one) for one in getattr(inputs, name)] for name in names})
