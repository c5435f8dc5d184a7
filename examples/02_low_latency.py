"""Low-latency dispatch and combine between two ranks, as a decode step calls them.

    python examples/02_low_latency.py [--ranks 2] [--tokens 16]

Each rank sends its tokens to the ranks of their experts, runs "experts" that multiply by a known factor, and gets the
weighted sum back. The recv hook separates sending from receiving: other work fits between the two.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from uccl_ep_serving import Buffer

HIDDEN, EXPERTS, TOPK = 512, 8, 4


def run(rank: int, ranks: int, tokens: int, meeting_point: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks)
    buffer = Buffer(
        dist.group.WORLD,
        num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, ranks, EXPERTS),
        low_latency_mode=True,
    )
    torch.manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
    topk_idx = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(tokens)])
    weights = torch.rand(tokens, TOPK)

    received, counts, handle, _, receive = buffer.low_latency_dispatch(
        x, topk_idx, tokens, EXPERTS, use_fp8=False, return_recv_hook=True, topk_weights=weights
    )
    receive()  # until here the shared experts could have run

    local = EXPERTS // ranks
    outputs = torch.zeros_like(received)
    for expert in range(local):
        rows = int(counts[expert])
        # expert number e multiplies by 1 + e / 8
        outputs[expert, :rows] = received[expert, :rows] * (1 + (rank * local + expert) / 8)

    combined, _, receive = buffer.low_latency_combine(outputs, topk_idx, weights, handle, return_recv_hook=True)
    receive()

    expected = x.float() * (weights * (1 + topk_idx / 8)).sum(dim=1, keepdim=True)
    error = ((combined.float() - expected).abs().max() / expected.abs().max()).item()
    assert error < 0.02, error
    ops = buffer.stats()["ops"]
    # one write, so that ranks do not end each other's lines
    print(f"rank {rank}: {tokens} tokens, received {counts.tolist()} rows per expert, largest error {error:.1e}, "
          f"dispatch {ops['ll_dispatch']['p50_us']} us, combine {ops['ll_combine']['p50_us']} us\n",
          end="")  # fmt: skip
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (arguments.ranks, arguments.tokens, f"{directory}/ranks"), arguments.ranks)
