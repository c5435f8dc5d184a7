"""What rank processes run in the test of gradients: the layer of examples/04_training.py beside a dense one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.support import bodies
from tests.support.interpreter import interpret
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

HIDDEN, TOPK = 64, 3
#: Tokens by rank, in turn.
TOKENS = (7, 0, 12, 5)


def example() -> ModuleType:
    """examples/04_training.py."""
    spec = importlib.util.spec_from_file_location("training", Path(__file__).parents[2] / "examples" / "04_training.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def inputs(rank: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [T, H], router scores [T, E], which choices are dropped bool [T, K], what the output is multiplied by)."""
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = TOKENS[rank % len(TOKENS)]
    x, factor = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    scores = torch.randn(tokens, experts, generator=generator)
    return x, scores, torch.rand(tokens, TOPK, generator=generator) < 0.2, factor


def differentiated_twice(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """What torch says to a gradient of a gradient."""
    training, rank = example(), exchange.rank
    buffer = bodies.opened(exchange, overrides)
    x, scores, _, _ = inputs(rank, 2 * exchange.size)
    x.requires_grad_()
    weights, ids = scores.softmax(dim=1).topk(TOPK, dim=1)
    experts = torch.randn(2, HIDDEN, HIDDEN, requires_grad=True)
    out = training.layer(buffer, x, ids, weights, experts)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    try:
        first.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        buffer.destroy()
    return ""


def gradients(
    exchange: StoreExchange, overrides: dict[str, Any], crossed: bool, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Largest difference from the dense layer, relative to its largest value: of the output and each gradient.

    Args:
        crossed: rows must have crossed once to a node.
        dtype: of tokens and experts.
    """
    training, rank, ranks = example(), exchange.rank, exchange.size
    if overrides.get("device") == "interpreter":
        interpret()
    buffer = bodies.opened(exchange, {"timeout": 120.0, "connect_timeout": 120.0, **overrides})
    local = 2
    count = local * ranks
    everything = torch.randn(count, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)) / HIDDEN**0.5
    everything = everything.to(dtype)

    def routed(scores: torch.Tensor, dropped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = scores.softmax(dim=1).topk(TOPK, dim=1)
        return torch.where(dropped, -1, ids), weights

    # the dense layer, for the tokens of all ranks: this rank's experts serve them too
    all_experts = everything.clone().requires_grad_()
    mine: tuple[torch.Tensor, ...] = ()
    for source in range(ranks):
        x, scores, dropped, factor = inputs(source, count)
        x = x.to(dtype).requires_grad_()
        scores.requires_grad_()
        out = training.run_experts(x, *routed(scores, dropped), all_experts)
        (out * factor).sum().backward()
        if source == rank:
            assert x.grad is not None
            assert scores.grad is not None
            mine = out.detach(), x.grad, scores.grad
    assert all_experts.grad is not None
    expected = (*mine, all_experts.grad[rank * local : (rank + 1) * local])

    x, scores, dropped, factor = inputs(rank, count)
    x = x.to(dtype).requires_grad_()
    scores.requires_grad_()
    experts = everything[rank * local : (rank + 1) * local].clone().requires_grad_()
    if crossed:
        _, per_node, _, _, _ = buffer.get_dispatch_layout(routed(scores, dropped)[0], count)
        assert per_node is not None
        assert len(per_node) < ranks
    found = {}
    # gradients add up; in the interpreter a step takes seconds
    steps = 1 if overrides.get("device") == "interpreter" else 2
    for _ in range(steps):
        out = training.layer(buffer, x, *routed(scores, dropped), experts)
        (out * factor).sum().backward()
    for name, actual, dense in zip(
        ("output", "x", "scores", "experts"),
        (out.detach(), *(one.grad / steps for one in (x, scores, experts))),
        expected,
        strict=True,
    ):
        scale = dense.abs().max().item() if dense.numel() else 1.0
        assert actual.shape == dense.shape
        found[name] = (actual - dense).abs().max().item() / scale if dense.numel() else 0.0
    buffer.destroy()
    return found
