"""A mixture-of-experts layer that trains: dispatch and combine inside autograd, each the backward of the other.

    python examples/04_training.py [--ranks 2] [--tokens 300] [--steps 20]

The gradients of a token's copies are brought home and summed by a combine, those of its router weights with them; the
gradient of a combine goes out again by a dispatch from the same handle. Every rank must run the backward pass, also one
that received no rows. The gradients are compared with those of a dense layer that holds all experts. What a training
job has to know besides: docs/training.md.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.autograd.function import once_differentiable

from uccl_ep_serving import Buffer

HIDDEN, EXPERTS, TOPK = 256, 8, 2


class Dispatch(torch.autograd.Function):
    """x [T, H], topk_idx int64 [T, K], topk_weights [T, K] -> rows [N, H], local ids and weights [N, K], handle."""

    @staticmethod
    def forward(ctx: Any, buffer: Buffer, experts: int, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, experts)
        rows, ids, weights, _, handle, event = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(ids)
        return rows, ids, weights, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Any, _ids: Any, weights: Any, _handle: Any) -> Any:
        x, topk_weights, event = ctx.buffer.combine(rows.contiguous(), ctx.handle, topk_weights=weights.contiguous())
        event.current_stream_wait()
        return None, None, x, None, topk_weights


class Combine(torch.autograd.Function):
    """rows [N, H], one for each that the dispatch of ``handle`` returned -> [T, H], summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, buffer: Buffer, handle: Any, rows: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, event = buffer.combine(rows.contiguous(), handle)
        event.current_stream_wait()
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, combined: Any) -> Any:
        rows, _, _, _, _, event = ctx.buffer.dispatch(combined.contiguous(), handle=ctx.handle)
        event.current_stream_wait()
        return None, None, rows


def run_experts(rows: Any, ids: Any, weights: Any, experts: Any) -> Any:
    """The weighted sum in float32, for each row, of the experts [E, H, H] that it chose; -1 in ``ids``: none."""
    out = torch.zeros_like(rows, dtype=torch.float32)
    for number, expert in enumerate(experts):
        row, slot = torch.where(ids == number)
        out = out.index_add(0, row, torch.tanh(rows[row] @ expert) * weights[row, slot, None])
    return out.to(rows.dtype)


def layer(buffer: Buffer, x: Any, topk_idx: Any, topk_weights: Any, experts: Any) -> Any:
    """[T, H] of this rank's tokens; ``experts`` are those of this rank, [E / ranks, H, H]."""
    rows, ids, weights, handle = Dispatch.apply(
        buffer, len(experts) * buffer.group_size, x, topk_idx, topk_weights.float()
    )
    return Combine.apply(buffer, handle, run_experts(rows, ids, weights, experts))


def run(rank: int, ranks: int, tokens: int, steps: int, meeting_point: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks)
    buffer = Buffer(dist.group.WORLD)
    torch.manual_seed(0)
    gate = torch.nn.Parameter(torch.randn(HIDDEN, EXPERTS) / HIDDEN**0.5)
    everything = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)
    local = EXPERTS // ranks
    experts = torch.nn.Parameter(everything[rank * local : (rank + 1) * local].detach().clone())
    torch.manual_seed(rank + 1)
    x = torch.randn(tokens, HIDDEN)
    target = torch.randn(tokens, HIDDEN) / 4

    def loss_of(output: Any) -> Any:
        return (output - target).square().mean()

    def routed() -> Any:
        weights, topk_idx = (x @ gate).softmax(dim=1).topk(TOPK, dim=1)
        return topk_idx, weights

    topk_idx, weights = routed()
    loss_of(run_experts(x, topk_idx, weights, everything)).backward()
    dist.all_reduce(everything.grad)
    expected = gate.grad.clone(), everything.grad[rank * local : (rank + 1) * local]
    gate.grad = None
    loss_of(layer(buffer, x, *routed(), experts)).backward()
    for name, ours, dense in zip(("gate", "experts"), (gate.grad, experts.grad), expected, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")

    optimizer = torch.optim.Adam([gate, experts], lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(layer(buffer, x, *routed(), experts))
        loss.backward()
        dist.all_reduce(gate.grad)  # the router is the same on every rank
        # On a GPU after torch.cuda.synchronize(): a backward returns there before its last operation has ended, and
        # what one that failed gives is zero.
        buffer.check()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    print(f"rank {rank}: gradients equal those of the dense layer; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.ranks < 1 or EXPERTS % arguments.ranks:
        parser.error(f"--ranks must divide the {EXPERTS} experts")
    if arguments.tokens < 1 or arguments.steps < 2:
        parser.error("--tokens must be at least 1, and --steps 2, to see the loss fall")
    with tempfile.TemporaryDirectory() as directory:
        settings = (arguments.ranks, arguments.tokens, arguments.steps, f"{directory}/ranks")
        mp.spawn(run, settings, arguments.ranks)
