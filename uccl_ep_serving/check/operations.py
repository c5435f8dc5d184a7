"""Small operations of each mode between two ranks, path by path, verified against the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .. import oracle
from ..buffer import Buffer
from ..config import Settings
from ..control_plane.bootstrap import Exchange
from ..protocol.layout import LowLatencyPlan
from .faults import Wrong, expect
from .paths import PATHS
from .place import Place, each_kernel_noted
from .workers import note

__all__ = ["ALONE", "PLAN", "low_latency", "normal"]

#: Sizes of two ranks, and of one alone.
PLAN = LowLatencyPlan(2, 8, 256, 8, 4, 2)
ALONE = LowLatencyPlan(1, 8, 256, 8, 4, 2)
#: Tokens of each rank: of low latency at most the plan's.
_LOW_LATENCY_TOKENS, _NORMAL_TOKENS = (8, 5), (40, 33)
#: DeepEP's tolerances of combined rows and of weights.
_CLOSE, _WEIGHTS_CLOSE = 5e-6, 1e-9


@contextlib.contextmanager
def _opened(place: Place, exchange: Exchange, overrides: dict[str, Any]) -> Iterator[Buffer]:
    """A Buffer whose waits end before a part's time does, whatever the environment says."""
    note("the opening of a Buffer")
    interpreted = place.target.interpreted
    given = {"device": "interpreter" if interpreted else "cuda", "heap_bytes": 32 << 20, "round_bytes": 4 << 20}
    waits = {"timeout": 60.0 if interpreted else 12.0, "connect_timeout": 25.0}
    settings = Settings.from_environment({}, **{**given, **waits, "chunk_bytes": 64 << 10, **overrides})
    buffer = Buffer(exchange, settings=settings)
    try:
        yield buffer
    except BaseException:
        buffer.runtime.close(0.0)
        raise
    buffer.destroy()


@contextlib.contextmanager
def _turn(place: Place, noted: bool) -> Iterator[None]:
    """An operation and its combine: with each kernel noted and waited for, or as a server runs them."""
    if noted:
        with each_kernel_noted(place.memory):
            yield
    else:
        note("an operation whose kernels are not waited for one by one")
        yield
        place.memory.synchronize()


