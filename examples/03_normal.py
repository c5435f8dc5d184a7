"""Normal-mode dispatch and combine, as a prefill step calls them, with a cached second dispatch.

    python examples/03_normal.py [--ranks 2] [--tokens 1000]

Each token travels once to every rank that holds one of its experts; rows come back as a plain sum, because the experts'
side has applied the router weights already.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from uccl_ep_serving import Buffer

HIDDEN, EXPERTS, TOPK = 1024, 8, 2


def run(rank: int, ranks: int, tokens: int, meeting_point: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks)
    buffer = Buffer(dist.group.WORLD)
    torch.manual_seed(rank)
    tokens += 100 * rank  # ranks need not have the same number
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
    topk_idx = torch.rand(tokens, EXPERTS).topk(TOPK, dim=1).indices
    weights = torch.rand(tokens, TOPK)

    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    received, local_idx, local_weights, counts, handle, event = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
    )
    event.current_stream_wait()

    # expert number e multiplies by 1 + e / 8; local ids are -1 where a top-k slot belongs to another rank
    experts = local_idx + rank * (EXPERTS // ranks)
    factor = torch.where(local_idx >= 0, local_weights * (1 + experts / 8), 0.0).sum(dim=1, keepdim=True)
    outputs = (received.float() * factor).bfloat16()
    combined, _, event = buffer.combine(outputs, handle)
    event.current_stream_wait()

    expected = x.float() * (weights * (1 + topk_idx / 8)).sum(dim=1, keepdim=True)
    error = ((combined.float() - expected).abs().max() / expected.abs().max()).item()
    assert error < 0.02, error

    again, *_ = buffer.dispatch(x, handle=handle)  # same routing: no counts are exchanged
    assert torch.equal(again, received)
    ops = buffer.stats()["ops"]
    print(f"rank {rank}: {tokens} tokens out, {len(received)} in, {counts} per expert, largest error {error:.1e}, "
          f"dispatch {ops['normal_dispatch']['p50_us']} us, combine {ops['normal_combine']['p50_us']} us")  # fmt: skip
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.ranks < 1 or EXPERTS % arguments.ranks or arguments.tokens < 1:
        parser.error(f"--ranks must divide the {EXPERTS} experts, and --tokens be at least 1")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (arguments.ranks, arguments.tokens, f"{directory}/ranks"), arguments.ranks)