def _tokens(counts: tuple[int, ...], seed: int) -> list[oracle.LowLatencyInput]:
    """Random tokens, ids (a tenth of them -1) and weights of every rank."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for count in counts:
        x = torch.randn(count, PLAN.hidden, generator=generator).bfloat16()
        ids = torch.rand(count, PLAN.experts, generator=generator).topk(PLAN.topk, dim=1).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        found.append(oracle.LowLatencyInput(x, ids, torch.rand(count, PLAN.topk, generator=generator)))
    return found


def _expect_equal(where: str, what: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.0) -> None:
    """Raise :class:`Wrong` unless ``found`` has the bits of ``wanted``, or a calc_diff below ``tolerance``."""
    found = found.cpu()
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise Wrong(where, *(f"{what} {one.dtype}{list(one.shape)}" for one in (wanted, found)))
    bits, wanted_bits = (one.contiguous().view(torch.uint8) for one in (found, wanted))
    if torch.equal(bits, wanted_bits) or (tolerance and oracle.calc_diff(found, wanted) < tolerance):
        return
    differs = (bits != wanted_bits).view(*found.shape, -1).any(dim=-1) if found.dim() else bits != wanted_bits
    places = differs.nonzero().tolist()
    first = tuple(places[0])
    of_all = f"{len(places)} of {found.numel()} values of {what} differ, the first at {list(first)}"
    raise Wrong(where, f"{wanted[first].item()!r} there", f"{found[first].item()!r} ({of_all})")


def low_latency(place: Place, exchange: Exchange, path: str) -> str:
    """Dispatch and combine with and without weights at dispatch, kernel by kernel and then as a server runs them."""
    with _opened(place, exchange, PATHS[path]) as buffer:
        for turn in range(4):
            given = _tokens(_LOW_LATENCY_TOKENS[: exchange.size], seed=turn)
            with _turn(place, noted=turn < 2):
                _low_latency(place, buffer, given, reduced=turn % 2 == 0)
    return "4 dispatches and combines are right to the bit"


def _low_latency(place: Place, buffer: Buffer, given: list[oracle.LowLatencyInput], reduced: bool) -> None:
    rank, device, tokens, experts = buffer.rank, place.device, PLAN.tokens, PLAN.experts
    x, ids, weights = (one.to(device) for one in (given[rank].x, given[rank].topk_idx, given[rank].topk_weights))
    rows, count, handle, event, _ = buffer.low_latency_dispatch(
        x, ids, tokens, experts, use_fp8=False, topk_weights=weights if reduced else None, deterministic=True
    )
    event.current_stream_wait()
    assert isinstance(rows, torch.Tensor)
    received = [oracle.low_latency_dispatch(given, peer, tokens, experts) for peer in range(buffer.group_size)]
    here = received[rank]
    _expect_equal("kernel dispatch_recv", "rows of each expert", count, here.count)
    _expect_equal("kernel dispatch_recv", "layout_range", handle.layout_range, here.layout_range)
    y = torch.full_like(rows, float("nan"))  # so that a row shows which is none
    for expert, number in enumerate(here.count.tolist()):
        where, of = "kernels dispatch_send and dispatch_recv", f"expert {expert}"
        _expect_equal(where, f"src_info of {of}", handle.src_info[expert, :number], here.src_info[expert, :number])
        _expect_equal(where, f"rows of {of}", rows[expert, :number], here.x[expert, :number])
        y[expert, :number] = rows[expert, :number] * _factors(rank, len(here.count))[expert].item()
    outputs = [(one.x * _factors(peer, len(one.x))[:, None, None]).bfloat16() for peer, one in enumerate(received)]
    combined, event, _ = buffer.low_latency_combine(y, ids, weights, handle)
    event.current_stream_wait()
    wanted = oracle.low_latency_combine(given[rank], rank, outputs, received, reduced)
    _expect_equal("kernels combine_send and combine_recv", "combined tokens", combined, wanted)


def _factors(rank: int, local: int) -> torch.Tensor:
    """What each expert of ``rank`` multiplies by: powers of two, so that nothing is rounded."""
    return torch.exp2((torch.arange(local) + rank * local).float() % 3)


def normal(place: Place, exchange: Exchange, path: str) -> str:
    """Layout, dispatch, dispatch from the handle and combine: with a look of the host at the number of rows, and
    without one; kernel by kernel, then as a server runs them."""
    with _opened(place, exchange, PATHS[path]) as buffer:
        for turn in range(4):
            given = _tokens(_NORMAL_TOKENS[: exchange.size], seed=turn)
            worst = sum(len(one.x) for one in given) + 2 if turn % 2 else 0
            with _turn(place, noted=turn < 2):
                _normal(place, buffer, given, worst)
    return "8 dispatches and 4 combines are right"


def _normal(place: Place, buffer: Buffer, given: list[oracle.LowLatencyInput], worst: int) -> None:
    rank, device = buffer.rank, place.device
    x, ids, weights = (one.to(device) for one in (given[rank].x, given[rank].topk_idx, given[rank].topk_weights))
    all_ids, all_weights = [one.topk_idx for one in given], [one.topk_weights for one in given]
    delivered = oracle.normal_dispatch(all_ids, all_weights, PLAN.experts)
    here = delivered[rank]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, PLAN.experts)
    mine = oracle.in_rank(given[rank].topk_idx, PLAN.experts, buffer.group_size)
    _expect_equal("kernel mark_tokens", "is_token_in_rank", in_rank, mine)
    received, local_ids, local_weights, counts, handle, event = buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=in_rank,
        num_worst_tokens=worst,
    )
    event.current_stream_wait()
    assert isinstance(received, torch.Tensor)
    assert local_ids is not None
    assert local_weights is not None
    number, where = len(here.source), "kernel dispatch_rows"
    expect(len(received) == (worst or number), "kernel dispatch_rows", f"{worst or number} rows", len(received))
    expect(counts == ([] if worst else here.expert_counts), "kernel dispatch_rows", f"{here.expert_counts}", counts)
    _expect_equal(where, "rows", received[:number], here.rows([one.x for one in given]))
    _expect_equal(where, "ids", local_ids[:number], here.topk_idx)
    _expect_equal(where, "weights", local_weights[:number], here.topk_weights)
    again, *_, handle, event = buffer.dispatch(x, handle=handle)
    event.current_stream_wait()
    assert isinstance(again, torch.Tensor)
    _expect_equal(f"{where} (from a handle)", "rows", again[:number], received[:number].cpu())
    combined, back, event = buffer.combine(_outputs(again, rank), handle, topk_weights=local_weights)
    event.current_stream_wait()
    assert back is not None
    outputs = [_outputs(one.rows([source.x for source in given]), peer) for peer, one in enumerate(delivered)]
    tokens = len(given[rank].x)
    wanted = oracle.normal_combine(outputs, delivered, rank, tokens)
    _expect_equal("kernel combine_rows", "combined tokens", combined, wanted, _CLOSE)
    wanted = oracle.normal_combine_weights([one.topk_weights for one in delivered], delivered, rank, tokens)
    _expect_equal("kernel combine_rows", "combined weights", back, wanted, _WEIGHTS_CLOSE)


def _outputs(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """What the experts of ``rank`` make of its rows."""
    return rows * (rank + 1.5)
